//! What can be wrong between this process and etcd.

use std::path::PathBuf;
use std::time::Duration;

/// Why etcd cannot be used, or did not do what was asked.
#[derive(Debug, thiserror::Error)]
pub enum EtcdError {
    /// The URL names a user, and nothing says the password.
    #[error(
        "the etcd URL names a user but there is no password; set --membership-password-file or \
         THALWEG_MEMBERSHIP_PASSWORD"
    )]
    PasswordMissing,
    /// There is a password for nobody.
    #[error("there is a password for etcd but no user; write it into the URL: etcd://USER@host:2379")]
    UserMissing,
    /// etcds:// without an authority to trust.
    #[error(
        "etcds:// needs --membership-ca-file, the PEM file of the authority that signed etcd's certificate"
    )]
    AuthorityMissing,
    /// A certificate for a connection that is not encrypted.
    #[error("certificates for etcd are of no use with etcd://; write etcds://, or leave them out")]
    TlsUnused,
    /// A file cannot be read.
    #[error("cannot read {path}: {source}", path = path.display())]
    File {
        /// As configured.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// The endpoint or the certificates are not usable.
    #[error("etcd endpoint {endpoint}: {reason}; check the certificate files")]
    Endpoint {
        /// host:port.
        endpoint: String,
        /// What is wrong, with its causes.
        reason: String,
    },
    /// Silence.
    #[error("etcd at {endpoint} did not answer {call} within {limit:?}")]
    Timeout {
        /// host:port.
        endpoint: String,
        /// What was asked.
        call: &'static str,
        /// How long was waited.
        limit: Duration,
    },
    /// It answered no, or the connection broke.
    #[error("etcd at {endpoint} failed {call}: {reason}")]
    Call {
        /// host:port.
        endpoint: String,
        /// What was asked.
        call: &'static str,
        /// etcd's words, and what to do where that is known.
        reason: String,
    },
    /// The watch is of no use any more.
    #[error("the watch on etcd at {endpoint} ended: {reason}")]
    WatchEnded {
        /// host:port.
        endpoint: String,
        /// Why.
        reason: String,
    },
}
