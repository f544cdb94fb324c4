//! Dispatch against real gRPC servers that answer by script.
#![allow(clippy::unwrap_used, reason = "a test's helpers may panic")]

#[path = "support/scripted_worker.rs"]
mod scripted_worker;
#[path = "support/tokenizer.rs"]
mod tokenizer;

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use scripted_worker::{Scene, ScriptedWorker, Step, about};
use thalweg_cache_index::{BlockEvent, CacheIndex, EventBatch, MemoryIndex};
use thalweg_membership::StaticMembership;
use thalweg_proto::block_hash::{HashRoot, full_blocks};
use thalweg_proto::code::ErrorCode;
use thalweg_proto::ids::{WorkerEpoch, WorkerId};
use thalweg_proto::v1;
use thalweg_router::config::RouterConfig;
use thalweg_router::dispatch::{Generation, GenerationEvent, Tokenized};
use thalweg_router::error::RouterError;
use thalweg_router::router::{Router, RunningRouter};
use thalweg_router::workers::Worker;
use thalweg_router::workers::health::HealthState;
use tokio::time::Instant;

/// A router with scripted workers behind it.
struct Stage {
    scene: Arc<Scene>,
    workers: Vec<ScriptedWorker>,
    membership: Arc<StaticMembership>,
    index: Arc<MemoryIndex>,
    router: RunningRouter,
}

fn config() -> RouterConfig {
    RouterConfig {
        http: ([127, 0, 0, 1], 0).into(),
        router_id: "router".to_owned(),
        router_seed: Some(11),
        ..RouterConfig::default()
    }
}

async fn stage_of(config: RouterConfig, abouts: Vec<v1::DescribeResponse>, steps: Vec<Step>) -> Stage {
    let scene = Scene::new(steps);
    let workers: Vec<ScriptedWorker> =
        abouts.into_iter().map(|about| ScriptedWorker::start(&scene, about)).collect();
    let membership = Arc::new(StaticMembership::new(workers.iter().map(|w| w.address.clone())));
    let index = Arc::new(MemoryIndex::new());
    let router =
        Router::start(config, Arc::<StaticMembership>::clone(&membership), Arc::<MemoryIndex>::clone(&index));
    let router = router.await.unwrap();
    router.state().workers.wait_for_ready(workers.len()).await;
    Stage { scene, workers, membership, index, router }
}

async fn stage(count: usize, steps: Vec<Step>) -> Stage {
    stage_of(config(), (0..count).map(|i| about(&format!("w{i}"))).collect(), steps).await
}

impl Stage {
    fn request(&self, max_tokens: u32) -> Tokenized {
        Tokenized {
            request_id: "r".to_owned(),
            model: self.router.state().models.get("tiny").unwrap(),
            prompt_ids: (0..100).collect(),
            sampling: v1::SamplingParams { max_tokens, ..Default::default() },
            n: 1,
            tenant: "default".to_owned(),
            scope: v1::CacheScope { scope: "default".to_owned(), salt: String::new() },
            adapter: String::new(),
            priority: 0,
            deadline: Instant::now() + Duration::from_secs(60),
            traceparent: String::new(),
        }
    }

    async fn dispatch(&self, max_tokens: u32) -> Result<Generation, RouterError> {
        self.router.state().dispatcher.dispatch(self.request(max_tokens)).await
    }

    /// Of the blocks of `request`'s prompt.
    fn keys(&self) -> Vec<u64> {
        let root = HashRoot { fingerprint: b"print", adapter: "", scope: "default", salt: "" };
        full_blocks(root.hash(), &self.request(1).prompt_ids, 16).iter().map(|b| b.index_key()).collect()
    }

    fn worker(&self, id: &str) -> Arc<Worker> {
        let workers = self.router.state().workers.list();
        Arc::clone(workers.iter().find(|w| w.id.as_str() == id).unwrap())
    }

    async fn wait_for_state(&self, id: &str, state: HealthState) {
        self.worker(id).watch_state().wait_for(|s| *s == state).await.unwrap();
    }

    /// No booking, no permit, no buffer is left, and the workers say the same.
    async fn wait_until_idle(&self) {
        let state = self.router.state();
        let idle = || {
            let workers = state.workers.list();
            let quiet =
                |w: &Arc<Worker>| w.open_bookings() == 0 && w.load().running == 0 && w.load().waiting == 0;
            workers.iter().all(quiet)
                && state.dispatcher.running() == 0
                && state.dispatcher.buffered_bytes() == 0
        };
        let patience = async {
            while !idle() {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        tokio::time::timeout(Duration::from_secs(10), patience).await.expect("everything is given back");
        assert!(state.metrics_text().contains("thalweg_router_queue_depth 0"));
    }
}

/// Tokens until the end, and how it ended. Whoever has read everything lets go.
async fn read(mut generation: Generation) -> (Vec<u32>, Result<(), RouterError>) {
    let mut tokens = Vec::new();
    while let Some(event) = generation.next().await {
        match event {
            Ok(GenerationEvent::Prompt(_)) => {}
            Ok(GenerationEvent::Deltas(deltas)) => {
                tokens.extend(deltas.into_iter().flat_map(|d| d.token_ids))
            }
            Err(error) => return (tokens, Err(error)),
        }
    }
    (tokens, Ok(()))
}

#[tokio::test]
async fn a_request_is_served_and_accounted_to_its_end() {
    let stage = stage(2, vec![]).await;
    assert_eq!(stage.scene.tokenizers_sent.load(Ordering::SeqCst), 1, "one tokenizer per fingerprint");
    let mut generation = stage.dispatch(5).await.unwrap();
    assert!(matches!(generation.next().await, Some(Ok(GenerationEvent::Prompt(_)))));
    let served_by = generation.worker().clone();
    assert_eq!(read(generation).await, (vec![0, 1, 2, 3, 4], Ok(())));

    let seen = stage.scene.seen();
    let [(worker, request)] = seen.as_slice() else { panic!("{seen:?}") };
    assert_eq!(worker, served_by.as_str());
    assert_eq!((request.router_id.as_str(), request.booking, request.prompt_ids.len()), ("router", 1, 100));
    assert_eq!(request.fingerprint, bytes::Bytes::from_static(b"print"));
    assert_eq!(request.choices, [v1::ChoiceState::default()]);
    stage.wait_until_idle().await;
    let metrics = stage.router.state().metrics_text();
    assert!(metrics.contains("thalweg_router_requests_total{code=\"ok\"} 1"), "{metrics}");
    assert!(metrics.contains("thalweg_router_worker_state{worker=\"w0\",state=\"ready\"} 1"), "{metrics}");
    stage.router.shutdown().await;
}

#[tokio::test]
async fn choices_of_one_request_end_together() {
    let stage = stage(1, vec![]).await;
    let request = Tokenized { n: 3, ..stage.request(2) };
    let generation = stage.router.state().dispatcher.dispatch(request).await.unwrap();
    assert_eq!(read(generation).await, (vec![0, 0, 0, 1, 1, 1], Ok(())));
    stage.wait_until_idle().await;
}

#[tokio::test]
async fn before_the_first_token_another_worker_is_tried() {
    for step in [
        Step::Refuse(ErrorCode::Overloaded),
        Step::Refuse(ErrorCode::Draining),
        Step::Refuse(ErrorCode::Unavailable),
        Step::Refuse(ErrorCode::FingerprintMismatch),
        Step::EndEmpty,
    ] {
        let stage = stage(3, vec![step.clone(), step.clone()]).await;
        let generation = stage.dispatch(3).await.unwrap();
        let served_by = generation.worker().clone();
        assert_eq!(read(generation).await, (vec![0, 1, 2], Ok(())), "{step:?}");
        let mut tried: Vec<String> = stage.scene.seen().into_iter().map(|(worker, _)| worker).collect();
        assert_eq!(tried.last().map(String::as_str), Some(served_by.as_str()));
        tried.sort();
        assert_eq!(tried, ["w0", "w1", "w2"], "{step:?}: never the same twice");
        let attempts: Vec<u64> = stage.scene.seen().iter().map(|(_, r)| r.attempt_id).collect();
        assert_eq!(attempts, [1, 2, 3]);
        stage.wait_until_idle().await;
    }
}

#[tokio::test]
async fn a_worker_that_dies_before_the_first_token_is_replaced() {
    let mut stage = stage(2, vec![Step::Hold(0)]).await;
    let dispatch = tokio::spawn({
        let (dispatcher, request) = (Arc::clone(&stage.router.state().dispatcher), stage.request(3));
        async move { dispatcher.dispatch(request).await }
    });
    stage.scene.wait_for_seen(1).await;
    let first: usize = stage.scene.seen()[0].0[1..].parse().unwrap();
    stage.workers[first].kill();
    let generation = dispatch.await.unwrap().unwrap();
    assert_ne!(generation.worker().as_str(), format!("w{first}"));
    assert_eq!(read(generation).await, (vec![0, 1, 2], Ok(())));
}

#[tokio::test]
async fn errors_that_are_the_requests_own_are_not_tried_again() {
    let stage = stage(2, vec![Step::Refuse(ErrorCode::InvalidRequest)]).await;
    let error = stage.dispatch(3).await.map(drop).unwrap_err();
    assert_eq!((error.code, error.message.as_str()), (ErrorCode::InvalidRequest, "scripted invalid_request"));
    assert_eq!(stage.scene.seen().len(), 1);
    stage.wait_until_idle().await;
}

#[tokio::test]
async fn tries_are_bounded() {
    let stage = stage(5, vec![Step::Refuse(ErrorCode::Overloaded); 9]).await;
    let error = stage.dispatch(3).await.map(drop).unwrap_err();
    assert_eq!(error.code, ErrorCode::Overloaded);
    assert!(error.retry_after.is_some());
    assert_eq!(stage.scene.seen().len(), 3);
    stage.wait_until_idle().await;
}

#[tokio::test]
async fn dropping_a_generation_cancels_at_the_worker() {
    let stage = stage(1, vec![Step::Hold(2)]).await;
    let mut generation = stage.dispatch(100).await.unwrap();
    generation.next().await.unwrap().unwrap();
    assert_eq!(stage.worker("w0").open_bookings(), 1);
    drop(generation);
    stage.scene.wait_for_cancelled(1).await;
    stage.wait_until_idle().await;
}

#[tokio::test]
async fn giving_up_before_the_first_token_cancels_at_the_worker() {
    let stage = stage(1, vec![Step::Hold(0)]).await;
    let dispatch = tokio::spawn({
        let (dispatcher, request) = (Arc::clone(&stage.router.state().dispatcher), stage.request(3));
        async move { dispatcher.dispatch(request).await.map(drop) }
    });
    stage.scene.wait_for_seen(1).await;
    dispatch.abort();
    stage.scene.wait_for_cancelled(1).await;
    stage.wait_until_idle().await;
}

#[tokio::test]
async fn a_request_past_its_deadline_is_ended_everywhere() {
    let stage = stage(1, vec![Step::Hold(2)]).await;
    let deadline = Instant::now() + Duration::from_millis(300);
    let request = Tokenized { deadline, ..stage.request(100) };
    let generation = stage.router.state().dispatcher.dispatch(request).await.unwrap();
    let (tokens, end) = read(generation).await;
    assert_eq!((tokens, end.unwrap_err().code), (vec![0, 1], ErrorCode::DeadlineExceeded));
    stage.scene.wait_for_cancelled(1).await;
    stage.wait_until_idle().await;
}

#[tokio::test]
async fn a_stream_that_breaks_after_tokens_ends_with_an_error() {
    let stage = stage(2, vec![Step::BreakAfter(2)]).await;
    let generation = stage.dispatch(5).await.unwrap();
    let (tokens, end) = read(generation).await;
    let error = end.unwrap_err();
    assert_eq!((tokens, error.code), (vec![0, 1], ErrorCode::Unavailable));
    assert!(error.message.contains("after 2 tokens"), "{error}");
    assert_eq!(stage.scene.seen().len(), 1);
    stage.wait_until_idle().await;
}

#[tokio::test]
async fn late_tokens_of_another_attempt_are_dropped() {
    let stage = stage(1, vec![Step::LateTokens]).await;
    let generation = stage.dispatch(3).await.unwrap();
    assert_eq!(read(generation).await, (vec![0, 1, 2], Ok(())));
}

#[tokio::test]
async fn a_draining_worker_gets_nothing_new_and_finishes_what_it_has() {
    let stage = stage(2, vec![Step::Hold(1)]).await;
    let held = stage.dispatch(9).await.unwrap();
    let drained = held.worker().clone();
    stage.worker(drained.as_str()).client().drain(v1::DrainRequest {}).await.unwrap();
    stage.wait_for_state(drained.as_str(), HealthState::Draining).await;
    for _ in 0..10 {
        let generation = stage.dispatch(2).await.unwrap();
        assert_ne!(*generation.worker(), drained);
        assert_eq!(read(generation).await, (vec![0, 1], Ok(())));
    }
    let other = if drained.as_str() == "w0" { "w1" } else { "w0" };
    stage.worker(other).client().drain(v1::DrainRequest {}).await.unwrap();
    stage.wait_for_state(other, HealthState::Draining).await;
    let error = stage.dispatch(2).await.map(drop).unwrap_err();
    assert_eq!(error.code, ErrorCode::Unavailable);
    assert!(error.message.contains("2 draining"), "{error}");
    assert_eq!(stage.worker(drained.as_str()).open_bookings(), 1, "what runs goes on");
}

#[tokio::test]
async fn overload_waits_in_the_router_and_then_is_refused_at_once() {
    let mut config = config();
    config.limits.queue_requests_max = 1;
    let abouts = vec![v1::DescribeResponse { max_num_seqs: 1, ..about("w0") }];
    let stage = stage_of(config, abouts, vec![Step::Hold(1)]).await;
    // A second of prefill ahead: with its one slot taken the worker takes nothing more.
    stage.workers[0].load.send_modify(|load| load.prefill_tokens_ahead = 1_000);
    let held = stage.dispatch(9).await.unwrap();
    while stage.worker("w0").load().running == 0 || stage.worker("w0").load().prefill_tokens_ahead < 1_000 {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let waiting = tokio::spawn({
        let (dispatcher, request) = (Arc::clone(&stage.router.state().dispatcher), stage.request(2));
        async move { read(dispatcher.dispatch(request).await.unwrap()).await }
    });
    while !stage.router.state().metrics_text().contains("thalweg_router_queue_depth 1") {
        assert!(!waiting.is_finished(), "it went to the worker");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let error = stage.dispatch(2).await.map(drop).unwrap_err();
    assert_eq!(error.code, ErrorCode::Overloaded);
    assert!(error.retry_after >= Some(Duration::from_secs(1)));
    assert_eq!(stage.scene.seen().len(), 1, "the worker saw neither");
    drop(held);
    assert_eq!(waiting.await.unwrap(), (vec![0, 1], Ok(())));
    stage.workers[0].load.send_modify(|load| load.prefill_tokens_ahead = 0);
    stage.wait_until_idle().await;
}

#[tokio::test]
async fn workers_may_come_late_and_leave() {
    let stage = stage(1, vec![]).await;
    let late = ScriptedWorker::start(&stage.scene, about("late"));
    stage.membership.set([stage.workers[0].address.clone(), late.address.clone()]);
    stage.router.state().workers.wait_for_ready(2).await;
    stage.wait_for_state("late", HealthState::Ready).await;

    let mut only_late = late;
    stage.membership.set([only_late.address.clone()]);
    // Not listed any more, but its report stream is open: it lives.
    let generation = stage.dispatch(2).await.unwrap();
    assert_eq!(read(generation).await.1, Ok(()));
    assert_eq!(stage.router.state().workers.list().len(), 2);

    only_late.kill();
    stage.wait_for_state("late", HealthState::Gone).await;
    let address = only_late.socket();
    drop(only_late);
    let _again =
        ScriptedWorker::start_at(&stage.scene, v1::DescribeResponse { epoch: 2, ..about("late") }, address);
    stage.router.state().workers.wait_for_ready(2).await;
    assert_eq!(stage.worker("late").epoch, WorkerEpoch(2));
}

#[tokio::test]
async fn a_restarted_worker_owes_nothing_for_its_former_life() {
    let mut stage = stage(1, vec![Step::Hold(1); 4]).await;
    let mut held = Vec::new();
    for _ in 0..4 {
        held.push(stage.dispatch(9).await.unwrap());
    }
    let former = stage.worker("w0");
    assert_eq!(former.open_bookings(), 4);
    let address = stage.workers[0].socket();
    stage.workers[0].kill();
    for generation in held {
        assert_eq!(read(generation).await.1.unwrap_err().code, ErrorCode::Unavailable);
    }
    stage.workers[0] =
        ScriptedWorker::start_at(&stage.scene, v1::DescribeResponse { epoch: 2, ..about("w0") }, address);
    while stage.worker("w0").epoch == WorkerEpoch(1) {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    stage.wait_for_state("w0", HealthState::Ready).await;
    let running = stage.dispatch(2).await.unwrap();
    assert_eq!(read(running).await, (vec![0, 1], Ok(())));
    stage.wait_until_idle().await;
    assert_eq!(former.open_bookings(), 0);
}

#[tokio::test]
async fn a_worker_with_other_weights_under_the_same_name_gets_nothing() {
    let stage = stage(1, vec![]).await;
    let other = v1::DescribeResponse { fingerprint: bytes::Bytes::from_static(b"other"), ..about("other") };
    let stray = ScriptedWorker::start(&stage.scene, other);
    stage.membership.set([stage.workers[0].address.clone(), stray.address.clone()]);
    stage.router.state().workers.wait_for_ready(2).await;
    for _ in 0..10 {
        assert_eq!(stage.dispatch(1).await.unwrap().worker(), &WorkerId::new("w0"));
    }
    assert_eq!(
        stage.router.state().models.get("tiny").unwrap().fingerprint,
        bytes::Bytes::from_static(b"print")
    );
}

#[tokio::test]
async fn a_silent_worker_is_suspected_then_given_up_and_comes_back() {
    let stage = stage(2, vec![Step::Hold(0)]).await;
    let dispatch = tokio::spawn({
        let (dispatcher, request) = (Arc::clone(&stage.router.state().dispatcher), stage.request(3));
        async move { read(dispatcher.dispatch(request).await.unwrap()).await }
    });
    stage.scene.wait_for_seen(1).await;
    let silent = stage.scene.seen()[0].0.clone();
    let index: usize = silent[1..].parse().unwrap();
    stage.workers[index].mute.send_replace(true);
    stage.wait_for_state(&silent, HealthState::Suspect).await;
    for _ in 0..5 {
        assert_ne!(stage.dispatch(1).await.unwrap().worker().as_str(), silent, "nothing new for a suspect");
    }
    // Once it is given up, the request that waits for its first token goes elsewhere.
    assert_eq!(dispatch.await.unwrap(), (vec![0, 1, 2], Ok(())));
    assert_eq!(stage.worker(&silent).state(), HealthState::Gone);
    stage.workers[index].mute.send_replace(false);
    stage.wait_for_state(&silent, HealthState::Ready).await;
}

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
async fn load_is_zero_after_many_aborted_requests() {
    let stage = stage(2, vec![]).await;
    for round in 0..3 {
        let tasks: Vec<_> = (0..100)
            .map(|i| {
                let (dispatcher, request) = (Arc::clone(&stage.router.state().dispatcher), stage.request(20));
                let task =
                    tokio::spawn(async move { read(dispatcher.dispatch(request).await.unwrap()).await });
                if i % 3 == 0 {
                    task.abort();
                }
                task
            })
            .collect();
        for (i, task) in tasks.into_iter().enumerate() {
            if i % 3 != 0 {
                assert_eq!(task.await.unwrap().0.len(), 20, "round {round}");
            }
        }
        stage.wait_until_idle().await;
    }
}

#[tokio::test]
async fn a_worker_that_flaps_is_known_once() {
    let mut stage = stage(1, vec![]).await;
    let address = stage.workers[0].socket();
    for epoch in 2..7 {
        stage.workers[0].kill();
        let again = v1::DescribeResponse { epoch, ..about("w0") };
        stage.workers[0] = ScriptedWorker::start_at(&stage.scene, again, address);
        while stage.worker("w0").epoch != WorkerEpoch(epoch) {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        stage.wait_for_state("w0", HealthState::Ready).await;
        assert_eq!(stage.router.state().workers.list().len(), 1);
        assert_eq!(read(stage.dispatch(2).await.unwrap()).await, (vec![0, 1], Ok(())));
    }
    assert_eq!(stage.scene.tokenizers_sent.load(Ordering::SeqCst), 1);
    stage.wait_until_idle().await;
}

#[tokio::test]
async fn one_worker_behind_two_addresses_is_known_once() {
    let stage = stage(1, vec![]).await;
    let port = stage.workers[0].address.port();
    let alias = format!("grpc://localhost:{port}").parse().unwrap();
    stage.membership.set([stage.workers[0].address.clone(), alias]);
    let late = ScriptedWorker::start(&stage.scene, about("late"));
    stage.membership.set([stage.workers[0].address.clone(), late.address.clone()]);
    stage.router.state().workers.wait_for_ready(2).await;
    let mut names: Vec<String> =
        stage.router.state().workers.list().iter().map(|w| w.id.to_string()).collect();
    names.sort();
    assert_eq!(names, ["late", "w0"]);
}

#[tokio::test]
async fn a_restarted_worker_matches_nothing_of_its_former_cache() {
    let mut stage = stage(2, vec![]).await;
    let keys = stage.keys();
    let events = vec![BlockEvent::Stored(keys)];
    stage.index.publish(EventBatch { worker: WorkerId::new("w0"), epoch: WorkerEpoch(1), seq: 1, events });
    assert_eq!(stage.router.state().workers.indexed_blocks(&stage.worker("w0")), 6);
    let address = stage.workers[0].socket();
    stage.workers[0].kill();
    stage.workers[0] =
        ScriptedWorker::start_at(&stage.scene, v1::DescribeResponse { epoch: 2, ..about("w0") }, address);
    while stage.worker("w0").epoch == WorkerEpoch(1) {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    stage.wait_for_state("w0", HealthState::Ready).await;
    assert_eq!(stage.router.state().workers.indexed_blocks(&stage.worker("w0")), 0);
    read(stage.dispatch(1).await.unwrap()).await.1.unwrap();
    let metrics = stage.router.state().metrics_text();
    assert!(metrics.contains("thalweg_router_predicted_cached_tokens_total 0\n"), "{metrics}");
}

#[tokio::test]
async fn shutting_down_lets_requests_finish_and_ends_those_that_do_not() {
    let mut config = config();
    config.timeouts.drain_timeout = Duration::from_millis(100);
    let stage = stage_of(config, vec![about("w0")], vec![Step::Hold(2)]).await;
    let held = stage.dispatch(9).await.unwrap();
    let address = stage.router.http_address();
    // An open connection with an unfinished request keeps the server from closing by itself.
    let mut client = tokio::net::TcpStream::connect(address).await.unwrap();
    tokio::io::AsyncWriteExt::write_all(&mut client, b"POST /v1/completions HTTP/1.1\r\n").await.unwrap();
    stage.router.shutdown().await;
    let (tokens, end) = read(held).await;
    assert_eq!((tokens, end.unwrap_err().code), (vec![0, 1], ErrorCode::Draining));
    assert!(tokio::net::TcpStream::connect(address).await.is_err(), "nobody listens any more");
}
