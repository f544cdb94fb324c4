//! Grammars of requests, compiled where nothing waits for them.

use std::sync::{Arc, OnceLock};

use bytes::Bytes;
use thalweg_model::grammar::{Grammar, GrammarError, GrammarSource, Grammars, JsonBlanks};
use thalweg_model::tokenizer::{Tokenizer, TokenizerBundle};
use thalweg_proto::code::ErrorCode;
use thalweg_proto::v1;
use thalweg_proto::v1::grammar::Source;
use tonic::Status;

/// Compiles for one model; workers of one process share it. Made of the tokenizer when the first grammar comes: a worker that
/// sees none never pays for it.
#[derive(Clone)]
pub(crate) struct GrammarCompiler(Arc<Inner>);

struct Inner {
    /// JSON of the model's `TokenizerBundle`.
    tokenizer: Bytes,
    made: OnceLock<Result<Grammars, GrammarError>>,
}

impl GrammarCompiler {
    pub(crate) fn new(tokenizer: Bytes) -> Self {
        Self(Arc::new(Inner { tokenizer, made: OnceLock::new() }))
    }

    /// The grammar of a request, or why it cannot be followed.
    pub(super) async fn compile(&self, grammar: v1::Grammar) -> Result<Grammar, Status> {
        let blanks = grammar.json_blanks_max.map_or_else(JsonBlanks::default, JsonBlanks);
        let source = source(grammar)?;
        let compiler = self.clone();
        let compiled = tokio::task::spawn_blocking(move || compiler.compile_here(&source, blanks)).await;
        let compiled = compiled.map_err(|error| ErrorCode::Internal.status(format!("grammar: {error}")))?;
        compiled.map_err(|error| {
            let code = match error {
                GrammarError::Busy => ErrorCode::Overloaded,
                _ => ErrorCode::InvalidRequest,
            };
            code.status(format!("grammar {error}"))
        })
    }

    /// The same on this thread, which waits for it.
    pub(crate) fn compile_here(
        &self,
        source: &GrammarSource,
        blanks: JsonBlanks,
    ) -> Result<Grammar, GrammarError> {
        let made = self.0.made.get_or_init(|| make(&self.0.tokenizer));
        made.as_ref().map_err(Clone::clone)?.compile(source, blanks)
    }
}

fn make(bundle: &[u8]) -> Result<Grammars, GrammarError> {
    let broken = |reason: String| GrammarError::Model { reason };
    let bundle: TokenizerBundle =
        serde_json::from_slice(bundle).map_err(|error| broken(error.to_string()))?;
    Grammars::new(&Tokenizer::new(&bundle).map_err(|error| broken(error.to_string()))?)
}

fn source(grammar: v1::Grammar) -> Result<GrammarSource, Status> {
    match grammar.source {
        Some(Source::JsonObject(true)) => Ok(GrammarSource::JsonObject),
        Some(Source::JsonSchema(text)) => Ok(GrammarSource::JsonSchema(text)),
        Some(Source::Regex(text)) => Ok(GrammarSource::Regex(text)),
        Some(Source::Choice(choice)) => Ok(GrammarSource::Choice(choice.texts)),
        Some(Source::Lark(text)) => Ok(GrammarSource::Lark(text)),
        // A kind that this worker is too old for must not become plain text.
        Some(Source::JsonObject(false)) | None => {
            Err(ErrorCode::InvalidRequest.status("grammar is of no kind that this worker knows; upgrade it"))
        }
    }
}
