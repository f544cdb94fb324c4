//! A simulated worker over real gRPC: as fast as its profile says, the same words each time, and wrong only where told to.

mod channel;
mod faults;
mod load;

use std::sync::Arc;
use std::time::Duration;

use tempfile::TempDir;
use thalweg_cache_index::MemoryIndex;
use thalweg_model::tokenizer::{Specials, Tokenizer, TokenizerBundle};
use thalweg_proto::code::ErrorCode;
use thalweg_proto::v1;
use thalweg_proto::v1::worker_client::WorkerClient;
use thalweg_worker::worker::SharedModel;
use tokio::time::Instant;
use tonic::transport::Channel;

use crate::fixture::{Fixture, generate, request, sampled, serve, serve_alone};

const FAST: &str = "step: {base_seconds: 0.001}\n";

/// A profile's file and the model that was loaded with it.
struct Sim {
    folder: TempDir,
    model: Arc<SharedModel>,
}

impl Sim {
    async fn load(profile: &str, flags: &str) -> Self {
        let folder = tempfile::tempdir().expect("a temporary folder");
        write(&folder, profile);
        let flags = format!("--engine sim --profile {} {flags}", folder.path().join(PROFILE).display());
        let model =
            tokio::task::spawn_blocking(move || crate::fixture::load(&flags)).await.expect("no panic");
        Self { folder, model: model.expect("a sound profile") }
    }

    /// Replaces the file, as an editor or a config map does.
    fn switch(&self, profile: &str) {
        write(&self.folder, profile);
    }
}

const PROFILE: &str = "profile.yaml";

fn write(folder: &TempDir, profile: &str) {
    let new = folder.path().join("new");
    std::fs::write(&new, profile).expect("room");
    std::fs::rename(new, folder.path().join(PROFILE)).expect("the folder's own file");
}

async fn start(profile: &str, flags: &str) -> (Sim, Fixture) {
    let sim = Sim::load(profile, flags).await;
    let fixture = serve_alone(&sim.model).await;
    (sim, fixture)
}

async fn tokenizer(client: &mut WorkerClient<Channel>) -> Tokenizer {
    let fetch = v1::FetchTokenizerRequest { model: "tiny".to_owned() };
    let mut chunks = client.fetch_tokenizer(fetch).await.expect("a tokenizer").into_inner();
    let mut json = Vec::new();
    while let Some(message) = chunks.message().await.expect("a tokenizer") {
        json.extend_from_slice(&message.chunk);
    }
    let bundle: TokenizerBundle = serde_json::from_slice(&json).expect("a tokenizer");
    Tokenizer::new(&bundle).expect("a tokenizer")
}

#[tokio::test(flavor = "multi_thread")]
async fn it_starts_at_once_and_says_what_it_is() {
    let profile = "step: {base_seconds: 0.5, prefill_token_seconds: 0.001, decode_sequence_seconds: 0.1}";
    let begin = Instant::now();
    let (sim, Fixture { worker, mut client }) = start(profile, "--max-num-batched-tokens 500").await;
    // A measurement of that speed alone would take 7 s.
    let took = begin.elapsed();
    assert!(took < Duration::from_secs(5), "{took:?}");
    let about = client.describe(v1::DescribeRequest {}).await.unwrap().into_inner();
    let rates = about.profile.unwrap();
    assert_eq!((about.hardware.as_str(), rates.prefill_tokens_per_second), ("sim", 500.0));
    let steps: Vec<(u32, f64)> = rates.decode.iter().map(|d| (d.batch, d.step_seconds)).collect();
    assert_eq!(steps, [(1, 0.6), (8, 1.3)]);
    let other = Sim::load("tokens: {seed: 2}", "").await;
    assert_ne!(other.model.fingerprint(), sim.model.fingerprint(), "what it says is its weights");
    let slower = Sim::load(FAST, "").await;
    assert_eq!(slower.model.fingerprint(), sim.model.fingerprint(), "its speed is not");
    worker.shutdown(Duration::ZERO).await;
}

/// Whichever routers ask: a worker's end must be put down to one of them.
#[tokio::test(flavor = "multi_thread")]
async fn one_request_is_on_trial_at_a_time() {
    let (_sim, Fixture { worker, mut client }) = start("step: {base_seconds: 0.2}", "").await;
    let ask = |attempt_id, on_trial| v1::GenerateRequest { attempt_id, on_trial, ..request(&[3; 20], 8) };
    let mut first = client.generate(ask(1, true)).await.expect("nobody else is").into_inner();
    let refused =
        client.generate(ask(2, true)).await.map(drop).expect_err("the first has brought nothing yet");
    assert_eq!(ErrorCode::of(&refused), ErrorCode::Overloaded, "{refused:?}");
    client.generate(ask(3, false)).await.expect("who is not suspected is let in");
    let mut tokens = 0;
    while tokens < 4 {
        let message = first.message().await.unwrap().expect("eight tokens");
        tokens += message.deltas.iter().map(|delta| delta.token_ids.len()).sum::<usize>();
    }
    let second = client.generate(ask(4, true)).await.expect("the first is acquitted").into_inner();
    drop(second);
    let free = async || client.clone().generate(ask(5, true)).await.is_ok();
    while !free().await {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    worker.shutdown(Duration::ZERO).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn flags_that_contradict_each_other_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    write(&folder, "speed: fast");
    let path = folder.path().join(PROFILE).display().to_string();
    for (flags, says) in [
        ("--engine sim".to_owned(), "needs --profile"),
        (format!("--profile {path}"), "is for --engine sim"),
        (format!("--engine sim --profile {path}"), "speed"),
    ] {
        let error = tokio::task::spawn_blocking(move || crate::fixture::load(&flags))
            .await
            .unwrap()
            .err()
            .expect(says);
        assert!(error.to_string().contains(says), "{error}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn steps_take_their_time() {
    let (_sim, Fixture { worker, mut client }) =
        start("step: {base_seconds: 0.02, prefill_token_seconds: 0.001}", "").await;
    let begin = Instant::now();
    let reply = generate(&mut client, request(&[9; 100], 10)).await.unwrap();
    let took = begin.elapsed();
    assert_eq!(reply.tokens().len(), 10);
    assert!(took >= Duration::from_millis(300), "100 ms of prefill and 10 steps of 20 ms took {took:?}");
    worker.shutdown(Duration::ZERO).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn scripts_are_said_and_end() {
    let profile = "tokens: {script: ['The river bends.']}\noutput_tokens: {fixed: 5}";
    let (_sim, Fixture { worker, mut client }) = start(profile, "").await;
    let tokenizer = tokenizer(&mut client).await;
    let script = tokenizer.encode("The river bends.", Specials::Plain, false);
    let asked = sampled(request(&[5, 6, 7], 50), |s| (s.ignore_eos, s.logprobs) = (false, Some(2)));
    let reply = generate(&mut client, asked).await.unwrap();
    let choice = &reply.choices[&0];
    let eos = tokenizer.bundle().eos_ids[0];
    let said: Vec<u32> = script.iter().cycle().take(4).copied().chain([eos]).collect();
    assert_eq!((&choice.tokens, choice.finish), (&said, v1::FinishReason::Stop));
    assert!(
        choice.logprobs.iter().zip(&said).all(|(l, id)| l.token_id == *id && l.rank == 1 && l.top.len() == 2)
    );
    let endless = generate(&mut client, request(&[5, 6, 7], 50)).await.unwrap();
    assert_eq!(endless.tokens().len(), 50, "an ignored end is no end");
    worker.shutdown(Duration::ZERO).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn many_fit_one_machine() {
    let sim = Sim::load(FAST, "--kv-cache-memory-bytes 64GiB").await;
    let mut workers = Vec::new();
    let index = Arc::new(MemoryIndex::new());
    for _ in 0..20 {
        workers.push(serve(&sim.model, index.clone()).await);
    }
    let replies = workers.iter_mut().map(|f| generate(&mut f.client, request(&[3; 20], 30)));
    for reply in futures::future::join_all(replies).await {
        assert_eq!(reply.unwrap().tokens().len(), 30);
    }
    for fixture in workers {
        fixture.worker.shutdown(Duration::ZERO).await;
    }
}
