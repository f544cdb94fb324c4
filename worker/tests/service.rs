//! One worker over real gRPC, on a real model.

use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use clap::Parser;
use futures::StreamExt;
use thalweg_cache_index::{CacheIndex, MemoryIndex};
use thalweg_model::tokenizer::TokenizerBundle;
use thalweg_proto::block_hash::{HashRoot, full_blocks};
use thalweg_proto::code::ErrorCode;
use thalweg_proto::ids::{WorkerEpoch, WorkerId};
use thalweg_proto::v1;
use thalweg_proto::v1::worker_client::WorkerClient;
use thalweg_worker::config::WorkerConfig;
use thalweg_worker::worker::{RunningWorker, SharedModel, Worker, WorkerAddress};
use tokio::time::Instant;
use tonic::transport::Channel;
use tonic::{Code, Status};
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::health_client::HealthClient;

#[derive(Parser)]
struct Flags {
    #[command(flatten)]
    config: WorkerConfig,
}

fn model() -> Arc<SharedModel> {
    static MODEL: OnceLock<Arc<SharedModel>> = OnceLock::new();
    let load = || {
        let file = test_model("SmolLM2-135M-Instruct.Q4_1.gguf");
        let flags =
            "test --model m --served-model-name tiny --kv-cache-memory-bytes 64MiB --max-model-len 1024";
        let flags = Flags::try_parse_from(flags.split(' ')).expect("known flags");
        SharedModel::load(&file, &flags.config, 1).expect("a sound model")
    };
    MODEL.get_or_init(load).clone()
}

fn test_model(file: &str) -> PathBuf {
    let of_workspace = || Path::new(env!("CARGO_MANIFEST_DIR")).join("../.cache/models");
    let path = std::env::var_os("THALWEG_TEST_MODELS").map_or_else(of_workspace, PathBuf::from).join(file);
    assert!(path.exists(), "{} is missing: run make test-models", path.display());
    path
}

struct Fixture {
    worker: RunningWorker,
    client: WorkerClient<Channel>,
    index: Arc<MemoryIndex>,
}

async fn start() -> Fixture {
    let free = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
    let address = WorkerAddress { id: WorkerId::new("w"), grpc: free, metrics: free };
    let index = Arc::new(MemoryIndex::new());
    let model = tokio::task::spawn_blocking(model).await.expect("no panic");
    let worker = Worker::start(address, &model, index.clone()).await.expect("a worker");
    let client =
        WorkerClient::connect(format!("http://{}", worker.grpc_address())).await.expect("a connection");
    Fixture { worker, client, index }
}

fn request(prompt: &[u32], max_tokens: u32) -> v1::GenerateRequest {
    v1::GenerateRequest {
        request_id: "r".to_owned(),
        attempt_id: 7,
        model: "tiny".to_owned(),
        prompt_ids: prompt.to_vec(),
        sampling: Some(v1::SamplingParams {
            top_p: 1.0,
            repetition_penalty: 1.0,
            max_tokens,
            ignore_eos: true,
            ..Default::default()
        }),
        choices: vec![v1::ChoiceState::default()],
        ..Default::default()
    }
}

#[derive(Debug, Default)]
struct Reply {
    prompt: Option<v1::PromptInfo>,
    tokens: Vec<u32>,
    logprobs: Vec<v1::TokenLogprobs>,
    finish: v1::FinishReason,
}

async fn generate(client: &mut WorkerClient<Channel>, request: v1::GenerateRequest) -> Result<Reply, Status> {
    let mut stream = client.generate(request).await?.into_inner();
    let mut reply = Reply::default();
    while let Some(message) = stream.message().await? {
        assert_eq!(message.attempt_id, 7);
        assert!(message.prompt.is_none() || reply.tokens.is_empty(), "prompt info comes first and once");
        reply.prompt = reply.prompt.or(message.prompt);
        for delta in message.deltas {
            assert_eq!(reply.finish, v1::FinishReason::Unspecified, "nothing behind the end");
            reply.finish = delta.finish_reason();
            reply.tokens.extend(delta.token_ids);
            reply.logprobs.extend(delta.logprobs);
        }
    }
    Ok(reply)
}

/// Waits for a load report that satisfies; the test's own timeout bounds it.
async fn load_until(
    client: &mut WorkerClient<Channel>,
    holds: impl Fn(&v1::LoadReport) -> bool,
) -> v1::LoadReport {
    let watch = v1::WatchLoadRequest { router_id: "test".to_owned() };
    let mut reports = client.watch_load(watch).await.expect("a stream").into_inner();
    loop {
        let report = reports.message().await.expect("no error").expect("the worker lives");
        if holds(&report) {
            return report;
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_router_needs_to_know_is_told() {
    let Fixture { worker, mut client, .. } = start().await;
    let about = client.describe(v1::DescribeRequest {}).await.unwrap().into_inner();
    assert_eq!((about.worker_id.as_str(), about.models.as_slice()), ("w", &["tiny".to_owned()][..]));
    assert_eq!((about.block_size, about.max_model_len, about.fingerprint.len()), (16, 1024, 32));
    assert!(about.epoch > 0 && about.kv_blocks_total >= 64 && about.hardware.starts_with("cpu-"));
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
    let Fixture { worker, mut client, index } = start().await;
    let prompt: Vec<u32> = (100..150).collect();
    let mut asked = request(&prompt, 6);
    asked.sampling.as_mut().unwrap().logprobs = Some(2);
    asked.router_id = "router-a".to_owned();
    asked.booking = 41;
    let first = generate(&mut client, asked.clone()).await.unwrap();
    assert_eq!((first.tokens.len(), first.finish), (6, v1::FinishReason::Length));
    assert_eq!(first.prompt.as_ref().unwrap().cached_tokens, 0);
    for (token, logprobs) in first.tokens.iter().zip(&first.logprobs) {
        assert_eq!((logprobs.token_id, logprobs.rank, logprobs.top.len()), (*token, 1, 2));
        assert!(logprobs.logprob <= 0.0 && logprobs.top[0].token_id == *token);
    }
    let second = generate(&mut client, asked).await.unwrap();
    assert_eq!(second.prompt.unwrap().cached_tokens, 48);
    assert_eq!(second.tokens, first.tokens);
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
async fn a_choice_goes_on_where_it_stopped() {
    let Fixture { worker, mut client, .. } = start().await;
    let prompt: Vec<u32> = (1000..1030).collect();
    for temperature in [0.0, 1.0] {
        let mut asked = request(&prompt, 12);
        let sampling = asked.sampling.as_mut().unwrap();
        (sampling.temperature, sampling.seed) = (temperature, 99);
        let whole = generate(&mut client, asked.clone()).await.unwrap();
        asked.choices[0].output_ids = whole.tokens[..5].to_vec();
        let rest = generate(&mut client, asked).await.unwrap();
        assert_eq!(rest.tokens, whole.tokens[5..], "temperature {temperature}");
    }
    worker.shutdown(Duration::ZERO).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn prompt_logprobs_have_one_entry_per_token() {
    let Fixture { worker, mut client, .. } = start().await;
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
async fn bad_requests_are_refused_and_the_worker_goes_on() {
    let Fixture { worker, mut client, .. } = start().await;
    let mut check = async |request: v1::GenerateRequest, code: ErrorCode, field: &str| {
        let status = generate(&mut client, request).await.unwrap_err();
        assert_eq!(ErrorCode::of(&status), code, "{status:?}");
        assert!(status.message().contains(field), "{status:?}");
        assert_eq!(generate(&mut client, request_one()).await.unwrap().tokens.len(), 1);
    };
    check(request(&[], 4), ErrorCode::InvalidRequest, "prompt_ids").await;
    check(request(&[49152], 4), ErrorCode::InvalidRequest, "prompt_ids[0]").await;
    check(request(&[1; 1024], 4), ErrorCode::ContextLengthExceeded, "1024").await;
    check(request(&[1], 0), ErrorCode::InvalidRequest, "max_tokens").await;
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
    let Fixture { worker, mut client, .. } = start().await;
    let mut streams = Vec::new();
    for i in 0..8 {
        let mut stream = client.generate(request(&[i + 10; 20], 900)).await.unwrap().into_inner();
        assert!(stream.message().await.unwrap().is_some());
        streams.push(stream);
    }
    let mut named = v1::GenerateRequest { request_id: "named".to_owned(), ..request(&[3; 20], 900) };
    named.attempt_id = 8;
    let mut aborted = client.generate(named).await.unwrap().into_inner();
    assert!(aborted.message().await.unwrap().is_some());
    client.abort(v1::AbortRequest { request_id: "named".to_owned(), attempt_id: 8 }).await.unwrap();
    let mut last = None;
    while let Some(message) = aborted.message().await.unwrap() {
        last = message.deltas.last().map(|d| d.finish_reason()).or(last);
    }
    assert_eq!(last, Some(v1::FinishReason::Abort));
    drop(streams);
    let load = load_until(&mut client, |load| load.running == 0 && load.waiting == 0).await;
    assert_eq!(load.kv_blocks_free + load.kv_blocks_cached, load.kv_blocks_total);
    worker.shutdown(Duration::ZERO).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_draining_worker_finishes_what_runs_and_refuses_the_rest() {
    let Fixture { worker, mut client, .. } = start().await;
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
    load_until(&mut client, |load| load.state() == v1::WorkerState::Draining).await;
    let rest = tokio::spawn(async move { running.map(|m| m.unwrap()).collect::<Vec<_>>().await });
    worker.shutdown(Duration::from_secs(60)).await;
    let rest = rest.await.unwrap();
    assert_eq!(rest.last().unwrap().deltas[0].finish_reason(), v1::FinishReason::Length);
}
