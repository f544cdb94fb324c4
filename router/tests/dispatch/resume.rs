//! Workers lost after the first token: another one goes on with every token that was received.

use std::time::Duration;

use thalweg_proto::code::ErrorCode;
use thalweg_proto::v1;
use thalweg_router::dispatch::{GenerationEvent, Tokenized};
use thalweg_router::workers::health::HealthState;
use tokio::time::Instant;

use crate::script::{Step, about};
use crate::{Stage, config, read, stage, stage_of};

/// What the n-th attempt was told to continue: (choice, tokens).
fn told(stage: &Stage, attempt: usize) -> Vec<(u32, Vec<u32>)> {
    let (_, request) = &stage.scene.seen()[attempt];
    request.choices.iter().map(|c| (c.index, c.output_ids.clone())).collect()
}

#[tokio::test]
async fn whatever_ends_a_stream_early_the_client_gets_every_token_once() {
    // streaming-07.
    for (step, reason) in [
        (Step::BreakAfter(2), "ended_early"),
        (Step::CrashAfter(2), "connection"),
        (Step::FailAfter(2, ErrorCode::Draining), "draining"),
        (Step::FailAfter(2, ErrorCode::Unavailable), "unavailable"),
        (Step::NonsenseAfter(2), "nonsense"),
    ] {
        let stage = stage(2, vec![step]).await;
        let generation = stage.dispatch(5).await.unwrap();
        assert_eq!(read(generation).await, (vec![0, 1, 2, 3, 4], Ok(())), "{reason}");
        let seen = stage.scene.seen();
        let [(first, of_first), (second, of_second)] = seen.as_slice() else { panic!("{seen:?}") };
        assert_ne!(first, second, "{reason}");
        assert_ne!(of_first.attempt_id, of_second.attempt_id);
        assert_ne!(of_first.booking, of_second.booking);
        assert_eq!(
            (told(&stage, 0), told(&stage, 1)),
            (vec![(0, vec![])], vec![(0, vec![0, 1])]),
            "{reason}"
        );
        assert!(stage.shows(&format!("thalweg_router_resumes_total{{reason=\"{reason}\"}} 1")), "{reason}");
        assert!(stage.shows("thalweg_router_resume_pause_seconds_count 1"));
        stage.wait_until_idle().await;
    }
}

#[tokio::test]
async fn a_broken_connection_is_noticed_within_50_ms() {
    let stage = stage(2, vec![Step::CrashAfter(2)]).await;
    let mut generation = stage.dispatch(5).await.unwrap();
    let (mut last, mut longest) = (Instant::now(), Duration::ZERO);
    while let Some(event) = generation.next().await {
        if matches!(event.unwrap(), GenerationEvent::Deltas(_)) {
            longest = longest.max(last.elapsed());
            last = Instant::now();
        }
    }
    // The health machine alone would take a second to suspect it and three to give it up.
    assert!(longest < Duration::from_millis(500), "a pause of {longest:?}");
}

#[tokio::test]
async fn only_choices_that_have_not_finished_go_on() {
    let stage = stage(2, vec![Step::BreakAfter(3)]).await;
    let request = Tokenized { n: 2, ..stage.request(5) };
    let mut generation = stage.router.state().dispatcher.dispatch(request).await.unwrap();
    generation.ender().end(1);
    let mut tokens = Vec::new();
    while let Some(event) = generation.next().await {
        if let GenerationEvent::Deltas(deltas) = event.unwrap() {
            tokens.extend(deltas.into_iter().filter(|d| d.index == 0).flat_map(|d| d.token_ids));
        }
    }
    assert_eq!(tokens, [0, 1, 2, 3, 4]);
    drop(generation);
    assert_eq!(told(&stage, 1), [(0, vec![0, 1, 2])]);
    stage.wait_until_idle().await;
}

#[tokio::test]
async fn the_worker_is_told_which_choice_needs_no_more_if_it_knows_how() {
    let knows = v1::DescribeResponse { features: vec!["abort_choices".to_owned()], ..about("w0") };
    let stage = stage_of(config(), vec![knows], vec![Step::Hold(2)]).await;
    let request = Tokenized { n: 3, ..stage.request(5) };
    let generation = stage.router.state().dispatcher.dispatch(request).await.unwrap();
    generation.ender().end(2);
    let abort = stage.scene.wait_for_abort().await;
    assert_eq!((abort.request_id.as_str(), abort.attempt_id, abort.choices), ("r", 1, vec![2]));
}

#[tokio::test]
async fn a_request_is_resumed_twice_at_most() {
    let stage = stage(5, vec![Step::BreakAfter(1); 9]).await;
    let (tokens, end) = read(stage.dispatch(9).await.unwrap()).await;
    let error = end.unwrap_err();
    assert_eq!((tokens, error.code), (vec![0, 1, 2], ErrorCode::Unavailable));
    assert!(error.message.contains("after 3 tokens"), "{error}");
    assert_eq!(stage.scene.seen().len(), 3);
    stage.wait_until_idle().await;
}

#[tokio::test]
async fn refusals_are_tried_elsewhere_and_do_not_count_as_resumes() {
    let refuse = Step::Refuse(ErrorCode::Overloaded);
    let stage = stage(5, vec![Step::BreakAfter(1), refuse.clone(), refuse]).await;
    assert_eq!(read(stage.dispatch(4).await.unwrap()).await, (vec![0, 1, 2, 3], Ok(())));
    assert_eq!(told(&stage, 3), [(0, vec![0])]);
    assert_eq!(stage.counted("resumes"), [("reason=\"ended_early\"".to_owned(), 1.0)]);
}

/// Workers that are full, or have another request on trial, are asked every 50 ms: that is one loss, and no retry.
#[tokio::test]
async fn a_resume_is_counted_once_however_often_full_workers_are_asked() {
    let mut steps = vec![Step::CrashAfter(1)];
    steps.extend(vec![Step::Refuse(ErrorCode::Overloaded); 7]);
    let stage = stage(2, steps).await;
    assert_eq!(read(stage.dispatch(4).await.unwrap()).await, (vec![0, 1, 2, 3], Ok(())));
    let seen = stage.scene.seen();
    assert_eq!(seen.len(), 9);
    assert_eq!(stage.counted("resumes"), [("reason=\"connection\"".to_owned(), 1.0)]);
    assert!(stage.counted("retries").is_empty());
    assert_eq!(stage.counted("room_waits"), [(String::new(), 1.0)]);
    let mut took = [&seen[0].0, &seen[8].0].map(|id| (format!("worker=\"{id}\""), 1.0));
    took.sort_by(|a, b| a.0.cmp(&b.0));
    assert_eq!(stage.counted("picks"), took);
    assert!(stage.shows("thalweg_router_predicted_time_to_first_token_seconds_count 1"));
}

#[tokio::test]
async fn an_answer_that_nobody_continues_is_no_resume() {
    let stage = stage(1, vec![Step::BreakAfter(1), Step::Refuse(ErrorCode::InvalidRequest)]).await;
    assert!(read(stage.dispatch(4).await.unwrap()).await.1.is_err());
    assert_eq!((stage.scene.seen().len(), stage.counted("resumes")), (2, Vec::new()));
}

#[tokio::test]
async fn with_no_worker_left_the_answer_waits_for_one_and_new_requests_do_not() {
    let mut stage = stage(1, vec![Step::Hold(3)]).await;
    let held = stage.spawn(stage.request(6));
    stage.scene.wait_for_seen(1).await;
    stage.workers[0].kill();
    stage.wait_for_state("w0", HealthState::Gone).await;
    let error = stage.dispatch(2).await.map(drop).unwrap_err();
    assert_eq!(error.code, ErrorCode::Unavailable);
    assert!(stage.shows("thalweg_router_queue_depth 1"), "the begun answer waits");
    stage.restart(0, 2);
    assert_eq!(held.await.unwrap(), ((0..6).collect(), Ok(())));
    stage.wait_until_idle().await;
}

#[tokio::test]
async fn a_resume_that_finds_no_worker_in_time_says_so() {
    let mut config = config();
    config.timeouts.queue_timeout = Duration::from_millis(200);
    let mut stage = stage_of(config, vec![about("w0")], vec![Step::Hold(3)]).await;
    let mut generation = stage.dispatch(6).await.unwrap();
    generation.next().await.unwrap().unwrap();
    stage.workers[0].kill();
    let error = read(generation).await.1.unwrap_err();
    assert!(matches!(error.code, ErrorCode::DeadlineExceeded | ErrorCode::Unavailable), "{error:?}");
    stage.wait_until_idle().await;
}

#[tokio::test]
async fn the_deadline_holds_over_resumes() {
    let stage = stage(2, vec![Step::BreakAfter(1), Step::Hold(1)]).await;
    let deadline = Instant::now() + Duration::from_millis(300);
    let request = Tokenized { deadline, ..stage.request(100) };
    let generation = stage.router.state().dispatcher.dispatch(request).await.unwrap();
    let (tokens, end) = read(generation).await;
    assert_eq!((tokens, end.unwrap_err().code), (vec![0, 1], ErrorCode::DeadlineExceeded));
    stage.wait_until_idle().await;
}

#[tokio::test]
async fn other_weights_do_not_continue_an_answer() {
    let mut stage = stage(1, vec![Step::Hold(2)]).await;
    let mut generation = stage.dispatch(6).await.unwrap();
    generation.next().await.unwrap().unwrap();
    let other =
        v1::DescribeResponse { epoch: 2, fingerprint: bytes::Bytes::from_static(b"other"), ..about("w0") };
    let scene = std::sync::Arc::clone(&stage.scene);
    stage.workers[0].restart(&scene, other);
    let error = read(generation).await.1.unwrap_err();
    assert_eq!(error.code, ErrorCode::Unavailable);
    assert!(error.message.contains("other weights"), "{error}");
    assert_eq!(stage.scene.seen().len(), 1);
}
