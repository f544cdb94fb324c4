//! A server of few words: reads requests, answers by a script.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use serde_json::Value;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Barrier;

type Script = dyn Fn(usize, &str) -> Reply + Send + Sync;

/// What is sent back.
pub(crate) struct Reply {
    status: u16,
    headers: String,
    chunks: Vec<String>,
    cut: bool,
}

/// Listens until it is dropped.
pub(crate) struct Server {
    pub(crate) url: String,
    seen: Arc<Seen>,
}

#[derive(Default)]
struct Seen {
    number: AtomicUsize,
    now: AtomicUsize,
    most: AtomicUsize,
    heads: Mutex<Vec<String>>,
    bodies: Mutex<Vec<Value>>,
}

impl Reply {
    pub(crate) fn stream(worker: &str, chunks: &[String]) -> Self {
        let headers = format!("content-type: text/event-stream\r\nx-thalweg-worker: {worker}\r\n");
        Self { status: 200, headers, chunks: chunks.to_vec(), cut: false }
    }

    pub(crate) fn status(status: u16) -> Self {
        Self { status, headers: String::new(), chunks: vec!["{}".into()], cut: false }
    }

    pub(crate) fn json(body: &Value) -> Self {
        Self { status: 200, headers: String::new(), chunks: vec![body.to_string()], cut: false }
    }

    /// The connection breaks before the end.
    pub(crate) fn cut(self) -> Self {
        Self { cut: true, ..self }
    }
}

impl Server {
    pub(crate) async fn start(script: impl Fn(usize, &str) -> Reply + Send + Sync + 'static) -> Self {
        Self::start_held(1, script).await
    }

    /// Answers only once `count` requests wait.
    pub(crate) async fn start_held(
        count: usize,
        script: impl Fn(usize, &str) -> Reply + Send + Sync + 'static,
    ) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let seen = Arc::new(Seen::default());
        let (script, barrier): (Arc<Script>, _) = (Arc::new(script), Arc::new(Barrier::new(count)));
        let shared = Arc::clone(&seen);
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                tokio::spawn(serve(stream, Arc::clone(&shared), Arc::clone(&script), Arc::clone(&barrier)));
            }
        });
        Self { url, seen }
    }

    pub(crate) fn most_at_once(&self) -> usize {
        self.seen.most.load(Ordering::SeqCst)
    }

    /// Of requests to generate, in order of arrival.
    pub(crate) fn bodies(&self) -> Vec<Value> {
        self.seen.bodies.lock().unwrap().clone()
    }

    /// Request lines and headers.
    pub(crate) fn heads(&self) -> Vec<String> {
        self.seen.heads.lock().unwrap().clone()
    }
}

/// Requests of one connection, one after the other.
async fn serve(stream: TcpStream, seen: Arc<Seen>, script: Arc<Script>, barrier: Arc<Barrier>) {
    let mut stream = BufReader::new(stream);
    while let Some((head, body)) = read_request(&mut stream).await {
        if let Ok(body) = serde_json::from_slice(&body) {
            seen.bodies.lock().unwrap().push(body);
        }
        seen.heads.lock().unwrap().push(head.clone());
        seen.most.fetch_max(seen.now.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
        barrier.wait().await;
        let reply = script(seen.number.fetch_add(1, Ordering::SeqCst), &head);
        seen.now.fetch_sub(1, Ordering::SeqCst);
        if send(stream.get_mut(), &reply).await.is_err() || reply.cut {
            return;
        }
    }
}

async fn read_request(stream: &mut BufReader<TcpStream>) -> Option<(String, Vec<u8>)> {
    let mut head = String::new();
    while !head.ends_with("\r\n\r\n") {
        if stream.read_line(&mut head).await.ok()? == 0 {
            return None;
        }
    }
    let length = head.lines().find_map(|line| line.strip_prefix("content-length: "));
    let mut body = vec![0; length.map_or(0, |length| length.parse().unwrap())];
    stream.read_exact(&mut body).await.ok()?;
    Some((head, body))
}

async fn send(stream: &mut TcpStream, reply: &Reply) -> std::io::Result<()> {
    let head = format!("HTTP/1.1 {} x\r\n{}transfer-encoding: chunked\r\n\r\n", reply.status, reply.headers);
    stream.write_all(head.as_bytes()).await?;
    for chunk in &reply.chunks {
        stream.write_all(format!("{:x}\r\n{chunk}\r\n", chunk.len()).as_bytes()).await?;
    }
    if !reply.cut {
        stream.write_all(b"0\r\n\r\n").await?;
    }
    stream.flush().await
}
