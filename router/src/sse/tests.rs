//! Chunks, byte for byte.

use serde_json::{Value, json};
use thalweg_proto::code::ErrorCode;

use super::chunk::{ChunkChoice, ChunkWriter, ReplyHead, error_event};
use crate::error::RouterError;
use crate::request::Endpoint;
use crate::usage::Usage;

fn head(object: &'static str) -> ReplyHead {
    ReplyHead {
        id: "id-1".to_owned(),
        object,
        created: 5,
        model: "m\"m".to_owned(),
        system_fingerprint: "fp_1".to_owned(),
    }
}

/// What one event says, checked to be one event.
fn event(bytes: &[u8]) -> Value {
    let text = std::str::from_utf8(bytes).expect("UTF-8");
    let data = text.strip_prefix("data: ").and_then(|t| t.strip_suffix("\n\n")).expect("one event");
    assert!(!data.contains('\n'));
    serde_json::from_str(data).expect("JSON")
}

fn check(write: impl Fn(&ChunkWriter, &mut Vec<u8>), endpoint: Endpoint, usage: bool, expected: Value) {
    let object = if endpoint == Endpoint::Chat { "chat.completion.chunk" } else { "text_completion" };
    let mut out = Vec::new();
    write(&ChunkWriter::new(endpoint, &head(object), usage), &mut out);
    let mut whole = json!({"id": "id-1", "object": object, "created": 5, "model": "m\"m",
                           "system_fingerprint": "fp_1"});
    for (name, value) in expected.as_object().expect("an object") {
        whole[name] = value.clone();
    }
    assert_eq!(event(&out), whole);
}

#[test]
fn chunks_have_openais_shapes() {
    let text = |w: &ChunkWriter, out: &mut Vec<u8>| {
        w.text(out, &ChunkChoice { index: 1, text: "a\n\"ž", ..ChunkChoice::default() });
    };
    let choice = |part: Value| {
        let mut choice = json!({"index": 1, "logprobs": null, "finish_reason": null});
        for (name, value) in part.as_object().expect("an object") {
            choice[name] = value.clone();
        }
        json!([choice])
    };
    let delta = choice(json!({"delta": {"content": "a\n\"ž"}}));
    check(text, Endpoint::Chat, false, json!({"choices": delta}));
    check(text, Endpoint::Chat, true, json!({"choices": delta, "usage": null}));
    check(text, Endpoint::Completions, false, json!({"choices": choice(json!({"text": "a\n\"ž"}))}));

    let role = choice(json!({"delta": {"role": "assistant", "content": ""}}));
    check(|w, out| w.role(out, 1, None), Endpoint::Chat, true, json!({"choices": role, "usage": null}));
    let with_ids = json!({"choices": role, "prompt_token_ids": [3, 4], "usage": null});
    check(|w, out| w.role(out, 1, Some(&[3, 4])), Endpoint::Chat, true, with_ids);

    let finish = choice(json!({"delta": {}, "finish_reason": "stop", "stop_reason": "x"}));
    check(|w, out| w.finish(out, 1, "stop", &Some("x")), Endpoint::Chat, false, json!({"choices": finish}));
    let finish = choice(json!({"text": "", "finish_reason": "length", "stop_reason": null}));
    let length = |w: &ChunkWriter, out: &mut Vec<u8>| w.finish(out, 1, "length", &None::<u32>);
    check(length, Endpoint::Completions, false, json!({"choices": finish}));

    let usage = Usage { prompt_tokens: 3, cached_tokens: 1, completion_tokens: 2, ..Usage::default() };
    let expected = json!({"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5,
                                                   "prompt_tokens_details": {"cached_tokens": 1}}});
    check(|w, out| w.usage(out, &usage), Endpoint::Chat, true, expected);
}

#[test]
fn ids_and_logprobs_go_into_the_choice() {
    let text = |w: &ChunkWriter, out: &mut Vec<u8>| {
        let choice = ChunkChoice {
            index: 0,
            text: "t",
            logprobs: Some(b"{\"content\":[]}"),
            token_ids: Some(&[1, 2]),
            prompt_token_ids: Some(&[3]),
        };
        w.text(out, &choice);
    };
    let choice = json!([{"index": 0, "text": "t", "logprobs": {"content": []}, "finish_reason": null,
                         "prompt_token_ids": [3], "token_ids": [1, 2]}]);
    check(text, Endpoint::Completions, false, json!({"choices": choice}));
}

#[test]
fn an_error_is_an_event_of_its_own() {
    let mut out = Vec::new();
    error_event(&mut out, &RouterError::new(ErrorCode::WorkerCrashed, "gone"));
    let expected = json!({"error": {"message": "gone", "type": "server_error", "param": null,
                                    "code": "worker_crashed"}});
    assert_eq!(event(&out), expected);
}
