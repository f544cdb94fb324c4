//! Why a load test could not be run.

use std::path::PathBuf;

/// The text is no server's address. The text itself is not repeated, since it may hold a password.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}; expected http://host:port, such as http://127.0.0.1:8080")]
pub struct ParseServerError(pub(crate) &'static str);

/// Names what is wrong and what to do. A request that fails is no error: the report counts it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LoadError {
    /// A number of the plan makes no sense.
    #[error("{what}")]
    Plan {
        /// The field and what it must be.
        what: String,
    },
    /// The server did not tell its models.
    #[error("cannot ask {url}/v1/models: {reason}; is the server up? (or name the model)")]
    Models {
        /// The server.
        url: String,
        /// What happened.
        reason: String,
    },
    /// The data set could not be read.
    #[error("cannot read {}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// A line of the data set is not a prompt.
    #[error("{} line {line}: {reason}", path.display())]
    Dataset {
        /// The file.
        path: PathBuf,
        /// Counted from 1.
        line: usize,
        /// What it should be.
        reason: String,
    },
}
