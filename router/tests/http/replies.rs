//! Replies in one piece.

use serde_json::{Value, json};
use thalweg_router::config::Surface;

use crate::speaking_worker::{prompt_message, responses};
use crate::{CHAT, COMPLETIONS, chat, completion, stage, stage_with};

#[tokio::test]
async fn a_chat_has_openais_shape() {
    let stage = stage().await;
    stage.worker.says("žluť 大阪");
    let reply = stage.http.post(CHAT, &chat(json!({"seed": 5, "cache_salt": "s"}))).await.json();
    let text = "žluť 大阪";
    assert_eq!(reply["object"], "chat.completion");
    assert!(reply["id"].as_str().unwrap().starts_with("chatcmpl-") && reply["created"].is_u64());
    assert_eq!(reply["model"], "tiny");
    let message = json!({"role": "assistant", "content": text, "refusal": null});
    let choice = json!({"index": 0, "message": message, "logprobs": null, "finish_reason": "stop", "stop_reason": null});
    assert_eq!(reply["choices"], json!([choice]));
    let tokens = text.len() + 1;
    let usage = json!({"prompt_tokens": 22, "completion_tokens": tokens, "total_tokens": 22 + tokens,
                       "prompt_tokens_details": {"cached_tokens": 0}});
    assert_eq!(reply["usage"], usage);

    let request = &stage.worker.requests()[0];
    let scope = request.cache_scope.clone().unwrap();
    assert_eq!((request.sampling.as_ref().unwrap().seed, scope.salt.as_str()), (5, "s"));
    assert_eq!(request.prompt_ids.len(), 22);
}

#[tokio::test]
async fn a_completion_has_openais_shape() {
    let stage = stage().await;
    stage.worker.says("abcdef");
    let fields = json!({"max_tokens": 3, "return_token_ids": true});
    let reply = stage.http.post(COMPLETIONS, &completion(fields)).await.json();
    assert_eq!(reply["object"], "text_completion");
    assert!(reply["id"].as_str().unwrap().starts_with("cmpl-"));
    let choice = json!({"index": 0, "text": "abc", "logprobs": null, "finish_reason": "length", "stop_reason": null,
                        "token_ids": [97, 98, 99], "prompt_token_ids": [256, 104, 105]});
    assert_eq!(reply["choices"], json!([choice]));
}

#[tokio::test]
async fn cached_tokens_are_told() {
    // prefix-cache-07.
    let stage = stage().await;
    stage.worker.script(|request| {
        use futures::StreamExt;
        let mut messages = responses(request, "ok");
        messages[0] = prompt_message(request, 16);
        futures::stream::iter(messages).map(Ok).boxed()
    });
    let reply = stage.http.post(CHAT, &chat(json!({}))).await.json();
    assert_eq!(reply["usage"]["prompt_tokens_details"]["cached_tokens"], 16);
}

fn texts(reply: &Value) -> Vec<(u64, String)> {
    let choices = reply["choices"].as_array().unwrap().iter();
    choices.map(|c| (c["index"].as_u64().unwrap(), c["text"].as_str().unwrap().to_owned())).collect()
}

#[tokio::test]
async fn every_choice_of_every_prompt_has_its_own_index_and_text() {
    // api-09.
    let stage = stage().await;
    stage.worker.says("<#>");
    let four = stage.http.post(COMPLETIONS, &completion(json!({"n": 4}))).await.json();
    let expected: Vec<_> = (0..4).map(|i| (i, format!("<{i}>"))).collect();
    assert_eq!(texts(&four), expected);
    assert_eq!(four["usage"]["completion_tokens"], 16);

    for prompt in [json!(["alpha", "beta"]), json!([[97, 108], [98]])] {
        let body = completion(json!({"prompt": prompt, "n": 2, "echo": true}));
        let reply = stage.http.post(COMPLETIONS, &body).await.json();
        let begins = |text: &str| {
            if prompt[0].is_string() {
                text.to_owned()
            } else {
                text.replace("alpha", "al").replace("beta", "b")
            }
        };
        let expected: Vec<_> = [("alpha<0>"), ("alpha<1>"), ("beta<0>"), ("beta<1>")]
            .iter()
            .enumerate()
            .map(|(i, t)| (i as u64, begins(t)))
            .collect();
        assert_eq!(texts(&reply), expected);
    }
}

#[tokio::test]
async fn eight_requests_of_four_choices_do_not_mix() {
    // api-07.
    let stage = stage().await;
    stage.worker.script(|request| {
        let prompt = *request.prompt_ids.last().unwrap() as u8 as char;
        crate::speaking_worker::say(request, &format!("{prompt}#"))
    });
    let ask = async |prompt: char| {
        let body = completion(json!({"prompt": prompt.to_string(), "n": 4}));
        texts(&stage.http.post(COMPLETIONS, &body).await.json())
    };
    let replies = futures::future::join_all("abcdefgh".chars().map(ask)).await;
    for (prompt, reply) in "abcdefgh".chars().zip(replies) {
        let expected: Vec<_> = (0..4).map(|i| (i, format!("{prompt}{i}"))).collect();
        assert_eq!(reply, expected);
    }
}

#[tokio::test]
async fn a_stop_string_ends_the_text_and_the_work() {
    let stage = stage().await;
    stage.worker.script(|request| {
        use futures::StreamExt;
        // Nothing comes after the text, so only the stop string can end the request.
        let messages: Vec<_> = responses(request, "one two three four").into_iter().take(17).collect();
        futures::stream::iter(messages).map(Ok).chain(futures::stream::pending()).boxed()
    });
    let reply = stage.http.post(COMPLETIONS, &completion(json!({"stop": ["three"]}))).await.json();
    assert_eq!(reply["choices"][0]["text"], "one two ");
    assert_eq!(reply["choices"][0]["finish_reason"], "stop");
    assert_eq!(reply["choices"][0]["stop_reason"], "three");
    assert_eq!(reply["usage"]["completion_tokens"], 13, "tokens behind the stop string do not count");
    stage.worker.ended(1).await;
}

#[tokio::test]
async fn json_may_have_as_many_blanks_as_the_router_says() {
    for (blanks, told) in [(None, 32), (Some(0), 0), (Some(7), 7)] {
        let set = |surface: &mut Surface| surface.json_blanks_max = blanks.unwrap_or(surface.json_blanks_max);
        let stage = stage_with(|config| set(&mut config.surface), true).await;
        for fields in [json!({"response_format": {"type": "json_object"}}), json!({"guided_json": {}})] {
            stage.http.post(CHAT, &chat(fields)).await;
        }
        stage.http.post(CHAT, &chat(json!({"guided_regex": "a+"}))).await;
        let requests = stage.worker.requests();
        let blanks: Vec<_> = requests.iter().map(|r| r.grammar.as_ref().unwrap().json_blanks_max).collect();
        assert_eq!(blanks, [Some(told), Some(told), None]);
    }
}
