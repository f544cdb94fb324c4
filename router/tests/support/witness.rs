//! What a speaking worker was asked, and how far it has come.

use std::time::Duration;

use thalweg_proto::v1::GenerateRequest;
use tokio::sync::watch;

use crate::speaking_worker::{SpeakingWorker, say};

impl SpeakingWorker {
    /// Says `text` to every request from now on.
    pub(crate) fn says(&self, text: &'static str) {
        self.script(move |request| say(request, text));
    }

    /// Requests received so far.
    pub(crate) fn requests(&self) -> Vec<GenerateRequest> {
        self.shared.requests.lock().clone()
    }

    /// Returns once so many answers have begun.
    pub(crate) async fn begun(&self, count: usize) {
        reached(&self.shared.begun, count).await;
    }

    /// Returns once so many answers are over.
    pub(crate) async fn ended(&self, count: usize) {
        reached(&self.shared.ended, count).await;
    }
}

async fn reached(count: &watch::Sender<usize>, wanted: usize) {
    let mut count = count.subscribe();
    let reached = count.wait_for(|c| *c >= wanted);
    tokio::time::timeout(Duration::from_secs(20), reached).await.expect("in time").expect("the worker lives");
}
