//! From the wire to an [`EngineRequest`]: every bound is checked here, once, and nowhere behind.

use std::sync::Arc;

use hashbrown::HashSet;
use thalweg_proto::block_hash::{BlockHash, HashRoot};
use thalweg_proto::code::ErrorCode;
use thalweg_proto::ids::AttemptId;
use thalweg_proto::v1;

use crate::engine::{ChoiceState, EngineRequest};
use crate::plan::AdapterSlot;
use crate::pooling::Pooling;
use crate::sampling::SamplingParams;

/// Choices of one request at most.
pub const CHOICES_MAX: usize = 128;

/// Alternatives beside a token at most, in `logprobs` and `prompt_logprobs`.
pub const LOGPROBS_MAX: u32 = 20;

/// Entries of `logit_bias` and `stop_token_ids` at most: devices keep a table of them for each sequence.
const LOGIT_BIAS_MAX: usize = 1024;
/// See [`LOGIT_BIAS_MAX`].
const STOP_TOKEN_IDS_MAX: usize = 256;

/// Below this a temperature overflows logits where it should pick the best: taken for 0.
const TEMPERATURE_MIN: f32 = 1e-5;

/// What requests are held against.
#[derive(Clone, Debug, PartialEq)]
pub struct ServedModel {
    /// Names that requests may use.
    pub names: Vec<String>,
    /// Of the weights and all else that changes KV values.
    pub fingerprint: bytes::Bytes,
    /// Ids from here on do not exist.
    pub vocab_size: usize,
    /// Prompt and output of one sequence, in tokens.
    pub max_model_len: u32,
    /// LoRA adapters, in the order of their places on the device.
    pub adapters: Vec<ServedAdapter>,
    /// The model's own end of sequence ids.
    pub eos_ids: Vec<u32>,
    /// Prompts can be embedded.
    pub embeds: bool,
}

/// An adapter that requests may name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServedAdapter {
    /// What they call it.
    pub name: String,
    /// Of what it does to the model.
    pub fingerprint: bytes::Bytes,
}

/// A request that is not served as it stands. The message starts with the field.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum RequestError {
    /// A field is out of bounds.
    #[error("{field} {problem}")]
    Field {
        /// Path of the field in the message.
        field: String,
        /// What is wrong with it, and what would be right.
        problem: String,
    },
    /// The prompt leaves no room for output.
    #[error(
        "prompt_ids has {tokens} tokens with its output, but the context is {limit} tokens, new output included"
    )]
    Context {
        /// Prompt and output so far.
        tokens: usize,
        /// Context of this worker.
        limit: u32,
    },
    /// No such model.
    #[error("model {name:?} is not served here, but {served}")]
    Model {
        /// As asked for.
        name: String,
        /// What is.
        served: String,
    },
    /// No such adapter.
    #[error("adapter {name:?} is not loaded here, but {loaded}; --lora-modules names what a worker loads")]
    Adapter {
        /// As asked for.
        name: String,
        /// What is.
        loaded: String,
    },
    /// The router hashed the prompt for other weights.
    #[error("fingerprint is of other weights than this worker's; describe it again")]
    Fingerprint,
    /// The router means another adapter by this name.
    #[error("adapter_fingerprint is of another adapter than {name:?} is here; describe this worker again")]
    AdapterFingerprint {
        /// As asked for.
        name: String,
    },
}

impl RequestError {
    /// What it means to a caller.
    pub fn code(&self) -> ErrorCode {
        match self {
            Self::Field { .. } => ErrorCode::InvalidRequest,
            Self::Context { .. } => ErrorCode::ContextLengthExceeded,
            Self::Model { .. } | Self::Adapter { .. } => ErrorCode::ModelNotFound,
            Self::Fingerprint | Self::AdapterFingerprint { .. } => ErrorCode::FingerprintMismatch,
        }
    }
}

impl From<RequestError> for tonic::Status {
    fn from(error: RequestError) -> Self {
        error.code().status(error.to_string())
    }
}

/// Parses a request, or says what is wrong with it. Its grammar is compiled elsewhere: that takes time.
pub fn parse(request: v1::GenerateRequest, model: &ServedModel) -> Result<EngineRequest, RequestError> {
    check_target(&request, model)?;
    let adapter = model.adapter(&request.adapter, &request.adapter_fingerprint)?;
    check_ids("prompt_ids", &request.prompt_ids, model)?;
    ensure(!request.prompt_ids.is_empty(), "prompt_ids", "is empty; at least one token is needed")?;
    if let Some(pooling) = pooling(&request, model)? {
        return embedding(request, pooling, adapter, model);
    }
    let wire = request.sampling.ok_or_else(|| field("sampling", "is missing"))?;
    let max_tokens = wire.max_tokens;
    check_context(request.prompt_ids.len(), max_tokens.min(1), model)?;
    ensure(wire.min_tokens <= max_tokens, "sampling.min_tokens", "is above max_tokens")?;
    let prompt_logprobs = wire.prompt_logprobs;
    check_top("sampling.prompt_logprobs", prompt_logprobs)?;
    let choices = parse_choices(request.choices, request.prompt_ids.len(), max_tokens, model)?;
    let root = root(request.cache_scope, &request.adapter, model);
    Ok(EngineRequest {
        request_id: request.request_id,
        attempt: AttemptId(request.attempt_id),
        prompt: request.prompt_ids.into(),
        sampling: Arc::new(parse_sampling(wire, model)?),
        max_tokens,
        prompt_logprobs,
        pooling: None,
        choices,
        root,
        adapter,
        priority: request.priority,
        booking: booking(request.router_id, request.booking),
    })
}

/// What is wanted of a prompt that gets no answer.
fn pooling(request: &v1::GenerateRequest, model: &ServedModel) -> Result<Option<Pooling>, RequestError> {
    let pooling = match v1::Pooling::try_from(request.pooling) {
        Ok(v1::Pooling::Unspecified) => return Ok(None),
        Ok(v1::Pooling::Last) => Pooling::Last,
        Ok(v1::Pooling::Mean) => Pooling::Mean,
        Err(_) => return Err(field("pooling", "is of no kind that this worker knows; upgrade it")),
    };
    ensure(model.embeds, "pooling", "is not served here; ask a worker with the feature `embed`")?;
    Ok(Some(pooling))
}

/// A request without output: what it says of sampling is not looked at.
fn embedding(
    request: v1::GenerateRequest,
    pooling: Pooling,
    adapter: AdapterSlot,
    model: &ServedModel,
) -> Result<EngineRequest, RequestError> {
    check_context(request.prompt_ids.len(), 0, model)?;
    ensure(
        request.grammar.is_none(),
        "grammar",
        "has no meaning where an embedding is wanted; leave it out",
    )?;
    let is_plain =
        matches!(request.choices.as_slice(), [only] if only.output_ids.is_empty() && !only.finished);
    ensure(is_plain, "choices", "must be one without output where an embedding is wanted")?;
    Ok(EngineRequest {
        request_id: request.request_id,
        attempt: AttemptId(request.attempt_id),
        prompt: request.prompt_ids.into(),
        sampling: Arc::new(SamplingParams::greedy()),
        max_tokens: 0,
        prompt_logprobs: None,
        pooling: Some(pooling),
        choices: vec![ChoiceState { index: request.choices[0].index, ..ChoiceState::default() }],
        root: root(request.cache_scope, &request.adapter, model),
        adapter,
        priority: request.priority,
        booking: booking(request.router_id, request.booking),
    })
}

fn root(scope: Option<v1::CacheScope>, adapter: &str, model: &ServedModel) -> BlockHash {
    let v1::CacheScope { scope, salt } = scope.unwrap_or_default();
    HashRoot { fingerprint: &model.fingerprint, adapter, scope: &scope, salt: &salt }.hash()
}

fn booking(router_id: String, number: u64) -> Option<(String, u64)> {
    (!router_id.is_empty()).then_some((router_id, number))
}

impl ServedModel {
    /// Whether this is a name of ours.
    pub fn check_name(&self, name: &str) -> Result<(), RequestError> {
        if self.names.iter().any(|n| n == name) {
            return Ok(());
        }
        Err(RequestError::Model { name: name.to_owned(), served: self.names.join(", ") })
    }
}

impl ServedModel {
    /// Place of an adapter on the device; no name means the model as it is. Where `fingerprint` is given it must be this one's.
    fn adapter(&self, name: &str, fingerprint: &[u8]) -> Result<AdapterSlot, RequestError> {
        if name.is_empty() {
            return Ok(AdapterSlot::BASE);
        }
        let index =
            self.adapters.iter().position(|adapter| adapter.name == name).ok_or_else(|| {
                RequestError::Adapter { name: name.to_owned(), loaded: self.loaded_adapters() }
            })?;
        if !fingerprint.is_empty() && self.adapters[index].fingerprint != fingerprint {
            return Err(RequestError::AdapterFingerprint { name: name.to_owned() });
        }
        Ok(AdapterSlot(index as u32 + 1))
    }

    fn loaded_adapters(&self) -> String {
        let names: Vec<_> = self.adapters.iter().map(|adapter| adapter.name.as_str()).collect();
        if names.is_empty() { "none is".to_owned() } else { names.join(", ") }
    }
}

fn check_target(request: &v1::GenerateRequest, model: &ServedModel) -> Result<(), RequestError> {
    model.check_name(&request.model)?;
    if !request.fingerprint.is_empty() && request.fingerprint != model.fingerprint {
        return Err(RequestError::Fingerprint);
    }
    Ok(())
}

fn parse_choices(
    choices: Vec<v1::ChoiceState>,
    prompt_tokens: usize,
    max_tokens: u32,
    model: &ServedModel,
) -> Result<Vec<ChoiceState>, RequestError> {
    ensure(!choices.is_empty(), "choices", "is empty; one per choice wanted is needed")?;
    ensure(choices.len() <= CHOICES_MAX, "choices", &format!("has over {CHOICES_MAX} entries"))?;
    ensure(choices.iter().any(|c| !c.finished), "choices", "are all finished; there is nothing to do")?;
    let mut seen = HashSet::new();
    let mut parsed = Vec::with_capacity(choices.len());
    for (i, choice) in choices.into_iter().enumerate() {
        let name = format!("choices[{i}]");
        if !seen.insert(choice.index) {
            return Err(field(format!("{name}.index"), format!("is {} a second time", choice.index)));
        }
        check_ids(&format!("{name}.output_ids"), &choice.output_ids, model)?;
        if !choice.finished {
            let tokens = prompt_tokens + choice.output_ids.len();
            if tokens > model.max_model_len as usize {
                return Err(RequestError::Context { tokens, limit: model.max_model_len });
            }
            // As many is no fault: whoever resumes may have lost no more than the word that it was the end.
            let too_many = choice.output_ids.len() > max_tokens as usize;
            ensure(!too_many, &format!("{name}.output_ids"), "has more than max_tokens")?;
        }
        parsed.push(ChoiceState {
            index: choice.index,
            output: choice.output_ids,
            finished: choice.finished,
        });
    }
    Ok(parsed)
}

fn parse_sampling(wire: v1::SamplingParams, model: &ServedModel) -> Result<SamplingParams, RequestError> {
    check_number("temperature", wire.temperature, wire.temperature >= 0.0, "at least 0")?;
    check_number("top_p", wire.top_p, wire.top_p > 0.0 && wire.top_p <= 1.0, "above 0 and at most 1")?;
    check_number("min_p", wire.min_p, (0.0..=1.0).contains(&wire.min_p), "from 0 to 1")?;
    let (presence, frequency) = (wire.presence_penalty, wire.frequency_penalty);
    check_number("presence_penalty", presence, (-2.0..=2.0).contains(&presence), "from -2 to 2")?;
    check_number("frequency_penalty", frequency, (-2.0..=2.0).contains(&frequency), "from -2 to 2")?;
    check_number("repetition_penalty", wire.repetition_penalty, wire.repetition_penalty > 0.0, "above 0")?;
    check_top("sampling.logprobs", wire.logprobs)?;
    check_count("sampling.stop_token_ids", wire.stop_token_ids.len(), STOP_TOKEN_IDS_MAX)?;
    check_count("sampling.logit_bias", wire.logit_bias.len(), LOGIT_BIAS_MAX)?;
    check_ids("sampling.stop_token_ids", &wire.stop_token_ids, model)?;
    Ok(SamplingParams {
        temperature: if wire.temperature < TEMPERATURE_MIN { 0.0 } else { wire.temperature },
        top_k: wire.top_k,
        top_p: wire.top_p,
        min_p: wire.min_p,
        presence_penalty: presence,
        frequency_penalty: frequency,
        repetition_penalty: wire.repetition_penalty,
        seed: wire.seed,
        min_tokens: wire.min_tokens,
        end_ids: end_ids(&wire, model),
        logprobs: wire.logprobs,
        logit_bias: parse_bias(wire.logit_bias, model)?,
        grammar: None,
    })
}

fn end_ids(wire: &v1::SamplingParams, model: &ServedModel) -> Vec<u32> {
    let own: &[u32] = if wire.ignore_eos { &[] } else { &model.eos_ids };
    let mut ids = [own, &wire.stop_token_ids].concat();
    ids.sort_unstable();
    ids.dedup();
    ids
}

fn parse_bias(
    bias: impl IntoIterator<Item = (u32, f32)>,
    model: &ServedModel,
) -> Result<Vec<(u32, f32)>, RequestError> {
    let mut bias: Vec<(u32, f32)> = bias.into_iter().collect();
    bias.sort_unstable_by_key(|(id, _)| *id);
    for &(id, value) in &bias {
        let name = format!("logit_bias[{id}]");
        ensure((id as usize) < model.vocab_size, &format!("sampling.{name}"), &out_of_vocabulary(model))?;
        check_number(&name, value, (-100.0..=100.0).contains(&value), "from -100 to 100")?;
    }
    Ok(bias)
}

fn check_count(name: &str, count: usize, most: usize) -> Result<(), RequestError> {
    ensure(count <= most, name, &format!("has {count} entries, must have at most {most}"))
}

fn check_ids(name: &str, ids: &[u32], model: &ServedModel) -> Result<(), RequestError> {
    match ids.iter().position(|id| *id as usize >= model.vocab_size) {
        None => Ok(()),
        Some(at) => {
            Err(field(format!("{name}[{at}]"), format!("is {}, {}", ids[at], out_of_vocabulary(model))))
        }
    }
}

fn out_of_vocabulary(model: &ServedModel) -> String {
    format!("out of the vocabulary of {} tokens", model.vocab_size)
}

/// `output`: tokens that must find room behind the prompt.
fn check_context(tokens: usize, output: u32, model: &ServedModel) -> Result<(), RequestError> {
    if tokens + output as usize > model.max_model_len as usize {
        return Err(RequestError::Context { tokens, limit: model.max_model_len });
    }
    Ok(())
}

fn check_number(name: &str, value: f32, within: bool, bounds: &str) -> Result<(), RequestError> {
    ensure(value.is_finite() && within, &format!("sampling.{name}"), &format!("is {value}, must be {bounds}"))
}

fn check_top(name: &str, top: Option<u32>) -> Result<(), RequestError> {
    let top = top.unwrap_or_default();
    ensure(top <= LOGPROBS_MAX, name, &format!("is {top}, must be at most {LOGPROBS_MAX}"))
}

fn ensure(holds: bool, name: &str, problem: &str) -> Result<(), RequestError> {
    if holds { Ok(()) } else { Err(field(name, problem)) }
}

fn field(field: impl Into<String>, problem: impl Into<String>) -> RequestError {
    RequestError::Field { field: field.into(), problem: problem.into() }
}
