//! What clients see when a worker is lost in the middle of an answer: nothing but a pause.

use futures::StreamExt;
use serde_json::{Value, json};
use thalweg_proto::code::ErrorCode;
use thalweg_proto::v1::GenerateRequest;

use crate::speaking_worker::{Answer, responses};
use crate::{CHAT, COMPLETIONS, Stage, chat, completion, stage};

/// Says `text`, and fails behind the third token of the first attempt.
fn breaks_once(text: &'static str) -> impl Fn(&GenerateRequest) -> Answer {
    move |request| {
        let all = responses(request, text).into_iter().map(Ok);
        if request.choices.iter().any(|c| !c.output_ids.is_empty()) {
            return futures::stream::iter(all).boxed();
        }
        let failure = Err(ErrorCode::Unavailable.status("scripted"));
        futures::stream::iter(all.take(4).chain([failure])).boxed()
    }
}

/// The reply of an undisturbed worker and that of one that breaks, without what differs by nature.
async fn both(stage: &Stage, path: &str, body: &Value, text: &'static str) -> [String; 2] {
    let mut replies = Vec::new();
    for breaks in [false, true] {
        match breaks {
            true => stage.worker.script(breaks_once(text)),
            false => stage.worker.says(text),
        }
        let before = stage.worker.requests().len();
        let reply = stage.http.post(path, body).await;
        assert_eq!(stage.worker.requests().len(), before + 1 + usize::from(breaks));
        let strip = |text: &str| {
            let mut value: Value = serde_json::from_str(text).unwrap_or_else(|e| panic!("{e}: {text}"));
            value.as_object_mut().unwrap().retain(|key, _| key != "id" && key != "created");
            value.to_string()
        };
        replies.push(match reply.header("content-type") {
            Some("application/json") => strip(&reply.text),
            _ => reply.chunks().iter().map(|c| strip(&c.to_string()) + "\n").collect(),
        });
    }
    replies.try_into().unwrap()
}

#[tokio::test]
async fn a_resumed_answer_is_the_undisturbed_one() {
    let stage = stage().await;
    let fields = [
        json!({}),
        json!({"stream": true, "stream_options": {"include_usage": true}}),
        json!({"n": 2}),
        json!({"n": 2, "stream": true, "stream_options": {"include_usage": true}}),
        // Held back over the break: "lo" is said before it, "ng" behind.
        json!({"stop": ["long"], "stream": true}),
        json!({"stop": ["long"], "n": 2}),
        json!({"logprobs": 2}),
        json!({"logprobs": 1, "stream": true, "return_token_ids": true}),
        json!({"prompt_logprobs": 1, "max_tokens": 6}),
        json!({"max_tokens": 6}),
    ];
    for fields in fields {
        // The three bytes of the euro sign come before, over and behind the break.
        for text in ["a long #", "x€€ #", "1234"] {
            let [whole, resumed] = both(&stage, COMPLETIONS, &completion(fields.clone()), text).await;
            assert_eq!(whole, resumed, "{fields} {text}");
        }
    }
    let body = chat(json!({"stream": true, "logprobs": true, "top_logprobs": 1}));
    let [whole, resumed] = both(&stage, CHAT, &body, "a long #").await;
    assert_eq!(whole, resumed);
}

#[tokio::test]
async fn a_resume_asks_for_open_choices_only_and_for_no_prompt_logprobs() {
    let stage = stage().await;
    stage.worker.script(breaks_once("12#456"));
    let body = completion(json!({"n": 2, "stop": ["21"], "prompt_logprobs": 1}));
    stage.http.post(COMPLETIONS, &body).await.json();
    let requests = stage.worker.requests();
    let [first, second] = requests.as_slice() else { panic!("{requests:?}") };
    let wanted = |r: &GenerateRequest| r.sampling.as_ref().unwrap().prompt_logprobs;
    assert_eq!((wanted(first), wanted(second)), (Some(1), None));
    assert_eq!(first.choices.len(), 2);
    assert!(first.attempt_id != second.attempt_id && first.request_id == second.request_id);
    // The second choice had met its stop string by then, if the client's side was fast enough to say so.
    assert!(second.choices.iter().any(|c| c.index == 0 && c.output_ids.len() == 3), "{:?}", second.choices);
}
