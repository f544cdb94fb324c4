//! The side that listens: a worker.

use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use rustls::ServerConfig;
use rustls::server::WebPkiClientVerifier;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};
use tokio::time::{sleep, timeout};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls;
use tokio_stream::Stream;
use tokio_stream::wrappers::ReceiverStream;

use super::files::Reloading;
use super::{ServerStream, TlsFiles, TokenGuard, TrustConfig, TrustError};
use crate::Place;
use crate::accept::Entrance;
use crate::rarely::Rarely;

/// What a peer gets to prove itself.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(5);
/// `PRI * HTTP/2.0` and what belongs to it.
const PREFACE_BYTES: usize = 24;
/// Between looks at a preface that has come in part, which honest peers send at once.
const PREFACE_POLL: Duration = Duration::from_millis(10);
/// Handshakes at a time; further connections wait in the listener's backlog.
const HANDSHAKES_MAX: usize = 256;
/// Connections that are ready and not yet served; further handshakes wait.
const READY_MAX: usize = 16;

/// Connections, as tonic's server takes them.
pub type Incoming = Pin<Box<dyn Stream<Item = std::io::Result<ServerStream>> + Send>>;

/// Whom a server lets in. The default lets in everybody.
#[derive(Clone, Default)]
pub struct ServerTrust {
    tls: Option<Arc<Reloading<ServerConfig>>>,
    guard: TokenGuard,
}

impl ServerTrust {
    /// Reads what the configuration names.
    pub fn load(config: &TrustConfig) -> Result<Self, TrustError> {
        let tls = config.tls.clone().map(|files| Reloading::new(files, server_config).map(Arc::new));
        let guard = config.token_file.as_deref().map(TokenGuard::from_file).transpose()?;
        Ok(Self { tls: tls.transpose()?, guard: guard.unwrap_or_default() })
    }

    /// Checks every call's token, for tonic's `InterceptorLayer`.
    pub fn guard(&self) -> TokenGuard {
        self.guard.clone()
    }

    /// The listener's connections, each with its handshake done. A peer that fails or dawdles holds up nobody else.
    pub fn incoming(&self, listener: TcpListener) -> Incoming {
        let (ready, connections) = mpsc::channel(READY_MAX);
        tokio::spawn(accept(listener, self.tls.clone(), ready));
        Box::pin(ReceiverStream::new(connections))
    }
}

type Ready = mpsc::Sender<std::io::Result<ServerStream>>;

/// Until nobody wants connections any more.
async fn accept(listener: TcpListener, tls: Option<Arc<Reloading<ServerConfig>>>, ready: Ready) {
    let entrance = Entrance::new(listener);
    let slots = Arc::new(Semaphore::new(HANDSHAKES_MAX));
    let refusals = Arc::<Rarely>::default();
    loop {
        let next = async {
            let slot = Arc::clone(&slots).acquire_owned().await;
            (slot, entrance.next().await)
        };
        let (slot, (stream, peer, place)) = tokio::select! {
            next = next => next,
            () = ready.closed() => return,
        };
        // The semaphore is never closed.
        let Ok(slot) = slot else { return };
        let newcomer = Newcomer { stream, peer, place, _slot: slot };
        let config = tls.as_ref().map(|tls| tls.get());
        tokio::spawn(newcomer.admit(config, ready.clone(), Arc::clone(&refusals)));
    }
}

/// A connection of somebody who has not proved anything yet.
struct Newcomer {
    stream: TcpStream,
    peer: SocketAddr,
    place: Place,
    _slot: OwnedSemaphorePermit,
}

impl Newcomer {
    async fn admit(self, config: Option<Arc<ServerConfig>>, ready: Ready, refusals: Arc<Rarely>) {
        let peer = self.peer;
        let stream = match config {
            None => match timeout(HANDSHAKE_TIMEOUT, preface(&self.stream)).await {
                Ok(Ok(())) => ServerStream::Plain(self.stream, self.place),
                _ => return tracing::debug!(%peer, "a peer did not begin to speak HTTP/2 in time"),
            },
            Some(config) => {
                let handshake = TlsAcceptor::from(config).accept(self.stream);
                match timeout(HANDSHAKE_TIMEOUT, handshake).await {
                    Ok(Ok(stream)) => ServerStream::Tls(Box::new(stream), self.place),
                    Ok(Err(error)) => return refused(&refusals, peer, &error),
                    Err(_) => {
                        return tracing::debug!(%peer, "a peer did not finish its TLS handshake in time");
                    }
                }
            }
        };
        // Nobody serves any more: the connection is dropped.
        let _ = ready.send(Ok(stream)).await;
    }
}

/// Until as many bytes are there as HTTP/2 begins with: a server would wait for them without end.
async fn preface(stream: &TcpStream) -> std::io::Result<()> {
    let mut bytes = [0; PREFACE_BYTES];
    loop {
        match stream.peek(&mut bytes).await? {
            0 => return Err(std::io::ErrorKind::UnexpectedEof.into()),
            PREFACE_BYTES => return Ok(()),
            _ => sleep(PREFACE_POLL).await,
        }
    }
}

fn refused(refusals: &Rarely, peer: SocketAddr, error: &std::io::Error) {
    // A health check that only connects, or a port scan.
    if error.kind() == std::io::ErrorKind::UnexpectedEof {
        return tracing::debug!(%peer, "a peer left during its TLS handshake");
    }
    match refusals.turn() {
        Some(untold) => tracing::warn!(%peer, %error, untold, "a peer's TLS handshake failed, it is refused"),
        None => tracing::debug!(%peer, %error, "a peer's TLS handshake failed, it is refused"),
    }
}

fn server_config(files: &TlsFiles) -> Result<ServerConfig, TrustError> {
    let material = files.read()?;
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let verifier = WebPkiClientVerifier::builder_with_provider(material.roots.into(), Arc::clone(&provider))
        .build()
        .map_err(|error| files.unusable(error))?;
    let mut config = ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(|error| files.unusable(error))?
        .with_client_cert_verifier(verifier)
        .with_single_cert(material.chain, material.key)
        .map_err(|error| files.unusable(error))?;
    config.alpn_protocols = vec![b"h2".to_vec()];
    Ok(config)
}

impl std::fmt::Debug for ServerTrust {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ServerTrust").field("tls", &self.tls.is_some()).field("guard", &self.guard).finish()
    }
}
