//! The gRPC server around the service: trust, limits, keep-alive, health, reflection, and its end.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use thalweg_proto::v1::inference_server::InferenceServer;
use thalweg_serve::grpc::{self, BindError, ConnectionLimits, Serving};
use thalweg_serve::http::Closing;
use thalweg_serve::trust::TokenGuard;
use tonic::service::InterceptorLayer;
use tonic::service::interceptor::InterceptedService;

use crate::config::RouterConfig;
use crate::error::RouterStartError;

use super::super::Opened;
use super::InferenceService;
use super::calls::Calls;
use super::guard::KeyGuard;

/// Of a caller's connection; a caller opens another one for more.
const LIMITS: ConnectionLimits = ConnectionLimits {
    window_bytes: 4 << 20,
    streams_max: 1024,
    keep_alive_interval: Duration::from_secs(20),
    keep_alive_timeout: Duration::from_secs(10),
};
/// Bytes of a message beside the body.
const ENVELOPE_BYTES: usize = 1 << 20;
/// What ended streams get to be read to their end; health watches have no end of their own and are cut then.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(1);

/// An address that is ours, with nobody answering yet.
pub(crate) struct GrpcListener(grpc::GrpcListener);

/// A server that answers. Dropping it stops it at once.
pub(crate) struct GrpcServer {
    pub(crate) address: SocketAddr,
    serving: Serving,
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
        match grpc::GrpcListener::bind(address, &config.trust).await {
            Ok(listener) => Ok(Some(Self(listener))),
            Err(BindError::Trust(error)) => Err(error.into()),
            Err(BindError::Address(source)) => Err(RouterStartError::BindGrpc { address, source }),
        }
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
        let token = if api.router.keys.are_needed() { TokenGuard::default() } else { self.0.guard() };
        let service = InferenceServer::new(InferenceService { api, calls: calls.clone() })
            .max_decoding_message_size(bytes_max)
            .max_encoding_message_size(usize::MAX);
        let (health, health_service) = tonic_health::server::health_reporter();
        health.set_serving::<InferenceServer<InferenceService>>().await;
        let reflection = grpc::reflection("thalweg.v1.Inference")
            .map_err(|error| RouterStartError::Reflection(error.to_string()))?;
        let drain = closing.drain.clone();
        tokio::spawn(async move {
            drain.cancelled().await;
            health.set_not_serving::<InferenceServer<InferenceService>>().await;
        });
        let close = closing.close.clone().cancelled_owned();
        let address = self.0.address();
        let serving = LIMITS
            .server()
            .layer(InterceptorLayer::new(token))
            .add_service(InterceptedService::new(service, KeyGuard(Arc::clone(&opened.door))))
            .add_service(health_service)
            .add_service(reflection)
            .serve_with_incoming_shutdown(self.0.incoming(), close);
        Ok(GrpcServer { address, serving: Serving::start(serving), calls })
    }
}

impl GrpcServer {
    /// Waits for the end of the last answer, once it was told to close.
    pub(crate) async fn ended(&mut self) {
        self.calls.ended().await;
        self.serving.ended(CLOSE_TIMEOUT).await;
    }
}
