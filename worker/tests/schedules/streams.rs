//! The engine's thread and its streams: every request ends in exactly one way, whatever happens around it.

use std::sync::Arc;

use thalweg_proto::code::ErrorCode;
use thalweg_worker::engine::{ChoiceState, Engine, EngineConfig, EngineRequest, FinishReason};
use thalweg_worker::sampling::SamplingParams;

use crate::engines::*;

/// ATOM#1562 and ATOM#1589: requests whose client hung up ran on; blocks leaked; aborts were counted for normal ends.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn cut_streams_free_everything_and_others_finish() {
    // kv-cache-01.
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
        assert_eq!((info.cached_tokens, info.prompt_logprobs), (cached, wanted.then(|| expected.clone())));
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
    assert_eq!(events[0].prompt.clone().unwrap().prompt_logprobs, Some(MODEL.prompt_logprobs(&fresh.prompt)));

    // Nothing left to do but the prompt's logprobs, and nothing left at all.
    for prompt_logprobs in [Some(1), None] {
        let done = EngineRequest { max_tokens: 0, prompt_logprobs, ..fresh.clone() };
        let (events, _) = read(engine.generate(done).unwrap()).await;
        assert_eq!(choice(&events, 0), (vec![], end.clone()));
        let got = events[0].prompt.clone().unwrap().prompt_logprobs.map_or(0, |known| known.len());
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
        (EngineConfig { max_num_mixed_tokens: 7, ..config() }, "--max-num-mixed-tokens"),
        (EngineConfig { max_model_len: 1, ..config() }, "--max-model-len"),
    ];
    for (config, part) in cases {
        let error = Engine::start(config, Box::new(runner()), None).unwrap_err().to_string();
        assert!(error.contains(part), "{error}");
    }
}
