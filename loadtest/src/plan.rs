//! What to send, where to and when.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use http::{HeaderValue, Uri};

use crate::error::{LoadError, ParseServerError};

/// A load test.
#[derive(Clone, Debug)]
pub struct Plan {
    /// The server.
    pub url: ServerUrl,
    /// None asks the server and takes its first model.
    pub model: Option<String>,
    /// Sent as a bearer token.
    pub api_key: Option<ApiKey>,
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

/// Where a server is: `http://host:port`, perhaps with a path, without a slash at its end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServerUrl(String);

/// A bearer token that no message shows.
#[derive(Clone, PartialEq, Eq)]
pub struct ApiKey(HeaderValue);

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

impl FromStr for ServerUrl {
    type Err = ParseServerError;

    fn from_str(text: &str) -> Result<Self, ParseServerError> {
        let base = text.trim_end_matches('/');
        let uri: Uri = base.parse().map_err(|_| ParseServerError("it is no URL"))?;
        if uri.authority().is_some_and(|authority| authority.as_str().contains('@')) {
            return Err(ParseServerError("a user or a password does not belong into it"));
        }
        let port = uri.authority().map_or("", |authority| &authority.as_str()[authority.host().len()..]);
        if !port.is_empty() && uri.port_u16().is_none_or(|port| port == 0) {
            return Err(ParseServerError("the port is not a number from 1 to 65535"));
        }
        match (uri.scheme_str(), uri.host()) {
            _ if uri.query().is_some() || base.contains('#') => Err(ParseServerError("it has a ? or a #")),
            (Some("http"), Some(_)) => Ok(Self(base.to_owned())),
            (Some("https"), _) => Err(ParseServerError("https is not spoken here")),
            _ => Err(ParseServerError("it lacks http://")),
        }
    }
}

impl fmt::Display for ServerUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl FromStr for ApiKey {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let value = HeaderValue::from_str(&format!("Bearer {text}"));
        let mut value = value.ok().filter(|_| !text.is_empty()).ok_or("expected visible ASCII characters")?;
        value.set_sensitive(true);
        Ok(Self(value))
    }
}

impl ApiKey {
    /// As requests carry it.
    pub(crate) fn header(&self) -> HeaderValue {
        self.0.clone()
    }
}

impl fmt::Debug for ApiKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ApiKey(..)")
    }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn servers_are_read_or_refused_without_being_repeated() {
        for (text, shown) in
            [("http://h:1/", "http://h:1"), ("http://[::1]:8080/base", "http://[::1]:8080/base")]
        {
            assert_eq!(text.parse::<ServerUrl>().unwrap().to_string(), shown);
        }
        for (text, says) in [
            ("localhost:8080", "lacks http://"),
            ("https://a", "https"),
            ("http://u:hunter2@h", "user or a password"),
            ("http://hunter2@h", "user or a password"),
            ("http://u:hunter2@h:bad", "user or a password"),
            ("http://h:bad", "port"),
            ("http://h:0", "port"),
            ("http://[::1]:70000", "port"),
            ("http://h?x=hunter2", "?"),
            ("", "no URL"),
        ] {
            let error = text.parse::<ServerUrl>().unwrap_err().to_string();
            assert!(error.contains(says) && !error.contains("hunter2"), "{text}: {error}");
        }
    }

    #[test]
    fn keys_are_not_shown() {
        let key: ApiKey = "hunter2".parse().unwrap();
        assert_eq!(key.header(), "Bearer hunter2");
        assert!(!format!("{key:?}{:?}", key.header()).contains("hunter2"));
        assert!(["", "a\nb"].into_iter().all(|text| text.parse::<ApiKey>().is_err()));
    }
}
