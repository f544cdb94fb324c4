//! The engine's thread and its streams: every request ends in exactly one way, whatever happens around it.

use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};

use thalweg_cache_index::event::BlockEvent;
use thalweg_proto::block_hash::BlockHash;
use thalweg_proto::code::ErrorCode;
use thalweg_proto::ids::AttemptId;
use thalweg_worker::backend::BackendError;
use thalweg_worker::engine::{
    ChoiceState, Engine, EngineConfig, EngineEvent, EngineHandle, EngineRequest, EngineStream, FinishReason,
    Refusal,
};
use thalweg_worker::kv::{KvConfig, KvEventSink};
use thalweg_worker::plan::{Logprobs, StepId, StepOutput, StepPlan};
use thalweg_worker::runner::Runner;
use thalweg_worker::sampling::SamplingParams;

use crate::hash_model::{HashModel, HashRunner, VOCAB};
use crate::workload::random_ids;

const MODEL: HashModel = HashModel { seed: 5, has_group: [true, true], window: Some(24) };

fn config() -> EngineConfig {
    EngineConfig {
        block_tokens: 8,
        kv_blocks: [40, 20],
        has_group: [true, true],
        sliding_window: Some(24),
        max_model_len: 200,
        max_num_seqs: 8,
        max_num_batched_tokens: 64,
        max_waiting: 500,
        enable_prefix_caching: true,
        vocab_size: VOCAB as usize,
        prefill_rate: 0.0,
    }
}

fn runner() -> HashRunner {
    let EngineConfig { block_tokens, kv_blocks: blocks, has_group, sliding_window, .. } = config();
    let kv = KvConfig { block_tokens, blocks, has_group, sliding_window, prefix_caching: true };
    HashRunner::new(MODEL, &kv, config().max_num_batched_tokens)
}

fn start() -> EngineHandle {
    Engine::start(config(), Box::new(runner()), None).unwrap()
}

fn request(number: u64, prompt_len: usize, max_tokens: u32) -> EngineRequest {
    use rand::SeedableRng;
    let prompt = random_ids(&mut rand::rngs::StdRng::seed_from_u64(number % 5), prompt_len);
    EngineRequest {
        request_id: format!("request {number}"),
        attempt: AttemptId(number),
        prompt: prompt.into(),
        sampling: Arc::new(SamplingParams { seed: number, ..SamplingParams::greedy() }),
        max_tokens,
        prompt_logprobs: None,
        choices: vec![ChoiceState::default()],
        root: BlockHash([0; 16]),
        priority: 0,
        booking: None,
    }
}

/// One choice's tokens and end, events checked for order.
async fn read(mut stream: EngineStream) -> (Vec<EngineEvent>, Option<Refusal>) {
    let mut events = Vec::new();
    while let Some(event) = stream.recv().await {
        match event {
            Ok(event) => events.push(event),
            Err(refusal) => return (events, Some(refusal)),
        }
    }
    (events, None)
}

fn choice(events: &[EngineEvent], index: u32) -> (Vec<u32>, Vec<FinishReason>) {
    let deltas = || events.iter().flat_map(|e| &e.deltas).filter(|d| d.index == index);
    (deltas().flat_map(|d| d.tokens.clone()).collect(), deltas().filter_map(|d| d.finish).collect())
}

fn answer(request: &EngineRequest, index: u32) -> Vec<u32> {
    let ids = |answer: Vec<Logprobs>| answer.iter().map(|t| t.token).collect();
    ids(MODEL.answer(&request.prompt, &[], &request.sampling, index, request.max_tokens as usize).0)
}

/// Lets one step be collected per token sent; all of them when the sender is gone.
struct GatedRunner(HashRunner, Receiver<()>);

impl Runner for GatedRunner {
    fn submit(&mut self, plan: StepPlan) -> Result<StepId, BackendError> {
        self.0.submit(plan)
    }

    fn collect(&mut self, step: StepId) -> Result<StepOutput, BackendError> {
        let _ = self.1.recv();
        self.0.collect(step)
    }
}

fn start_gated(config: EngineConfig) -> (EngineHandle, Sender<()>) {
    let (gate, wait) = channel();
    (Engine::start(config, Box::new(GatedRunner(runner(), wait)), None).unwrap(), gate)
}

/// ATOM#1562 and ATOM#1589: requests whose client hung up ran on; blocks leaked; aborts were counted for normal ends.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn cut_streams_free_everything_and_others_finish() {
    let engine = start();
    for round in 0..5 {
        let mut tasks = Vec::new();
        for number in 0..60 {
            let request = request(round * 60 + number, 5 + number as usize % 60, 40);
            let expected = answer(&request, 0);
            let mut stream = engine.generate(request).unwrap();
            tasks.push(tokio::spawn(async move {
                match number % 3 {
                    0 => assert_eq!(choice(&read(stream).await.0, 0), (expected, vec![FinishReason::Length])),
                    1 => {
                        for _ in 0..3 {
                            assert!(stream.recv().await.unwrap().is_ok());
                        }
                    }
                    _ => drop(stream),
                }
            }));
        }
        for task in tasks {
            task.await.unwrap();
        }
        let idle =
            engine.load().wait_for(|load| load.running == 0 && load.waiting == 0).await.unwrap().clone();
        assert_eq!(idle.kv.free + idle.kv.cached, idle.kv.total, "blocks leak");
        let counters = idle.counters;
        assert_eq!(counters.aborted + counters.finished_length, (round + 1) * 60);
        assert!(counters.aborted <= (round + 1) * 40 && counters.aborted == counters.finished_abort);
        assert_eq!(
            (idle.prefill_tokens_ahead, idle.running_context_tokens, counters.invariant_violations),
            (0, 0, 0)
        );
    }
    let samples = engine.take_observations();
    assert_eq!(samples.end_to_end.len() as u64, engine.stats().counters.finished_length);
    assert_eq!(engine.take_observations().queue.len(), 0);
}

#[tokio::test]
async fn requests_out_of_bounds_are_refused_by_name() {
    let engine = start();
    let choices = |choices: &[(u32, bool)]| -> Vec<ChoiceState> {
        choices
            .iter()
            .map(|(index, finished)| ChoiceState { index: *index, finished: *finished, output: Vec::new() })
            .collect()
    };
    let base = || request(1, 10, 5);
    let cases: Vec<(EngineRequest, ErrorCode, &str)> = vec![
        (EngineRequest { prompt: Arc::new([]), ..base() }, ErrorCode::InvalidRequest, "prompt_ids"),
        (EngineRequest { prompt: Arc::new([1, 64]), ..base() }, ErrorCode::InvalidRequest, "64"),
        (EngineRequest { choices: Vec::new(), ..base() }, ErrorCode::InvalidRequest, "choices"),
        (EngineRequest { choices: choices(&[(0, true)]), ..base() }, ErrorCode::InvalidRequest, "choices"),
        (
            EngineRequest { choices: choices(&[(3, false), (3, true)]), ..base() },
            ErrorCode::InvalidRequest,
            "3",
        ),
        (
            EngineRequest {
                choices: vec![ChoiceState { output: vec![99], ..ChoiceState::default() }],
                ..base()
            },
            ErrorCode::InvalidRequest,
            "output_ids",
        ),
        (request(1, 200, 5), ErrorCode::ContextLengthExceeded, "200"),
    ];
    for (request, code, part) in cases {
        let refusal = engine.generate(request).unwrap_err();
        assert_eq!(refusal.code(), code);
        assert!(refusal.to_string().contains(part), "{refusal}");
    }
    let request = request(2, 199, 5);
    let (events, _) = read(engine.generate(request).unwrap()).await;
    assert_eq!(choice(&events, 0).0.len(), 1, "the context's end is an end by length");
    assert_eq!(choice(&events, 0).1, [FinishReason::Length]);
}

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

        fn collect(&mut self, _: StepId) -> Result<StepOutput, BackendError> {
            panic!("nothing was submitted")
        }
    }
    let engine = Engine::start(config(), Box::new(Panicking), None).unwrap();
    let (events, refusal) = read(engine.generate(request(1, 20, 50)).unwrap()).await;
    assert_eq!((events.len(), refusal.unwrap().code()), (0, ErrorCode::Unavailable));
    assert!(engine.ended().await.contains("panicked"));
}

#[tokio::test]
async fn the_first_event_tells_of_the_prompt_and_only_it() {
    let engine = start();
    let asked = EngineRequest { prompt_logprobs: Some(0), ..request(1, 41, 6) };
    let expected = MODEL.prompt_logprobs(&asked.prompt);
    // Computed in full although the second one's prefix is cached; the third one uses the cache.
    for (request, cached) in
        [(asked.clone(), 0), (asked.clone(), 0), (EngineRequest { prompt_logprobs: None, ..asked }, 40)]
    {
        let wanted = request.prompt_logprobs.is_some();
        let (events, _) = read(engine.generate(request).unwrap()).await;
        let infos: Vec<_> = events.iter().map(|e| e.prompt.is_some()).collect();
        assert_eq!(infos, [true, false, false, false, false, false]);
        let info = events[0].prompt.clone().unwrap();
        assert_eq!(
            (info.cached_tokens, info.prompt_logprobs),
            (cached, if wanted { expected.clone() } else { Vec::new() })
        );
    }
    let counters = engine.stats().counters;
    assert_eq!((counters.prefix_queries, counters.prefix_hits), (41, 40));
    assert_eq!((counters.prompt_tokens, counters.generation_tokens), (123, 18));
}

#[tokio::test]
async fn resumed_choices_go_on_where_they_were() {
    let engine = start();
    let fresh = EngineRequest { prompt_logprobs: Some(1), ..request(1, 30, 9) };
    let whole: Vec<Vec<u32>> = (0..4).map(|index| answer(&fresh, index)).collect();
    let state = |index: u32, kept: usize, finished| ChoiceState {
        index,
        finished,
        output: whole[index as usize][..kept].to_vec(),
    };
    let choices = vec![state(0, 9, false), state(1, 4, false), state(2, 2, true), state(3, 0, false)];
    let (events, error) = read(engine.generate(EngineRequest { choices, ..fresh.clone() }).unwrap()).await;
    assert_eq!(error, None);
    let end = vec![FinishReason::Length];
    assert_eq!(choice(&events, 0), (vec![], end.clone()), "it had its tokens already");
    assert_eq!(choice(&events, 1), (whole[1][4..].to_vec(), end.clone()));
    assert_eq!(choice(&events, 2), (vec![], vec![]), "finished ones are not run");
    assert_eq!(choice(&events, 3), (whole[3].clone(), end.clone()));
    assert_eq!(events[0].prompt.clone().unwrap().prompt_logprobs, MODEL.prompt_logprobs(&fresh.prompt));

    // Nothing left to do but the prompt's logprobs, and nothing left at all.
    for prompt_logprobs in [Some(1), None] {
        let done = EngineRequest { max_tokens: 0, prompt_logprobs, ..fresh.clone() };
        let (events, _) = read(engine.generate(done).unwrap()).await;
        assert_eq!(choice(&events, 0), (vec![], end.clone()));
        let got = events[0].prompt.clone().unwrap().prompt_logprobs.len();
        assert_eq!(got, prompt_logprobs.map_or(0, |_| 29));
    }
}

#[tokio::test]
async fn stop_ids_end_a_choice_and_the_surplus_is_dropped() {
    let engine = start();
    let mut sent = request(1, 12, 30);
    let whole = answer(&sent, 0);
    let end_ids = vec![whole[10]];
    let first = whole.iter().position(|t| *t == whole[10]).unwrap();
    sent.sampling = Arc::new(SamplingParams { end_ids, logprobs: Some(0), ..(*sent.sampling).clone() });
    let (events, _) = read(engine.generate(sent).unwrap()).await;
    assert_eq!(choice(&events, 0), (whole[..=first].to_vec(), vec![FinishReason::Stop]));
    assert!(events.iter().flat_map(|e| &e.deltas).all(|d| d.logprobs.len() == d.tokens.len()));
    assert_eq!(engine.stats().counters.generation_tokens, first as u64 + 1);
}

#[tokio::test]
async fn load_echoes_bookings_and_measures_speed() {
    let engine = start();
    let booked = |number, booking| EngineRequest {
        booking: Some(("router a".into(), booking)),
        ..request(number, 64, 20)
    };
    for (number, booking) in [(1, 7), (2, 3)] {
        read(engine.generate(booked(number, booking)).unwrap()).await;
    }
    let load = engine.stats();
    assert_eq!(load.booked.iter().collect::<Vec<_>>(), [(&"router a".to_owned(), &7)]);
    // The hash runner takes a millisecond per token.
    assert!((load.rates.prefill_tokens_per_second - 1000.0).abs() < 1.0, "{:?}", load.rates);
    assert_eq!(load.rates.decode.iter().map(|d| d.batch).collect::<Vec<_>>(), [1]);
    assert!((load.rates.decode[0].step_seconds - 0.001).abs() < 1e-9);
}

#[test]
fn settings_that_cannot_work_are_refused_at_start() {
    let cases = [
        (EngineConfig { kv_blocks: [24, 20], ..config() }, "group full"),
        (EngineConfig { kv_blocks: [40, 3], ..config() }, "group sliding"),
        (EngineConfig { sliding_window: None, ..config() }, "sliding_window"),
        (EngineConfig { max_num_batched_tokens: 7, ..config() }, "--max-num-batched-tokens"),
        (EngineConfig { max_model_len: 1, ..config() }, "--max-model-len"),
    ];
    for (config, part) in cases {
        let error = Engine::start(config, Box::new(runner()), None).unwrap_err().to_string();
        assert!(error.contains(part), "{error}");
    }
}
