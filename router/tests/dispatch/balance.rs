//! Load is spread, counted right, and kept from workers that are in no state to take it.

use std::sync::Arc;
use std::time::Duration;

use thalweg_cache_index::{CacheIndex, MemoryIndex};
use thalweg_proto::v1;
use thalweg_router::dispatch::Tokenized;
use thalweg_router::router::Router;
use thalweg_router::workers::health::HealthState;
use thalweg_router::workers::load::Weight;

use crate::members::Members;
use crate::script::{Step, about};
use crate::{Stage, config, index_of, stage, stage_of};

fn served(stage: &Stage) -> Vec<usize> {
    stage.workers.iter().map(|w| w.served()).collect()
}

#[tokio::test]
async fn aborted_requests_leave_no_load_and_a_restarted_worker_no_imbalance() {
    // routing-01, routing-02.
    let mut stage = stage(2, vec![]).await;
    for round in 0..3 {
        let tasks: Vec<_> = (0..100).map(|_| stage.spawn(stage.request(20))).collect();
        tasks.iter().step_by(3).for_each(tokio::task::JoinHandle::abort);
        for (i, task) in tasks.into_iter().enumerate() {
            if i % 3 != 0 {
                assert_eq!(task.await.unwrap().0.len(), 20, "round {round}");
            }
        }
        stage.wait_until_idle().await;
    }
    stage.restart(1, 2);
    stage.wait_for_epoch("w1", 2).await;
    // Held, so that shares follow from what is counted and not from who answers first.
    const HELD: u32 = 7;
    stage.scene.by_first_token.lock().insert(HELD, Step::Hold(1));
    for round in 0..5 {
        let before = served(&stage);
        let mut held = Vec::new();
        for i in 0..16 {
            let request = Tokenized { prompt_ids: [HELD, i, i].into(), ..stage.request(3) };
            held.push(stage.router.state().dispatcher.dispatch(request).await.unwrap());
        }
        let share = served(&stage)[0] - before[0];
        assert!((7..=9).contains(&share), "round {round}: {share} of 16 on one of two");
        drop(held);
        stage.wait_until_idle().await;
    }
}

#[tokio::test]
async fn routers_see_each_others_load() {
    // routing-11.
    let stage = stage(4, vec![Step::Hold(1); 80]).await;
    let membership = Arc::new(Members::new(stage.workers.iter().map(|w| w.address.clone())));
    let other_config =
        thalweg_router::config::RouterConfig { router_id: Some("other".to_owned()), ..config() };
    let other = Router::start(other_config, membership, Arc::new(MemoryIndex::new())).await.unwrap();
    other.state().workers.wait_for_ready(4).await;
    let mut held = Vec::new();
    for i in 0..28 {
        // One router gets three times as many as the other.
        let router = if i % 4 == 0 { other.state() } else { stage.router.state() };
        // A new prompt each: on a slow machine a worker that has just computed the same one would be worth its queue.
        let request = Tokenized { prompt_ids: (1_000 * i..1_000 * i + 100).collect(), ..stage.request(9) };
        held.push(router.dispatcher.dispatch(request).await.unwrap());
        // What one router has booked the other learns from the worker's next report.
        let running = |w: &crate::ScriptedWorker| w.load.borrow().running;
        let total: u32 = stage.workers.iter().map(running).sum();
        assert_eq!(total, i + 1);
        for state in [other.state(), stage.router.state()] {
            let known = || state.workers.list().iter().map(|w| w.load().running).sum::<u32>();
            while known() != total {
                tokio::time::sleep(Duration::from_millis(2)).await;
            }
        }
    }
    let counts = served(&stage);
    assert!(counts.iter().all(|n| (5..=9).contains(n)), "{counts:?} of 28 on four");
}

#[tokio::test]
async fn routers_of_one_id_do_not_take_each_others_bookings_for_their_own() {
    let stage = stage(1, vec![Step::Hold(1); 3]).await;
    let mut held = Vec::new();
    for i in 0..3 {
        let request = Tokenized { prompt_ids: [i; 9].into(), ..stage.request(9) };
        held.push(stage.router.state().dispatcher.dispatch(request).await.unwrap());
    }
    let membership = Arc::new(Members::new(stage.workers.iter().map(|w| w.address.clone())));
    let again = Router::start(config(), membership, Arc::new(MemoryIndex::new())).await.unwrap();
    let workers = &again.state().workers;
    workers.wait_for_ready(1).await;
    let worker = workers.list()[0].clone();
    assert_eq!(worker.load().running, 3);
    let booking = workers.book(&worker, Weight { sequences: 1, ..Weight::default() });
    assert_eq!((booking.number(), worker.load().waiting), (1, 1), "the report does not include it");
}

#[tokio::test]
async fn a_busy_worker_gets_neither_misses_nor_hits_that_would_wait_longer_there() {
    // routing-03: w0 has 30 sequences and little in its cache, w1 has nothing to do and much in its cache.
    let room = |id: &str| v1::DescribeResponse { max_num_seqs: 64, ..about(id) };
    let stage = stage_of(config(), ["w0", "w1"].map(room).into(), vec![]).await;
    stage.workers[0].load.send_modify(|load| (load.running, load.running_context_tokens) = (30, 6_000));
    while stage.worker("w0").load().running < 30 {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let store = |id: &str, keys: Vec<u64>| {
        let (worker, epoch) = (stage.worker(id).id.clone(), stage.worker(id).epoch);
        let events = vec![thalweg_cache_index::BlockEvent::Stored(keys)];
        stage.index.publish(thalweg_cache_index::EventBatch { worker, epoch, seq: 1, events });
    };
    store("w0", stage.keys());
    store("w1", (0..50_000u64).map(|i| i.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1).collect());
    assert_eq!(stage.dispatch(1).await.unwrap().worker().as_str(), "w1", "a hit that is not worth the wait");
    for i in 1..=100 {
        let request = Tokenized { prompt_ids: (1_000 * i..1_000 * i + 100).collect(), ..stage.request(1) };
        let generation = stage.router.state().dispatcher.dispatch(request).await.unwrap();
        assert_eq!(generation.worker().as_str(), "w1", "miss number {i}");
        crate::read(generation).await.1.unwrap();
    }
}

#[tokio::test]
async fn a_worker_that_hangs_is_given_up_though_it_reports() {
    let stage = stage(2, vec![Step::Hold(2)]).await;
    let held = stage.spawn(stage.request(5));
    stage.scene.wait_for_seen(1).await;
    let hung = stage.scene.seen()[0].0.clone();
    // It says that it runs a request, every 250 ms, and its step counter stands still.
    assert_eq!(held.await.unwrap(), ((0..5).collect(), Ok(())));
    assert_ne!(stage.scene.seen()[1].0, hung);
    assert!(stage.shows("thalweg_router_resumes_total{reason=\"gone\"} 1"));
}

#[tokio::test]
async fn a_worker_that_crawls_keeps_its_streams_and_gets_no_others() {
    let stage = stage(2, vec![Step::Hold(3)]).await;
    let held = stage.spawn(stage.request(6));
    stage.scene.wait_for_seen(1).await;
    let slow = stage.scene.seen()[0].0.clone();
    for (i, worker) in stage.workers.iter().enumerate() {
        let slowness = if i == index_of(&slow) { 30.0 } else { 1.0 };
        let rates = v1::Rates {
            prefill_tokens_per_second: 1_000.0 / slowness,
            prefill_samples: 100,
            decode: vec![v1::DecodeRate { batch: 1, step_seconds: 0.01 * slowness, samples: 100 }],
        };
        worker.load.send_modify(|load| load.rates = Some(rates));
        while stage.worker(&format!("w{i}")).last_report().rates.is_none() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }
    for i in 1..20 {
        // New prompts: one that the slow worker has in its cache may well be worth waiting for.
        let request = Tokenized { prompt_ids: (1_000 * i..1_000 * i + 100).collect(), ..stage.request(1) };
        let generation = stage.router.state().dispatcher.dispatch(request).await.unwrap();
        let fast = generation.worker().clone();
        let stood = |name: &str| {
            let worker = stage.worker(name);
            format!("{name} {:?} {:?} {:?}", worker.state(), worker.load(), worker.speed())
        };
        assert_ne!(fast.as_str(), slow, "request {i}: {}, {}", stood("w0"), stood("w1"));
        // Several that are not given back yet, or that an old report still shows, would make the slow one the better choice.
        drop(generation);
        let fast = stage.worker(fast.as_str());
        // A step for each that has ended.
        while fast.open_bookings() > 0 || fast.last_report().steps < u64::from(i) {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }
    assert_eq!(stage.worker(&slow).state(), HealthState::Ready);
    assert!(!held.is_finished());
    assert_eq!(stage.scene.seen().iter().filter(|(worker, _)| *worker == slow).count(), 1);
    assert_eq!(stage.scene.seen().len(), 20, "its stream was tried nowhere else");
}

#[tokio::test]
async fn a_drained_worker_with_a_large_index_is_out_at_once_and_a_lost_one_matches_nothing() {
    // cache-index-10.
    let mut stage = stage_of(config(), (0..2).map(|i| about(&format!("w{i}"))).collect(), vec![]).await;
    let mut keys = stage.keys();
    keys.extend((0..300_000u64).map(|i| i.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1));
    let (worker, epoch) = (stage.worker("w1").id.clone(), stage.worker("w1").epoch);
    let events = vec![thalweg_cache_index::BlockEvent::Stored(keys)];
    stage.index.publish(thalweg_cache_index::EventBatch { worker, epoch, seq: 1, events });
    assert_eq!(stage.dispatch(1).await.unwrap().worker().as_str(), "w1");
    stage.worker("w1").client().drain(v1::DrainRequest {}).await.unwrap();
    stage.wait_for_state("w1", HealthState::Draining).await;
    for _ in 0..20 {
        assert_eq!(stage.dispatch(1).await.unwrap().worker().as_str(), "w0");
    }
    let holder = stage.worker("w1").holder.unwrap();
    let matched = |stage: &Stage| {
        stage.index.replica().lookup(&stage.keys(), tokio::time::Instant::now()).blocks(holder)
    };
    assert_eq!(matched(&stage), 6);
    let mut state = stage.worker("w1").watch_state();
    stage.workers[1].kill();
    state.wait_for(|s| *s == HealthState::Gone).await.unwrap();
    assert_eq!(matched(&stage), 0, "the moment it is given up");
}
