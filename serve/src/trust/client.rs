//! The side that connects: a router.

use std::future::poll_fn;
use std::pin::Pin;
use std::sync::Arc;

use hyper_util::rt::TokioIo;
use rustls::ClientConfig;
use rustls::pki_types::ServerName;
use tokio::io::AsyncBufRead;
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::rustls;
use tonic::codegen::InterceptedService;
use tonic::codegen::http::Uri;
use tonic::transport::{Channel, Endpoint};

use super::files::Reloading;
use super::{Bearer, TlsFiles, TrustConfig, TrustError};

/// A channel whose calls show the cluster's token, where there is one.
pub type TrustedChannel = InterceptedService<Channel, Bearer>;

/// How a client proves itself and whom it believes. The default does neither.
#[derive(Clone, Default)]
pub struct ClientTrust {
    tls: Option<Tls>,
    bearer: Bearer,
}

#[derive(Clone)]
struct Tls {
    config: Arc<Reloading<ClientConfig>>,
    server_name: Option<ServerName<'static>>,
}

impl ClientTrust {
    /// Reads what the configuration names.
    pub fn load(config: &TrustConfig) -> Result<Self, TrustError> {
        let server_name = config
            .server_name
            .clone()
            .map(|name| ServerName::try_from(name.clone()).map_err(|_| TrustError::ServerName { name }));
        let server_name = server_name.transpose()?;
        let tls = config.tls.clone().map(|files| {
            let config = Arc::new(Reloading::new(files, client_config)?);
            Ok(Tls { config, server_name })
        });
        let bearer = config.token_file.as_deref().map(Bearer::from_file).transpose()?;
        Ok(Self { tls: tls.transpose()?, bearer: bearer.unwrap_or_default() })
    }

    /// A channel that connects when first used and again after every break. The endpoint's URI is a plain http:// one; TLS
    /// is added here, with the certificates of the moment.
    pub fn channel(&self, endpoint: &Endpoint) -> TrustedChannel {
        let channel = match self.tls.clone() {
            None => endpoint.connect_lazy(),
            Some(tls) => endpoint.connect_with_connector_lazy(tower::service_fn(move |uri| {
                let tls = tls.clone();
                async move { tls.connect(uri).await }
            })),
        };
        InterceptedService::new(channel, self.bearer.clone())
    }
}

impl Tls {
    async fn connect(self, uri: Uri) -> std::io::Result<TokioIo<tokio_rustls::client::TlsStream<TcpStream>>> {
        let invalid = |reason| std::io::Error::new(std::io::ErrorKind::InvalidInput, reason);
        let host = uri.host().ok_or_else(|| invalid("the address has no host"))?;
        let host = host.trim_start_matches('[').trim_end_matches(']').to_owned();
        let port = uri.port_u16().ok_or_else(|| invalid("the address has no port"))?;
        let name = match self.server_name {
            Some(name) => name,
            None => ServerName::try_from(host.clone())
                .map_err(|_| invalid("no certificate can name this host"))?,
        };
        let stream = TcpStream::connect((host, port)).await?;
        stream.set_nodelay(true)?;
        let mut stream = TlsConnector::from(self.config.get()).connect(name, stream).await?;
        // In TLS 1.3 a server judges our certificate when we are through. Its first bytes, HTTP/2 settings, say that it lets
        // us in; without waiting for them a refusal would look like a connection that closed for no reason.
        if poll_fn(|cx| Pin::new(&mut stream).poll_fill_buf(cx).map_ok(<[u8]>::is_empty)).await? {
            let reason = "the other side closed the connection behind the TLS handshake";
            return Err(std::io::Error::new(std::io::ErrorKind::UnexpectedEof, reason));
        }
        Ok(TokioIo::new(stream))
    }
}

fn client_config(files: &TlsFiles) -> Result<ClientConfig, TrustError> {
    let material = files.read()?;
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let mut config = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(|error| files.unusable(error))?
        .with_root_certificates(material.roots)
        .with_client_auth_cert(material.chain, material.key)
        .map_err(|error| files.unusable(error))?;
    config.alpn_protocols = vec![b"h2".to_vec()];
    Ok(config)
}

impl std::fmt::Debug for ClientTrust {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ClientTrust").field("tls", &self.tls.is_some()).field("bearer", &self.bearer).finish()
    }
}
