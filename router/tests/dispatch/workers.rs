//! Workers that come, go, fall silent and return.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use thalweg_proto::code::ErrorCode;
use thalweg_proto::ids::{WorkerEpoch, WorkerId};
use thalweg_proto::v1;
use thalweg_router::workers::health::HealthState;

use crate::script::{Step, about};
use crate::scripted_worker::ScriptedWorker;
use crate::{Stage, config, index_of, read, stage, stage_of};

#[tokio::test]
async fn a_draining_worker_gets_nothing_new_and_finishes_what_it_has() {
    let stage = stage(2, vec![Step::Hold(1)]).await;
    let held = stage.dispatch(9).await.unwrap();
    let drained = held.worker().clone();
    stage.worker(drained.as_str()).client().drain(v1::DrainRequest {}).await.unwrap();
    stage.wait_for_state(drained.as_str(), HealthState::Draining).await;
    for _ in 0..10 {
        let generation = stage.dispatch(2).await.unwrap();
        assert_ne!(*generation.worker(), drained);
        assert_eq!(read(generation).await, (vec![0, 1], Ok(())));
    }
    let other = if drained.as_str() == "w0" { "w1" } else { "w0" };
    stage.worker(other).client().drain(v1::DrainRequest {}).await.unwrap();
    stage.wait_for_state(other, HealthState::Draining).await;
    let error = stage.dispatch(2).await.map(drop).unwrap_err();
    assert_eq!(error.code, ErrorCode::Unavailable);
    assert!(error.message.contains("2 draining"), "{error}");
    assert_eq!(stage.worker(drained.as_str()).open_bookings(), 1, "what runs goes on");
}

#[tokio::test]
async fn workers_may_come_late_and_leave() {
    let stage = stage(1, vec![]).await;
    let late = ScriptedWorker::start(&stage.scene, about("late"));
    stage.membership.set([stage.workers[0].address.clone(), late.address.clone()]);
    stage.router.state().workers.wait_for_ready(2).await;
    stage.wait_for_state("late", HealthState::Ready).await;

    let mut only_late = late;
    stage.membership.set([only_late.address.clone()]);
    // Not listed any more, but its report stream is open: it lives.
    let generation = stage.dispatch(2).await.unwrap();
    assert_eq!(read(generation).await.1, Ok(()));
    assert_eq!(stage.router.state().workers.list().len(), 2);

    only_late.kill();
    stage.wait_for_state("late", HealthState::Gone).await;
    let address = only_late.socket();
    drop(only_late);
    let _again =
        ScriptedWorker::start_at(&stage.scene, v1::DescribeResponse { epoch: 2, ..about("late") }, address);
    stage.router.state().workers.wait_for_ready(2).await;
    assert_eq!(stage.worker("late").epoch, WorkerEpoch(2));
}

#[tokio::test]
async fn a_worker_that_left_leaves_no_series_and_no_model_in_the_list() {
    // metrics-04.
    let mut stage = stage(1, vec![]).await;
    read(stage.dispatch(1).await.unwrap()).await.1.unwrap();
    assert!(stage.shows("thalweg_router_picks_total{worker=\"w0\"} 1"));
    stage.membership.set([]);
    stage.workers[0].kill();
    let state = stage.router.state();
    while !state.workers.list().is_empty() {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    assert!(!state.metrics_text().contains("worker=\"w0\""));
    assert!(state.models.list().is_empty());
    assert!(state.models.get("tiny").is_some(), "it is told from an unknown one");
}

#[tokio::test]
async fn a_restarted_worker_owes_nothing_for_its_former_life() {
    // routing-02: requests of the former life end on the new one's account only as far as they go on there.
    let mut stage = stage(1, vec![Step::Hold(1); 4]).await;
    let held: Vec<_> = (0..4).map(|_| stage.spawn(stage.request(9))).collect();
    stage.scene.wait_for_seen(4).await;
    let former = stage.worker("w0");
    assert_eq!(former.open_bookings(), 4);
    stage.restart(0, 2);
    for generation in held {
        assert_eq!(generation.await.unwrap(), ((0..9).collect(), Ok(())));
    }
    stage.wait_until_idle().await;
    assert_eq!((former.open_bookings(), stage.worker("w0").open_bookings()), (0, 0));
    assert!(stage.shows("thalweg_router_resumes_total{reason=\"connection\"} 4"));
}

#[tokio::test]
async fn a_worker_with_other_weights_under_the_same_name_gets_nothing() {
    let stage = stage(1, vec![]).await;
    let other = v1::DescribeResponse { fingerprint: bytes::Bytes::from_static(b"other"), ..about("other") };
    let stray = ScriptedWorker::start(&stage.scene, other);
    stage.membership.set([stage.workers[0].address.clone(), stray.address.clone()]);
    stage.router.state().workers.wait_for_ready(2).await;
    for _ in 0..10 {
        assert_eq!(stage.dispatch(1).await.unwrap().worker(), &WorkerId::new("w0"));
    }
    assert_eq!(
        stage.router.state().models.get("tiny").unwrap().fingerprint,
        bytes::Bytes::from_static(b"print")
    );
}

#[tokio::test]
async fn a_silent_worker_is_suspected_then_given_up_and_comes_back() {
    let stage = stage(2, vec![Step::Hold(0)]).await;
    let dispatch = tokio::spawn({
        let (dispatcher, request) = (Arc::clone(&stage.router.state().dispatcher), stage.request(3));
        async move { read(dispatcher.dispatch(request).await.unwrap()).await }
    });
    stage.scene.wait_for_seen(1).await;
    let silent = stage.scene.seen()[0].0.clone();
    let index = index_of(&silent);
    stage.workers[index].mute.send_replace(true);
    stage.wait_for_state(&silent, HealthState::Suspect).await;
    for _ in 0..5 {
        assert_ne!(stage.dispatch(1).await.unwrap().worker().as_str(), silent, "nothing new for a suspect");
    }
    // Once it is given up, the request that waits for its first token goes elsewhere.
    assert_eq!(dispatch.await.unwrap(), (vec![0, 1, 2], Ok(())));
    assert_eq!(stage.worker(&silent).state(), HealthState::Gone);
    stage.workers[index].mute.send_replace(false);
    stage.wait_for_state(&silent, HealthState::Ready).await;
}

#[tokio::test]
async fn a_context_is_that_of_live_workers_and_begun_answers_go_where_it_is_as_large() {
    let small = || v1::DescribeResponse { max_model_len: 128, ..about("small") };
    let mut stage = stage_of(config(), vec![about("large"), small()], vec![Step::BreakAfter(3)]).await;
    let context = |stage: &Stage| stage.router.state().models.get("tiny").unwrap().max_model_len;
    assert_eq!(context(&stage), 128);
    stage.workers[1].kill();
    while context(&stage) != 512 {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    assert_eq!(stage.worker("small").state(), HealthState::Gone);
    let long = stage.request(50);

    stage.workers[1].restart(&stage.scene, v1::DescribeResponse { epoch: 2, ..small() });
    stage.wait_for_epoch("small", 2).await;
    let (tokens, end) = stage.spawn(long.clone()).await.unwrap();
    assert_eq!((tokens.len(), end), (50, Ok(())), "broken once, and resumed");
    assert!(stage.scene.seen().iter().all(|(worker, _)| worker == "large"));
    stage.workers[0].kill();
    stage.wait_for_state("large", HealthState::Gone).await;
    let error = stage.spawn(long).await.unwrap().1.unwrap_err();
    assert!(error.message.contains("context of 150 tokens"), "{error:?}");
}

#[tokio::test]
async fn a_worker_that_flaps_is_known_once() {
    // routing-09.
    let mut stage = stage(1, vec![]).await;
    for epoch in 2..7 {
        stage.restart(0, epoch);
        stage.wait_for_epoch("w0", epoch).await;
        assert_eq!(stage.router.state().workers.list().len(), 1);
        assert_eq!(read(stage.dispatch(2).await.unwrap()).await, (vec![0, 1], Ok(())));
    }
    assert_eq!(stage.scene.tokenizers_sent.load(Ordering::SeqCst), 1);
    stage.wait_until_idle().await;
}

#[tokio::test]
async fn one_worker_behind_two_addresses_is_known_once() {
    let stage = stage(1, vec![]).await;
    let port = stage.workers[0].address.port();
    let alias = format!("grpc://localhost:{port}").parse().unwrap();
    stage.membership.set([stage.workers[0].address.clone(), alias]);
    let late = ScriptedWorker::start(&stage.scene, about("late"));
    stage.membership.set([stage.workers[0].address.clone(), late.address.clone()]);
    stage.router.state().workers.wait_for_ready(2).await;
    let mut names: Vec<String> =
        stage.router.state().workers.list().iter().map(|w| w.id.to_string()).collect();
    names.sort();
    assert_eq!(names, ["late", "w0"]);
}

#[tokio::test]
async fn two_workers_of_one_id_are_counted() {
    let mut stage = stage(2, vec![]).await;
    stage.workers[1].restart(&stage.scene, v1::DescribeResponse { epoch: 7, ..about("w0") });
    let ready = |count| format!("thalweg_router_worker_state{{worker=\"w0\",state=\"ready\"}} {count}");
    while !stage.shows(&ready(2)) {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    stage.workers[0].kill();
    while !stage.shows(&ready(1)) {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    stage.workers[1].kill();
    while !stage.shows(&ready(0)) {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}
