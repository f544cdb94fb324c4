//! Whom the processes of a cluster trust.

use std::path::PathBuf;

use clap::Args;
use thalweg_proto::value;
use thalweg_serve::trust::{TlsFiles, TrustConfig};

use super::BadOption;

/// What keeps strangers out between router and worker: certificates, a shared token, or both.
#[derive(Args, Clone, Debug)]
pub(crate) struct TrustOptions {
    /// PEM file of this process's certificate for gRPC between router and worker; read again when it changes
    #[arg(long, env = "THALWEG_TLS_CERT_FILE", value_name = "FILE")]
    #[arg(value_parser = value::file)]
    tls_cert_file: Option<PathBuf>,

    /// PEM file of that certificate's key
    #[arg(long, env = "THALWEG_TLS_KEY_FILE", value_name = "FILE")]
    #[arg(value_parser = value::file)]
    tls_key_file: Option<PathBuf>,

    /// PEM file of the authorities that must have signed the other side's certificate
    #[arg(long, env = "THALWEG_TLS_CA_FILE", value_name = "FILE")]
    #[arg(value_parser = value::file)]
    tls_ca_file: Option<PathBuf>,

    /// Name that workers' certificates are made out to. Default: the host of each worker's address
    #[arg(long, env = "THALWEG_TLS_SERVER_NAME", value_name = "NAME")]
    #[arg(value_parser = value::name)]
    tls_server_name: Option<String>,

    /// File with the token that router and workers share; of several lines workers take any, routers show the first
    #[arg(long, env = "THALWEG_CLUSTER_TOKEN_FILE", value_name = "FILE", value_parser = value::file)]
    cluster_token_file: Option<PathBuf>,
}

impl TrustOptions {
    /// As the protocol's crate wants it. Half of what TLS needs is refused, whatever it came from: it would be no TLS.
    pub(crate) fn config(&self) -> anyhow::Result<TrustConfig> {
        let tls = match (&self.tls_cert_file, &self.tls_key_file, &self.tls_ca_file) {
            (Some(certificate), Some(key), Some(authority)) => Some(TlsFiles {
                certificate: certificate.clone(),
                key: key.clone(),
                authority: authority.clone(),
            }),
            (None, None, None) if self.tls_server_name.is_none() => None,
            (certificate, key, authority) => {
                let flags = [
                    ("--tls-cert-file", certificate.is_none()),
                    ("--tls-key-file", key.is_none()),
                    ("--tls-ca-file", authority.is_none()),
                ];
                let missing: Vec<_> =
                    flags.iter().filter(|(_, missing)| *missing).map(|(flag, _)| *flag).collect();
                let text = format!(
                    "TLS needs --tls-cert-file, --tls-key-file and --tls-ca-file; without {}",
                    missing.join(", ")
                );
                return Err(BadOption::because(text));
            }
        };
        Ok(TrustConfig {
            tls,
            token_file: self.cluster_token_file.clone(),
            server_name: self.tls_server_name.clone(),
        })
    }
}
