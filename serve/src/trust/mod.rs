//! Who may speak the protocol: mutual TLS, a shared token, or both. Certificates are read again when their files change;
//! connections that are open live on.

mod client;
mod error;
mod files;
mod server;
mod stream;
mod token;

use std::path::PathBuf;

pub use client::{ClientTrust, TrustedChannel};
pub use error::TrustError;
pub use files::TlsFiles;
pub use server::{Incoming, ServerTrust};
pub use stream::ServerStream;
pub use token::{Bearer, TokenGuard};

/// What one process was told to trust, and to prove itself with. Nothing at all is allowed too.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TrustConfig {
    /// For mutual TLS.
    pub tls: Option<TlsFiles>,
    /// File with the tokens of the cluster, one a line: servers take any of them, clients show the first.
    pub token_file: Option<PathBuf>,
    /// What servers' certificates are made out to; without it, the host of the address that is connected to.
    pub server_name: Option<String>,
}

impl TrustConfig {
    /// Whether strangers are kept out.
    pub fn is_set(&self) -> bool {
        self.tls.is_some() || self.token_file.is_some()
    }
}
