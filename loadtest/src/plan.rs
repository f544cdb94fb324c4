//! What to send, where to and when.

use std::path::PathBuf;
use std::time::Duration;

use crate::error::LoadError;

/// A load test.
#[derive(Clone, Debug)]
pub struct Plan {
    /// The server: `http://host:port`.
    pub url: String,
    /// None asks the server and takes its first model.
    pub model: Option<String>,
    /// Sent as a bearer token.
    pub api_key: Option<String>,
    /// Which of the server's two ways to generate.
    pub endpoint: Endpoint,
    /// When conversations begin.
    pub arrivals: Arrivals,
    /// What they say.
    pub workload: Workload,
    /// How many there are. Each has as many requests as turns.
    pub conversations: usize,
    /// Tokens of each answer, at most.
    pub max_tokens: u32,
    /// Answers go on to `max_tokens` (servers that know the field `ignore_eos`).
    pub ignore_eos: bool,
    /// Sampling temperature.
    pub temperature: f32,
    /// What counts as a good answer; none: every complete one.
    pub slo: Slo,
    /// A request that takes longer has failed.
    pub timeout: Duration,
    /// Of arrivals and prompts.
    pub seed: u64,
    /// Shows a bar on a terminal.
    pub progress: bool,
}

/// The path that requests go to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Endpoint {
    /// `/v1/chat/completions`.
    Chat,
    /// `/v1/completions`.
    Completions,
}

/// When conversations begin.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Arrivals {
    /// Open loop: whenever a Poisson process says so, however slow the server is.
    Poisson {
        /// Conversations a second, on average.
        per_second: f64,
    },
    /// Closed loop: this many at once, each followed by the next.
    Closed {
        /// Conversations at once.
        concurrency: usize,
    },
}

/// What conversations say.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Workload {
    /// Words drawn at random, most of which are one token for most tokenizers.
    Synthetic(Synthetic),
    /// Lines of `{"prompt": ..}` or `{"messages": [..]}`, in random order, from the start again when used up.
    Dataset(PathBuf),
}

/// Shape of synthetic conversations.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Synthetic {
    /// Words of each user turn.
    pub words: usize,
    /// Words that conversations of one group have in common at their beginning.
    pub shared_words: usize,
    /// How many such groups there are.
    pub groups: usize,
    /// User turns of a conversation, each sent with the whole conversation before it.
    pub turns: usize,
}

/// Limits that a good answer keeps.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Slo {
    /// Time to the first token, in ms.
    pub ttft_ms: Option<f64>,
    /// Time for each further token, in ms.
    pub tpot_ms: Option<f64>,
}

impl Endpoint {
    pub(crate) fn path(self) -> &'static str {
        match self {
            Self::Chat => "/v1/chat/completions",
            Self::Completions => "/v1/completions",
        }
    }
}

impl Plan {
    pub(crate) fn check(&self) -> Result<(), LoadError> {
        let wrong = |what: &str| Err(LoadError::Plan { what: what.to_owned() });
        if self.conversations == 0 {
            return wrong("the number of conversations must be 1 or more");
        }
        if self.max_tokens == 0 {
            return wrong("the number of output tokens must be 1 or more");
        }
        match self.arrivals {
            Arrivals::Poisson { per_second } if !(per_second.is_finite() && per_second > 0.0) => {
                return wrong("the request rate must be a number above 0");
            }
            Arrivals::Closed { concurrency: 0 } => return wrong("the concurrency must be 1 or more"),
            _ => {}
        }
        match &self.workload {
            Workload::Synthetic(Synthetic { words: 0, .. }) => wrong("a prompt needs at least one word"),
            Workload::Synthetic(Synthetic { turns: 0, .. }) => {
                wrong("a conversation needs at least one turn")
            }
            Workload::Synthetic(Synthetic { groups: 0, .. }) => {
                wrong("there must be at least one shared prefix")
            }
            _ => Ok(()),
        }
    }
}
