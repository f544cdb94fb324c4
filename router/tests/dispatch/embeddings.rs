//! Prompts that are embedded go the way of all others, to workers that can.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use thalweg_cache_index::{BlockEvent, CacheIndex, EventBatch};
use thalweg_proto::code::ErrorCode;
use thalweg_proto::ids::{WorkerEpoch, WorkerId};
use thalweg_proto::v1;
use thalweg_router::dispatch::{GenerationEvent, Tokenized};
use thalweg_router::error::RouterError;

use crate::script::{Step, WIDTH, about, embeds};
use crate::{Stage, config, read, stage_of};

async fn embedding_stage(workers: usize, steps: Vec<Step>) -> Stage {
    stage_of(config(), (0..workers).map(|i| embeds(&format!("w{i}"))).collect(), steps).await
}

fn request(stage: &Stage, pooling: v1::Pooling) -> Tokenized {
    let wanted = v1::EmbeddingInfo { width: WIDTH, pooling: pooling.into() };
    Tokenized { embedding: Some(wanted), ..stage.request(0) }
}

/// Dispatches in a task of its own and reads the vector, and nothing else.
fn spawn(stage: &Stage, request: Tokenized) -> tokio::task::JoinHandle<Result<Vec<f32>, RouterError>> {
    let dispatcher = Arc::clone(&stage.router.state().dispatcher);
    tokio::spawn(async move {
        let mut generation = dispatcher.dispatch(request).await?;
        let mut vector = Vec::new();
        while let Some(event) = generation.next().await {
            match event? {
                GenerationEvent::Prompt(info) => vector = info.embedding,
                GenerationEvent::Deltas(deltas) => {
                    assert!(deltas.iter().all(|delta| delta.token_ids.is_empty()), "no token is drawn");
                }
            }
        }
        Ok(vector)
    })
}

/// The scripted workers' answer to the prompt of `Stage::request`.
const EXPECTED: [f32; 4] = [1.0, 0.0, 0.0, 0.0];

#[tokio::test]
async fn a_worker_that_fails_is_replaced() {
    for step in [
        Step::Refuse(ErrorCode::Overloaded),
        Step::Refuse(ErrorCode::Draining),
        Step::Refuse(ErrorCode::FingerprintMismatch),
        Step::EndEmpty,
        Step::FailAfter(0, ErrorCode::Unavailable),
        Step::CrashAfter(0),
        Step::NonsenseAfter(0),
    ] {
        let stage = embedding_stage(3, vec![step.clone()]).await;
        let vector = spawn(&stage, request(&stage, v1::Pooling::Last)).await.unwrap();
        assert_eq!(vector, Ok(EXPECTED.to_vec()), "{step:?}");
        let seen = stage.scene.seen();
        assert_eq!(seen.len(), 2, "{step:?}");
        assert_ne!(seen[0].0, seen[1].0, "{step:?}: elsewhere");
        for (_, request) in &seen {
            assert_eq!((request.pooling(), request.choices.len()), (v1::Pooling::Last, 1));
            assert!(request.booking > 0 && request.choices[0].output_ids.is_empty());
        }
        stage.wait_until_idle().await;
    }
}

/// A vector that is not what was asked for is no answer, however often it comes.
#[tokio::test]
async fn a_vector_of_another_width_is_nonsense() {
    let stage = embedding_stage(3, Vec::new()).await;
    let wanted = v1::EmbeddingInfo { width: WIDTH + 1, pooling: v1::Pooling::Mean.into() };
    let request = Tokenized { embedding: Some(wanted), ..stage.request(0) };
    let error = spawn(&stage, request).await.unwrap().unwrap_err();
    assert_eq!(error.code, ErrorCode::Unavailable);
    assert!(error.message.contains("4 values for an embedding of 5"), "{error}");
    assert_eq!(stage.scene.seen().len(), 3, "each was asked");
    stage.wait_until_idle().await;
}

/// A worker that does not know embeddings would write an answer: it is not asked.
#[tokio::test]
async fn workers_without_the_feature_are_not_asked() {
    let stage = stage_of(config(), vec![about("w0"), embeds("w1"), about("w2")], Vec::new()).await;
    for _ in 0..6 {
        let vector = spawn(&stage, request(&stage, v1::Pooling::Mean)).await.unwrap();
        assert_eq!(vector, Ok(EXPECTED.to_vec()));
    }
    assert!(stage.scene.seen().iter().all(|(worker, _)| worker == "w1"));

    let old = stage_of(config(), vec![about("w0")], Vec::new()).await;
    let error = spawn(&old, request(&old, v1::Pooling::Last)).await.unwrap().unwrap_err();
    assert_eq!(error.code, ErrorCode::Unavailable);
    assert!(error.message.contains("give it --pooling-type"), "{error}");
    assert!(old.scene.seen().is_empty());
    assert_eq!(read(old.dispatch(2).await.unwrap()).await, (vec![0, 1], Ok(())), "answers are served");
}

/// The last token's pooling may use what a worker holds of the prompt; a mean may not, and is not sent there for it.
#[tokio::test]
async fn last_follows_the_prefix_cache_and_mean_the_load() {
    let stage = embedding_stage(2, Vec::new()).await;
    let events = vec![BlockEvent::Stored(stage.keys())];
    stage.index.publish(EventBatch { worker: WorkerId::new("w1"), epoch: WorkerEpoch(1), seq: 1, events });
    stage.scene.cached_tokens.store(96, Ordering::SeqCst);
    for _ in 0..4 {
        spawn(&stage, request(&stage, v1::Pooling::Last)).await.unwrap().unwrap();
        stage.wait_until_idle().await;
    }
    assert!(stage.scene.seen().iter().all(|(worker, _)| worker == "w1"), "where the prefix lies");
    for _ in 0..16 {
        spawn(&stage, request(&stage, v1::Pooling::Mean)).await.unwrap().unwrap();
        stage.wait_until_idle().await;
    }
    let means = &stage.scene.seen()[4..];
    assert!(means.iter().any(|(worker, _)| worker == "w0"), "either may compute it");
}
