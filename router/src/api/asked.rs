//! Who asks, and what comes beside the body, over HTTP and over gRPC alike.

use std::sync::Arc;
use std::time::Duration;

use axum::extract::Request;
use thalweg_proto::v1;
use tokio::time::Instant;

use crate::auth::Grant;
use crate::dispatch::Tokenized;
use crate::models::ModelEntry;
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

impl Asked {
    /// A prompt of this request on its way to a worker, for as long as it may take: one greedy choice unless more is said.
    pub(super) fn tokenized(
        &self,
        api: &Api,
        model: &Arc<ModelEntry>,
        prompt_ids: Arc<[u32]>,
        salt: &str,
    ) -> Tokenized {
        let grant = &*self.grant;
        let mut longest = api.router.config.timeouts.request_timeout;
        for own in [grant.duration_max, self.patience].into_iter().flatten() {
            longest = longest.min(own);
        }
        Tokenized {
            request_id: String::new(),
            model: Arc::clone(model),
            prompt_ids,
            sampling: v1::SamplingParams::default(),
            grammar: None,
            embedding: None,
            n: 1,
            tenant: grant.tenant.clone(),
            tenant_limit: api.router.tenant_limit(grant),
            scope: v1::CacheScope { scope: grant.scope().to_owned(), salt: salt.to_owned() },
            priority: 0,
            deadline: Instant::now() + longest,
            traceparent: self.trace.parent.clone(),
            tracestate: self.trace.state.clone(),
            taken: Arc::default(),
        }
    }
}

/// Name of one prompt of a request, which are `count`.
pub(super) fn prompt_id(request_id: &str, at: usize, count: usize) -> String {
    if count == 1 { request_id.to_owned() } else { format!("{request_id}-{at}") }
}

/// What the layer in front of all routes let this request do.
pub(super) fn grant(request: &Request) -> Arc<Grant> {
    request.extensions().get::<Arc<Grant>>().cloned().unwrap_or_else(|| Arc::new(Grant::open()))
}
