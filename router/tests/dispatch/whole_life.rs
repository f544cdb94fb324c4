//! From admission to the last token, and every way in which a request may end.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use thalweg_proto::code::ErrorCode;
use thalweg_proto::v1;
use thalweg_router::dispatch::{GenerationEvent, Tokenized};
use tokio::time::Instant;

use crate::script::{Step, about};
use crate::{config, read, stage, stage_of};

#[tokio::test]
async fn a_request_is_served_and_accounted_to_its_end() {
    let stage = stage(2, vec![]).await;
    assert_eq!(stage.scene.tokenizers_sent.load(Ordering::SeqCst), 1, "one tokenizer per fingerprint");
    let mut generation = stage.dispatch(5).await.unwrap();
    assert!(matches!(generation.next().await, Some(Ok(GenerationEvent::Prompt(_)))));
    let served_by = generation.worker().clone();
    assert_eq!(read(generation).await, (vec![0, 1, 2, 3, 4], Ok(())));

    let seen = stage.scene.seen();
    let [(worker, request)] = seen.as_slice() else { panic!("{seen:?}") };
    assert_eq!(worker, served_by.as_str());
    assert!(request.router_id.starts_with("router/"), "{}", request.router_id);
    assert_eq!((request.booking, request.prompt_ids.len()), (1, 100));
    assert_eq!(request.fingerprint, bytes::Bytes::from_static(b"print"));
    assert_eq!(request.choices, [v1::ChoiceState::default()]);
    stage.wait_until_idle().await;
    let metrics = stage.router.state().metrics_text();
    assert!(metrics.contains("thalweg_router_requests_total{code=\"ok\"} 1"), "{metrics}");
    assert!(metrics.contains("thalweg_router_worker_state{worker=\"w0\",state=\"ready\"} 1"), "{metrics}");
    stage.router.shutdown().await;
}

#[tokio::test]
async fn choices_of_one_request_end_together() {
    let stage = stage(1, vec![]).await;
    let request = Tokenized { n: 3, ..stage.request(2) };
    let generation = stage.router.state().dispatcher.dispatch(request).await.unwrap();
    assert_eq!(read(generation).await, (vec![0, 100, 200, 1, 101, 201], Ok(())));
    stage.wait_until_idle().await;
}

#[tokio::test]
async fn dropping_a_generation_cancels_at_the_worker() {
    let stage = stage(1, vec![Step::Hold(2)]).await;
    let mut generation = stage.dispatch(100).await.unwrap();
    generation.next().await.unwrap().unwrap();
    assert_eq!(stage.worker("w0").open_bookings(), 1);
    drop(generation);
    stage.scene.wait_for_cancelled(1).await;
    stage.wait_until_idle().await;
}

#[tokio::test]
async fn giving_up_before_the_first_token_cancels_at_the_worker() {
    let stage = stage(1, vec![Step::Hold(0)]).await;
    let dispatch = tokio::spawn({
        let (dispatcher, request) = (Arc::clone(&stage.router.state().dispatcher), stage.request(3));
        async move { dispatcher.dispatch(request).await.map(drop) }
    });
    stage.scene.wait_for_seen(1).await;
    dispatch.abort();
    stage.scene.wait_for_cancelled(1).await;
    stage.wait_until_idle().await;
}

#[tokio::test]
async fn a_request_past_its_deadline_is_ended_everywhere() {
    let stage = stage(1, vec![Step::Hold(2)]).await;
    let deadline = Instant::now() + Duration::from_millis(300);
    let request = Tokenized { deadline, ..stage.request(100) };
    let generation = stage.router.state().dispatcher.dispatch(request).await.unwrap();
    let (tokens, end) = read(generation).await;
    assert_eq!((tokens, end.unwrap_err().code), (vec![0, 1], ErrorCode::DeadlineExceeded));
    stage.scene.wait_for_cancelled(1).await;
    stage.wait_until_idle().await;
}

#[tokio::test]
async fn late_tokens_of_another_attempt_are_dropped() {
    let stage = stage(1, vec![Step::LateTokens]).await;
    let generation = stage.dispatch(3).await.unwrap();
    assert_eq!(read(generation).await, (vec![0, 1, 2], Ok(())));
}

#[tokio::test]
async fn overload_waits_in_the_router_and_then_is_refused_at_once() {
    let mut config = config();
    config.limits.queue_requests_max = 1;
    let abouts = vec![v1::DescribeResponse { max_num_seqs: 1, ..about("w0") }];
    let stage = stage_of(config, abouts, vec![Step::Hold(1)]).await;
    // A second of prefill ahead: with its one slot taken the worker takes nothing more.
    stage.workers[0].load.send_modify(|load| load.prefill_tokens_ahead = 1_000);
    let held = stage.dispatch(9).await.unwrap();
    while stage.worker("w0").load().running == 0 || stage.worker("w0").load().prefill_tokens_ahead < 1_000 {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let waiting = tokio::spawn({
        let (dispatcher, request) = (Arc::clone(&stage.router.state().dispatcher), stage.request(2));
        async move { read(dispatcher.dispatch(request).await.unwrap()).await }
    });
    while !stage.router.state().metrics_text().contains("thalweg_router_queue_depth 1") {
        assert!(!waiting.is_finished(), "it went to the worker");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let error = stage.dispatch(2).await.map(drop).unwrap_err();
    assert_eq!(error.code, ErrorCode::Overloaded);
    assert!(error.retry_after >= Some(Duration::from_secs(1)));
    assert_eq!(stage.scene.seen().len(), 1, "the worker saw neither");
    drop(held);
    assert_eq!(waiting.await.unwrap(), (vec![0, 1], Ok(())));
    stage.workers[0].load.send_modify(|load| load.prefill_tokens_ahead = 0);
    stage.wait_until_idle().await;
}

#[tokio::test]
async fn shutting_down_lets_requests_finish_and_ends_those_that_do_not() {
    let mut config = config();
    config.timeouts.drain_timeout = Duration::from_millis(100);
    let stage = stage_of(config, vec![about("w0")], vec![Step::Hold(2)]).await;
    let held = stage.dispatch(9).await.unwrap();
    let address = stage.router.http_address();
    // An open connection with an unfinished request keeps the server from closing by itself.
    let mut client = tokio::net::TcpStream::connect(address).await.unwrap();
    tokio::io::AsyncWriteExt::write_all(&mut client, b"POST /v1/completions HTTP/1.1\r\n").await.unwrap();
    stage.router.shutdown().await;
    let (tokens, end) = read(held).await;
    assert_eq!((tokens, end.unwrap_err().code), (vec![0, 1], ErrorCode::Draining));
    assert!(tokio::net::TcpStream::connect(address).await.is_err(), "nobody listens any more");
}
