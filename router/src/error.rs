//! Why a request was not served, and why a router did not start.

use std::borrow::Cow;
use std::net::SocketAddr;
use std::time::Duration;

use thalweg_proto::code::ErrorCode;

/// Characters of a client's own words that an error message repeats: enough to recognise them by.
const ECHO_CHARS_MAX: usize = 128;
/// Characters of a whole message, whatever went into it.
const MESSAGE_CHARS_MAX: usize = 2048;

/// A request that could not be served, or not to its end.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct RouterError {
    /// What kind of fault; decides status and retry.
    pub code: ErrorCode,
    /// A sentence for the user: what is wrong and what to do.
    pub message: String,
    /// Field of the request that is at fault.
    pub param: Option<String>,
    /// When a new try may succeed, for the Retry-After header.
    pub retry_after: Option<Duration>,
}

impl RouterError {
    /// An error of no particular field.
    pub fn new(code: ErrorCode, message: impl Into<String>) -> Self {
        Self { code, message: message.into(), param: None, retry_after: None }
    }

    /// A fault of one field of the request.
    pub fn field(param: impl Into<String>, message: impl Into<String>) -> Self {
        Self { param: Some(param.into()), ..Self::new(ErrorCode::InvalidRequest, message) }
    }

    /// What a worker answered.
    pub fn of_status(status: &tonic::Status) -> Self {
        Self::new(ErrorCode::of(status), status.message())
    }

    /// The same with a time after which to try again.
    pub fn retry_after(self, after: Duration) -> Self {
        Self { retry_after: Some(after), ..self }
    }
}

/// What a client sent, as far as messages repeat it.
pub(crate) fn echo(text: &str) -> Cow<'_, str> {
    cut(text, ECHO_CHARS_MAX)
}

/// A message as clients get it.
pub(crate) fn bounded(message: &str) -> Cow<'_, str> {
    cut(message, MESSAGE_CHARS_MAX)
}

fn cut(text: &str, chars_max: usize) -> Cow<'_, str> {
    match text.char_indices().nth(chars_max) {
        Some((end, _)) => Cow::Owned(format!("{}...", &text[..end])),
        None => Cow::Borrowed(text),
    }
}

/// The router did not start.
#[derive(Debug, thiserror::Error)]
pub enum RouterStartError {
    /// The HTTP address is taken or not ours.
    #[error("cannot listen on {address}: {source}; choose another address with --http")]
    Bind {
        /// The address asked for.
        address: SocketAddr,
        /// What the system said.
        source: std::io::Error,
    },
    /// The gRPC address is taken or not ours.
    #[error("cannot listen on {address} for gRPC: {source}; choose another address with --grpc")]
    BindGrpc {
        /// The address asked for.
        address: SocketAddr,
        /// What the system said.
        source: std::io::Error,
    },
    /// The built-in descriptors cannot be read.
    #[error("gRPC reflection: {0}")]
    Reflection(String),
    /// Certificates or tokens are of no use.
    #[error(transparent)]
    Trust(#[from] thalweg_serve::trust::TrustError),
    /// The variable of API keys is set and holds none.
    #[error(
        "{} is set but holds no key: give it one, or unset it to let everybody in",
        crate::config::API_KEY_VARIABLE
    )]
    NoKey,
    /// A value of the configuration contradicts another or itself.
    #[error("--{option}: {reason}")]
    Config {
        /// The flag, without dashes.
        option: String,
        /// What is wrong and what would be right.
        reason: String,
    },
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_words_are_cut_between_characters() {
        let check = |text: &str, expected: &str| assert_eq!(cut(text, 3), expected);
        check("", "");
        check("abc", "abc");
        check("abcd", "abc...");
        check("žžžž", "žžž...");
    }
}
