//! What workers have taken of a request, told while it waits for its first token.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

use thalweg_proto::ids::WorkerId;

/// One for all prompts of a request.
#[derive(Debug, Default)]
pub struct Taken {
    worker: OnceLock<WorkerId>,
    prompt_tokens: AtomicU64,
}

impl Taken {
    /// A prompt is with a worker for the first time.
    pub(super) fn add(&self, worker: &WorkerId, prompt_tokens: u64) {
        self.prompt_tokens.fetch_add(prompt_tokens, Ordering::Relaxed);
        self.worker.get_or_init(|| worker.clone());
    }

    /// Who took the first prompt; None: nobody has taken one.
    pub fn worker(&self) -> Option<&WorkerId> {
        self.worker.get()
    }

    /// Of all prompts that a worker has taken, however many workers each met.
    pub fn prompt_tokens(&self) -> u64 {
        self.prompt_tokens.load(Ordering::Relaxed)
    }
}
