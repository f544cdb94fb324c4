//! Who asks, and what comes beside the body, over HTTP and over gRPC alike.

use std::sync::Arc;
use std::time::Duration;

use axum::extract::Request;

use crate::auth::Grant;
use crate::usage::UsageRecord;

use super::Api;
use super::headers::RequestId;
use super::trace::Trace;

/// What is known of a request before its body is read.
pub(super) struct Asked {
    pub(super) grant: Arc<Grant>,
    /// The client's name of it.
    pub(super) client_id: String,
    pub(super) trace: Trace,
    /// How long the client itself waits.
    pub(super) patience: Option<Duration>,
}

impl Asked {
    pub(super) fn over_http(request: &Request) -> Self {
        let id = request.extensions().get::<RequestId>();
        Self {
            grant: grant(request),
            client_id: id.map(|id| id.0.clone()).unwrap_or_default(),
            trace: Trace::of(request.headers()),
            patience: None,
        }
    }

    /// The record of this request, which is written when it is dropped.
    pub(super) fn record(&self, api: &Api, endpoint: &'static str) -> UsageRecord {
        let log = api.router.usage_log.clone();
        let (metrics, grant) = (Arc::clone(&api.metrics), Arc::clone(&self.grant));
        UsageRecord::begin(metrics, log, grant, self.client_id.clone(), endpoint)
    }
}

/// What the layer in front of all routes let this request do.
pub(super) fn grant(request: &Request) -> Arc<Grant> {
    request.extensions().get::<Arc<Grant>>().cloned().unwrap_or_else(|| Arc::new(Grant::open()))
}
