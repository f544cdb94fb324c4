//! Log probabilities in the three shapes that clients know.

use serde::Serialize;
use serde_json::{Map, Value, json};
use thalweg_model::tokenizer::Tokenizer;
use thalweg_proto::v1;

use super::choice::TokenInfo;

/// JSON has no infinity. vLLM's clients know this floor.
const FLOOR: f64 = -9999.0;

/// What tokens are called.
#[derive(Clone, Copy)]
pub(crate) struct TokenNames<'a> {
    pub(crate) tokenizer: &'a Tokenizer,
    /// vLLM's `token_id:97` instead of the token's text, which need not be valid UTF-8.
    pub(crate) are_ids: bool,
}

impl TokenNames<'_> {
    fn name(&self, id: u32) -> String {
        if self.are_ids { format!("token_id:{id}") } else { self.tokenizer.token_text(id) }
    }

    /// A name that tokens have alone which are no text by themselves, as OpenAI's completions give it.
    fn own_name(&self, id: u32) -> String {
        let bytes = self.tokenizer.token_bytes(id);
        if self.are_ids || std::str::from_utf8(&bytes).is_ok() {
            return self.name(id);
        }
        bytes.iter().fold("bytes:".to_owned(), |name, byte| name + &format!("\\x{byte:02x}"))
    }
}

/// `choices[].logprobs` of a chat.
#[derive(Debug, Serialize)]
pub(crate) struct ChatLogprobs {
    content: Vec<ChatToken>,
}

#[derive(Debug, Serialize)]
struct ChatToken {
    #[serde(flatten)]
    token: ScoredToken,
    top_logprobs: Vec<ScoredToken>,
}

#[derive(Debug, Serialize)]
struct ScoredToken {
    token: String,
    logprob: f64,
    bytes: Vec<u8>,
}

/// `choices[].logprobs` of a completion: parallel arrays.
#[derive(Debug, Default, Serialize)]
pub(crate) struct CompletionLogprobs {
    tokens: Vec<String>,
    token_logprobs: Vec<Option<f64>>,
    top_logprobs: Vec<Option<Map<String, Value>>>,
    text_offset: Vec<usize>,
}

impl ChatLogprobs {
    pub(crate) fn new(names: TokenNames<'_>, tokens: &[TokenInfo]) -> Self {
        let entry = |info: &TokenInfo| ChatToken {
            token: scored(names, info.logprobs.token_id, info.logprobs.logprob),
            top_logprobs: info.logprobs.top.iter().map(|t| scored(names, t.token_id, t.logprob)).collect(),
        };
        Self { content: tokens.iter().map(entry).collect() }
    }

    /// An object for each token.
    pub(crate) fn into_values(self) -> Vec<Value> {
        // Texts and numbers always have a value.
        self.content.iter().map(|token| serde_json::to_value(token).unwrap_or_default()).collect()
    }
}

impl CompletionLogprobs {
    /// `first_is_prompt`: the first token has nothing before it, and so no probability.
    pub(crate) fn new(
        names: TokenNames<'_>,
        tokens: &[TokenInfo],
        count: u32,
        first_is_prompt: bool,
    ) -> Self {
        let mut all = Self::default();
        for (at, info) in tokens.iter().enumerate() {
            let known = at > 0 || !first_is_prompt;
            all.tokens.push(names.own_name(info.logprobs.token_id));
            all.token_logprobs.push(known.then(|| finite(info.logprobs.logprob)));
            all.top_logprobs.push(known.then(|| top_by_name(names, &info.logprobs, count)));
            all.text_offset.push(info.text_offset);
        }
        all
    }
}

/// vLLM's `prompt_logprobs`: null for the first token, then an object by token id.
pub(crate) fn prompt_logprobs(tokenizer: &Tokenizer, tokens: &[v1::TokenLogprobs], count: u32) -> Value {
    let entry = |(at, token): (usize, &v1::TokenLogprobs)| {
        if at == 0 {
            return Value::Null;
        }
        let mut by_id = Map::new();
        let mut put = |id: u32, logprob: f32, rank: usize| {
            by_id.entry(id.to_string()).or_insert_with(|| {
                json!({"logprob": finite(logprob), "rank": rank, "decoded_token": tokenizer.token_text(id)})
            });
        };
        put(token.token_id, token.logprob, token.rank as usize);
        for (at, top) in token.top.iter().take(count as usize).enumerate() {
            put(top.token_id, top.logprob, at + 1);
        }
        Value::Object(by_id)
    };
    Value::Array(tokens.iter().enumerate().map(entry).collect())
}

/// The token itself and its alternatives. Of tokens that read the same the first one stays: the token itself, else the likeliest.
fn top_by_name(names: TokenNames<'_>, token: &v1::TokenLogprobs, count: u32) -> Map<String, Value> {
    let mut map = Map::new();
    let top = token.top.iter().take(count as usize).map(|top| (top.token_id, top.logprob));
    for (id, logprob) in std::iter::once((token.token_id, token.logprob)).chain(top) {
        map.entry(names.own_name(id)).or_insert_with(|| json!(finite(logprob)));
    }
    map
}

fn scored(names: TokenNames<'_>, id: u32, logprob: f32) -> ScoredToken {
    let bytes = match names.tokenizer.token_bytes(id) {
        bytes if bytes.is_empty() => names.tokenizer.token_text(id).into_bytes(),
        bytes => bytes,
    };
    ScoredToken { token: names.name(id), logprob: finite(logprob), bytes }
}

/// At most 0 and never infinite or NaN. Of double width, so that every shape prints the same digits.
fn finite(logprob: f32) -> f64 {
    if logprob.is_nan() { FLOOR } else { f64::from(logprob).clamp(FLOOR, 0.0) }
}
