//! Follows the file of keys as it changes.

use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::sleep;

use super::Keys;

/// How often the file is looked at.
const EVERY: Duration = Duration::from_secs(1);

/// What changes whenever a file is replaced or written, also behind a symbolic link.
type Stamp = Option<(u64, i64, i64, u64)>;

impl Keys {
    /// Takes up every change of the file. One that cannot be used is told of once, and the keys stay as they are.
    pub(crate) async fn follow(self: Arc<Self>) {
        let Some(path) = self.path().map(Path::to_owned) else { return };
        // None at first, so that a change since the start is not missed.
        let mut seen: Option<Stamp> = None;
        loop {
            let (keys, path) = (Arc::clone(&self), path.clone());
            let look = move || {
                let now = stamp(&path);
                (seen != Some(now)).then(|| (now, keys.reload()))
            };
            match tokio::task::spawn_blocking(look).await {
                Ok(Some((now, result))) => {
                    let is_first = seen.replace(now).is_none();
                    match result {
                        Ok(_) if is_first => {}
                        Ok(keys) => tracing::info!(keys, "api keys were read anew"),
                        Err(error) => {
                            tracing::warn!(%error, "api keys cannot be read anew, the former ones hold")
                        }
                    }
                }
                Ok(None) => {}
                Err(_) => return,
            }
            sleep(EVERY).await;
        }
    }
}

fn stamp(path: &Path) -> Stamp {
    let metadata = std::fs::metadata(path).ok()?;
    Some((metadata.ino(), metadata.mtime(), metadata.mtime_nsec(), metadata.len()))
}
