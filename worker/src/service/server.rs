//! The gRPC server around the service: limits, keep-alive, health, reflection.

use std::net::SocketAddr;
use std::time::Duration;

use thalweg_proto::trust::{ServerTrust, TrustConfig, TrustError};
use thalweg_proto::v1::worker_server::WorkerServer;
use thalweg_proto::{DESCRIPTORS, MESSAGE_BYTES_MAX};
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;
use tonic::service::InterceptorLayer;
use tonic::transport::Server;
use tonic_health::server::HealthReporter;

use super::WorkerService;

/// What a peer may send before we have read it, per stream and per connection.
const STREAM_WINDOW_BYTES: u32 = 1 << 20;
const CONNECTION_WINDOW_BYTES: u32 = 16 << 20;

/// Streams of one connection; a router has one connection, and more requests than this are refused anyhow.
const STREAMS_MAX: u32 = 16_384;

const KEEP_ALIVE_INTERVAL: Duration = Duration::from_secs(5);
const KEEP_ALIVE_TIMEOUT: Duration = Duration::from_secs(5);

/// What ended streams get to be read to their end.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(2);

/// Why the gRPC server cannot start.
#[derive(Debug, thiserror::Error)]
pub enum GrpcError {
    /// The address is taken, or not ours.
    #[error("cannot listen on {address} for gRPC: {source}; choose another with --grpc")]
    Bind {
        /// As configured.
        address: SocketAddr,
        /// What the system said.
        source: std::io::Error,
    },
    /// Certificates or tokens are of no use.
    #[error("gRPC: {0}")]
    Trust(#[from] TrustError),
    /// The built-in descriptors cannot be read.
    #[error("gRPC reflection: {0}")]
    Reflection(#[from] tonic_reflection::server::Error),
}

/// An address that is ours, with nobody answering yet.
pub(crate) struct GrpcListener {
    pub(crate) address: SocketAddr,
    listener: TcpListener,
    trust: ServerTrust,
}

/// A server that answers.
pub(crate) struct GrpcServer {
    pub(crate) address: SocketAddr,
    health: HealthReporter,
    task: tokio::task::JoinHandle<()>,
}

impl GrpcListener {
    /// Takes the address, for those whom we are to trust.
    pub(crate) async fn bind(address: SocketAddr, trust: &TrustConfig) -> Result<Self, GrpcError> {
        let trust = ServerTrust::load(trust)?;
        let failed = |source| GrpcError::Bind { address, source };
        let listener = TcpListener::bind(address).await.map_err(failed)?;
        Ok(Self { address: listener.local_addr().map_err(failed)?, listener, trust })
    }

    /// Serves until `stop`, then finishes what runs.
    pub(crate) async fn serve(
        self,
        service: WorkerService,
        stop: CancellationToken,
    ) -> Result<GrpcServer, GrpcError> {
        let (health, health_service) = tonic_health::server::health_reporter();
        health.set_serving::<WorkerServer<WorkerService>>().await;
        let reflection = tonic_reflection::server::Builder::configure()
            .register_encoded_file_descriptor_set(DESCRIPTORS)
            .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
            .with_service_name("thalweg.v1.Worker")
            .with_service_name("grpc.health.v1.Health")
            .with_service_name("grpc.reflection.v1.ServerReflection")
            .build_v1()?;
        let worker = WorkerServer::new(service)
            .max_decoding_message_size(MESSAGE_BYTES_MAX)
            .max_encoding_message_size(MESSAGE_BYTES_MAX);
        let serving = limits(Server::builder())
            .layer(InterceptorLayer::new(self.trust.guard()))
            .add_service(worker)
            .add_service(health_service)
            .add_service(reflection)
            .serve_with_incoming_shutdown(self.trust.incoming(self.listener), stop.cancelled_owned());
        let task = tokio::spawn(async move {
            if let Err(error) = serving.await {
                tracing::error!(%error, "gRPC server failed");
            }
        });
        Ok(GrpcServer { address: self.address, health, task })
    }
}

impl GrpcServer {
    /// Tells health watchers that new work goes elsewhere, as soon as `draining` is over.
    pub(crate) fn not_serving_after(&self, draining: impl Future<Output = ()> + Send + 'static) {
        let health = self.health.clone();
        tokio::spawn(async move {
            draining.await;
            health.set_not_serving::<WorkerServer<WorkerService>>().await;
        });
    }

    /// Waits for the end of the last stream; call behind `stop`. Health watches have no end of their own and are cut.
    pub(crate) async fn ended(mut self) {
        match tokio::time::timeout(CLOSE_TIMEOUT, &mut self.task).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => tracing::error!(%error, "gRPC server panicked"),
            Err(_) => self.task.abort(),
        }
    }
}

fn limits(server: Server) -> Server {
    server
        .initial_stream_window_size(STREAM_WINDOW_BYTES)
        .initial_connection_window_size(CONNECTION_WINDOW_BYTES)
        .max_concurrent_streams(STREAMS_MAX)
        .http2_keepalive_interval(Some(KEEP_ALIVE_INTERVAL))
        .http2_keepalive_timeout(Some(KEEP_ALIVE_TIMEOUT))
}
