//! What can be wrong with certificates and tokens.

use std::path::PathBuf;

/// Trust cannot be established.
#[derive(Debug, thiserror::Error)]
pub enum TrustError {
    /// A file cannot be read.
    #[error("cannot read {path}: {source}", path = path.display())]
    Read {
        /// As configured.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// It holds something else.
    #[error("{path} holds no {what} in PEM form: {reason}", path = path.display())]
    Pem {
        /// As configured.
        path: PathBuf,
        /// What was looked for.
        what: &'static str,
        /// What the reader said.
        reason: String,
    },
    /// Certificate, key and authority do not make a TLS configuration.
    #[error("{certificate} and its key cannot be used for TLS: {reason}", certificate = certificate.display())]
    Tls {
        /// As configured.
        certificate: PathBuf,
        /// What rustls said.
        reason: String,
    },
    /// There is no token in the file.
    #[error("{path} holds no token; write one of at least {bytes_min} printable ASCII characters, such as from: openssl rand -hex 32", path = path.display())]
    Token {
        /// As configured.
        path: PathBuf,
        /// What a token must have.
        bytes_min: usize,
    },
    /// No certificate can be made out to it.
    #[error("--tls-server-name {name:?} is neither a host name nor an IP address")]
    ServerName {
        /// As configured.
        name: String,
    },
}
