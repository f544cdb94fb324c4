//! Why a worker's answer ended early, and what follows from it.

use std::error::Error;

use thalweg_proto::code::ErrorCode;

use super::RETRY_AFTER;
use crate::error::RouterError;

/// Reason of a connection that could not be opened.
const CONNECT: &str = "connect";

/// Why the answer ended early.
#[derive(Clone, Debug)]
pub(super) enum Broken {
    /// The worker or the way to it failed.
    Lost {
        /// Short name for metrics.
        reason: &'static str,
        /// For people.
        why: String,
        /// The worker's life may have ended with it.
        exit: bool,
    },
    /// The worker refused or failed, and said so.
    Refused(RouterError),
    /// The request's time is over.
    Late,
}

impl Broken {
    pub(super) fn of(status: &tonic::Status) -> Self {
        let sources = || {
            let first: Option<&(dyn Error + 'static)> = status.source();
            std::iter::successors(first, |error| (*error).source())
        };
        if sources().any(|error| error.is::<tonic::ConnectError>()) {
            // It never got there, so it has nothing to do with how the worker ended.
            return Self::Lost { reason: CONNECT, why: status.message().to_owned(), exit: false };
        }
        // A status with a source was made on this side: the connection failed.
        let local = sources().next().is_some();
        let code = ErrorCode::of(status);
        if local || (code == ErrorCode::Unavailable && status.metadata().is_empty()) {
            return Self::lost("connection", status.message());
        }
        let error = RouterError::of_status(status);
        match error.code {
            // It had the model and the adapter when it described itself: this is another life, not yet known as such.
            ErrorCode::ModelNotFound => {
                Self::Refused(RouterError { code: ErrorCode::FingerprintMismatch, ..error })
            }
            _ => Self::Refused(error),
        }
    }

    /// The worker sent what cannot be, or gave the request up.
    pub(super) fn of_nonsense(error: RouterError) -> Self {
        match error.code {
            ErrorCode::Internal => Self::Lost { reason: "nonsense", why: error.message, exit: false },
            _ => Self::Refused(error),
        }
    }

    /// An abnormal end of the worker.
    pub(super) fn lost(reason: &'static str, why: &str) -> Self {
        Self::Lost { reason, why: why.to_owned(), exit: true }
    }

    /// It is given up: silent, hanging, or replaced by another life.
    pub(super) fn silent() -> Self {
        Self::lost("gone", "it fell silent, hangs or was restarted")
    }

    /// A stream that ends without its last token.
    pub(super) fn ended_early() -> Self {
        Self::Lost { reason: "ended_early", why: "it ended its answer early".to_owned(), exit: false }
    }

    /// The worker's life may have ended with it.
    pub(super) fn is_exit(&self) -> bool {
        matches!(self, Self::Lost { exit: true, .. })
    }

    /// A draining worker that has no more time for it.
    pub(super) fn is_hand_over(&self) -> bool {
        matches!(self, Self::Refused(error) if error.code == ErrorCode::Draining)
    }

    /// The worker said no.
    pub(super) fn is_refusal(&self) -> bool {
        matches!(self, Self::Refused(_))
    }

    /// The worker has no room at present.
    pub(super) fn is_overload(&self) -> bool {
        matches!(self, Self::Refused(error) if error.code == ErrorCode::Overloaded)
    }

    /// It never reached the worker.
    pub(super) fn never_arrived(&self) -> bool {
        matches!(self, Self::Lost { reason: CONNECT, .. })
    }

    /// Nothing was done that another worker could not do.
    pub(super) fn retry_elsewhere(&self) -> bool {
        match self {
            Self::Lost { .. } => true,
            Self::Refused(error) => error.code.retry_elsewhere(),
            Self::Late => false,
        }
    }

    /// Short name for metrics.
    pub(super) fn reason(&self) -> &'static str {
        match self {
            Self::Lost { reason, .. } => reason,
            Self::Refused(error) => error.code.as_str(),
            Self::Late => "late",
        }
    }

    /// What the client is told when there is no other try.
    pub(super) fn into_error(self, tokens: usize) -> RouterError {
        match self {
            Self::Lost { why, .. } if tokens == 0 => {
                let message =
                    format!("the worker could not be reached before the first token: {why}; try again");
                RouterError::new(ErrorCode::Unavailable, message).retry_after(RETRY_AFTER)
            }
            Self::Lost { why, .. } => {
                let message = format!("the worker was lost after {tokens} tokens: {why}; try again");
                RouterError::new(ErrorCode::Unavailable, message)
            }
            Self::Refused(error) if error.code == ErrorCode::Overloaded => error.retry_after(RETRY_AFTER),
            Self::Refused(error) => error,
            Self::Late => {
                let mut message = "the request took longer than allowed".to_owned();
                if tokens > 0 {
                    message += &format!("; it ended after {tokens} tokens");
                }
                RouterError::new(ErrorCode::DeadlineExceeded, message)
            }
        }
    }
}
