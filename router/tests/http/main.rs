//! The HTTP surface in front of a worker that says what a test wants.
#![allow(clippy::unwrap_used, reason = "a test's helpers may panic")]

#[path = "../support/speaking_worker.rs"]
mod speaking_worker;
#[path = "../support/tokenizer.rs"]
mod tokenizer;
#[path = "../support/witness.rs"]
mod witness;

mod auth;
mod bad_input;
mod connections;
mod embeddings;
mod endpoints;
mod going_away;
mod grpc;
mod grpc_trust;
mod logprobs;
mod openapi;
mod overload;
mod reasoning;
mod replies;
mod responses;
mod resume;
mod streams;
mod tools;

use std::sync::Arc;

use serde_json::{Value, json};
use speaking_worker::SpeakingWorker;
use thalweg_cache_index::MemoryIndex;
use thalweg_harness::HttpClient;
use thalweg_membership::StaticMembership;
use thalweg_model::tokenizer::TokenizerBundle;
use thalweg_router::config::RouterConfig;
use thalweg_router::router::{Router, RunningRouter};

pub(crate) const CHAT: &str = "/v1/chat/completions";
pub(crate) const COMPLETIONS: &str = "/v1/completions";
pub(crate) const EMBEDDINGS: &str = "/v1/embeddings";
pub(crate) const RESPONSES: &str = "/v1/responses";

/// One worker that serves `tiny`, and a router in front of it.
pub(crate) struct Stage {
    pub(crate) worker: SpeakingWorker,
    pub(crate) router: RunningRouter,
    pub(crate) http: HttpClient,
}

pub(crate) async fn stage() -> Stage {
    stage_with(|_| {}, true).await
}

pub(crate) async fn stage_with(change: impl FnOnce(&mut RouterConfig), with_template: bool) -> Stage {
    stage_of(change, &tokenizer::bundle(with_template, 512)).await
}

pub(crate) async fn stage_of(change: impl FnOnce(&mut RouterConfig), bundle: &TokenizerBundle) -> Stage {
    let worker = SpeakingWorker::start("w0", &["tiny"], bundle).await;
    let router = router(change, [worker.address.as_str()]).await;
    router.ready(1).await;
    let http = HttpClient::new(router.http_address());
    Stage { worker, router, http }
}

pub(crate) async fn router<'a>(
    change: impl FnOnce(&mut RouterConfig),
    workers: impl IntoIterator<Item = &'a str>,
) -> RunningRouter {
    let mut config = RouterConfig { http: ([127, 0, 0, 1], 0).into(), ..RouterConfig::default() };
    change(&mut config);
    let members = workers.into_iter().map(|address| address.parse().expect("a worker's address"));
    let membership = Arc::new(StaticMembership::new(members));
    Router::start(config, membership, Arc::new(MemoryIndex::new())).await.expect("the router starts")
}

/// A sound chat with more fields.
pub(crate) fn chat(fields: Value) -> Value {
    merged(
        json!({"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 100}),
        fields,
    )
}

/// A sound completion with more fields.
pub(crate) fn completion(fields: Value) -> Value {
    merged(json!({"model": "tiny", "prompt": "hi", "max_tokens": 100}), fields)
}

fn merged(mut body: Value, fields: Value) -> Value {
    for (name, value) in fields.as_object().expect("an object") {
        body[name] = value.clone();
    }
    body
}

/// The text of one choice of a stream.
pub(crate) fn streamed_text(chunks: &[Value], index: u64) -> String {
    let choices = chunks.iter().flat_map(|c| c["choices"].as_array().expect("choices"));
    let of_index = choices.filter(|c| c["index"] == index);
    of_index.filter_map(|c| c["text"].as_str().or(c["delta"]["content"].as_str())).collect()
}
