//! How streams end before their time: refusals, drains, aborts, devices that fail.

use std::sync::{Arc, Mutex};

use thalweg_cache_index::event::BlockEvent;
use thalweg_proto::code::ErrorCode;
use thalweg_proto::ids::AttemptId;
use thalweg_worker::backend::BackendError;
use thalweg_worker::engine::{
    ChoiceState, Engine, EngineConfig, EngineRequest, EngineStream, FinishReason, Refusal,
};
use thalweg_worker::kv::KvEventSink;
use thalweg_worker::plan::{StepId, StepMasks, StepOutput, StepPlan};
use thalweg_worker::runner::Runner;

use crate::engines::*;

#[tokio::test]
async fn a_full_queue_refuses_at_once() {
    let (engine, gate) = start_gated(EngineConfig { max_num_seqs: 1, max_waiting: 3, ..config() });
    let first = engine.generate(request(1, 10, 5)).unwrap();
    engine.load().wait_for(|load| load.running == 1 || load.steps > 0).await.ok();
    let mut streams = vec![first];
    let refusal = loop {
        match engine.generate(request(2, 10, 5)) {
            Ok(stream) => streams.push(stream),
            Err(refusal) => break refusal,
        }
    };
    assert_eq!(refusal.code(), ErrorCode::Overloaded);
    assert!((3..=4).contains(&streams.len()), "{} were taken", streams.len());
    drop(gate);
    for stream in streams {
        assert_eq!(choice(&read(stream).await.0, 0).0.len(), 5);
    }
}

#[tokio::test]
async fn draining_finishes_what_runs_and_refuses_the_rest() {
    let (engine, gate) = start_gated(config());
    let running = engine.generate(request(1, 10, 5)).unwrap();
    engine.drain();
    assert!(engine.stats().draining, "told before anything is refused, even while the device is busy");
    assert_eq!(engine.generate(request(2, 10, 5)).unwrap_err(), Refusal::Draining);
    drop(gate);
    engine.draining().await;
    engine.drained().await;
    assert!(engine.stats().draining, "and it stays told");
    assert_eq!(choice(&read(running).await.0, 0).1, [FinishReason::Length]);
    engine.shutdown().await;
    assert_eq!(engine.failure().as_deref(), Some("shut down"));
    engine.drained().await;
}

/// What is not finished when the engine is shut down can be resumed elsewhere, and the worker's end was no crash.
#[tokio::test]
async fn a_shutdown_hands_over_what_runs_and_what_waits() {
    let (engine, gate) = start_gated(EngineConfig { max_num_seqs: 1, ..config() });
    let streams: Vec<EngineStream> = (1..4).map(|n| engine.generate(request(n, 10, 50)).unwrap()).collect();
    engine.load().wait_for(|load| load.running == 1).await.unwrap();
    let ended = engine.shutdown();
    tokio::pin!(ended);
    // Asked for before the device can go on.
    tokio::select! {
        biased;
        () = &mut ended => unreachable!("the device is held"),
        () = std::future::ready(()) => {}
    }
    drop(gate);
    ended.await;
    for stream in streams {
        let refusal = read(stream).await.1.expect("an error, not a bare end");
        assert_eq!((refusal.code(), refusal.code().retry_elsewhere()), (ErrorCode::Draining, true));
    }
}

#[tokio::test]
async fn aborts_end_running_and_queued_requests_alone() {
    let (engine, gate) = start_gated(EngineConfig { max_num_seqs: 1, ..config() });
    let streams: Vec<EngineStream> = (1..4).map(|n| engine.generate(request(n, 10, 5)).unwrap()).collect();
    engine.abort("request 1", AttemptId(9), &[]);
    engine.abort("request 1", AttemptId(1), &[]);
    engine.abort("request 2", AttemptId(2), &[]);
    drop(gate);
    let mut ends = Vec::new();
    for stream in streams {
        ends.push(choice(&read(stream).await.0, 0).1);
    }
    assert_eq!(ends, [[FinishReason::Abort], [FinishReason::Abort], [FinishReason::Length]]);
    let idle = engine
        .load()
        .wait_for(|load| load.running == 0 && load.counters.finished_length == 1)
        .await
        .unwrap()
        .clone();
    assert_eq!((idle.counters.aborted, idle.kv.free + idle.kv.cached), (2, idle.kv.total));
}

/// Whichever choices are cut off, the leader that computes the prompt included, the others answer in full, and the first
/// event tells of the prompt and of those that ended before it.
#[tokio::test]
async fn choices_that_are_cut_off_leave_the_others_as_they_were() {
    let state = |index| ChoiceState { index, ..ChoiceState::default() };
    for cut in [&[0][..], &[0, 1], &[2], &[1, 2], &[0, 0, 9]] {
        let (engine, gate) = start_gated(EngineConfig { max_num_seqs: 2, ..config() });
        let sent = EngineRequest { choices: (0..3).map(state).collect(), ..request(1, 30, 6) };
        let whole: Vec<Vec<u32>> = (0..3).map(|index| answer(&sent, index)).collect();
        let stream = engine.generate(sent).unwrap();
        engine.abort("request 1", AttemptId(1), cut);
        engine.abort("request 1", AttemptId(1), cut);
        drop(gate);
        let (events, error) = read(stream).await;
        assert_eq!(error, None);
        assert!(events[0].prompt.is_some() && events[1..].iter().all(|e| e.prompt.is_none()));
        for (index, whole) in (0..).zip(whole) {
            let (tokens, finish) = choice(&events, index);
            match cut.contains(&index) {
                true => assert!(finish == [FinishReason::Abort] && whole.starts_with(&tokens)),
                false => {
                    assert_eq!((tokens, finish), (whole, vec![FinishReason::Length]), "{index} of {cut:?}")
                }
            }
        }
        let idle = engine.load().wait_for(|load| load.running == 0).await.unwrap().clone();
        assert_eq!((idle.kv.free + idle.kv.cached, idle.counters.aborted), (idle.kv.total, 0), "{cut:?}");
    }
    let engine = start();
    let sent = EngineRequest { choices: (0..3).map(state).collect(), ..request(1, 30, 100) };
    let stream = engine.generate(sent).unwrap();
    engine.abort("request 1", AttemptId(1), &[2, 1, 0]);
    let (events, _) = read(stream).await;
    assert!(
        (0..3).all(|index| choice(&events, index).1 == [FinishReason::Abort]),
        "all of them is the request"
    );
    assert_eq!(engine.load().wait_for(|load| load.running == 0).await.unwrap().counters.aborted, 1);
}

/// A step that failed before the next was submitted: the reason is the step's, not that nothing can be submitted.
#[tokio::test]
async fn a_device_that_fails_between_steps_tells_why() {
    struct Failed;
    impl Runner for Failed {
        fn submit(&mut self, plan: StepPlan) -> Result<StepId, BackendError> {
            match plan.slots.is_empty() {
                false => Ok(StepId(0)),
                true => Err(BackendError { device: "fake".into(), reason: "an earlier step failed".into() }),
            }
        }

        fn provide_masks(&mut self, _: StepId, _: StepMasks) -> Result<(), BackendError> {
            unreachable!("nothing is constrained")
        }

        fn collect(&mut self, _: StepId) -> Result<StepOutput, BackendError> {
            Err(BackendError { device: "fake".into(), reason: "the reason".into() })
        }
    }
    let engine = Engine::start(config(), Box::new(Failed), None).unwrap();
    let (_, refusal) = read(engine.generate(request(1, 20, 50)).unwrap()).await;
    assert!(refusal.unwrap().to_string().contains("the reason"));
    assert_eq!(engine.ended().await.as_ref(), "fake: the reason");
}

#[tokio::test]
async fn a_failing_device_ends_every_stream_with_a_reason() {
    struct Recorder(Arc<Mutex<Vec<BlockEvent>>>);
    impl KvEventSink for Recorder {
        fn record(&mut self, event: BlockEvent) {
            self.0.lock().unwrap().push(event);
        }
    }
    let told = Arc::new(Mutex::new(Vec::new()));
    let mut failing = runner();
    failing.fails_after = Some(6);
    let engine = Engine::start(config(), Box::new(failing), Some(Box::new(Recorder(told.clone())))).unwrap();
    let sent = request(1, 20, 50);
    let expected = answer(&sent, 0);
    let (events, refusal) = read(engine.generate(sent).unwrap()).await;
    let got = choice(&events, 0).0;
    assert!(!got.is_empty() && expected.starts_with(&got), "what was streamed is right");
    let refusal = refusal.unwrap();
    assert_eq!(refusal.code(), ErrorCode::Unavailable);
    assert!(refusal.to_string().contains("told to fail"), "{refusal}");
    assert!(engine.ended().await.contains("told to fail"));
    assert_eq!(engine.generate(request(2, 5, 5)).unwrap_err().code(), ErrorCode::Unavailable);
    let told = told.lock().unwrap();
    assert!(matches!(told.first(), Some(BlockEvent::Stored(keys)) if keys.len() == 2), "{told:?}");
    assert_eq!(told.last(), Some(&BlockEvent::Cleared));
}

#[tokio::test]
async fn a_panicking_device_ends_every_stream_too() {
    struct Panicking;
    impl Runner for Panicking {
        fn submit(&mut self, _: StepPlan) -> Result<StepId, BackendError> {
            panic!("a panic that this test expects")
        }

        fn provide_masks(&mut self, _: StepId, _: StepMasks) -> Result<(), BackendError> {
            unreachable!("nothing is constrained")
        }

        fn collect(&mut self, _: StepId) -> Result<StepOutput, BackendError> {
            panic!("nothing was submitted")
        }
    }
    let engine = Engine::start(config(), Box::new(Panicking), None).unwrap();
    let (events, refusal) = read(engine.generate(request(1, 20, 50)).unwrap()).await;
    assert_eq!((events.len(), refusal.unwrap().code()), (0, ErrorCode::Unavailable));
    assert!(engine.ended().await.contains("panicked"));
}
