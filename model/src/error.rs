//! Why a model could not be read.

use std::path::{Path, PathBuf};

/// Names the file, what is wrong with it and what to do.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ModelError {
    /// The file could not be opened or read.
    #[error("cannot read {}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// The file is not what its format demands.
    #[error("{}: {reason}", path.display())]
    Malformed {
        /// The file.
        path: PathBuf,
        /// Which part, and what it should be.
        reason: String,
    },
    /// The model is sound, but of a kind that is not served.
    #[error("{}: {what} is not supported; {instead}", path.display())]
    Unsupported {
        /// The file.
        path: PathBuf,
        /// What it has.
        what: String,
        /// What to use.
        instead: String,
    },
}

impl ModelError {
    /// [`ModelError::Io`].
    pub fn io(path: &Path, source: std::io::Error) -> Self {
        Self::Io { path: path.to_owned(), source }
    }

    /// [`ModelError::Malformed`].
    pub fn malformed(path: &Path, reason: impl Into<String>) -> Self {
        Self::Malformed { path: path.to_owned(), reason: reason.into() }
    }

    /// [`ModelError::Unsupported`].
    pub fn unsupported(path: &Path, what: impl Into<String>, instead: impl Into<String>) -> Self {
        Self::Unsupported { path: path.to_owned(), what: what.into(), instead: instead.into() }
    }
}
