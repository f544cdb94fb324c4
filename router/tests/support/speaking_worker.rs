//! A worker that speaks real gRPC and says what its script says.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use futures::stream::{self, BoxStream, Stream, StreamExt};
use parking_lot::Mutex;
use thalweg_model::tokenizer::TokenizerBundle;
use thalweg_proto::v1::worker_server::{Worker, WorkerServer};
use thalweg_proto::v1::*;
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio_stream::wrappers::TcpListenerStream;
use tonic::{Request, Response, Status};

use crate::tokenizer::END;

/// What a worker answers to a request.
pub(crate) type Answer = BoxStream<'static, Result<GenerateResponse, Status>>;

type Script = Arc<dyn Fn(&GenerateRequest) -> Answer + Send + Sync>;

/// A running stand-in. Dropping it closes its connections.
pub(crate) struct SpeakingWorker {
    pub(crate) address: String,
    pub(crate) shared: Arc<Shared>,
    server: tokio::task::JoinHandle<()>,
}

/// What it is, and what it was asked.
pub(crate) struct Shared {
    id: String,
    models: Vec<String>,
    features: Vec<String>,
    bundle: Vec<u8>,
    max_model_len: u32,
    script: Mutex<Script>,
    pub(crate) requests: Mutex<Vec<GenerateRequest>>,
    /// Answers that were begun, and those that are over, whoever ended them.
    pub(crate) begun: watch::Sender<usize>,
    pub(crate) ended: watch::Sender<usize>,
}

impl SpeakingWorker {
    /// Starts a worker that serves `models` and says "ok".
    pub(crate) async fn start(id: &str, models: &[&str], bundle: &TokenizerBundle) -> Self {
        Self::start_with(id, models, bundle, &["grammar", "embed"]).await
    }

    /// The same with other features.
    pub(crate) async fn start_with(
        id: &str,
        models: &[&str],
        bundle: &TokenizerBundle,
        features: &[&str],
    ) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let address = format!("grpc://{}", listener.local_addr().expect("bound"));
        let shared = Arc::new(Shared {
            id: id.to_owned(),
            models: models.iter().map(|m| (*m).to_owned()).collect(),
            features: features.iter().map(|f| (*f).to_owned()).collect(),
            bundle: serde_json::to_vec(bundle).expect("JSON"),
            max_model_len: bundle.max_position as u32,
            script: Mutex::new(Arc::new(|request| match request.pooling {
                0 => say(request, "ok"),
                _ => embed(request),
            })),
            requests: Mutex::default(),
            begun: watch::Sender::new(0),
            ended: watch::Sender::new(0),
        });
        let service = WorkerServer::new(Service(Arc::clone(&shared)));
        let server = tokio::spawn(async move {
            let server = tonic::transport::Server::builder().add_service(service);
            server.serve_with_incoming(TcpListenerStream::new(listener)).await.expect("serves");
        });
        Self { address, shared, server }
    }

    /// What to answer from now on.
    pub(crate) fn script(&self, script: impl Fn(&GenerateRequest) -> Answer + Send + Sync + 'static) {
        *self.shared.script.lock() = Arc::new(script);
    }
}

impl Drop for SpeakingWorker {
    fn drop(&mut self) {
        self.server.abort();
    }
}

/// One byte a token, END last; every choice gets the same text with its index in place of `#`.
pub(crate) fn say(request: &GenerateRequest, text: &str) -> Answer {
    stream::iter(responses(request, text)).map(Ok).boxed()
}

/// The messages of `say`: the prompt's, then one per token.
pub(crate) fn responses(request: &GenerateRequest, text: &str) -> Vec<GenerateResponse> {
    let sampling = request.sampling.clone().unwrap_or_default();
    let max = sampling.max_tokens as usize;
    let mut messages = vec![prompt_message(request, 0)];
    let texts: Vec<_> =
        request.choices.iter().map(|c| (c.index, text.replace('#', &c.index.to_string()))).collect();
    let longest = texts.iter().map(|(_, t)| t.len() + 1).max().unwrap_or(0).min(max);
    if max == 0 {
        let end = |(index, _): &(u32, String)| ChoiceDelta {
            index: *index,
            finish_reason: FinishReason::Length.into(),
            ..ChoiceDelta::default()
        };
        messages[0].deltas = texts.iter().map(end).collect();
    }
    // A choice goes on behind what it has already.
    let had =
        |index: u32| request.choices.iter().find(|c| c.index == index).map_or(0, |c| c.output_ids.len());
    for step in 0..longest {
        let next = |(index, text): &(u32, String)| delta(*index, text, had(*index) + step, max, &sampling);
        let deltas: Vec<_> = texts.iter().filter_map(next).collect();
        if deltas.is_empty() {
            break;
        }
        messages.push(GenerateResponse { attempt_id: request.attempt_id, prompt: None, deltas });
    }
    messages
}

/// Width of embeddings.
pub(crate) const WIDTH: u32 = 4;

/// An embedding: of the prompt's length, first and last token, and the pooling.
pub(crate) fn embed(request: &GenerateRequest) -> Answer {
    let mut message = prompt_message(request, 0);
    if let Some(prompt) = &mut message.prompt {
        prompt.embedding = embedding(&request.prompt_ids, request.pooling());
    }
    message.deltas =
        vec![ChoiceDelta { finish_reason: FinishReason::Length.into(), ..ChoiceDelta::default() }];
    stream::iter([Ok(message)]).boxed()
}

/// Of length 1.
pub(crate) fn embedding(ids: &[u32], pooling: Pooling) -> Vec<f32> {
    let last = ids[ids.len() - 1];
    let values = [ids.len() as u32, ids[0], last, 100 * pooling as u32].map(f64::from);
    let length = values.iter().map(|x| x * x).sum::<f64>().sqrt();
    values.iter().map(|x| (x / length) as f32).collect()
}

/// The first message of an answer.
pub(crate) fn prompt_message(request: &GenerateRequest, cached_tokens: u32) -> GenerateResponse {
    let wanted = request.sampling.as_ref().and_then(|s| s.prompt_logprobs);
    let prompt_logprobs = match wanted {
        Some(top) => request.prompt_ids.iter().map(|id| logprobs(*id, top)).collect(),
        None => Vec::new(),
    };
    GenerateResponse {
        attempt_id: request.attempt_id,
        prompt: Some(PromptInfo { cached_tokens, prompt_logprobs, ..PromptInfo::default() }),
        deltas: Vec::new(),
    }
}

fn delta(index: u32, text: &str, at: usize, max: usize, sampling: &SamplingParams) -> Option<ChoiceDelta> {
    if at >= max {
        return None;
    }
    let id = match text.as_bytes().get(at) {
        Some(byte) => u32::from(*byte),
        None if at == text.len() => END,
        None => return None,
    };
    let finish_reason = match () {
        () if id == END => FinishReason::Stop,
        () if at + 1 == max => FinishReason::Length,
        () => FinishReason::Unspecified,
    };
    let logprobs = sampling.logprobs.map(|top| vec![logprobs(id, top)]).unwrap_or_default();
    Some(ChoiceDelta { index, token_ids: vec![id], logprobs, finish_reason: finish_reason.into() })
}

/// -1 for the token, -2 and on for the letters from `A`.
fn logprobs(token_id: u32, top: u32) -> TokenLogprobs {
    let top = (0..top).map(|i| TopLogprob { token_id: 65 + i, logprob: -2.0 - i as f32 }).collect();
    TokenLogprobs { token_id, logprob: -1.0, rank: 1, top }
}

struct Service(Arc<Shared>);

type Streamed<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

#[tonic::async_trait]
impl Worker for Service {
    type GenerateStream = Streamed<GenerateResponse>;
    type OpenChannelStream = Streamed<ChannelMessage>;
    type WatchLoadStream = Streamed<LoadReport>;
    type FetchTokenizerStream = Streamed<FetchTokenizerResponse>;

    async fn generate(
        &self,
        request: Request<GenerateRequest>,
    ) -> Result<Response<Self::GenerateStream>, Status> {
        let request = request.into_inner();
        let script = Arc::clone(&self.0.script.lock());
        let mut answer = script(&request);
        self.0.requests.lock().push(request);
        self.0.begun.send_modify(|c| *c += 1);
        let over = Over(Arc::clone(&self.0));
        // The router refuses an answer whose first item is an error before it is open, so errors come with the call.
        let first = match answer.next().await {
            Some(Err(status)) => return Err(status),
            first => first,
        };
        let answer = stream::iter(first).chain(answer);
        Ok(Response::new(Box::pin(answer.map(move |item| {
            let _until_the_end = &over;
            item
        }))))
    }

    async fn open_channel(
        &self,
        _request: Request<OpenChannelRequest>,
    ) -> Result<Response<Self::OpenChannelStream>, Status> {
        Err(Status::unimplemented("this worker has no channels"))
    }

    async fn abort(&self, _request: Request<AbortRequest>) -> Result<Response<AbortResponse>, Status> {
        Ok(Response::new(AbortResponse {}))
    }

    async fn watch_load(
        &self,
        _request: Request<WatchLoadRequest>,
    ) -> Result<Response<Self::WatchLoadStream>, Status> {
        static STEPS: AtomicU64 = AtomicU64::new(0);
        let id = self.0.id.clone();
        let mut heartbeat = tokio::time::interval(Duration::from_millis(100));
        let reports = stream::poll_fn(move |context| {
            heartbeat.poll_tick(context).map(|_| {
                Some(Ok(LoadReport {
                    worker_id: id.clone(),
                    epoch: 1,
                    state: WorkerState::Ready.into(),
                    kv_blocks_total: 1000,
                    kv_blocks_free: 1000,
                    steps: STEPS.fetch_add(1, Ordering::Relaxed),
                    ..LoadReport::default()
                }))
            })
        });
        Ok(Response::new(Box::pin(reports)))
    }

    async fn describe(
        &self,
        _request: Request<DescribeRequest>,
    ) -> Result<Response<DescribeResponse>, Status> {
        Ok(Response::new(DescribeResponse {
            worker_id: self.0.id.clone(),
            epoch: 1,
            models: self.0.models.clone(),
            fingerprint: vec![7; 32].into(),
            block_size: 16,
            hash_version: thalweg_proto::block_hash::HASH_VERSION,
            max_model_len: self.0.max_model_len,
            max_num_seqs: 64,
            max_num_batched_tokens: 2048,
            kv_blocks_total: 1000,
            protocol_min: 1,
            protocol_max: 1,
            features: self.0.features.clone(),
            embedding: Some(EmbeddingInfo { width: WIDTH, pooling: Pooling::Last.into() }),
            hardware: "test".to_owned(),
            version: "0".to_owned(),
            profile: Some(Rates {
                prefill_tokens_per_second: 1000.0,
                prefill_samples: 100,
                decode: vec![DecodeRate { batch: 1, step_seconds: 0.001, samples: 100 }],
            }),
            ..DescribeResponse::default()
        }))
    }

    async fn fetch_tokenizer(
        &self,
        _request: Request<FetchTokenizerRequest>,
    ) -> Result<Response<Self::FetchTokenizerStream>, Status> {
        let chunks: Vec<_> = self
            .0
            .bundle
            .chunks(1 << 20)
            .map(|chunk| Ok(FetchTokenizerResponse { chunk: chunk.to_vec().into() }))
            .collect();
        Ok(Response::new(Box::pin(stream::iter(chunks))))
    }

    async fn drain(&self, _request: Request<DrainRequest>) -> Result<Response<DrainResponse>, Status> {
        Ok(Response::new(DrainResponse { running: 0 }))
    }
}

struct Over(Arc<Shared>);

impl Drop for Over {
    fn drop(&mut self) {
        self.0.ended.send_modify(|c| *c += 1);
    }
}
