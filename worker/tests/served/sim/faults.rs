//! What a profile's faults make of a worker, as its router sees it.

use std::os::unix::process::ExitStatusExt;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use thalweg_cache_index::{CacheIndex, EventBatch, Replica};
use thalweg_model::tokenizer::Specials;
use thalweg_proto::code::ErrorCode;
use thalweg_proto::v1;
use tokio::time::{Instant, timeout};

use super::{FAST, Sim, start, tokenizer};
use crate::fixture::{Fixture, PATIENCE, generate, load_until, metric, read, request, serve};

/// Faults of streams, which their reader sees.
#[tokio::test(flavor = "multi_thread")]
async fn streams_go_wrong_as_told() {
    let (sim, Fixture { worker, mut client }) = start(FAST, "").await;
    let sound = generate(&mut client, request(&[3; 20], 8)).await.unwrap().tokens().to_vec();
    type Check = fn(&[u32], &[v1::GenerateResponse]) -> bool;
    let cases: [(&str, Check); 4] = [
        ("invalid_ids", |sound, got| ids(got).iter().zip(sound).all(|(id, right)| *id == right + 49152)),
        ("out_of_order", |sound, got| ids(got).len() == 8 && ids(got)[..2] == [sound[1], sound[0]]),
        ("unknown_choice", |_, got| got.iter().flat_map(|m| &m.deltas).all(|d| d.index == 1000)),
        ("truncated", |sound, got| ids(got) == sound[..2]),
    ];
    for (garbage, is_as_told) in cases {
        sim.switch(&format!("{FAST}faults: {{garbage: {garbage}}}"));
        until(async || {
            let mut stream = client.generate(request(&[3; 20], 8)).await.unwrap().into_inner();
            let mut got = Vec::new();
            while let Some(message) = stream.message().await.unwrap() {
                got.push(message);
            }
            is_as_told(&sound, &got)
        })
        .await;
    }
    sim.switch("nonsense: 1");
    sim.switch(FAST);
    until(async || {
        let mut stream = client.generate(request(&[3; 20], 8)).await.unwrap().into_inner();
        let mut got = Vec::new();
        while let Some(message) = stream.message().await.unwrap() {
            got.push(message);
        }
        ids(&got) == sound
    })
    .await;
    worker.shutdown(Duration::ZERO).await;
}

fn ids(messages: &[v1::GenerateResponse]) -> Vec<u32> {
    messages.iter().flat_map(|m| &m.deltas).flat_map(|d| d.token_ids.clone()).collect()
}

/// Tries until it holds; the test fails when it does not in time.
async fn until(mut holds: impl AsyncFnMut() -> bool) {
    let begin = Instant::now();
    while !holds().await {
        assert!(begin.elapsed() < PATIENCE, "it never came to hold");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn delayed_and_slow_streams_hurt_nobody_else() {
    let slow = "faults: {delay_seconds: 0.2, slow_seconds: 0.05}";
    let (sim, Fixture { worker, mut client }) = start(&format!("{FAST}{slow}"), "").await;
    let begin = Instant::now();
    let mut stream = client.generate(request(&[3; 20], 4)).await.unwrap().into_inner();
    assert!(stream.message().await.unwrap().is_some());
    assert!(begin.elapsed() >= Duration::from_millis(200), "{:?}", begin.elapsed());
    read(&mut stream).await;
    assert!(begin.elapsed() >= Duration::from_millis(350), "{:?}", begin.elapsed());
    sim.switch("faults: {delay_seconds: 3600}");
    let mut held = loop {
        let mut stream = client.generate(request(&[4; 20], 4)).await.unwrap().into_inner();
        if timeout(Duration::from_secs(1), stream.message()).await.is_err() {
            break stream;
        }
    };
    // Its steps went on behind its back, and a switch lets go of what it holds.
    load_until(&mut client, |load| load.running == 0 && load.steps >= 8).await;
    sim.switch(FAST);
    assert_eq!(timeout(PATIENCE, read(&mut held)).await.unwrap().tokens().len(), 4);
    worker.shutdown(Duration::ZERO).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stalled_worker_takes_requests_and_makes_no_step() {
    let (sim, Fixture { worker, mut client }) = start("faults: {stall: true}", "").await;
    let mut stream = client.generate(request(&[3; 20], 4)).await.unwrap().into_inner();
    let before = load_until(&mut client, |load| load.running == 1).await.steps;
    let mut watch = client.watch_load(v1::WatchLoadRequest::default()).await.unwrap().into_inner();
    for _ in 0..3 {
        let report = watch.message().await.unwrap().unwrap();
        assert_eq!((report.running, report.steps), (1, before), "reports go on, steps do not");
    }
    sim.switch("");
    assert_eq!(timeout(PATIENCE, read(&mut stream)).await.unwrap().tokens().len(), 4);
    sim.switch("faults: {stall: true}");
    // Even a device that hangs does not keep the process from ending, nor its streams from being told.
    let mut hung = loop {
        let mut stream = client.generate(request(&[4; 20], 4)).await.unwrap().into_inner();
        if timeout(Duration::from_millis(300), stream.message()).await.is_err() {
            break stream;
        }
    };
    let last = tokio::spawn(async move { read(&mut hung).await });
    timeout(PATIENCE, worker.shutdown(Duration::ZERO)).await.expect("an end");
    assert_eq!(ErrorCode::of(&last.await.unwrap().error.expect("no bare cut")), ErrorCode::Draining);
}

#[tokio::test(flavor = "multi_thread")]
async fn it_refuses_and_falls_silent() {
    let (sim, Fixture { worker, mut client }) = start("faults: {refuse: true, silent: true}", "").await;
    let refused = client.generate(request(&[3; 20], 4)).await.unwrap_err();
    assert_eq!(
        (ErrorCode::of(&refused), refused.code()),
        (ErrorCode::Overloaded, tonic::Code::ResourceExhausted)
    );
    let mut watch = client.watch_load(v1::WatchLoadRequest::default()).await.unwrap().into_inner();
    // Two heartbeats long.
    assert!(
        timeout(Duration::from_millis(600), watch.message()).await.is_err(),
        "the stream stays open, silent"
    );
    sim.switch("");
    assert!(timeout(PATIENCE, watch.message()).await.unwrap().unwrap().is_some());
    assert_eq!(generate(&mut client, request(&[3; 20], 4)).await.unwrap().tokens().len(), 4);
    worker.shutdown(Duration::ZERO).await;
}

#[derive(Default)]
struct Recorder {
    seqs: Mutex<Vec<u64>>,
    replica: Arc<Replica>,
}

impl CacheIndex for Recorder {
    fn publish(&self, batch: EventBatch) {
        self.seqs.lock().push(batch.seq);
    }

    fn replica(&self) -> Arc<Replica> {
        self.replica.clone()
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn cache_events_go_astray_as_told() {
    let cases = [
        ("lost", vec![1, 2, 4, 5]),
        ("duplicated", vec![1, 2, 3, 3, 4, 5]),
        ("reordered", vec![1, 2, 4, 3, 5]),
    ];
    for (fault, expected) in cases {
        let sim = Sim::load(&format!("faults: {{cache_events: {fault}}}"), "").await;
        let index = Arc::new(Recorder::default());
        let Fixture { worker, mut client } = serve(&sim.model, index.clone()).await;
        for number in 0..4 {
            // Each in a batch of its own: the next request comes when this one's blocks have been told.
            let told = metric(&worker, "thalweg_worker_cache_batches_total").await;
            generate(&mut client, request(&[number; 20], 4)).await.unwrap();
            until(async || metric(&worker, "thalweg_worker_cache_batches_total").await > told).await;
        }
        assert_eq!(*index.seqs.lock(), expected, "{fault}");
        worker.shutdown(Duration::ZERO).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_prompt_that_panics_ends_the_engine_with_the_reason() {
    let (_sim, Fixture { worker, mut client }) =
        start(&format!("{FAST}faults: {{panic_on: poison}}"), "").await;
    let tokenizer = tokenizer(&mut client).await;
    let prompt = tokenizer.encode("Do not drink the poison.", Specials::Plain, false);
    let mut other = client.generate(request(&[3; 20], 900)).await.unwrap().into_inner();
    assert!(other.message().await.unwrap().is_some());
    let status = generate(&mut client, request(&prompt, 4)).await.unwrap_err();
    let others = read(&mut other).await.error.expect("its engine is gone");
    let reason = worker.engine().ended().await;
    for (code, text) in [
        (ErrorCode::of(&status), status.message()),
        (ErrorCode::of(&others), others.message()),
        (ErrorCode::Unavailable, &reason),
    ] {
        assert_eq!(code, ErrorCode::Unavailable);
        assert!(text.contains("panicked") && text.contains("panic_on"), "{text}");
    }
    let after = client.generate(request(&[3; 20], 4)).await.unwrap_err();
    assert_eq!(ErrorCode::of(&after), ErrorCode::Unavailable);
    worker.shutdown(Duration::ZERO).await;
}

/// In a process of its own, which is this test once more.
#[tokio::test(flavor = "multi_thread")]
async fn a_prompt_that_aborts_takes_the_process_along() {
    const CHILD: &str = "THALWEG_TEST_ABORTS";
    if std::env::var_os(CHILD).is_some() {
        let (_sim, Fixture { worker: _worker, mut client }) = start("faults: {abort_on: [7, 8]}", "").await;
        generate(&mut client, request(&[8, 7, 7], 4)).await.expect("a harmless prompt");
        let _ = generate(&mut client, request(&[1, 7, 8, 9], 4)).await;
        return;
    }
    let name = "sim::faults::a_prompt_that_aborts_takes_the_process_along";
    let mut child = std::process::Command::new(std::env::current_exe().unwrap());
    let child = child.args(["--exact", name]).env(CHILD, "1").output();
    let child = tokio::task::spawn_blocking(move || child).await.unwrap().unwrap();
    assert_eq!(child.status.signal(), Some(libc::SIGABRT), "{child:?}");
}
