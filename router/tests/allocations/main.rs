//! A streamed token costs the same whether much or little was said before it, all the way from the worker's message to the
//! client's bytes. One test, as the allocator counts for the whole process: the worker's and the client's part are in the
//! figures, and they do not grow either.
#![allow(clippy::unwrap_used, reason = "a test's helpers may panic")]

#[path = "../support/speaking_worker.rs"]
mod speaking_worker;
#[path = "../support/tokenizer.rs"]
mod tokenizer;

use std::alloc::System;
use std::sync::Arc;

use cap::Cap;
use serde_json::{Value, json};
use speaking_worker::{SpeakingWorker, say};
use thalweg_cache_index::MemoryIndex;
use thalweg_harness::HttpClient;
use thalweg_membership::StaticMembership;
use thalweg_router::config::RouterConfig;
use thalweg_router::router::Router;

#[global_allocator]
static ALLOCATOR: Cap<System> = Cap::new(System, usize::MAX);

const CHAT: &str = "/v1/chat/completions";
const COMPLETIONS: &str = "/v1/completions";
const RESPONSES: &str = "/v1/responses";

/// Lengths of answers in tokens; what a request costs by itself cancels out between two of them.
const EARLY: [usize; 2] = [200, 1_000];
const LATE: [usize; 2] = [3_200, 4_000];
/// Noise of timers, reports and vectors that double. Copying one byte for each character said before would add 3,000 to a token.
const GROWTH_MAX: f64 = 500.0;

/// Path, fields, and what stands before and behind the bulk of the answer.
type Case = (&'static str, Value, &'static str, &'static str);

#[tokio::test]
async fn a_token_costs_no_more_behind_a_long_answer() {
    let mut bundle = tokenizer::bundle(true, 2 * LATE[1]);
    bundle.chat_template = Some(TEMPLATE.to_owned());
    let worker = SpeakingWorker::start("w0", &["tiny"], &bundle).await;
    let config = RouterConfig { http: ([127, 0, 0, 1], 0).into(), ..RouterConfig::default() };
    let membership = StaticMembership::new([worker.address.parse().unwrap()]);
    let router =
        Router::start(config, Arc::new(membership), Arc::new(MemoryIndex::new())).await.expect("it starts");
    router.ready(1).await;
    let http = HttpClient::new(router.http_address());
    for (path, fields, before, behind) in cases() {
        let cost = async |tokens: usize| {
            let text = format!("{before}{}{behind}", "word ".repeat(tokens / 5));
            let said = text.clone();
            worker.script(move |request| say(request, &said));
            bytes_allocated(&http, path, &fields, text.len()).await as f64
        };
        // What is made once is made now.
        cost(EARLY[0]).await;
        let between = async |[from, to]: [usize; 2]| (cost(to).await - cost(from).await) / (to - from) as f64;
        let (early, late) = (between(EARLY).await, between(LATE).await);
        println!("{path} {fields}: {early:.0} bytes a token of {EARLY:?}, {late:.0} of {LATE:?}");
        assert!(late < early + GROWTH_MAX, "{path} {fields}: {early:.0} bytes a token, then {late:.0}");
    }
}

fn cases() -> Vec<Case> {
    let tool = json!({"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}});
    let call = "<tool_call>\n{\"name\": \"add\", \"arguments\": {\"a\": \"";
    let format = json!({"type": "json_object"});
    vec![
        (CHAT, json!({}), "", ""),
        (CHAT, json!({"stop": ["words of", "wordy"], "n": 2}), "", ""),
        (CHAT, json!({"logprobs": true, "top_logprobs": 2, "return_token_ids": true}), "", ""),
        (CHAT, json!({"tools": [tool]}), call, "\"}}\n</tool_call>"),
        (CHAT, json!({"tools": [tool]}), "", ""),
        (CHAT, json!({"response_format": format}), "{\"a\": \"", "\"}"),
        (CHAT, json!({}), "<think>\n", "\n</think>\n\nyes"),
        (COMPLETIONS, json!({"logprobs": 1, "echo": true, "stop": "wordy"}), "", ""),
        (RESPONSES, json!({}), "", ""),
    ]
}

/// Of one streamed answer, read to its end.
async fn bytes_allocated(http: &HttpClient, path: &str, fields: &Value, tokens: usize) -> usize {
    let mut body = match path {
        CHAT => json!({"messages": [{"role": "user", "content": "hi"}], "max_tokens": tokens + 1}),
        COMPLETIONS => json!({"prompt": "hi", "max_tokens": tokens + 1}),
        _ => json!({"input": "hi", "max_output_tokens": tokens + 1, "store": false}),
    };
    (body["model"], body["stream"]) = (json!("tiny"), json!(true));
    for (name, value) in fields.as_object().unwrap() {
        body[name] = value.clone();
    }
    let before = ALLOCATOR.total_allocated();
    let mut reply = http.open(path, &body).await;
    assert_eq!(reply.status.as_u16(), 200);
    let mut events = 0;
    while let Some(event) = reply.next().await {
        assert!(!event.contains("\"error\":{"), "{event}");
        events += 1;
    }
    // Some are held back for a while, for what may become a stop string.
    assert!(events > tokens / 10, "{events} events of {tokens} tokens");
    ALLOCATOR.total_allocated() - before
}

/// Of a model that thinks and calls tools.
const TEMPLATE: &str = "{% for message in messages %}{{ message.content }}{% endfor %}\
    {% if tools %}<tool_call>{{ tools | tojson }}{% endif %}\
    {% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}";
