//! A choice goes on where it stopped, bit for bit: on another worker, with nothing but what its router received.

use std::sync::Arc;

use thalweg_proto::v1;
use thalweg_worker::worker::SharedModel;

use crate::fixture::{Choice, Fixture, generate, load, request, sampled, serve_alone, smollm2};

type Change = fn(&mut v1::SamplingParams);

/// Every kind of state that a worker must rebuild from output_ids.
const SAMPLINGS: [(&str, Change); 8] = [
    ("greedy", |_| {}),
    ("seeded", |s| (s.temperature, s.seed) = (1.0, 99)),
    ("seeded, top_p and top_k", |s| (s.temperature, s.seed, s.top_p, s.top_k) = (0.9, 5, 0.9, 40)),
    ("presence and frequency", |s| (s.presence_penalty, s.frequency_penalty) = (1.5, 0.7)),
    ("repetition", |s| s.repetition_penalty = 1.4),
    ("seeded with penalties", |s| {
        (s.temperature, s.seed, s.frequency_penalty, s.repetition_penalty) = (1.2, 3, 1.0, 1.2);
    }),
    ("logprobs", |s| s.logprobs = Some(3)),
    ("min_tokens", |s| (s.temperature, s.seed, s.min_tokens, s.ignore_eos) = (1.5, 8, 9, false)),
];

const OUTPUTS: u32 = 14;
const PROMPT: std::ops::Range<u32> = 1000..1037;

#[tokio::test(flavor = "multi_thread")]
async fn on_the_cpu() {
    let model = tokio::task::spawn_blocking(smollm2).await.expect("no panic");
    check_samplings(&model).await;
    check_several_choices(&model).await;
    check_ends(&model).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn in_a_simulation() {
    let profile = tempfile::NamedTempFile::new().expect("a temporary file");
    std::fs::write(profile.path(), "step: {base_seconds: 0.0005}\ntokens: {seed: 4}\n").expect("room");
    let flags = format!("--engine sim --profile {}", profile.path().display());
    let model =
        tokio::task::spawn_blocking(move || load(&flags)).await.expect("no panic").expect("a profile");
    check_samplings(&model).await;
    check_several_choices(&model).await;
    check_ends(&model).await;
}

async fn check_samplings(model: &Arc<SharedModel>) {
    // One has the prefix cached, the other has never heard of the request.
    let (mut first, mut second) = (serve_alone(model).await, serve_alone(model).await);
    let prompt: Vec<u32> = PROMPT.collect();
    for (name, change) in SAMPLINGS {
        let asked = sampled(request(&prompt, OUTPUTS), change);
        let whole =
            generate(&mut first.client, asked.clone()).await.expect(name).choices.remove(&0).expect(name);
        assert_eq!(whole.tokens.len(), OUTPUTS as usize, "{name}: {whole:?}");
        for kept in [1, 5, 11, 13] {
            for client in [&mut first.client, &mut second.client] {
                let rest = generate(client, resumed(&asked, &whole, kept)).await.expect(name);
                let info = rest.prompt.expect(name);
                assert!(info.cached_tokens <= 32, "{name}: cached tokens are the prompt's, {info:?}");
                assert_eq!(rest.choices[&0], behind(&whole, kept), "{name}, resumed behind {kept}");
            }
        }
    }
    end(first).await;
    end(second).await;
}

/// Choices of one request stop at different places, and one has finished: that one is not run again.
async fn check_several_choices(model: &Arc<SharedModel>) {
    let Fixture { worker, mut client } = serve_alone(model).await;
    let prompt: Vec<u32> = PROMPT.rev().collect();
    let mut asked =
        sampled(request(&prompt, OUTPUTS), |s| (s.temperature, s.seed, s.logprobs) = (1.0, 1, Some(1)));
    asked.choices = (0..3).map(|index| v1::ChoiceState { index, ..Default::default() }).collect();
    let whole = generate(&mut client, asked.clone()).await.expect("three choices").choices;
    assert!(whole.len() == 3 && whole[&0].tokens != whole[&1].tokens, "choices differ");
    let kept = [OUTPUTS as usize, 3, 0];
    for (choice, kept) in asked.choices.iter_mut().zip(kept) {
        choice.output_ids = whole[&choice.index].tokens[..kept].to_vec();
        choice.finished = kept == OUTPUTS as usize;
    }
    let rest = generate(&mut client, asked).await.expect("the rest").choices;
    assert_eq!(rest.keys().copied().collect::<Vec<_>>(), [1, 2]);
    for index in [1, 2] {
        assert_eq!(rest[&index], behind(&whole[&index], kept[index as usize]), "choice {index}");
    }
    worker.shutdown(std::time::Duration::ZERO).await;
}

/// A router may have lost no more than the word that it was the end.
async fn check_ends(model: &Arc<SharedModel>) {
    let Fixture { worker, mut client } = serve_alone(model).await;
    let prompt: Vec<u32> = PROMPT.collect();
    let full = request(&prompt, OUTPUTS);
    let whole =
        generate(&mut client, full.clone()).await.expect("tokens").choices.remove(&0).expect("choice 0");
    let stopping = sampled(full.clone(), |s| s.stop_token_ids = vec![whole.tokens[6]]);
    let first = whole.tokens.iter().position(|token| *token == whole.tokens[6]).expect("it is there") + 1;
    for (asked, kept, finish) in
        [(full, OUTPUTS as usize, v1::FinishReason::Length), (stopping, first, v1::FinishReason::Stop)]
    {
        let rest = generate(&mut client, resumed(&asked, &whole, kept)).await.expect("an end");
        let expected = Choice { finish, ..Choice::default() };
        assert_eq!(rest.choices[&0], expected, "behind {kept}");
    }
    worker.shutdown(std::time::Duration::ZERO).await;
}

fn resumed(asked: &v1::GenerateRequest, whole: &Choice, kept: usize) -> v1::GenerateRequest {
    let mut asked = asked.clone();
    asked.choices[0].output_ids = whole.tokens[..kept].to_vec();
    asked
}

/// What is to come behind `kept` tokens: new tokens alone, with their logprobs, and the same end.
fn behind(whole: &Choice, kept: usize) -> Choice {
    Choice {
        tokens: whole.tokens[kept..].to_vec(),
        logprobs: whole.logprobs.get(kept..).unwrap_or_default().to_vec(),
        finish: whole.finish,
    }
}

async fn end(fixture: Fixture) {
    fixture.worker.shutdown(std::time::Duration::ZERO).await;
}
