//! API keys in gRPC's metadata.

use std::sync::Arc;

use http::header::AUTHORIZATION;
use tonic::metadata::MetadataMap;
use tonic::service::Interceptor;
use tonic::{Request, Status};

use crate::auth::layer::Door;

use super::reply;

/// Lets in who may come in over HTTP, with the same grant.
#[derive(Clone)]
pub(super) struct KeyGuard(pub(super) Arc<Door>);

impl Interceptor for KeyGuard {
    fn call(&mut self, mut request: Request<()>) -> Result<Request<()>, Status> {
        let mut headers = std::mem::take(request.metadata_mut()).into_headers();
        let Some(grant) = self.0.admit(&headers) else {
            let message =
                "an API key that is known here is needed; send it as metadata `authorization: Bearer KEY`";
            return Err(reply::unauthenticated(message));
        };
        headers.remove(AUTHORIZATION);
        *request.metadata_mut() = MetadataMap::from_headers(headers);
        request.extensions_mut().insert(grant);
        Ok(request)
    }
}
