//! One worker over real gRPC, and a client that checks what every stream must hold to.

use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use clap::Parser;
use thalweg_cache_index::{CacheIndex, MemoryIndex};
use thalweg_proto::ids::WorkerId;
use thalweg_proto::v1;
use thalweg_proto::v1::worker_client::WorkerClient;
use thalweg_serve::trust::TrustConfig;
use thalweg_worker::config::WorkerConfig;
use thalweg_worker::worker::{RunningWorker, SharedModel, StartError, Worker, WorkerAddress};
use tonic::Status;
use tonic::transport::Channel;

#[derive(Parser)]
struct Flags {
    #[command(flatten)]
    config: WorkerConfig,
}

/// Id of every attempt.
pub(crate) const ATTEMPT: u64 = 7;

/// Longer than anything here takes; a test that gets there fails.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// SmolLM2, loaded once for the whole binary.
pub(crate) fn smollm2() -> Arc<SharedModel> {
    static MODEL: OnceLock<Arc<SharedModel>> = OnceLock::new();
    MODEL.get_or_init(|| load("").expect("a sound model")).clone()
}

/// SmolLM2's checkpoint, with more flags.
pub(crate) fn load(flags: &str) -> Result<Arc<SharedModel>, StartError> {
    let file = test_model("SmolLM2-135M-Instruct.Q4_1.gguf");
    let common = "test --model m --served-model-name tiny --max-model-len 1024";
    let memory = if flags.contains("--kv-cache") { "" } else { "--kv-cache-memory-bytes 64MiB" };
    let flags = [common, memory, flags].into_iter().flat_map(str::split_whitespace);
    let flags = Flags::try_parse_from(flags).expect("known flags");
    SharedModel::load(&file, &flags.config, 1)
}

fn test_model(file: &str) -> PathBuf {
    let of_workspace = || Path::new(env!("CARGO_MANIFEST_DIR")).join("../.cache/models");
    let path = std::env::var_os("THALWEG_TEST_MODELS").map_or_else(of_workspace, PathBuf::from).join(file);
    assert!(path.exists(), "{} is missing: run make test-models", path.display());
    path
}

/// A worker and its only client.
pub(crate) struct Fixture {
    pub(crate) worker: RunningWorker,
    pub(crate) client: WorkerClient<Channel>,
}

/// Serves a model on free ports.
pub(crate) async fn serve(model: &Arc<SharedModel>, index: Arc<dyn CacheIndex>) -> Fixture {
    let free = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
    let address =
        WorkerAddress { id: WorkerId::new("w"), grpc: free, metrics: free, trust: TrustConfig::default() };
    let worker = Worker::start(address, model, index).await.expect("a worker");
    let client =
        WorkerClient::connect(format!("http://{}", worker.grpc_address())).await.expect("a connection");
    Fixture { worker, client }
}

/// Serves a model whose cache events nobody hears.
pub(crate) async fn serve_alone(model: &Arc<SharedModel>) -> Fixture {
    serve(model, Arc::new(MemoryIndex::new())).await
}

/// One greedy choice that goes on until `max_tokens`.
pub(crate) fn request(prompt: &[u32], max_tokens: u32) -> v1::GenerateRequest {
    v1::GenerateRequest {
        request_id: "r".to_owned(),
        attempt_id: ATTEMPT,
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

/// The request with other sampling.
pub(crate) fn sampled(
    mut request: v1::GenerateRequest,
    change: impl FnOnce(&mut v1::SamplingParams),
) -> v1::GenerateRequest {
    change(request.sampling.as_mut().expect("it has some"));
    request
}

/// What came of one choice.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Choice {
    pub(crate) tokens: Vec<u32>,
    pub(crate) logprobs: Vec<v1::TokenLogprobs>,
    pub(crate) finish: v1::FinishReason,
}

/// What came of a request.
#[derive(Debug, Default)]
pub(crate) struct Reply {
    pub(crate) prompt: Option<v1::PromptInfo>,
    pub(crate) choices: std::collections::BTreeMap<u32, Choice>,
    /// How the stream ended, when not well.
    pub(crate) error: Option<Status>,
}

impl Reply {
    /// Of choice 0.
    pub(crate) fn tokens(&self) -> &[u32] {
        &self.choices[&0].tokens
    }

    /// Takes in a message.
    pub(crate) fn take(&mut self, message: v1::GenerateResponse) {
        assert_eq!(message.attempt_id, ATTEMPT);
        assert!(message.prompt.is_none() || self.choices.is_empty(), "prompt info comes first and once");
        self.prompt = self.prompt.take().or(message.prompt);
        for delta in message.deltas {
            let choice = self.choices.entry(delta.index).or_default();
            assert_eq!(choice.finish, v1::FinishReason::Unspecified, "nothing behind the end");
            choice.finish = delta.finish_reason();
            choice.tokens.extend(delta.token_ids);
            choice.logprobs.extend(delta.logprobs);
        }
    }
}

/// Reads a stream to its end.
pub(crate) async fn read(stream: &mut tonic::Streaming<v1::GenerateResponse>) -> Reply {
    let mut reply = Reply::default();
    loop {
        match stream.message().await {
            Ok(Some(message)) => reply.take(message),
            Ok(None) => return reply,
            Err(status) => return Reply { error: Some(status), ..reply },
        }
    }
}

/// Sends a request and reads its stream, which must end well.
pub(crate) async fn generate(
    client: &mut WorkerClient<Channel>,
    request: v1::GenerateRequest,
) -> Result<Reply, Status> {
    let mut stream = client.generate(request).await?.into_inner();
    let reply = read(&mut stream).await;
    reply.error.clone().map_or(Ok(reply), Err)
}

/// Waits for a load report that satisfies.
pub(crate) async fn load_until(
    client: &mut WorkerClient<Channel>,
    holds: impl Fn(&v1::LoadReport) -> bool,
) -> v1::LoadReport {
    let watch = v1::WatchLoadRequest { router_id: "test".to_owned() };
    let mut reports = client.watch_load(watch).await.expect("a stream").into_inner();
    let found = async {
        loop {
            let report = reports.message().await.expect("no error").expect("the worker lives");
            if holds(&report) {
                return report;
            }
        }
    };
    tokio::time::timeout(PATIENCE, found).await.expect("such a load")
}

/// A counter or gauge, as /metrics tells it.
pub(crate) async fn metric(worker: &RunningWorker, name: &str) -> f64 {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    let mut socket = tokio::net::TcpStream::connect(worker.metrics_address()).await.expect("a connection");
    let ask = "GET /metrics HTTP/1.1\r\nhost: w\r\nconnection: close\r\n\r\n";
    socket.write_all(ask.as_bytes()).await.expect("it listens");
    let mut text = String::new();
    socket.read_to_string(&mut text).await.expect("an answer");
    let line = text.lines().find(|line| line.split('{').next() == Some(name));
    let line = line.unwrap_or_else(|| panic!("{name} is missing in {text}"));
    line.rsplit(' ').next().and_then(|value| value.parse().ok()).expect("a number")
}
