//! The gRPC surface of one replica.

mod channels;
mod faulty;
mod generate;
mod grammar;
mod load;
mod parse;
#[cfg(test)]
mod parse_tests;
mod server;
mod wire;

use std::pin::Pin;
use std::sync::Arc;

use bytes::Bytes;
use futures::Stream;
use thalweg_proto::code::ErrorCode;
use thalweg_proto::ids::AttemptId;
use thalweg_proto::v1;
use thalweg_proto::v1::worker_server::Worker;
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status};

pub(crate) use channels::Channels;
pub(crate) use grammar::GrammarCompiler;
pub use parse::{CHOICES_MAX, LOGPROBS_MAX, RequestError, ServedAdapter, ServedModel, parse};
pub use server::GrpcError;
pub(crate) use server::{GrpcClaim, GrpcServer};
pub(crate) use wire::{Identity, embedding_info, rates};

use crate::engine::{EngineHandle, EventChannel};
use crate::metrics::{EventCounters, Outcome};
use crate::runner::sim::FaultSwitch;
use generate::{GenerateStream, StreamedRequest};

/// Bytes of one FetchTokenizer message.
pub const TOKENIZER_CHUNK_BYTES: usize = 1 << 20;

/// Answers what routers ask; holds no state of its own beside the engine's.
#[derive(Clone)]
pub(crate) struct WorkerService {
    pub(crate) engine: EngineHandle,
    pub(crate) model: ServedModel,
    pub(crate) description: v1::DescribeResponse,
    /// JSON of the model's `TokenizerBundle`.
    pub(crate) tokenizer: Bytes,
    pub(crate) grammars: GrammarCompiler,
    pub(crate) identity: Identity,
    pub(crate) counters: EventCounters,
    /// Through which routers get many requests' messages at once.
    pub(crate) channels: Channels,
    /// For the one request that is on trial.
    pub(crate) trial: Arc<Semaphore>,
    /// Ends streams that have no end of their own.
    pub(crate) closing: CancellationToken,
    /// What a simulated worker does wrong.
    pub(crate) faults: Option<FaultSwitch>,
}

type Reply<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

#[tonic::async_trait]
impl Worker for WorkerService {
    type GenerateStream = Reply<v1::GenerateResponse>;
    type OpenChannelStream = Reply<v1::ChannelMessage>;
    type WatchLoadStream = Reply<v1::LoadReport>;
    type FetchTokenizerStream = Reply<v1::FetchTokenizerResponse>;

    async fn generate(
        &self,
        request: Request<v1::GenerateRequest>,
    ) -> Result<Response<Self::GenerateStream>, Status> {
        let request = request.into_inner();
        let id = request.request_id.clone();
        match self.start(request).await {
            Ok(stream) => Ok(Response::new(match &self.faults {
                None => Box::pin(stream),
                Some(faults) => Box::pin(faulty::generate(stream, faults.clone(), self.model.vocab_size)),
            })),
            Err(status) => {
                self.counters.ended(Outcome::Rejected);
                tracing::debug!(request_id = id, reason = status.message(), "request refused");
                Err(status)
            }
        }
    }

    async fn open_channel(
        &self,
        request: Request<v1::OpenChannelRequest>,
    ) -> Result<Response<Self::OpenChannelStream>, Status> {
        tracing::debug!(router_id = request.get_ref().router_id, "a router opens a channel");
        Ok(Response::new(Box::pin(self.channels.open(self.closing.clone()))))
    }

    async fn abort(&self, request: Request<v1::AbortRequest>) -> Result<Response<v1::AbortResponse>, Status> {
        let request = request.into_inner();
        self.engine.abort(&request.request_id, AttemptId(request.attempt_id), &request.choices);
        Ok(Response::new(v1::AbortResponse {}))
    }

    async fn watch_load(
        &self,
        request: Request<v1::WatchLoadRequest>,
    ) -> Result<Response<Self::WatchLoadStream>, Status> {
        tracing::debug!(router_id = request.get_ref().router_id, "a router watches");
        let reports = load::reports(self.engine.load(), self.identity.clone(), self.closing.clone());
        Ok(Response::new(match &self.faults {
            None => Box::pin(reports),
            Some(faults) => Box::pin(faulty::reports(reports, faults.clone())),
        }))
    }

    async fn describe(
        &self,
        _request: Request<v1::DescribeRequest>,
    ) -> Result<Response<v1::DescribeResponse>, Status> {
        Ok(Response::new(self.description.clone()))
    }

    async fn fetch_tokenizer(
        &self,
        request: Request<v1::FetchTokenizerRequest>,
    ) -> Result<Response<Self::FetchTokenizerStream>, Status> {
        self.model.check_name(&request.get_ref().model)?;
        let bytes = self.tokenizer.clone();
        let chunks = (0..bytes.len()).step_by(TOKENIZER_CHUNK_BYTES).map(move |start| {
            let end = bytes.len().min(start + TOKENIZER_CHUNK_BYTES);
            Ok(v1::FetchTokenizerResponse { chunk: bytes.slice(start..end) })
        });
        Ok(Response::new(Box::pin(futures::stream::iter(chunks))))
    }

    async fn drain(
        &self,
        _request: Request<v1::DrainRequest>,
    ) -> Result<Response<v1::DrainResponse>, Status> {
        tracing::info!("drain asked for");
        self.engine.drain();
        let load = self.engine.stats();
        Ok(Response::new(v1::DrainResponse { running: load.running + load.waiting }))
    }
}

impl WorkerService {
    async fn start(&self, mut request: v1::GenerateRequest) -> Result<GenerateStream, Status> {
        if self.faults.as_ref().is_some_and(|faults| faults.now().refuse) {
            return Err(ErrorCode::Overloaded.status("the profile's faults refuse every request"));
        }
        let trial = match request.on_trial.then(|| Arc::clone(&self.trial).try_acquire_owned()) {
            Some(Err(_)) => {
                return Err(ErrorCode::Overloaded.status("another request is on trial here; try elsewhere"));
            }
            Some(Ok(turn)) => Some(turn),
            None => None,
        };
        let channel = self.channel_for(&request);
        let grammar = request.grammar.take_if(|_| request.pooling == 0);
        let mut request = parse(request, &self.model)?;
        if let Some(grammar) = grammar {
            let grammar = self.grammars.compile(grammar).await?;
            Arc::make_mut(&mut request.sampling).grammar = Some(grammar);
        }
        let streamed = StreamedRequest {
            attempt_id: request.attempt.0,
            first_token: request.prompt[0],
            open: request.choices.iter().filter(|c| !c.finished).count(),
            has_channel: channel.is_some(),
            trial,
        };
        let events = self.engine.generate_to(request, channel).map_err(|refusal| wire::status(&refusal))?;
        Ok(GenerateStream::new(events, streamed, self.counters.clone(), self.closing.clone()))
    }

    /// The channel that the request joins. Logprobs and embeddings are too long for it, faults want a stream to spoil, and of a
    /// trial the stream must see the tokens.
    fn channel_for(&self, request: &v1::GenerateRequest) -> Option<Arc<EventChannel>> {
        let has_logprobs =
            request.sampling.as_ref().is_none_or(|s| s.logprobs.or(s.prompt_logprobs).is_some());
        let is_short = !has_logprobs && request.pooling == 0 && !request.on_trial;
        let is_spoilt = self.faults.as_ref().is_some_and(|faults| faults.now().spoil_streams());
        if is_short && !is_spoilt { self.channels.get(request.channel) } else { None }
    }
}
