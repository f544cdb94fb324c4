//! gRPC servers: an address that is ours, limits on each connection, reflection, and the end.

use std::net::SocketAddr;
use std::time::Duration;

use thalweg_proto::DESCRIPTORS;
use tokio::net::TcpListener;
use tokio::task::JoinHandle;
use tokio::time::timeout;
use tonic::transport::Server;
use tonic_reflection::server::v1::{ServerReflection, ServerReflectionServer};

use crate::Claim;
use crate::trust::{Incoming, ServerTrust, TokenGuard, TrustConfig, TrustError};

/// What a peer may send on a stream before we have read it.
const STREAM_WINDOW_BYTES: u32 = 1 << 20;

/// Limits of one connection.
#[derive(Clone, Copy, Debug)]
pub struct ConnectionLimits {
    /// What a peer may send on all its streams before we have read it.
    pub window_bytes: u32,
    /// Calls at a time.
    pub streams_max: u32,
    /// Between two pings.
    pub keep_alive_interval: Duration,
    /// A peer that does not answer a ping by then is gone.
    pub keep_alive_timeout: Duration,
}

impl ConnectionLimits {
    /// A server whose connections have these limits.
    pub fn server(self) -> Server {
        Server::builder()
            .initial_stream_window_size(STREAM_WINDOW_BYTES)
            .initial_connection_window_size(self.window_bytes)
            .max_concurrent_streams(self.streams_max)
            .http2_keepalive_interval(Some(self.keep_alive_interval))
            .http2_keepalive_timeout(Some(self.keep_alive_timeout))
    }
}

/// An address that is ours, and whom we are to trust; nobody can connect yet.
pub struct GrpcClaim {
    claim: Claim,
    trust: ServerTrust,
}

impl GrpcClaim {
    /// Takes the address, for those whom we are to trust.
    pub fn take(address: SocketAddr, trust: &TrustConfig) -> Result<Self, BindError> {
        let trust = ServerTrust::load(trust)?;
        Ok(Self { claim: Claim::take(address)?, trust })
    }

    /// From now on connections wait to be answered.
    pub fn listen(self) -> std::io::Result<GrpcListener> {
        let address = self.claim.address();
        Ok(GrpcListener { address, listener: self.claim.listen()?, trust: self.trust })
    }
}

/// An address that is ours, with nobody answering yet.
pub struct GrpcListener {
    address: SocketAddr,
    listener: TcpListener,
    trust: ServerTrust,
}

/// Why there is no listener.
#[derive(Debug, thiserror::Error)]
pub enum BindError {
    /// Certificates or tokens are of no use.
    #[error(transparent)]
    Trust(#[from] TrustError),
    /// The address is taken, or not ours.
    #[error(transparent)]
    Address(#[from] std::io::Error),
}

impl GrpcListener {
    /// Takes the address, for those whom we are to trust.
    pub async fn bind(address: SocketAddr, trust: &TrustConfig) -> Result<Self, BindError> {
        Ok(GrpcClaim::take(address, trust)?.listen()?)
    }

    /// Where it listens; tells the port when 0 was asked for.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Checks every call's token, for tonic's `InterceptorLayer`.
    pub fn guard(&self) -> TokenGuard {
        self.trust.guard()
    }

    /// Connections, each with its handshake done.
    pub fn incoming(self) -> Incoming {
        self.trust.incoming(self.listener)
    }
}

/// Tells callers what a service of ours looks like.
pub fn reflection(
    service: &str,
) -> Result<ServerReflectionServer<impl ServerReflection>, tonic_reflection::server::Error> {
    tonic_reflection::server::Builder::configure()
        .register_encoded_file_descriptor_set(DESCRIPTORS)
        .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
        .with_service_name(service)
        .with_service_name("grpc.health.v1.Health")
        .with_service_name("grpc.reflection.v1.ServerReflection")
        .build_v1()
}

/// A server that answers. Dropping it stops it at once.
pub struct Serving(JoinHandle<()>);

impl Serving {
    /// Serves until `server` has ended.
    pub fn start(server: impl Future<Output = Result<(), tonic::transport::Error>> + Send + 'static) -> Self {
        Self(tokio::spawn(async move {
            if let Err(error) = server.await {
                tracing::error!(%error, "gRPC server failed");
            }
        }))
    }

    /// Waits for the end of the last stream, once it was told to end; health watches have no end of their own and are cut
    /// after `patience`.
    pub async fn ended(&mut self, patience: Duration) {
        if self.0.is_finished() {
            return;
        }
        match timeout(patience, &mut self.0).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => tracing::error!(%error, "gRPC server panicked"),
            Err(_) => self.0.abort(),
        }
    }
}

impl Drop for Serving {
    fn drop(&mut self) {
        self.0.abort();
    }
}
