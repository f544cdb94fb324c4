//! More requests than the workers and the queue take.

use std::time::Duration;

use futures::StreamExt;
use http::StatusCode;
use serde_json::json;

use crate::speaking_worker::responses;
use crate::{CHAT, COMPLETIONS, RESPONSES, Stage, chat, completion, stage_with};

/// What the worker says that it runs at once.
const SLOTS: usize = 64;
const QUEUE: usize = 8;
const REQUESTS: usize = 10 * (SLOTS + QUEUE);

#[tokio::test]
async fn what_neither_workers_nor_queue_take_is_refused_at_once() {
    // limits-03.
    let stage = stage_with(|c| c.limits.queue_requests_max = QUEUE, true).await;
    let go = waits_for_the_word(&stage);
    // A hundred tokens each: with its slots taken the worker has more than a second of prefill ahead.
    let body = completion(json!({"prompt": "x".repeat(100)}));
    let tasks: Vec<_> = (0..REQUESTS)
        .map(|_| {
            let (http, body) = (stage.http.clone(), body.clone());
            tokio::spawn(async move { http.post(COMPLETIONS, &body).await })
        })
        .collect();
    stage.worker.begun(SLOTS).await;
    rest_is_refused(&stage).await;
    go.send_replace(true);
    let (mut served, mut sent_away) = (0, 0);
    for task in tasks {
        let reply = task.await.unwrap();
        if reply.status == StatusCode::OK {
            served += 1;
            continue;
        }
        assert_eq!(reply.status, StatusCode::TOO_MANY_REQUESTS, "{}", reply.text);
        assert!(reply.header("retry-after").is_some());
        sent_away += 1;
    }
    assert_eq!((served, sent_away), (SLOTS + QUEUE, REQUESTS - SLOTS - QUEUE));
}

/// A burst of two kinds at once: neither gets all the places because it is ready for them sooner.
#[tokio::test]
async fn chats_and_responses_get_places_in_the_queue_alike() {
    let stage = stage_with(|c| c.limits.queue_requests_max = QUEUE, true).await;
    let go = waits_for_the_word(&stage);
    let text = "x".repeat(100);
    let kinds = [
        (CHAT, chat(json!({"messages": [{"role": "user", "content": text}]}))),
        (RESPONSES, json!({"model": "tiny", "input": text, "max_output_tokens": 100})),
    ];
    let tasks: Vec<_> = (0..REQUESTS)
        .map(|at| {
            let (http, (path, body)) = (stage.http.clone(), kinds[at % 2].clone());
            tokio::spawn(async move { (at % 2, http.post(path, &body).await.status) })
        })
        .collect();
    stage.worker.begun(SLOTS).await;
    rest_is_refused(&stage).await;
    go.send_replace(true);
    let mut served = [0; 2];
    for task in tasks {
        let (kind, status) = task.await.unwrap();
        served[kind] += usize::from(status == StatusCode::OK);
    }
    assert!(served.iter().all(|count| *count > (SLOTS + QUEUE) / 6), "{served:?}");
}

/// Answers come once the word is given.
fn waits_for_the_word(stage: &Stage) -> tokio::sync::watch::Sender<bool> {
    let go = tokio::sync::watch::Sender::new(false);
    let word = go.clone();
    stage.worker.script(move |request| {
        let (messages, mut word) = (responses(request, "ok"), word.subscribe());
        let begin = async move { word.wait_for(|go| *go).await.map(drop).unwrap() };
        futures::stream::once(begin)
            .flat_map(move |()| futures::stream::iter(messages.clone()))
            .map(Ok)
            .boxed()
    });
    go
}

async fn rest_is_refused(stage: &Stage) {
    // Most are refused before anybody has looked for their model's name.
    let refused = |metrics: &str| -> usize {
        let lines = metrics.lines().filter(|l| l.contains("outcome=\"overloaded\"} "));
        lines.filter_map(|l| l.rsplit(' ').next()?.parse::<usize>().ok()).sum()
    };
    let all_refused = async {
        while refused(&stage.http.get("/metrics").await.text) < REQUESTS - SLOTS - QUEUE {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(60), all_refused).await.expect("the rest is refused");
}
