//! Which chunks a stream consists of, in which order.

use crate::output::choice::{Piece, TokenInfo};
use crate::output::logprobs::{ChatLogprobs, CompletionLogprobs};
use crate::request::Endpoint;
use crate::sse::chunk::{ChunkChoice, ChunkWriter, json};
use crate::usage::Usage;

use super::session::Session;

/// The chunks of one stream: per choice an opening where there is one, text, and the finish; then usage.
pub(super) struct ChunkScript {
    writer: ChunkWriter,
    opened: Vec<bool>,
    include_usage: bool,
    /// Every chunk tells what there is so far.
    continuous_usage: bool,
}

impl ChunkScript {
    pub(super) fn new(session: &Session) -> Self {
        let request = &session.request;
        let options = request.reply();
        Self {
            writer: ChunkWriter::new(request.endpoint(), &session.head, options.include_usage),
            opened: vec![false; session.assembly.choices()],
            include_usage: options.include_usage,
            continuous_usage: options.include_usage && options.continuous_usage,
        }
    }

    pub(super) fn piece(&mut self, session: &Session, piece: &Piece, out: &mut Vec<u8>) {
        if self.continuous_usage {
            self.writer.tell_usage(&session.assembly.usage());
        }
        if !std::mem::replace(&mut self.opened[piece.choice], true) {
            self.open(session, piece.choice, out);
        }
        if !piece.reasoning.is_empty() {
            self.writer.reasoning(out, piece.choice, &piece.reasoning);
        }
        let options = session.request.reply();
        let token_ids = options.return_token_ids.then_some(piece.token_ids.as_slice());
        let has_ids = token_ids.is_some_and(|ids| !ids.is_empty());
        if !piece.text.is_empty() || !piece.logprobs.is_empty() || has_ids {
            let logprobs = logprobs(session, &piece.logprobs, false);
            let choice = ChunkChoice {
                index: piece.choice,
                text: &piece.text,
                logprobs: logprobs.as_deref(),
                token_ids,
                prompt_token_ids: None,
            };
            self.writer.text(out, &choice);
        }
        for call in &piece.calls {
            self.writer.call(out, piece.choice, call);
        }
        if let Some(finish) = &piece.finish {
            self.writer.finish(out, piece.choice, finish.reason, &finish.stop);
        }
    }

    pub(super) fn end(&self, usage: &Usage, out: &mut Vec<u8>) {
        if self.include_usage {
            self.writer.usage(out, usage);
        }
    }

    fn open(&self, session: &Session, index: usize, out: &mut Vec<u8>) {
        let options = session.request.reply();
        let prompt = session.assembly.prompt_of(index);
        let prompt_token_ids = options.return_token_ids.then(|| session.assembly.prompt_ids(prompt));
        if session.request.endpoint().is_chat() {
            self.writer.role(out, index, prompt_token_ids);
            return;
        }
        let echo = session.assembly.echo(prompt);
        if echo.is_none() && prompt_token_ids.is_none() {
            return;
        }
        let infos = echo.map(|echo| echo.token_infos(session.assembly.prompt_logprobs(prompt)));
        let logprobs = infos.and_then(|infos| logprobs(session, &infos, true));
        let choice = ChunkChoice {
            index,
            text: echo.map_or("", |echo| echo.text()),
            logprobs: logprobs.as_deref(),
            token_ids: None,
            prompt_token_ids,
        };
        self.writer.text(out, &choice);
    }
}

/// A chunk's logprobs as JSON, if the client asked for them.
fn logprobs(session: &Session, tokens: &[TokenInfo], are_prompt: bool) -> Option<Vec<u8>> {
    let count = session.request.reply().logprobs.filter(|_| !tokens.is_empty())?;
    let names = session.token_names();
    let mut out = Vec::new();
    match session.request.endpoint() {
        Endpoint::Chat | Endpoint::Responses => json(&mut out, &ChatLogprobs::new(names, tokens)),
        Endpoint::Completions => json(&mut out, &CompletionLogprobs::new(names, tokens, count, are_prompt)),
    }
    Some(out)
}
