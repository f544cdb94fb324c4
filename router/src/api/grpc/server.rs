//! The gRPC server around the service: trust, limits, keep-alive, health, reflection, and its end.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use thalweg_proto::DESCRIPTORS;
use thalweg_proto::trust::{ServerTrust, TokenGuard};
use thalweg_proto::v1::inference_server::InferenceServer;
use tokio::net::TcpListener;
use tokio::task::JoinHandle;
use tokio::time::timeout;
use tonic::service::InterceptorLayer;
use tonic::service::interceptor::InterceptedService;
use tonic::transport::Server;

use crate::config::RouterConfig;
use crate::error::RouterStartError;

use super::super::Opened;
use super::super::server::Closing;
use super::InferenceService;
use super::calls::Calls;
use super::guard::KeyGuard;

/// What a caller may send before we have read it, per stream and per connection.
const STREAM_WINDOW_BYTES: u32 = 1 << 20;
const CONNECTION_WINDOW_BYTES: u32 = 4 << 20;
/// Calls at a time on one connection; a caller opens another one for more.
const STREAMS_MAX: u32 = 1024;
/// A caller that does not answer a ping in time is gone.
const KEEP_ALIVE_INTERVAL: Duration = Duration::from_secs(20);
const KEEP_ALIVE_TIMEOUT: Duration = Duration::from_secs(10);
/// Bytes of a message beside the body.
const ENVELOPE_BYTES: usize = 1 << 20;
/// What ended streams get to be read to their end; health watches have no end of their own and are cut then.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(1);

/// An address that is ours, with nobody answering yet.
pub(crate) struct GrpcListener {
    pub(crate) address: SocketAddr,
    listener: TcpListener,
    trust: ServerTrust,
}

/// A server that answers. Dropping it stops it at once.
pub(crate) struct GrpcServer {
    pub(crate) address: SocketAddr,
    task: JoinHandle<()>,
    calls: Calls,
}

impl GrpcListener {
    /// Takes the address, if there is to be one, for those who are trusted. `are_keys_needed`: strangers have none.
    pub(crate) async fn bind(
        config: &RouterConfig,
        are_keys_needed: bool,
    ) -> Result<Option<Self>, RouterStartError> {
        let Some(address) = config.grpc.grpc else { return Ok(None) };
        let is_guarded = are_keys_needed || config.trust.is_set() || config.grpc.insecure;
        if !address.ip().is_loopback() && !is_guarded {
            let reason = format!(
                "other hosts reach {address}: give --api-keys-file, the --tls-* files or --cluster-token-file, so that \
                 strangers are refused; --insecure if the network keeps them out; or bind to 127.0.0.1"
            );
            return Err(RouterStartError::Config { option: "grpc".to_owned(), reason });
        }
        let failed = |source| RouterStartError::BindGrpc { address, source };
        let trust = ServerTrust::load(&config.trust)?;
        let listener = TcpListener::bind(address).await.map_err(failed)?;
        Ok(Some(Self { address: listener.local_addr().map_err(failed)?, listener, trust }))
    }

    /// Serves until it is told to close, then finishes what runs.
    pub(crate) async fn serve(
        self,
        opened: &Opened,
        closing: &Closing,
    ) -> Result<GrpcServer, RouterStartError> {
        let (api, calls) = (Arc::clone(&opened.api), Calls::default());
        let bytes_max = api.router.config.limits.body_bytes_max.saturating_add(ENVELOPE_BYTES);
        // A caller can show one of them alone.
        let token = if api.router.keys.are_needed() { TokenGuard::default() } else { self.trust.guard() };
        let service = InferenceServer::new(InferenceService { api, calls: calls.clone() })
            .max_decoding_message_size(bytes_max)
            .max_encoding_message_size(usize::MAX);
        let (health, health_service) = tonic_health::server::health_reporter();
        health.set_serving::<InferenceServer<InferenceService>>().await;
        let reflection = tonic_reflection::server::Builder::configure()
            .register_encoded_file_descriptor_set(DESCRIPTORS)
            .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
            .with_service_name("thalweg.v1.Inference")
            .with_service_name("grpc.health.v1.Health")
            .with_service_name("grpc.reflection.v1.ServerReflection")
            .build_v1()
            .map_err(|error| RouterStartError::Reflection(error.to_string()))?;
        let drain = closing.drain.clone();
        tokio::spawn(async move {
            drain.cancelled().await;
            health.set_not_serving::<InferenceServer<InferenceService>>().await;
        });
        let close = closing.close.clone().cancelled_owned();
        let serving = limits(Server::builder())
            .layer(InterceptorLayer::new(token))
            .add_service(InterceptedService::new(service, KeyGuard(Arc::clone(&opened.door))))
            .add_service(health_service)
            .add_service(reflection)
            .serve_with_incoming_shutdown(self.trust.incoming(self.listener), close);
        let task = tokio::spawn(async move {
            if let Err(error) = serving.await {
                tracing::error!(%error, "gRPC server failed");
            }
        });
        Ok(GrpcServer { address: self.address, task, calls })
    }
}

impl GrpcServer {
    /// Waits for the end of the last answer, once it was told to close.
    pub(crate) async fn ended(&mut self) {
        self.calls.ended().await;
        if self.task.is_finished() {
            return;
        }
        match timeout(CLOSE_TIMEOUT, &mut self.task).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => tracing::error!(%error, "gRPC server panicked"),
            Err(_) => self.task.abort(),
        }
    }
}

impl Drop for GrpcServer {
    fn drop(&mut self) {
        self.task.abort();
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
