//! Embeddings over real gRPC: one worker with a real model, and one that only pretends to have it.

use std::sync::Arc;
use std::time::Duration;

use thalweg_proto::code::ErrorCode;
use thalweg_proto::v1;
use thalweg_worker::worker::SharedModel;

use crate::fixture::{Fixture, Reply, generate, load, load_until, request, serve_alone, smollm2};

/// Values of SmolLM2's hidden states.
const WIDTH: usize = 576;

fn embed(prompt: &[u32], pooling: v1::Pooling) -> v1::GenerateRequest {
    v1::GenerateRequest { pooling: pooling.into(), sampling: None, ..request(prompt, 0) }
}

/// The vector and the prompt's cached tokens.
async fn vector(fixture: &mut Fixture, request: v1::GenerateRequest) -> (Vec<f32>, u32) {
    let Reply { prompt, choices, .. } = generate(&mut fixture.client, request).await.expect("an embedding");
    assert_eq!((choices.len(), choices[&0].tokens.len()), (1, 0), "no token is drawn");
    assert_eq!(choices[&0].finish, v1::FinishReason::Length);
    let info = prompt.expect("what became of the prompt");
    assert_eq!(info.embedding.len(), WIDTH);
    (info.embedding, info.cached_tokens)
}

async fn model(flags: &'static str) -> Arc<SharedModel> {
    tokio::task::spawn_blocking(move || load(flags)).await.expect("no panic").expect("sound flags")
}

#[tokio::test(flavor = "multi_thread")]
async fn last_reads_the_prefix_cache_and_mean_does_not() {
    let model = tokio::task::spawn_blocking(smollm2).await.expect("no panic");
    let mut fixture = serve_alone(&model).await;
    let about = fixture.client.describe(v1::DescribeRequest {}).await.unwrap().into_inner();
    assert!(about.features.iter().any(|feature| feature == "embed"), "{:?}", about.features);
    let expected = v1::EmbeddingInfo { width: WIDTH as u32, pooling: v1::Pooling::Last.into() };
    assert_eq!(about.embedding, Some(expected));

    let prompt: Vec<u32> = (100..165).collect();
    let (last, mean) = (embed(&prompt, v1::Pooling::Last), embed(&prompt, v1::Pooling::Mean));
    let (fresh, cached) = vector(&mut fixture, last.clone()).await;
    assert_eq!(cached, 0);
    let (again, cached) = vector(&mut fixture, last.clone()).await;
    assert_eq!((cached, again == fresh), (64, true), "the same to the bit with a prefix from the cache");
    let (averaged, cached) = vector(&mut fixture, mean.clone()).await;
    assert_eq!((cached, averaged == fresh), (0, false));
    assert_eq!(vector(&mut fixture, mean.clone()).await, (averaged.clone(), 0));
    // What an embedding leaves in the cache serves answers, and the other way round.
    let answered = generate(&mut fixture.client, request(&prompt, 2)).await.unwrap();
    assert_eq!(answered.prompt.unwrap().cached_tokens, 64);

    // All at once, beside an answer: the batch changes nothing.
    let asked = (0..12).map(|i| {
        let (request, expected) = if i % 2 == 0 { (&last, &fresh) } else { (&mean, &averaged) };
        let (mut client, request) = (fixture.client.clone(), request.clone());
        async move { (generate(&mut client, request).await.unwrap().prompt.unwrap().embedding, expected) }
    });
    for (ours, expected) in futures::future::join_all(asked).await {
        assert!(ours == *expected, "in a batch it differs");
    }
    let load = load_until(&mut fixture.client, |load| load.running == 0 && load.waiting == 0).await;
    assert_eq!(load.kv_blocks_free + load.kv_blocks_cached, load.kv_blocks_total);
    fixture.worker.shutdown(Duration::ZERO).await;
}

/// Pools that hold little more than one prompt, and steps of a few tokens: prompts are cut and preempted on the way.
#[tokio::test(flavor = "multi_thread")]
async fn short_steps_and_few_blocks_change_nothing() {
    let whole = tokio::task::spawn_blocking(smollm2).await.expect("no panic");
    let tight = model("--max-num-batched-tokens 40 --max-num-seqs 9 --kv-cache-memory-bytes 28MiB").await;
    let (mut whole, mut tight) = (serve_alone(&whole).await, serve_alone(&tight).await);
    let prompts: Vec<Vec<u32>> =
        [1, 15, 16, 17, 63, 65, 300, 500, 700].map(|len| (7..7 + len).collect()).to_vec();
    for pooling in [v1::Pooling::Last, v1::Pooling::Mean] {
        let asked = prompts.iter().map(|prompt| {
            let (mut client, request) = (tight.client.clone(), embed(prompt, pooling));
            async move { generate(&mut client, request).await.unwrap().prompt.unwrap().embedding }
        });
        let together = futures::future::join_all(asked).await;
        for (prompt, ours) in prompts.iter().zip(together) {
            let (alone, _) = vector(&mut whole, embed(prompt, pooling)).await;
            assert!(ours == alone, "{} tokens, {pooling:?}", prompt.len());
        }
    }
    let load = load_until(&mut tight.client, |load| load.running == 0 && load.waiting == 0).await;
    assert_eq!(load.kv_blocks_free + load.kv_blocks_cached, load.kv_blocks_total);
    whole.worker.shutdown(Duration::ZERO).await;
    tight.worker.shutdown(Duration::ZERO).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_that_make_no_sense_are_refused() {
    let model = tokio::task::spawn_blocking(smollm2).await.expect("no panic");
    let mut fixture = serve_alone(&model).await;
    let sound = || embed(&[5, 6, 7], v1::Pooling::Last);
    let grammar =
        v1::Grammar { source: Some(v1::grammar::Source::Regex("a".to_owned())), json_blanks_max: None };
    let begun = v1::ChoiceState { output_ids: vec![1], ..Default::default() };
    for (request, code, says) in [
        (v1::GenerateRequest { pooling: 9, ..sound() }, ErrorCode::InvalidRequest, "pooling is of no kind"),
        (
            v1::GenerateRequest { choices: vec![begun], ..sound() },
            ErrorCode::InvalidRequest,
            "choices must be one",
        ),
        (
            v1::GenerateRequest { choices: Vec::new(), ..sound() },
            ErrorCode::InvalidRequest,
            "choices must be one",
        ),
        (
            v1::GenerateRequest { grammar: Some(grammar), ..sound() },
            ErrorCode::InvalidRequest,
            "grammar has no",
        ),
        (embed(&[], v1::Pooling::Mean), ErrorCode::InvalidRequest, "prompt_ids is empty"),
        (embed(&[1; 1025], v1::Pooling::Mean), ErrorCode::ContextLengthExceeded, "1025"),
    ] {
        let status = generate(&mut fixture.client, request).await.expect_err(says);
        assert_eq!(ErrorCode::of(&status), code, "{status:?}");
        assert!(status.message().contains(says), "{status:?}");
        vector(&mut fixture, sound()).await;
    }
    // No room for output is needed.
    vector(&mut fixture, embed(&[1; 1024], v1::Pooling::Mean)).await;
    fixture.worker.shutdown(Duration::ZERO).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_dropped_request_frees_its_blocks() {
    let slow = model("--max-num-batched-tokens 8 --max-num-seqs 8").await;
    let mut fixture = serve_alone(&slow).await;
    let mut streams = Vec::new();
    for i in 0..8 {
        let asked = embed(&[i + 10; 1000], v1::Pooling::Mean);
        streams.push(fixture.client.generate(asked).await.unwrap().into_inner());
    }
    load_until(&mut fixture.client, |load| load.running > 0).await;
    drop(streams);
    let load = load_until(&mut fixture.client, |load| load.running == 0 && load.waiting == 0).await;
    assert_eq!(load.kv_blocks_free + load.kv_blocks_cached, load.kv_blocks_total);
    fixture.worker.shutdown(Duration::ZERO).await;
}

/// Vectors are a function of the tokens alone, and of the profile's seed.
#[tokio::test(flavor = "multi_thread")]
async fn a_simulation_embeds_too() {
    let simulated = async |seed: u32| {
        let profile = tempfile::NamedTempFile::new().expect("a temporary file");
        let text = format!("step: {{base_seconds: 0.0005}}\ntokens: {{seed: {seed}}}\n");
        std::fs::write(profile.path(), text).expect("room");
        let flags = format!("--engine sim --pooling-type MEAN --profile {}", profile.path().display());
        let model = tokio::task::spawn_blocking(move || load(&flags)).await.expect("no panic");
        serve_alone(&model.expect("a profile")).await
    };
    let (mut one, mut other) = (simulated(4).await, simulated(5).await);
    let about = one.client.describe(v1::DescribeRequest {}).await.unwrap().into_inner();
    assert_eq!(about.embedding.map(|told| told.pooling()), Some(v1::Pooling::Mean), "the flag is told");
    let prompt: Vec<u32> = (100..400).collect();
    let (first, _) = vector(&mut one, embed(&prompt, v1::Pooling::Last)).await;
    let length: f32 = first.iter().map(|x| x * x).sum();
    assert!((length - 1.0).abs() < 1e-4, "{length}");
    assert_eq!(vector(&mut one, embed(&prompt, v1::Pooling::Mean)).await.0, first);
    assert_ne!(vector(&mut one, embed(&prompt[1..], v1::Pooling::Mean)).await.0, first);
    assert_ne!(vector(&mut other, embed(&prompt, v1::Pooling::Mean)).await.0, first);
    one.worker.shutdown(Duration::ZERO).await;
    other.worker.shutdown(Duration::ZERO).await;
}
