//! Requests with a grammar, as their streams see it.

use std::sync::Arc;

use thalweg_proto::code::ErrorCode;
use thalweg_worker::engine::{ChoiceState, EngineRequest, FinishReason};
use thalweg_worker::sampling::SamplingParams;

use crate::engines::*;
use crate::grammars::{EOS, grammars};

/// Of `grammars()`.
const CHOICE: usize = 3;
const REGEX: usize = 2;

fn constrained(number: u64, grammar: usize, params: SamplingParams) -> EngineRequest {
    let grammar = Some(grammars()[grammar].clone());
    EngineRequest { sampling: Arc::new(SamplingParams { grammar, ..params }), ..request(number, 30, 20) }
}

/// Ends of a text beyond which there is nothing: no surplus token, and neither ignored ends nor min_tokens matter.
#[tokio::test]
async fn a_complete_text_ends_its_choice() {
    let engine = start();
    for params in [
        SamplingParams::greedy(),
        SamplingParams { end_ids: EOS.to_vec(), ..SamplingParams::greedy() },
        SamplingParams { end_ids: EOS.to_vec(), min_tokens: 15, ..SamplingParams::greedy() },
    ] {
        for number in 1..6 {
            let sent = constrained(number, CHOICE, SamplingParams { seed: number, ..params.clone() });
            let expected = answer(&sent, 0);
            let (events, refusal) = read(engine.generate(sent).unwrap()).await;
            let (tokens, finish) = choice(&events, 0);
            assert_eq!((&tokens, refusal), (&expected, None));
            // "x" may go on to "xyz", or end at an end of sequence.
            let reason = if tokens.last().is_some_and(|token| EOS.contains(token)) {
                FinishReason::Stop
            } else {
                FinishReason::Complete
            };
            assert_eq!(finish, [reason]);
        }
    }
}

/// Whoever resumes may have lost the last token, or no more than the word that it was the last.
#[tokio::test]
async fn a_resumed_choice_stands_where_it_stood_in_its_grammar() {
    let engine = start();
    for number in 1..4 {
        let sent = constrained(number, REGEX, SamplingParams { seed: number, ..SamplingParams::greedy() });
        let whole = answer(&sent, 0);
        for kept in 0..=whole.len() {
            let choices = vec![ChoiceState { output: whole[..kept].to_vec(), ..ChoiceState::default() }];
            let (events, refusal) =
                read(engine.generate(EngineRequest { choices, ..sent.clone() }).unwrap()).await;
            assert_eq!(
                (choice(&events, 0).0, refusal),
                (whole[kept..].to_vec(), None),
                "{kept} of {whole:?}"
            );
            assert_eq!(choice(&events, 0).1, [FinishReason::Complete]);
        }
    }
}

/// Output that is no text of the grammar (of another version, say) ends in an error that nobody tries again, and the engine
/// goes on.
#[tokio::test]
async fn a_grammar_that_cannot_be_followed_fails_its_request_alone() {
    let engine = start();
    let sent = constrained(1, CHOICE, SamplingParams::greedy());
    let wrong = |index| ChoiceState { index, output: vec![0, 0], ..ChoiceState::default() };
    let right = ChoiceState { index: 2, ..ChoiceState::default() };
    let broken = EngineRequest { choices: vec![wrong(0), wrong(1), right], ..sent.clone() };
    let other = engine.generate(request(2, 20, 30)).unwrap();
    let (_, refusal) = read(engine.generate(broken).unwrap()).await;
    let refusal = refusal.expect("an error");
    assert_eq!(
        (refusal.code(), refusal.code().retry_elsewhere()),
        (ErrorCode::InvalidRequest, false),
        "{refusal}"
    );
    assert!(refusal.to_string().contains("grammar"), "{refusal}");
    assert_eq!(choice(&read(other).await.0, 0).1, [FinishReason::Length]);
    assert_eq!(choice(&read(engine.generate(sent.clone()).unwrap()).await.0, 0).0, answer(&sent, 0));
    let idle = engine.load().wait_for(|load| load.running == 0).await.unwrap().clone();
    assert_eq!(idle.kv.free + idle.kv.cached, idle.kv.total);
}

/// The device waits for masks when the engine is told to stop.
#[tokio::test]
async fn a_shutdown_amid_constrained_steps_ends() {
    let (engine, gate) = start_gated(config());
    let streams: Vec<_> =
        (1..4).map(|n| engine.generate(constrained(n, REGEX, SamplingParams::greedy())).unwrap()).collect();
    gate.send(()).unwrap();
    engine.load().wait_for(|load| load.running == 3).await.unwrap();
    let ended = engine.shutdown();
    drop(gate);
    ended.await;
    for stream in streams {
        let (events, refusal) = read(stream).await;
        assert!(refusal.is_some() || choice(&events, 0).1.len() == 1);
    }
}
