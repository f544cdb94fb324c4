//! The gRPC server around the service: limits, keep-alive, health, reflection.

use std::net::SocketAddr;
use std::time::Duration;

use thalweg_proto::MESSAGE_BYTES_MAX;
use thalweg_proto::v1::worker_server::WorkerServer;
use thalweg_serve::grpc::{self, BindError, ConnectionLimits, Serving};
use thalweg_serve::trust::{TrustConfig, TrustError};
use tokio_util::sync::CancellationToken;
use tonic::service::InterceptorLayer;
use tonic_health::server::HealthReporter;

use super::WorkerService;

/// A router has one connection, and more requests than this are refused anyhow.
const LIMITS: ConnectionLimits = ConnectionLimits {
    window_bytes: 16 << 20,
    streams_max: 16_384,
    keep_alive_interval: Duration::from_secs(5),
    keep_alive_timeout: Duration::from_secs(5),
};

/// What ended streams get to be read to their end; health watches have no end of their own and are cut then.
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

/// An address that is ours; nobody can connect yet.
pub(crate) struct GrpcClaim {
    /// As configured.
    address: SocketAddr,
    claim: grpc::GrpcClaim,
}

/// A server that answers.
pub(crate) struct GrpcServer {
    pub(crate) address: SocketAddr,
    health: HealthReporter,
    serving: Serving,
}

impl GrpcClaim {
    /// Takes the address, for those whom we are to trust.
    pub(crate) fn take(address: SocketAddr, trust: &TrustConfig) -> Result<Self, GrpcError> {
        let claim = grpc::GrpcClaim::take(address, trust).map_err(|error| match error {
            BindError::Trust(error) => error.into(),
            BindError::Address(source) => GrpcError::Bind { address, source },
        })?;
        Ok(Self { address, claim })
    }

    /// Serves until `stop`, then finishes what runs.
    pub(crate) async fn serve(
        self,
        service: WorkerService,
        stop: CancellationToken,
    ) -> Result<GrpcServer, GrpcError> {
        let failed = |source| GrpcError::Bind { address: self.address, source };
        let listener = self.claim.listen().map_err(failed)?;
        let (health, health_service) = tonic_health::server::health_reporter();
        health.set_serving::<WorkerServer<WorkerService>>().await;
        let worker = WorkerServer::new(service)
            .max_decoding_message_size(MESSAGE_BYTES_MAX)
            .max_encoding_message_size(MESSAGE_BYTES_MAX);
        let address = listener.address();
        let serving = LIMITS
            .server()
            .layer(InterceptorLayer::new(listener.guard()))
            .add_service(worker)
            .add_service(health_service)
            .add_service(grpc::reflection("thalweg.v1.Worker")?)
            .serve_with_incoming_shutdown(listener.incoming(), stop.cancelled_owned());
        Ok(GrpcServer { address, health, serving: Serving::start(serving) })
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

    /// Waits for the end of the last stream; call behind `stop`.
    pub(crate) async fn ended(mut self) {
        self.serving.ended(CLOSE_TIMEOUT).await;
    }
}
