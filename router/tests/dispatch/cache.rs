//! Where the index says that a prompt lies.

use std::sync::atomic::Ordering;

use thalweg_cache_index::{BlockEvent, CacheIndex, EventBatch};
use thalweg_proto::block_hash::{HashRoot, full_blocks};
use thalweg_proto::ids::{WorkerEpoch, WorkerId};
use thalweg_proto::v1::DescribeResponse;
use thalweg_router::dispatch::GenerationEvent;

use crate::script::about;
use crate::{Stage, config, read, stage, stage_of};

#[tokio::test]
async fn a_prompt_goes_where_its_blocks_lie_and_experience_corrects_the_index() {
    let stage = stage(2, vec![]).await;
    let request = stage.request(1);
    let root = HashRoot { fingerprint: b"print", adapter: "", scope: "default", salt: "" };
    let keys: Vec<u64> =
        full_blocks(root.hash(), &request.prompt_ids, 16).iter().map(|b| b.index_key()).collect();
    stage.index.publish(EventBatch {
        worker: WorkerId::new("w1"),
        epoch: WorkerEpoch(1),
        seq: 1,
        events: vec![BlockEvent::Stored(keys)],
    });
    let generation = stage.dispatch(1).await.unwrap();
    assert_eq!(generation.worker().as_str(), "w1");
    read(generation).await.1.unwrap();
    // The script's prompts report no cached token.
    assert!((stage.worker("w1").confidence().ratio() - 0.9).abs() < 1e-9);
    let metrics = stage.router.state().metrics_text();
    for line in ["predicted_cached_tokens_total 96", "actual_cached_tokens_total 0"] {
        assert!(metrics.contains(&format!("thalweg_router_{line}\n")), "{metrics}");
    }
}

#[tokio::test]
async fn blocks_of_another_size_are_not_matched() {
    // cache-index-04.
    let other = DescribeResponse { block_size: 32, ..about("w1") };
    let stage = stage_of(config(), vec![about("w0"), other], vec![]).await;
    let events = vec![BlockEvent::Stored(stage.keys())];
    stage.index.publish(EventBatch { worker: WorkerId::new("w1"), epoch: WorkerEpoch(1), seq: 1, events });
    read(stage.dispatch(1).await.unwrap()).await.1.unwrap();
    assert!(stage.shows("thalweg_router_predicted_cached_tokens_total 0"));
}

#[tokio::test]
async fn predictions_that_come_true_keep_their_confidence() {
    let stage = stage(2, vec![]).await;
    let events = vec![BlockEvent::Stored(stage.keys())];
    stage.index.publish(EventBatch { worker: WorkerId::new("w1"), epoch: WorkerEpoch(1), seq: 1, events });
    stage.scene.cached_tokens.store(96, Ordering::SeqCst);
    for _ in 0..5 {
        let mut generation = stage.dispatch(2).await.unwrap();
        assert_eq!(generation.worker().as_str(), "w1");
        let Some(Ok(GenerationEvent::Prompt(info))) = generation.next().await else { panic!("no prompt") };
        assert_eq!(info.cached_tokens, 96);
        read(generation).await.1.unwrap();
    }
    let ratio = stage.worker("w1").confidence().ratio();
    assert!((ratio - 1.0).abs() < 1e-9, "what the client was told is accounted as well: {ratio}");
    assert!(stage.shows("thalweg_router_actual_cached_tokens_total 480"));
}

#[tokio::test]
async fn a_restarted_worker_matches_nothing_of_its_former_cache() {
    let mut stage = stage(2, vec![]).await;
    let indexed = |stage: &Stage| stage.router.state().workers.indexed_blocks(&stage.worker("w0"));
    let store = |stage: &Stage, epoch| {
        let (worker, events) = (WorkerId::new("w0"), vec![BlockEvent::Stored(stage.keys())]);
        stage.index.publish(EventBatch { worker, epoch: WorkerEpoch(epoch), seq: 1, events });
    };
    store(&stage, 1);
    assert_eq!(indexed(&stage), 6);
    // Its clock goes back as well.
    for (before, epoch) in [(1, 3), (3, 2)] {
        stage.restart(0, epoch);
        stage.wait_for_epoch("w0", epoch).await;
        assert_eq!(indexed(&stage), 0);
        store(&stage, before);
        assert_eq!(indexed(&stage), 0, "said by the former life, heard late");
        store(&stage, epoch);
        assert_eq!(indexed(&stage), 6);
    }
    stage.restart(0, 1);
    stage.wait_for_epoch("w0", 1).await;
    read(stage.dispatch(1).await.unwrap()).await.1.unwrap();
    let metrics = stage.router.state().metrics_text();
    assert!(metrics.contains("thalweg_router_predicted_cached_tokens_total 0\n"), "{metrics}");
}

#[tokio::test]
async fn the_index_forgets_a_worker_that_another_one_replaced_at_its_address() {
    let mut stage = stage(1, vec![]).await;
    let (worker, events) = (WorkerId::new("w0"), vec![BlockEvent::Stored(stage.keys())]);
    stage.index.publish(EventBatch { worker, epoch: WorkerEpoch(1), seq: 1, events });
    stage.workers[0].restart(&stage.scene, about("successor"));
    let workers = &stage.router.state().workers;
    while workers.list()[0].id.as_str() != "successor" {
        tokio::time::sleep(std::time::Duration::from_millis(5)).await;
    }
    assert_eq!(stage.index.replica().stats().workers, 1);
}
