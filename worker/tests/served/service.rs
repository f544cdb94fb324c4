//! One worker over real gRPC, on a real model.

use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt;
use thalweg_cache_index::{CacheIndex, MemoryIndex};
use thalweg_model::tokenizer::TokenizerBundle;
use thalweg_proto::block_hash::{HashRoot, full_blocks};
use thalweg_proto::code::ErrorCode;
use thalweg_proto::ids::{WorkerEpoch, WorkerId};
use thalweg_proto::v1;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::Instant;
use tonic::Code;
use tonic::transport::Channel;
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::health_client::HealthClient;

use crate::fixture::{ATTEMPT, Fixture, generate, load_until, read, request, serve, smollm2};

async fn start() -> (Fixture, Arc<MemoryIndex>) {
    let model = tokio::task::spawn_blocking(smollm2).await.expect("no panic");
    let index = Arc::new(MemoryIndex::new());
    (serve(&model, index.clone()).await, index)
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_router_needs_to_know_is_told() {
    let (Fixture { worker, mut client }, _) = start().await;
    let about = client.describe(v1::DescribeRequest {}).await.unwrap().into_inner();
    assert_eq!((about.worker_id.as_str(), about.models.as_slice()), ("w", &["tiny".to_owned()][..]));
    assert_eq!((about.block_size, about.max_model_len, about.fingerprint.len()), (16, 1024, 32));
    assert!(about.epoch > 0 && about.kv_blocks_total >= 64 && about.hardware.starts_with("cpu-"));
    assert!(about.features.iter().any(|feature| feature == "abort_choices"), "{:?}", about.features);
    let profile = about.profile.unwrap();
    assert!(profile.prefill_tokens_per_second > 0.0 && profile.decode[0].step_seconds > 0.0, "{profile:?}");

    let fetch = v1::FetchTokenizerRequest { model: "tiny".to_owned() };
    let mut chunks = client.fetch_tokenizer(fetch).await.unwrap().into_inner();
    let (mut json, mut count) = (Vec::new(), 0);
    while let Some(message) = chunks.message().await.unwrap() {
        assert!(message.chunk.len() <= 1 << 20);
        json.extend_from_slice(&message.chunk);
        count += 1;
    }
    let bundle: TokenizerBundle = serde_json::from_slice(&json).unwrap();
    assert!(count > 1 && bundle.vocab_size == 49152 && bundle.chat_template.is_some());
    let unknown =
        client.fetch_tokenizer(v1::FetchTokenizerRequest { model: "x".to_owned() }).await.unwrap_err();
    assert_eq!(ErrorCode::of(&unknown), ErrorCode::ModelNotFound);
    worker.shutdown(Duration::ZERO).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn tokens_stream_and_prefixes_are_reused_and_published() {
    let (Fixture { worker, mut client }, index) = start().await;
    let prompt: Vec<u32> = (100..150).collect();
    let mut asked = request(&prompt, 6);
    asked.sampling.as_mut().unwrap().logprobs = Some(2);
    asked.router_id = "router-a".to_owned();
    asked.booking = 41;
    let first = generate(&mut client, asked.clone()).await.unwrap();
    let choice = &first.choices[&0];
    assert_eq!((choice.tokens.len(), choice.finish), (6, v1::FinishReason::Length));
    assert_eq!(first.prompt.as_ref().unwrap().cached_tokens, 0);
    for (token, logprobs) in choice.tokens.iter().zip(&choice.logprobs) {
        assert_eq!((logprobs.token_id, logprobs.rank, logprobs.top.len()), (*token, 1, 2));
        assert!(logprobs.logprob <= 0.0 && logprobs.top[0].token_id == *token);
    }
    let second = generate(&mut client, asked).await.unwrap();
    assert_eq!(second.prompt.as_ref().unwrap().cached_tokens, 48);
    assert_eq!(second.tokens(), first.tokens());
    let load =
        load_until(&mut client, |load| load.running == 0 && load.booked.contains_key("router-a")).await;
    assert_eq!(load.booked["router-a"], 41);
    assert_eq!(load.kv_blocks_free + load.kv_blocks_cached, load.kv_blocks_total);
    let about = client.describe(v1::DescribeRequest {}).await.unwrap().into_inner();
    let root = HashRoot { fingerprint: &about.fingerprint, adapter: "", scope: "", salt: "" }.hash();
    let keys: Vec<u64> = full_blocks(root, &prompt, 16).iter().map(|hash| hash.index_key()).collect();
    let replica = index.replica();
    let holder = replica.enroll(&WorkerId::new("w"), WorkerEpoch(about.epoch)).unwrap();
    load_until(&mut client, |_| replica.lookup(&keys, Instant::now()).blocks(holder) == 3).await;
    worker.shutdown(Duration::ZERO).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn prompt_logprobs_have_one_entry_per_token() {
    let (Fixture { worker, mut client }, _) = start().await;
    let prompt: Vec<u32> = (200..220).collect();
    let mut asked = request(&prompt, 1);
    asked.sampling.as_mut().unwrap().prompt_logprobs = Some(1);
    let info = generate(&mut client, asked).await.unwrap().prompt.unwrap();
    let ids: Vec<u32> = info.prompt_logprobs.iter().map(|l| l.token_id).collect();
    assert_eq!(ids, prompt);
    assert!(info.prompt_logprobs[0].logprob.is_nan() && info.prompt_logprobs[0].top.is_empty());
    assert!(info.prompt_logprobs[1..].iter().all(|l| l.logprob <= 0.0 && l.top.len() == 1 && l.rank > 0));
    worker.shutdown(Duration::ZERO).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_prompt_without_output_ends_with_its_logprobs() {
    let (Fixture { worker, mut client }, _) = start().await;
    for (tokens, wanted, choices) in
        [(20, Some(1), 1), (20, Some(0), 3), (1, Some(1), 1), (20, None, 2), (1024, Some(0), 1)]
    {
        let prompt: Vec<u32> = (200..200 + tokens).collect();
        let mut asked = request(&prompt, 0);
        asked.sampling.as_mut().unwrap().prompt_logprobs = wanted;
        asked.choices = (0..choices).map(|index| v1::ChoiceState { index, ..Default::default() }).collect();
        let answer = generate(&mut client, asked).await.unwrap();
        let ends: Vec<_> =
            answer.choices.values().map(|choice| (choice.tokens.len(), choice.finish)).collect();
        assert_eq!(ends, vec![(0, v1::FinishReason::Length); choices as usize], "{tokens} {wanted:?}");
        let ids: Vec<u32> = answer.prompt.unwrap().prompt_logprobs.iter().map(|l| l.token_id).collect();
        assert_eq!(ids, if wanted.is_some() { prompt } else { Vec::new() });
    }
    worker.shutdown(Duration::ZERO).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn bad_requests_are_refused_and_the_worker_goes_on() {
    let (Fixture { worker, mut client }, _) = start().await;
    let mut check = async |request: v1::GenerateRequest, code: ErrorCode, field: &str| {
        let status = generate(&mut client, request).await.unwrap_err();
        assert_eq!(ErrorCode::of(&status), code, "{status:?}");
        assert!(status.message().contains(field), "{status:?}");
        assert_eq!(generate(&mut client, request_one()).await.unwrap().tokens().len(), 1);
    };
    check(request(&[], 4), ErrorCode::InvalidRequest, "prompt_ids").await;
    check(request(&[49152], 4), ErrorCode::InvalidRequest, "prompt_ids[0]").await;
    check(request(&[1; 1024], 4), ErrorCode::ContextLengthExceeded, "1024").await;
    check(request(&[1; 1025], 0), ErrorCode::ContextLengthExceeded, "1025").await;
    let other = v1::GenerateRequest { model: "nope".to_owned(), ..request_one() };
    check(other, ErrorCode::ModelNotFound, "nope").await;
    let stale = v1::GenerateRequest { fingerprint: vec![1; 32].into(), ..request_one() };
    check(stale, ErrorCode::FingerprintMismatch, "fingerprint").await;
    worker.shutdown(Duration::ZERO).await;
}

fn request_one() -> v1::GenerateRequest {
    request(&[5, 6, 7], 1)
}

#[tokio::test(flavor = "multi_thread")]
async fn dropped_and_aborted_streams_free_their_blocks() {
    let (Fixture { worker, mut client }, _) = start().await;
    let mut streams = Vec::new();
    for i in 0..8 {
        let mut stream = client.generate(request(&[i + 10; 20], 900)).await.unwrap().into_inner();
        assert!(stream.message().await.unwrap().is_some());
        streams.push(stream);
    }
    let named = v1::GenerateRequest { request_id: "named".to_owned(), ..request(&[3; 20], 900) };
    let mut aborted = client.generate(named).await.unwrap().into_inner();
    assert!(aborted.message().await.unwrap().is_some());
    client.abort(abort("named", &[])).await.unwrap();
    assert_eq!(read(&mut aborted).await.choices[&0].finish, v1::FinishReason::Abort);
    drop(streams);
    let load = load_until(&mut client, |load| load.running == 0 && load.waiting == 0).await;
    assert_eq!(load.kv_blocks_free + load.kv_blocks_cached, load.kv_blocks_total);
    worker.shutdown(Duration::ZERO).await;
}

fn abort(request_id: &str, choices: &[u32]) -> v1::AbortRequest {
    v1::AbortRequest { request_id: request_id.to_owned(), attempt_id: ATTEMPT, choices: choices.to_vec() }
}

#[tokio::test(flavor = "multi_thread")]
async fn choices_that_are_cut_off_free_their_blocks_and_the_others_go_on() {
    let (Fixture { worker, mut client }, _) = start().await;
    let mut asked = request(&[11; 20], 300);
    asked.choices = (0..3).map(|index| v1::ChoiceState { index, ..Default::default() }).collect();
    let whole = generate(&mut client, asked.clone()).await.unwrap();
    let mut stream = client.generate(asked).await.unwrap().into_inner();
    let mut reply = crate::fixture::Reply::default();
    while reply.choices.len() < 3 {
        reply.take(stream.message().await.unwrap().unwrap());
    }
    // A choice that does not exist is no reason to end those that do.
    client.abort(abort("r", &[0, 2, 77])).await.unwrap();
    load_until(&mut client, |load| load.running == 1 && load.waiting == 0).await;
    while let Some(message) = stream.message().await.unwrap() {
        reply.take(message);
    }
    let finishes: Vec<_> = reply.choices.values().map(|choice| choice.finish).collect();
    use v1::FinishReason::{Abort, Length};
    assert_eq!(finishes, [Abort, Length, Abort]);
    assert_eq!(reply.choices[&1], whole.choices[&1]);
    let load = load_until(&mut client, |load| load.running == 0 && load.waiting == 0).await;
    assert_eq!(load.kv_blocks_free + load.kv_blocks_cached, load.kv_blocks_total);
    worker.shutdown(Duration::ZERO).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_draining_worker_finishes_what_runs_and_refuses_the_rest() {
    let (Fixture { worker, mut client }, _) = start().await;
    let endpoint = Channel::from_shared(format!("http://{}", worker.grpc_address())).unwrap();
    let mut health = HealthClient::new(endpoint.connect().await.unwrap());
    let mut serving = async || {
        let service = tonic_health::pb::HealthCheckRequest { service: "thalweg.v1.Worker".to_owned() };
        health.check(service).await.unwrap().into_inner().status()
    };
    assert_eq!(serving().await, ServingStatus::Serving);
    let mut running = client.generate(request(&[9; 20], 64)).await.unwrap().into_inner();
    assert!(running.message().await.unwrap().is_some());
    assert_eq!(client.drain(v1::DrainRequest {}).await.unwrap().into_inner().running, 1);
    let refused = client.generate(request_one()).await.unwrap_err();
    assert_eq!((ErrorCode::of(&refused), refused.code()), (ErrorCode::Draining, Code::Unavailable));
    while serving().await != ServingStatus::NotServing {}
    load_until(&mut client, |load| load.state() == v1::WorkerState::Draining).await;
    let rest = tokio::spawn(async move { running.map(|m| m.unwrap()).collect::<Vec<_>>().await });
    worker.shutdown(Duration::from_secs(60)).await;
    let rest = rest.await.unwrap();
    assert_eq!(rest.last().unwrap().deltas[0].finish_reason(), v1::FinishReason::Length);
}

/// Who connects to the metrics address and asks for nothing, or for half of something, is let go.
#[tokio::test]
async fn idle_connections_to_metrics_are_closed() {
    let (Fixture { worker, .. }, _) = start().await;
    let begun = Instant::now();
    let silent = ["", "GET /metrics HTTP/1.1\r\nhost: w\r\n"].map(async |text| {
        let mut socket = TcpStream::connect(worker.metrics_address()).await.unwrap();
        socket.write_all(text.as_bytes()).await.unwrap();
        let mut bytes = Vec::new();
        // A reset is an end as well.
        let _ = socket.read_to_end(&mut bytes).await;
        bytes
    });
    for bytes in futures::future::join_all(silent).await {
        assert_eq!(bytes, b"");
    }
    assert!((9..20).contains(&begun.elapsed().as_secs()), "after {:?}", begun.elapsed());
    worker.shutdown(Duration::ZERO).await;
}
