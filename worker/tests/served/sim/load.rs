//! More than a worker can take, and its end.

use std::time::Duration;

use thalweg_proto::code::ErrorCode;
use thalweg_proto::v1;
use tokio::time::{Instant, timeout};

use super::start;
use crate::fixture::{Fixture, PATIENCE, Reply, generate, load_until, read, request};

/// A worker takes max_num_seqs requests, and one second of prefill on top; the rest is refused at once.
#[tokio::test(flavor = "multi_thread")]
async fn overload_is_refused_at_once() {
    // 200 tokens a second; the prompts below take 0.25 s each.
    let profile = "step: {prefill_token_seconds: 0.005, base_seconds: 0.001}\nfaults: {stall: true}";
    let (sim, Fixture { worker, mut client }) =
        start(profile, "--max-num-seqs 2 --max-num-batched-tokens 64").await;
    let mut streams = Vec::new();
    for number in 0..2 {
        streams.push(client.generate(request(&[number; 50], 4)).await.unwrap().into_inner());
    }
    load_until(&mut client, |load| load.running == 1).await;
    let begin = Instant::now();
    let mut refused = 0;
    for number in 2..40 {
        match client.generate(request(&[number; 50], 4)).await {
            Ok(stream) => streams.push(stream.into_inner()),
            Err(status) => {
                assert_eq!(status.code(), tonic::Code::ResourceExhausted, "{status:?}");
                assert!(status.message().contains("all places are taken"), "{status:?}");
                refused += 1;
            }
        }
    }
    assert!(begin.elapsed() < Duration::from_secs(5), "{:?}", begin.elapsed());
    // Of the first one's tokens some may be counted as computed: it is in a step that does not end.
    assert!((4..=6).contains(&streams.len()), "{} were taken", streams.len());
    assert_eq!(streams.len() + refused, 40);
    sim.switch("");
    for mut stream in streams {
        assert_eq!(timeout(PATIENCE, read(&mut stream)).await.unwrap().tokens().len(), 4);
    }
    // A long prompt has its turn where a place is free.
    assert_eq!(generate(&mut client, request(&[99; 300], 1)).await.unwrap().tokens().len(), 1);
    worker.shutdown(Duration::ZERO).await;
}

/// Asked by RPC or by whoever ends the process, it comes to the same.
#[tokio::test(flavor = "multi_thread")]
async fn what_still_runs_behind_the_drain_timeout_is_handed_over() {
    for by_rpc in [true, false] {
        let (_sim, Fixture { worker, mut client }) = start("step: {base_seconds: 0.01}", "").await;
        let mut running = client.generate(request(&[3; 20], 900)).await.unwrap().into_inner();
        let mut reply = Reply::default();
        reply.take(running.message().await.unwrap().unwrap());
        let mut watch = client.watch_load(v1::WatchLoadRequest::default()).await.unwrap().into_inner();
        assert_eq!(watch.message().await.unwrap().unwrap().state(), v1::WorkerState::Ready);
        let engine = worker.engine().clone();
        if by_rpc {
            assert_eq!(client.drain(v1::DrainRequest {}).await.unwrap().into_inner().running, 1);
        }
        let ending = tokio::spawn(worker.shutdown(Duration::from_millis(300)));
        engine.draining().await;
        let refused = client.generate(request(&[3; 20], 4)).await.unwrap_err();
        assert_eq!(
            (ErrorCode::of(&refused), refused.code()),
            (ErrorCode::Draining, tonic::Code::Unavailable)
        );
        while watch.message().await.unwrap().unwrap().state() != v1::WorkerState::Draining {}
        let rest = timeout(PATIENCE, read(&mut running)).await.unwrap();
        let status = rest.error.as_ref().expect("no bare cut");
        assert!(ErrorCode::of(status) == ErrorCode::Draining && ErrorCode::of(status).retry_elsewhere());
        assert!(rest.tokens().len() > 5, "it ran on until then");
        timeout(PATIENCE, ending).await.unwrap().unwrap();
    }
}
