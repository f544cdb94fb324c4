//! Whom the processes of a cluster trust.

use std::path::PathBuf;

use clap::Args;
use thalweg_proto::trust::{TlsFiles, TrustConfig};

/// What keeps strangers out between router and worker: certificates, a shared token, or both.
#[derive(Args, Clone, Debug)]
pub(crate) struct TrustOptions {
    /// PEM file of this process's certificate for gRPC between router and worker; read again when it changes
    #[arg(long, env = "THALWEG_TLS_CERT_FILE", value_name = "FILE", requires_all = ["tls_key_file", "tls_ca_file"])]
    tls_cert_file: Option<PathBuf>,

    /// PEM file of that certificate's key
    #[arg(long, env = "THALWEG_TLS_KEY_FILE", value_name = "FILE", requires = "tls_cert_file")]
    tls_key_file: Option<PathBuf>,

    /// PEM file of the authorities that must have signed the other side's certificate
    #[arg(long, env = "THALWEG_TLS_CA_FILE", value_name = "FILE", requires = "tls_cert_file")]
    tls_ca_file: Option<PathBuf>,

    /// Name that workers' certificates are made out to. Default: the host of each worker's address
    #[arg(long, env = "THALWEG_TLS_SERVER_NAME", value_name = "NAME", requires = "tls_cert_file")]
    tls_server_name: Option<String>,

    /// File with the token that router and workers share; of several lines workers take any, routers show the first
    #[arg(long, env = "THALWEG_CLUSTER_TOKEN_FILE", value_name = "FILE")]
    cluster_token_file: Option<PathBuf>,
}

impl TrustOptions {
    /// As the protocol's crate wants it.
    pub(crate) fn config(&self) -> TrustConfig {
        let files = self.tls_cert_file.clone().zip(self.tls_key_file.clone()).zip(self.tls_ca_file.clone());
        TrustConfig {
            tls: files.map(|((certificate, key), authority)| TlsFiles { certificate, key, authority }),
            token_file: self.cluster_token_file.clone(),
            server_name: self.tls_server_name.clone(),
        }
    }
}
