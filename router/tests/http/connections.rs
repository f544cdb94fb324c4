//! Connections that bring nothing, and the end of a router.

use std::net::SocketAddr;
use std::time::Duration;

use futures::StreamExt;
use http::StatusCode;
use http_body_util::{BodyExt, Full};
use hyper_util::rt::{TokioExecutor, TokioIo};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::Instant;

use crate::speaking_worker::responses;
use crate::{COMPLETIONS, Stage, completion, stage, stage_with};

/// What a connection brings until it is closed.
async fn bytes_until_closed(mut socket: TcpStream) -> String {
    let mut bytes = Vec::new();
    // A reset is an end as well.
    let _ = socket.read_to_end(&mut bytes).await;
    String::from_utf8(bytes).unwrap()
}

async fn raw(address: SocketAddr, text: &str) -> TcpStream {
    let mut socket = TcpStream::connect(address).await.unwrap();
    socket.write_all(text.as_bytes()).await.unwrap();
    socket
}

#[tokio::test]
async fn a_connection_that_never_completes_a_request_is_closed() {
    let stage = stage().await;
    let address = stage.router.http_address();
    let silent = [
        raw(address, "").await,
        raw(address, "P").await,
        raw(address, "GET /health HTTP/1.1\r\nhost: x\r\n").await,
    ];
    let busy = raw(address, "GET /health HTTP/1.1\r\nhost: x\r\n\r\n").await;
    let start = Instant::now();
    for socket in silent {
        assert_eq!(bytes_until_closed(socket).await, "");
    }
    assert!((9..20).contains(&start.elapsed().as_secs()), "after {:?}", start.elapsed());
    // One that has been served is kept for its next request.
    let mut head = [0; 12];
    let mut busy = busy;
    busy.read_exact(&mut head).await.unwrap();
    busy.write_all(b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n").await.unwrap();
    assert_eq!(bytes_until_closed(busy).await.matches("HTTP/1.1 200").count(), 1);
}

/// Replies for which the head is enough: the rest of the request is read all the same, so that the next one on the connection is served, and a
/// client that writes on sees its reply.
#[tokio::test]
async fn what_a_refused_request_leaves_unread_does_not_end_its_connection() {
    let stage = stage_with(|c| c.limits.body_bytes_max = 64 << 10, true).await;
    let head_of = |path: &str, length: usize| {
        format!("POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {length}\r\n")
    };
    for (path, length, status) in
        [("/nowhere", 1000, "404"), ("/health", 5 << 20, "405"), (COMPLETIONS, 5 << 20, "413")]
    {
        let head = format!("{}content-type: application/json\r\n\r\n", head_of(path, length));
        let mut socket = raw(stage.router.http_address(), &head).await;
        tokio::time::sleep(Duration::from_millis(20)).await;
        let body = vec![b' '; length];
        socket.write_all(&body).await.unwrap_or_else(|error| panic!("{status}: {error}"));
        socket.write_all(b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n").await.unwrap();
        let replies = bytes_until_closed(socket).await;
        assert!(replies.starts_with(&format!("HTTP/1.1 {status}")), "{replies}");
        assert!(replies.contains("HTTP/1.1 200"), "{status}: {replies}");
    }
    // A client that waits to be asked for its body, and one whose body is too long to be read, are told that the connection ends.
    for more in ["expect: 100-continue\r\ncontent-length: 1000", "content-length: 99000000"] {
        let head = format!("POST /nowhere HTTP/1.1\r\nhost: x\r\n{more}\r\n\r\n");
        let replies = bytes_until_closed(raw(stage.router.http_address(), &head).await).await;
        assert!(replies.starts_with("HTTP/1.1 404"), "{replies}");
        assert!(replies.to_lowercase().contains("connection: close"), "{replies}");
    }
}

/// Bodies that stay away halfway hold memory for as long as a client may stall; all of them together no more than is allowed.
#[tokio::test]
async fn bodies_that_have_come_in_part_are_bounded_together() {
    let narrow = |c: &mut thalweg_router::config::RouterConfig| {
        (c.limits.body_bytes_max, c.limits.body_buffer_bytes_max) = (64 << 10, 100 << 10);
    };
    let stage = stage_with(narrow, true).await;
    let half = format!(
        "POST {COMPLETIONS} HTTP/1.1\r\nhost: x\r\ncontent-length: {}\r\n\r\n{}",
        64 << 10,
        " ".repeat(60 << 10)
    );
    let held = raw(stage.router.http_address(), &half).await;
    let mut large = completion(json!({"stream": false}));
    large["user"] = "u".repeat(60 << 10).into();
    loop {
        let refused = stage.http.post(COMPLETIONS, &large).await;
        if refused.status == 429 {
            assert!(
                refused.headers.contains_key("retry-after") && refused.text.contains("in part"),
                "{}",
                refused.text
            );
            break;
        }
    }
    assert_eq!(
        stage.http.post(COMPLETIONS, &completion(json!({"stream": false}))).await.status,
        200,
        "small ones fit"
    );
    drop(held);
    while stage.http.post(COMPLETIONS, &large).await.status == 429 {}
}

#[tokio::test]
async fn a_body_that_drips_is_given_up_and_a_slow_one_is_not() {
    let stage = stage_with(|c| c.timeouts.client_stall_timeout = Duration::from_secs(1), true).await;
    let body = completion(json!({"stream": false})).to_string();
    let head = format!(
        "POST {COMPLETIONS} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-type: application/json\r\n\
         content-length: {}\r\n\r\n",
        body.len()
    );
    // Each byte comes well before a client counts as stalled.
    let drips = async |parts: usize| {
        let mut socket = raw(stage.router.http_address(), &head).await;
        let (start, mut ticks) = (Instant::now(), tokio::time::interval(Duration::from_millis(200)));
        for part in body.as_bytes().chunks(body.len().div_ceil(parts)) {
            ticks.tick().await;
            if socket.write_all(part).await.is_err() {
                break;
            }
        }
        (bytes_until_closed(socket).await, start.elapsed())
    };
    let ((slow, _), (dripping, took)) = tokio::join!(drips(3), drips(30));
    assert!(slow.starts_with("HTTP/1.1 200"), "{slow}");
    // What was on its way to a closed connection may reset it, and the answer with it.
    assert!(dripping.is_empty() || dripping.starts_with("HTTP/1.1 400"), "{dripping}");
    assert!(took < Duration::from_secs(4), "open for {took:?}");
    let metrics = stage.http.get("/metrics").await.text;
    assert!(metrics.contains("outcome=\"invalid_request\"} 1"), "{metrics}");
}

#[tokio::test]
async fn a_client_that_reads_nothing_is_cut_off_and_its_worker_is_told() {
    let stage = stage_with(|c| c.timeouts.client_stall_timeout = Duration::from_secs(1), true).await;
    let text = "x".repeat(400);
    stage.worker.script(move |request| {
        let mut messages = responses(request, &text);
        messages.pop();
        // Alternatives of each token are more than a socket holds.
        let endless = futures::stream::iter(messages).chain(futures::stream::pending());
        endless.map(Ok).boxed()
    });
    let body = completion(json!({"stream": true, "n": 64, "logprobs": 20, "max_tokens": 450})).to_string();
    let head = format!(
        "POST {COMPLETIONS} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    );
    let start = Instant::now();
    let silent = raw(stage.router.http_address(), &head).await;
    stage.worker.begun(1).await;
    stage.worker.ended(1).await;
    assert!(start.elapsed() < Duration::from_secs(10), "{:?}", start.elapsed());
    let cut = async {
        while !stage.http.get("/metrics").await.text.contains("outcome=\"cancelled\"} 1") {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(10), cut).await.expect("it is counted as cut off");
    drop(silent);
}

/// Says a token, waits for the word, says the rest.
fn waits(stage: &Stage) -> tokio::sync::watch::Sender<bool> {
    let go = tokio::sync::watch::Sender::new(false);
    let word = go.clone();
    stage.worker.script(move |request| {
        let mut messages = responses(request, "abc");
        let rest = messages.split_off(2);
        let mut word = word.subscribe();
        let rest = futures::stream::once(async move {
            word.wait_for(|go| *go).await.map(drop).unwrap();
            futures::stream::iter(rest)
        });
        futures::stream::iter(messages).chain(rest.flatten()).map(Ok).boxed()
    });
    go
}

#[tokio::test]
async fn a_draining_router_takes_requests_for_the_delay_and_finishes_all_of_them() {
    // drain-01, drain-02.
    let delay = Duration::from_millis(1_500);
    let Stage { worker, router, http } = stage_with(|c| c.timeouts.drain_delay = delay, true).await;
    let stage = Stage { worker, router, http };
    let go = waits(&stage);
    let address = stage.router.http_address();
    let mut streams = Vec::new();
    for _ in 0..10 {
        streams.push(stage.http.open(COMPLETIONS, &completion(json!({"stream": true}))).await);
    }
    stage.worker.begun(10).await;
    let Stage { worker, router, http } = stage;
    let ended = tokio::spawn(router.shutdown());
    let start = Instant::now();
    while http.get("/ready").await.status == StatusCode::OK {
        tokio::task::yield_now().await;
    }
    // Whoever has not noticed yet is served on connections of its own, and asked to go.
    let mut served = 0;
    while start.elapsed() < delay / 2 {
        let health = http.get("/health").await;
        assert_eq!((health.status, health.header("connection")), (StatusCode::OK, Some("close")));
        served += 1;
    }
    assert!(served > 0);
    worker.says("ok");
    let late = http.post(COMPLETIONS, &completion(json!({}))).await.json();
    assert_eq!(late["choices"][0]["text"], "ok");
    go.send_replace(true);
    for stream in streams {
        let chunks = stream.read().await.chunks();
        assert_eq!(crate::streamed_text(&chunks, 0), "abc");
    }
    ended.await.unwrap();
    assert!(start.elapsed() >= delay, "ended after {:?}", start.elapsed());
    assert!(TcpStream::connect(address).await.is_err(), "nobody listens any more");
}

#[tokio::test]
async fn idle_connections_do_not_hold_up_the_end() {
    let stage = stage().await;
    let mut idle = raw(stage.router.http_address(), "GET /health HTTP/1.1\r\nhost: x\r\n\r\n").await;
    idle.read_exact(&mut [0; 12]).await.unwrap();
    let start = Instant::now();
    stage.router.shutdown().await;
    assert!(start.elapsed() < Duration::from_secs(5), "{:?}", start.elapsed());
    bytes_until_closed(idle).await;
}

#[tokio::test]
async fn what_the_drain_timeout_ends_is_told_so() {
    let stage = stage_with(|c| c.timeouts.drain_timeout = Duration::from_millis(200), true).await;
    let _never = waits(&stage);
    let streams = [true, true, false].map(|streamed| {
        let http = stage.http.clone();
        tokio::spawn(async move { http.post(COMPLETIONS, &completion(json!({"stream": streamed}))).await })
    });
    stage.worker.begun(3).await;
    let Stage { router, worker: _worker, .. } = stage;
    router.shutdown().await;
    for stream in streams {
        let reply = stream.await.unwrap();
        let error: Value = match reply.events().last() {
            Some(event) => serde_json::from_str(event).unwrap(),
            None => reply.json(),
        };
        assert_eq!(error["error"]["code"], "draining", "{}", reply.text);
    }
}

#[tokio::test]
async fn http2_clients_are_served_and_told_to_go() {
    let delay = Duration::from_secs(1);
    let stage = stage_with(|c| c.timeouts.drain_delay = delay, true).await;
    let address = stage.router.http_address();
    let socket = TokioIo::new(TcpStream::connect(address).await.unwrap());
    let (mut client, connection) =
        hyper::client::conn::http2::handshake(TokioExecutor::new(), socket).await.unwrap();
    let connection = tokio::spawn(connection);
    let get = |client: &mut hyper::client::conn::http2::SendRequest<Full<bytes::Bytes>>| {
        let uri = format!("http://{address}/health");
        client.send_request(http::Request::get(uri).body(Full::default()).unwrap())
    };
    let reply = get(&mut client).await.unwrap();
    assert_eq!(reply.status(), StatusCode::OK);
    assert!(reply.into_body().collect().await.unwrap().to_bytes().starts_with(b"{"));
    let ended = tokio::spawn(stage.router.shutdown());
    // GOAWAY ends the client's connection in order, well before the router ends.
    connection.await.unwrap().unwrap();
    assert!(!ended.is_finished());
    ended.await.unwrap();
}

#[tokio::test]
async fn words_of_the_client_are_repeated_in_part_only() {
    let stage = stage().await;
    let long = "x".repeat(100_000);
    let named = stage.http.post(COMPLETIONS, &completion(json!({"model": long}))).await;
    let biased = stage.http.post(COMPLETIONS, &completion(json!({"logit_bias": {&long: 1}}))).await;
    let lost = stage.http.get(&format!("/{}", &long[..50_000])).await;
    for reply in [named, biased, lost] {
        assert!(reply.text.len() < 1_000, "{} bytes", reply.text.len());
        assert!(reply.error()["message"].as_str().unwrap().contains("xxx..."));
    }
}
