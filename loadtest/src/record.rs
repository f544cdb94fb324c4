//! What one request showed.

use std::time::Duration;

/// A request that has ended, well or not.
#[derive(Clone, Debug, Default)]
pub struct Record {
    /// None where the answer came whole.
    pub failure: Option<Failure>,
    /// The worker that the server named.
    pub worker: Option<String>,
    /// From sending to the first token.
    pub ttft: Option<Duration>,
    /// From sending to the last token.
    pub last_token: Option<Duration>,
    /// From sending to the end of the answer.
    pub total: Duration,
    /// Times between pieces of text, in seconds. Where a server sends several tokens at once, they are one piece.
    pub gaps_s: Vec<f32>,
    /// As the server counted.
    pub prompt_tokens: u64,
    /// Of these, found in a cache.
    pub cached_tokens: u64,
    /// As the server counted; pieces of text where it did not.
    pub output_tokens: u64,
}

/// Why an answer did not come whole.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Failure {
    /// Another status than 200.
    #[error("http {0}")]
    Status(u16),
    /// No connection, or one that broke.
    #[error("connection")]
    Connection,
    /// Longer than the plan allows.
    #[error("timeout")]
    Timeout,
    /// The stream had an error event.
    #[error("error event {0}")]
    Event(String),
    /// The stream ended before `[DONE]`.
    #[error("stream cut")]
    Cut,
    /// The stream is not what it should be.
    #[error("bad stream")]
    Malformed,
}

impl Record {
    /// Time for each token after the first; None where there is only one.
    pub fn tpot(&self) -> Option<Duration> {
        let further =
            u32::try_from(self.output_tokens.checked_sub(1)?).ok().filter(|further| *further > 0)?;
        Some(self.last_token?.checked_sub(self.ttft?)? / further)
    }
}
