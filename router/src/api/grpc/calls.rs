//! How many answers are on their way.

use tokio::sync::watch;

/// Counts them; clones count together.
#[derive(Clone, Default)]
pub(super) struct Calls(watch::Sender<usize>);

/// One answer, until it is dropped.
pub(super) struct Call(watch::Sender<usize>);

impl Calls {
    pub(super) fn begin(&self) -> Call {
        self.0.send_modify(|count| *count += 1);
        Call(self.0.clone())
    }

    /// Returns once there are none.
    pub(super) async fn ended(&self) {
        // Its sender lives as long as this.
        let _ = self.0.subscribe().wait_for(|count| *count == 0).await;
    }
}

impl Drop for Call {
    fn drop(&mut self) {
        self.0.send_modify(|count| *count -= 1);
    }
}
