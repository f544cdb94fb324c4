//! Prompts that take their workers down, and those who were merely near.

use std::time::Duration;

use thalweg_proto::code::ErrorCode;
use thalweg_router::dispatch::Tokenized;

use crate::script::Step;
use crate::{Stage, config, index_of, stage, stage_of};

const POISON: u32 = 666;

fn poison(stage: &Stage) -> Tokenized {
    Tokenized { prompt_ids: [POISON, 1, 2].into(), ..stage.request(9) }
}

fn served_by(stage: &Stage, first_token: u32) -> Vec<String> {
    let seen = stage.scene.seen();
    let of_prompt = seen.iter().filter(|(_, r)| r.prompt_ids[0] == first_token);
    of_prompt.map(|(worker, _)| worker.clone()).collect()
}

#[tokio::test]
async fn a_prompt_kills_three_workers_at_most_and_is_then_refused() {
    for tokens in [0, 2] {
        let stage = stage(5, vec![]).await;
        stage.scene.by_first_token.lock().insert(POISON, Step::CrashAfter(tokens));
        let error = stage.spawn(poison(&stage)).await.unwrap().1.unwrap_err();
        assert_eq!(error.code, ErrorCode::WorkerCrashed, "{error}");
        assert_eq!(error.code.http(), http::StatusCode::INTERNAL_SERVER_ERROR);
        let mut killed = served_by(&stage, POISON);
        killed.sort();
        killed.dedup();
        assert_eq!(killed.len(), 3, "{killed:?}");
        let on_trial: Vec<_> = stage.scene.seen().iter().map(|(_, request)| request.on_trial).collect();
        assert_eq!(on_trial, [false, true, true], "workers tell other routers' suspects from it");
        let again = stage.spawn(poison(&stage)).await.unwrap().1.unwrap_err();
        assert_eq!(again.code, ErrorCode::WorkerCrashed);
        assert!(again.message.contains("refused"), "{again}");
        assert_eq!(served_by(&stage, POISON).len(), 3, "nobody was asked");
        assert!(stage.shows("thalweg_router_poisoned_prompts 1"));
        assert_eq!(
            stage.spawn(stage.request(3)).await.unwrap(),
            (vec![0, 1, 2], Ok(())),
            "others are served"
        );
        stage.wait_until_idle().await;
    }
}

#[tokio::test]
async fn requests_with_the_prompt_of_a_guilty_one_end_with_it() {
    for copies in [2, 3, 4] {
        let stage = stage(10, vec![]).await;
        // Copies that are there together end together.
        stage.scene.by_first_token.lock().insert(POISON, Step::CrashIn(Duration::from_millis(200)));
        let tasks: Vec<_> = (0..copies).map(|_| stage.spawn(poison(&stage))).collect();
        for task in tasks {
            assert_eq!(task.await.unwrap().1.unwrap_err().code, ErrorCode::WorkerCrashed);
        }
        let mut killed = served_by(&stage, POISON);
        killed.sort();
        killed.dedup();
        // Nobody knew of it when they began; after that no more are risked than three altogether.
        assert!((3..=copies.max(3)).contains(&killed.len()), "{copies} copies: {killed:?}");
        assert!(stage.shows("thalweg_router_poisoned_prompts 1"));
        stage.wait_until_idle().await;
    }
}

#[tokio::test]
async fn streams_that_shared_its_workers_survive_and_are_not_refused() {
    let mut config = config();
    config.timeouts.queue_timeout = Duration::from_secs(20);
    let abouts = (0..4).map(|i| crate::about(&format!("w{i}"))).collect();
    let mut stage = stage_of(config, abouts, vec![]).await;
    // Whoever goes on beside it has no token yet when the next worker ends.
    stage.scene.by_first_token.lock().insert(POISON, Step::CrashIn(Duration::from_millis(30)));
    let pace = Duration::from_millis(60);
    let others: Vec<_> = (0..24)
        .map(|i| {
            stage.scene.by_first_token.lock().insert(1_000 + i, Step::Paced(pace));
            let request = Tokenized { prompt_ids: [1_000 + i, 1, 2].into(), ..stage.request(12) };
            stage.spawn(request)
        })
        .collect();
    stage.scene.wait_for_seen(24).await;
    let guilty = stage.spawn(poison(&stage));
    let error = guilty.await.unwrap().1.unwrap_err();
    assert_eq!(error.code, ErrorCode::WorkerCrashed);
    for killed in served_by(&stage, POISON) {
        stage.restart(index_of(&killed), 2);
    }
    for other in others {
        assert_eq!(other.await.unwrap(), ((0..12).collect(), Ok(())));
    }
    assert!(stage.shows("thalweg_router_poisoned_prompts 1"), "only the guilty one");
    assert_eq!(served_by(&stage, POISON).len(), 3);
    stage.wait_until_idle().await;
}

#[tokio::test]
async fn requests_whose_workers_are_all_killed_are_not_to_blame() {
    for same_prompt in [false, true] {
        let mut stage = stage(3, vec![]).await;
        let requests = (0..12).map(|i| {
            let first = if same_prompt { 1_000 } else { 1_000 + i };
            stage.scene.by_first_token.lock().insert(first, Step::Paced(Duration::from_millis(100)));
            stage.spawn(Tokenized { prompt_ids: [first, 1, 2].into(), ..stage.request(20) })
        });
        let requests: Vec<_> = requests.collect();
        stage.scene.wait_for_seen(12).await;
        // Each life ends before anybody has brought a token in it, three times around.
        for epoch in 2..5 {
            for worker in 0..3 {
                stage.restart(worker, epoch);
            }
        }
        for request in requests {
            assert_eq!(request.await.unwrap(), ((0..20).collect(), Ok(())), "same prompt: {same_prompt}");
        }
        assert!(stage.shows("thalweg_router_poisoned_prompts 0"));
        stage.wait_until_idle().await;
    }
}

#[tokio::test]
async fn a_worker_that_is_killed_beside_a_trial_proves_another_cause() {
    let mut stage = stage(5, vec![]).await;
    stage.scene.by_first_token.lock().insert(POISON, Step::Hold(0));
    let suspected = stage.spawn(poison(&stage));
    let mut served = 0;
    for trial in [false, false, true] {
        served += 1;
        stage.scene.wait_for_seen(served).await;
        let its_worker = index_of(&stage.scene.seen()[served - 1].0);
        stage.workers[its_worker].kill();
        if trial {
            let another = (0..5).find(|w| !served_by(&stage, POISON).contains(&format!("w{w}"))).unwrap();
            stage.workers[another].kill();
        }
    }
    stage.scene.by_first_token.lock().insert(POISON, Step::Answer);
    assert_eq!(suspected.await.unwrap(), ((0..9).collect(), Ok(())));
    assert!(stage.shows("thalweg_router_poisoned_prompts 0"));
}
