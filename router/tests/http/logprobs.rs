//! Log probabilities in each endpoint's shape.

use serde_json::{Value, json};

use crate::{CHAT, COMPLETIONS, chat, completion, stage};

#[tokio::test]
async fn chats_have_content_entries() {
    // logprobs-05, logprobs-07.
    let stage = stage().await;
    stage.worker.says("ž");
    let content = async |fields: Value| {
        let reply = stage.http.post(CHAT, &chat(fields)).await.json();
        reply["choices"][0]["logprobs"].clone()
    };
    let entry = |token: &str, bytes: &[u8], top: Value| json!({"token": token, "logprob": -1.0, "bytes": bytes, "top_logprobs": top});
    let top = json!([{"token": "A", "logprob": -2.0, "bytes": [65]}, {"token": "B", "logprob": -3.0, "bytes": [66]}]);
    let with = |top: Value| {
        json!({"content": [
            entry("\u{fffd}", &[0xc5], top.clone()), entry("\u{fffd}", &[0xbe], top.clone()),
            entry("<|im_end|>", b"<|im_end|>", top),
        ]})
    };
    assert_eq!(content(json!({"logprobs": true, "top_logprobs": 2})).await, with(top));
    assert_eq!(content(json!({"logprobs": true})).await, with(json!([])));
    assert_eq!(content(json!({"logprobs": true, "top_logprobs": 0})).await, with(json!([])));
    assert_eq!(content(json!({})).await, Value::Null);
}

#[tokio::test]
async fn completions_have_parallel_arrays() {
    // logprobs-05, logprobs-07.
    let stage = stage().await;
    stage.worker.says("xy");
    let logprobs = async |fields: Value| {
        let reply = stage.http.post(COMPLETIONS, &completion(fields)).await.json();
        reply["choices"][0]["logprobs"].clone()
    };
    let expected = json!({
        "tokens": ["x", "y"], "token_logprobs": [-1.0, -1.0],
        "top_logprobs": [{"x": -1.0, "A": -2.0}, {"y": -1.0, "A": -2.0}], "text_offset": [0, 1],
    });
    assert_eq!(logprobs(json!({"logprobs": 1, "max_tokens": 2})).await, expected);
    let zero = logprobs(json!({"logprobs": 0, "max_tokens": 2})).await;
    assert_eq!(zero["token_logprobs"], json!([-1.0, -1.0]));
    assert_eq!(zero["top_logprobs"], json!([{"x": -1.0}, {"y": -1.0}]));
    assert_eq!(logprobs(json!({"logprobs": null})).await, Value::Null);
}

#[tokio::test]
async fn an_echoed_prompt_has_an_entry_per_token_the_first_without_probability() {
    // logprobs-04.
    let stage = stage().await;
    stage.worker.says("xy");
    let fields = json!({"prompt": "až", "echo": true, "logprobs": 1, "max_tokens": 1});
    let reply = stage.http.post(COMPLETIONS, &completion(fields)).await.json();
    let choice = &reply["choices"][0];
    assert_eq!(choice["text"], "ažx");
    let expected = json!({
        "tokens": ["<s>", "a", "bytes:\\xc5", "bytes:\\xbe", "x"],
        "token_logprobs": [null, -1.0, -1.0, -1.0, -1.0],
        "top_logprobs": [null, {"a": -1.0, "A": -2.0}, {"bytes:\\xc5": -1.0, "A": -2.0}, {"bytes:\\xbe": -1.0, "A": -2.0},
                         {"x": -1.0, "A": -2.0}],
        "text_offset": [0, 0, 1, 1, 2],
    });
    assert_eq!(choice["logprobs"], expected);
    let sampling = stage.worker.requests()[0].sampling.clone().unwrap();
    assert_eq!((sampling.logprobs, sampling.prompt_logprobs), (Some(1), Some(1)));
}

#[tokio::test]
async fn a_prompt_can_be_scored_without_an_answer() {
    let stage = stage().await;
    stage.worker.says("xy");
    let fields = json!({"prompt": ["az", "b"], "echo": true, "logprobs": 1, "max_tokens": 0});
    let reply = stage.http.post(COMPLETIONS, &completion(fields)).await.json();
    for (choice, (text, tokens)) in reply["choices"]
        .as_array()
        .unwrap()
        .iter()
        .zip([("az", json!(["<s>", "a", "z"])), ("b", json!(["<s>", "b"]))])
    {
        assert_eq!((&choice["text"], &choice["logprobs"]["tokens"]), (&json!(text), &tokens));
        assert_eq!(choice["finish_reason"], "length");
    }
    assert_eq!(reply["usage"]["completion_tokens"], 0);
    let full = json!({"prompt": vec![97; 512], "echo": true, "logprobs": 1, "max_tokens": 0});
    let reply = stage.http.post(COMPLETIONS, &completion(full)).await.json();
    assert_eq!(reply["choices"][0]["logprobs"]["tokens"].as_array().map(Vec::len), Some(512), "{reply}");
    assert_eq!(reply["usage"]["completion_tokens"], 0);
    let streamed = completion(json!({"prompt": "az", "echo": true, "max_tokens": 0, "stream": true}));
    let chunks = stage.http.post(COMPLETIONS, &streamed).await.chunks();
    let texts: Vec<_> = chunks.iter().map(|chunk| chunk["choices"][0]["text"].as_str().unwrap()).collect();
    assert_eq!(texts, ["az", ""]);
}

#[tokio::test]
async fn prompt_logprobs_come_by_token_id() {
    let stage = stage().await;
    let entry = json!([null, {
        "104": {"logprob": -1.0, "rank": 1, "decoded_token": "h"},
        "65": {"logprob": -2.0, "rank": 1, "decoded_token": "A"},
    }]);
    let body = completion(json!({"prompt": [256, 104], "prompt_logprobs": 1}));
    let reply = stage.http.post(COMPLETIONS, &body).await.json();
    assert_eq!(reply["choices"][0]["prompt_logprobs"], entry);
    let reply = stage.http.post(CHAT, &chat(json!({"prompt_logprobs": 0}))).await.json();
    assert_eq!(reply["prompt_logprobs"].as_array().map(Vec::len), Some(22));
}

#[tokio::test]
async fn a_stream_brings_the_same_logprobs() {
    let stage = stage().await;
    stage.worker.says("ab");
    let chunks = stage
        .http
        .post(CHAT, &chat(json!({"stream": true, "logprobs": true, "top_logprobs": 1})))
        .await
        .chunks();
    let whole = stage.http.post(CHAT, &chat(json!({"logprobs": true, "top_logprobs": 1}))).await.json();
    let entries = |choice: &Value| choice["logprobs"]["content"].as_array().cloned().unwrap_or_default();
    let streamed: Vec<_> = chunks.iter().flat_map(|c| entries(&c["choices"][0])).collect();
    assert_eq!(streamed, entries(&whole["choices"][0]));
    assert_eq!(streamed.len(), 3);

    let fields = json!({"stream": true, "echo": true, "logprobs": 1, "max_tokens": 1});
    let chunks = stage.http.post(COMPLETIONS, &completion(fields)).await.chunks();
    let tokens: Vec<_> = chunks
        .iter()
        .flat_map(|c| c["choices"][0]["logprobs"]["tokens"].as_array().cloned().unwrap_or_default())
        .collect();
    assert_eq!(tokens, ["<s>", "h", "i", "a"]);
}
