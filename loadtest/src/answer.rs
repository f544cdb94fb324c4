//! What an answer's events say, and when they said it.

use std::borrow::Cow;
use std::time::Duration;

use serde::Deserialize;
use serde::de::IgnoredAny;

use crate::record::{Failure, Record};

/// An answer as it grows.
#[derive(Debug, Default)]
pub(crate) struct Answer {
    record: Record,
    text: String,
    failure: Option<Failure>,
    done: bool,
    pieces: u64,
}

impl Answer {
    pub(crate) fn set_worker(&mut self, worker: Option<&str>) {
        self.record.worker = worker.map(str::to_owned);
    }

    /// An event that came `now` after sending.
    pub(crate) fn take(&mut self, data: &[u8], now: Duration) {
        if data == b"[DONE]" {
            self.done = true;
            return;
        }
        let Ok(chunk) = serde_json::from_slice::<Chunk<'_>>(data) else {
            self.failure.get_or_insert(Failure::Malformed);
            return;
        };
        if let Some(error) = chunk.error {
            let code = error.code.map(|code| code.as_str().map_or_else(|| code.to_string(), str::to_owned));
            self.failure.get_or_insert(Failure::Event(code.unwrap_or_default()));
        }
        if let Some(usage) = chunk.usage {
            self.record.prompt_tokens = usage.prompt_tokens;
            self.record.output_tokens = usage.completion_tokens;
            self.record.cached_tokens =
                usage.prompt_tokens_details.and_then(|details| details.cached_tokens).unwrap_or(0);
        }
        let before = self.text.len();
        let has_call = chunk.choices.iter().filter_map(|choice| choice.delta.as_ref()).any(|delta| {
            delta.tool_calls.is_some()
                || delta.reasoning_content.as_ref().is_some_and(|text| !text.0.is_empty())
        });
        let texts =
            chunk.choices.into_iter().filter_map(|Choice { text, delta }| text.or_else(|| delta?.content));
        texts.for_each(|text| self.text.push_str(&text.0));
        if has_call || self.text.len() > before {
            self.take_piece(now);
        }
    }

    fn take_piece(&mut self, now: Duration) {
        self.pieces += 1;
        match self.record.last_token {
            None => self.record.ttft = Some(now),
            Some(last) => self.record.gaps_s.push(now.saturating_sub(last).as_secs_f32()),
        }
        self.record.last_token = Some(now);
    }

    /// The stream has ended: whether it was whole.
    pub(crate) fn end(&mut self) -> Result<(), Failure> {
        match self.failure.take() {
            Some(failure) => Err(failure),
            None if self.done => Ok(()),
            None => Err(Failure::Cut),
        }
    }

    /// The record of it, and its text.
    pub(crate) fn finish(mut self, total: Duration, outcome: Result<(), Failure>) -> (Record, String) {
        self.record.total = total;
        self.record.failure = outcome.err();
        if self.record.output_tokens == 0 {
            self.record.output_tokens = self.pieces;
        }
        (self.record, self.text)
    }
}

/// The parts of a chunk that matter; what has no escapes is not copied.
#[derive(Deserialize)]
struct Chunk<'a> {
    #[serde(borrow, default)]
    choices: Vec<Choice<'a>>,
    #[serde(default)]
    usage: Option<Usage>,
    #[serde(default)]
    error: Option<ErrorBody>,
}

#[derive(Deserialize)]
struct Choice<'a> {
    #[serde(borrow, default)]
    delta: Option<Delta<'a>>,
    #[serde(borrow, default)]
    text: Option<Text<'a>>,
}

#[derive(Deserialize)]
struct Delta<'a> {
    #[serde(borrow, default)]
    content: Option<Text<'a>>,
    #[serde(borrow, default, alias = "reasoning")]
    reasoning_content: Option<Text<'a>>,
    #[serde(default)]
    tool_calls: Option<Vec<IgnoredAny>>,
}

#[derive(Deserialize)]
#[serde(transparent)]
struct Text<'a>(#[serde(borrow)] Cow<'a, str>);

#[derive(Deserialize)]
struct Usage {
    prompt_tokens: u64,
    #[serde(default)]
    completion_tokens: u64,
    #[serde(default)]
    prompt_tokens_details: Option<PromptDetails>,
}

#[derive(Deserialize)]
struct PromptDetails {
    #[serde(default)]
    cached_tokens: Option<u64>,
}

#[derive(Deserialize)]
struct ErrorBody {
    #[serde(default)]
    code: Option<serde_json::Value>,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn follow(events: &[(u64, &str)]) -> (Record, String) {
        let mut answer = Answer::default();
        for (ms, event) in events {
            answer.take(event.as_bytes(), Duration::from_millis(*ms));
        }
        let outcome = answer.end();
        answer.finish(Duration::from_millis(1000), outcome)
    }

    #[test]
    fn the_first_text_is_the_first_token() {
        let usage = r#"{"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":5,
            "prompt_tokens_details":{"cached_tokens":8}}}"#;
        let (record, text) = follow(&[
            (10, r#"{"choices":[{"delta":{"role":"assistant","content":""}}]}"#),
            (20, r#"{"choices":[{"delta":{"content":"a\n"}}],"usage":null}"#),
            (50, r#"{"choices":[{"delta":{"content":"b"}}]}"#),
            (60, r#"{"choices":[{"delta":{"content":"c"}}]}"#),
            (65, r#"{"choices":[{"delta":{},"finish_reason":"length"}]}"#),
            (70, usage),
            (70, "[DONE]"),
        ]);
        assert_eq!((record.failure.as_ref(), text.as_str()), (None, "a\nbc"));
        assert_eq!((record.prompt_tokens, record.cached_tokens, record.output_tokens), (9, 8, 5));
        assert_eq!(record.ttft, Some(Duration::from_millis(20)));
        assert_eq!(record.gaps_s, [0.03, 0.01]);
        assert_eq!(record.tpot(), Some(Duration::from_millis(10)));
    }

    #[test]
    fn texts_of_completions_thoughts_and_calls_count_too() {
        let check = |event: &str, expected: &str| {
            let (record, text) = follow(&[(5, event), (6, "[DONE]")]);
            assert_eq!((record.output_tokens, text.as_str()), (1, expected), "{event}");
            assert_eq!((record.ttft, record.tpot()), (Some(Duration::from_millis(5)), None));
        };
        check(r#"{"choices":[{"text":"x","index":0}]}"#, "x");
        check(r#"{"choices":[{"delta":{"reasoning_content":"hm"}}]}"#, "");
        check(r#"{"choices":[{"delta":{"content":null,"tool_calls":[{"index":0}]}}]}"#, "");
    }

    #[test]
    fn an_answer_that_is_not_whole_has_failed() {
        let text = (1, r#"{"choices":[{"text":"x"}]}"#);
        let error = (2, r#"{"error":{"message":"gone","code":"worker_lost"}}"#);
        let check = |events: &[(u64, &str)], expected: Failure| {
            assert_eq!(follow(events).0.failure, Some(expected), "{events:?}");
        };
        check(&[text], Failure::Cut);
        check(&[], Failure::Cut);
        check(&[text, error], Failure::Event("worker_lost".into()));
        check(&[text, error, (3, "[DONE]")], Failure::Event("worker_lost".into()));
        check(&[(1, "nonsense"), (2, "[DONE]")], Failure::Malformed);
    }
}
