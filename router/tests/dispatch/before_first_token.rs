//! What fails before the first token is tried elsewhere.

use std::sync::Arc;

use thalweg_proto::code::ErrorCode;
use thalweg_proto::v1;
use thalweg_router::dispatch::Tokenized;

use crate::script::{Step, about};
use crate::{Stage, config, read, stage, stage_of};

#[tokio::test]
async fn before_the_first_token_another_worker_is_tried() {
    // streaming-07.
    for step in [
        Step::Refuse(ErrorCode::Overloaded),
        Step::Refuse(ErrorCode::Draining),
        Step::Refuse(ErrorCode::Unavailable),
        Step::Refuse(ErrorCode::FingerprintMismatch),
        Step::EndEmpty,
    ] {
        let stage = stage(3, vec![step.clone(), step.clone()]).await;
        let generation = stage.dispatch(3).await.unwrap();
        let served_by = generation.worker().clone();
        assert_eq!(read(generation).await, (vec![0, 1, 2], Ok(())), "{step:?}");
        let mut tried: Vec<String> = stage.scene.seen().into_iter().map(|(worker, _)| worker).collect();
        assert_eq!(tried.last().map(String::as_str), Some(served_by.as_str()));
        tried.sort();
        assert_eq!(tried, ["w0", "w1", "w2"], "{step:?}: never the same twice");
        let attempts: Vec<u64> = stage.scene.seen().iter().map(|(_, r)| r.attempt_id).collect();
        assert_eq!(attempts, [1, 2, 3]);
        stage.wait_until_idle().await;
    }
}

#[tokio::test]
async fn a_worker_that_dies_before_the_first_token_is_replaced() {
    let mut stage = stage(2, vec![Step::Hold(0)]).await;
    let dispatch = tokio::spawn({
        let (dispatcher, request) = (Arc::clone(&stage.router.state().dispatcher), stage.request(3));
        async move { dispatcher.dispatch(request).await }
    });
    stage.scene.wait_for_seen(1).await;
    let first: usize = stage.scene.seen()[0].0[1..].parse().unwrap();
    stage.workers[first].kill();
    let generation = dispatch.await.unwrap().unwrap();
    assert_ne!(generation.worker().as_str(), format!("w{first}"));
    assert_eq!(read(generation).await, (vec![0, 1, 2], Ok(())));
    assert_eq!(stage.counted("retries"), [("reason=\"connection\"".to_owned(), 1.0)]);
}

/// A worker that does not know grammars would answer whatever it likes: it is not asked.
#[tokio::test]
async fn constrained_requests_go_only_where_grammars_are_known() {
    let grammar =
        v1::Grammar { source: Some(v1::grammar::Source::Regex("a+".to_owned())), json_blanks_max: None };
    let constrained =
        |stage: &Stage| Tokenized { grammar: Some(Arc::new(grammar.clone())), ..stage.request(3) };
    let knows = v1::DescribeResponse { features: vec!["grammar".to_owned()], ..about("w1") };
    let stage = stage_of(config(), vec![about("w0"), knows], Vec::new()).await;
    for _ in 0..6 {
        let generation = stage.router.state().dispatcher.dispatch(constrained(&stage)).await.unwrap();
        assert_eq!(generation.worker().as_str(), "w1");
        assert_eq!(read(generation).await.1, Ok(()));
    }
    assert!(stage.scene.seen().iter().all(|(_, request)| request.grammar.as_ref() == Some(&grammar)));
    let old = stage_of(config(), vec![about("w0")], Vec::new()).await;
    let error = old.router.state().dispatcher.dispatch(constrained(&old)).await.err().unwrap();
    assert_eq!(error.code, ErrorCode::Unavailable);
    assert!(error.message.contains("grammars"), "{error}");
    assert!(old.scene.seen().is_empty());
    assert_eq!(read(old.dispatch(3).await.unwrap()).await, (vec![0, 1, 2], Ok(())), "plain text is served");
}

#[tokio::test]
async fn errors_that_are_the_requests_own_are_not_tried_again() {
    let stage = stage(2, vec![Step::Refuse(ErrorCode::InvalidRequest)]).await;
    let error = stage.dispatch(3).await.map(drop).unwrap_err();
    assert_eq!((error.code, error.message.as_str()), (ErrorCode::InvalidRequest, "scripted invalid_request"));
    assert_eq!(stage.scene.seen().len(), 1);
    stage.wait_until_idle().await;
}

#[tokio::test]
async fn tries_are_bounded() {
    let stage = stage(5, vec![Step::Refuse(ErrorCode::Unavailable); 9]).await;
    let error = stage.dispatch(3).await.map(drop).unwrap_err();
    assert_eq!(error.code, ErrorCode::Unavailable);
    assert_eq!(stage.scene.seen().len(), 3);
    stage.wait_until_idle().await;
}

/// All of a fleet are told to leave at once; their successors come under other addresses.
#[tokio::test]
async fn who_is_turned_away_by_all_who_leave_waits_for_those_who_come() {
    let stage = stage(2, vec![Step::Refuse(ErrorCode::Draining); 7]).await;
    assert_eq!(read(stage.dispatch(3).await.unwrap()).await, (vec![0, 1, 2], Ok(())));
    assert_eq!(stage.scene.seen().len(), 8);
    stage.wait_until_idle().await;
}

#[tokio::test]
async fn full_workers_are_asked_again_until_one_has_room() {
    let stage = stage(2, vec![Step::Refuse(ErrorCode::Overloaded); 5]).await;
    assert_eq!(read(stage.dispatch(3).await.unwrap()).await, (vec![0, 1, 2], Ok(())));
    assert_eq!(stage.scene.seen().len(), 6);
    assert_eq!((stage.counted("retries"), stage.counted("room_waits").len()), (Vec::new(), 1));
    assert_eq!(stage.counted("picks").iter().map(|(_, count)| count).sum::<f64>(), 1.0);
    assert!(stage.shows("thalweg_router_predicted_time_to_first_token_seconds_count 1"));
    stage.wait_until_idle().await;
}
