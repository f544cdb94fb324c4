//! A process without file descriptors to spare, and one whose log has no room.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use serde_json::Value;
use thalweg_harness::metrics::Scrape;
use thalweg_harness::{Process, models};

use crate::support::BINARY;

/// Files that a process may open here, and idle connections that are too many for it.
const FILES: usize = 64;
const CONNECTIONS: usize = 100;
/// What a process may open that has more files already.
const NO_MORE: usize = 4;
/// A rate limit shows only where many accepts fail.
const FAILURES: f64 = 20.0;
const NO_FILE: &str = "connections wait because none can be accepted; raise `ulimit -n`";
const FULL: &str = "this process has as many connections as it may, others wait; raise `ulimit -n`";

/// Servers of HTTP and of gRPC say once what is wrong and what to do, count on, and accept again as soon as they can.
#[test]
fn whoever_has_no_file_left_says_so_once_and_accepts_again_later() {
    check_no_file(router(), ["http", "http"], "thalweg_router_accept_errors_total");
    check_no_file(router(), ["grpc", "http"], "thalweg_router_accept_errors_total");
    check_no_file(worker(), ["grpc", "metrics"], "thalweg_worker_accept_errors_total");
}

/// A crowd at one address takes neither the files that a process needs for itself nor the places of its other addresses, and is told of
/// once; a worker that was lost meanwhile is found again.
#[tokio::test]
async fn connections_take_some_files_alone() {
    check_full(router(), ["http", "grpc"], "thalweg_router_full_listeners");
    check_full(router(), ["grpc", "http"], "thalweg_router_full_listeners");
    check_full(worker(), ["metrics", "grpc"], "thalweg_worker_full_listeners");
    let (mut one, served) = worker();
    let grpc = served["grpc"].as_str().expect("an address").to_owned();
    let (router, listens) =
        start(&["router", "--http", "127.0.0.1:0", "--worker", &format!("grpc://{grpc}")]);
    let ready = |stream: &mut TcpStream| {
        scrape(stream).count("thalweg_router_worker_state", "state=\"ready\"") == 1.0
    };
    let mut scraper = TcpStream::connect(address(&listens, "http")).expect("it listens");
    while !ready(&mut scraper) {}
    let crowd = crowd(address(&listens, "http"));
    while scrape(&mut scraper).value("thalweg_router_full_listeners") == 0.0 {}
    one.end_at_once();
    while ready(&mut scraper) {}
    let _again = start(&[WORKER, &["--model", &model(), "--grpc", &grpc]].concat());
    let patience = tokio::time::Instant::now() + Duration::from_secs(20);
    while !ready(&mut scraper) {
        assert!(tokio::time::Instant::now() < patience, "the worker is not found again");
    }
    drop((crowd, router));
}

/// Where the system allows more files than it has set for a start, they are used.
#[test]
fn the_limit_of_files_is_raised() {
    let raised = format!("ulimit -Sn {FILES}; exec \"$0\" \"$@\"");
    let mut process = Process::start("sh", &[&["-c", &raised, BINARY], ROUTER].concat());
    process.logged("router listens");
    assert!(process.files_max() > FILES, "{}", process.files_max());
}

const ROUTER: &[&str] =
    &["router", "--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0", "--worker", "grpc://127.0.0.1:1"];
const WORKER: &[&str] =
    &["worker", "--threads", "1", "--kv-cache-memory-bytes", "16MiB", "--metrics", "127.0.0.1:0"];

fn model() -> String {
    models::tiny("llama3").to_str().expect("UTF-8").to_owned()
}

fn router() -> (Process, Value) {
    start(ROUTER)
}

fn worker() -> (Process, Value) {
    start(&[WORKER, &["--model", &model(), "--grpc", "127.0.0.1:0"]].concat())
}

/// A process with few files, and where it listens.
fn start(args: &[&str]) -> (Process, Value) {
    let limited = format!("ulimit -n {FILES}; exec \"$0\" \"$@\"");
    let mut process = Process::start("sh", &[&["-c", &limited, BINARY], args].concat());
    let listens = process.logged(if args[0] == "router" { "router listens" } else { "worker serves" });
    (process, listens)
}

fn address(listens: &Value, name: &str) -> SocketAddr {
    let address = listens[name].as_str().and_then(|text| text.parse().ok());
    address.unwrap_or_else(|| panic!("no {name}: {listens}"))
}

/// Connections that say nothing, until they are dropped.
fn crowd(address: SocketAddr) -> Vec<TcpStream> {
    (0..CONNECTIONS).map(|_| TcpStream::connect(address).expect("the backlog has room")).collect()
}

fn warnings(process: &mut Process, message: &str) -> usize {
    process.log().iter().filter(|event| event["level"] == "WARN" && event["message"] == message).count()
}

/// Crowds the first address of one that may open nothing more; the second address has the metrics.
fn check_no_file((mut process, listens): (Process, Value), [crowded, metrics]: [&str; 2], counter: &str) {
    let mut scraper = TcpStream::connect(address(&listens, metrics)).expect("it listens");
    assert_eq!(scrape(&mut scraper).value(counter), 0.0, "{crowded}");
    process.limit_files(NO_MORE);
    let late = TcpStream::connect(address(&listens, crowded)).expect("the backlog has room");
    process.logged(NO_FILE);
    while scrape(&mut scraper).value(counter) < FAILURES {}
    assert_eq!(warnings(&mut process, NO_FILE), 1, "{crowded}");
    process.limit_files(FILES);
    drop(late);
    let mut late = TcpStream::connect(address(&listens, metrics)).expect("it listens");
    assert!(scrape(&mut late).value(counter) >= FAILURES, "{crowded}");
    process.kill();
}

/// Crowds the first address; who comes later to the one with the metrics is served at once if that is another one.
fn check_full((mut process, listens): (Process, Value), [crowded, other]: [&str; 2], gauge: &str) {
    let metrics = if listens["metrics"].is_null() { "http" } else { "metrics" };
    let mut scraper = TcpStream::connect(address(&listens, metrics)).expect("it listens");
    assert_eq!(scrape(&mut scraper).value(gauge), 0.0, "{crowded}");
    let crowd = crowd(address(&listens, crowded));
    process.logged(FULL);
    while scrape(&mut scraper).value(gauge) != 1.0 {}
    if other == metrics {
        let mut late = TcpStream::connect(address(&listens, other)).expect("it listens");
        assert_eq!(scrape(&mut late).value(gauge), 1.0, "{other} has places of its own");
    }
    assert_eq!((warnings(&mut process, FULL), warnings(&mut process, NO_FILE)), (1, 0), "{crowded}");
    drop(crowd);
    while scrape(&mut scraper).value(gauge) != 0.0 {}
    process.kill();
}

/// Over a connection that stays open.
fn scrape(stream: &mut TcpStream) -> Scrape {
    stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n").expect("it reads");
    let (mut text, mut piece) = (Vec::new(), [0; 16 << 10]);
    let length = |text: &[u8]| -> Option<(usize, usize)> {
        let text = String::from_utf8_lossy(text);
        let (head, _) = text.split_once("\r\n\r\n")?;
        let length = head.to_lowercase().split_once("content-length: ")?.1.lines().next()?.parse().ok()?;
        Some((head.len() + 4, length))
    };
    loop {
        if let Some((head, body)) = length(&text)
            && text.len() == head + body
        {
            return Scrape::parse(std::str::from_utf8(&text[head..]).expect("UTF-8"));
        }
        let read = stream.read(&mut piece).expect("it answers");
        assert!(read > 0, "it closes the connection");
        text.extend_from_slice(&piece[..read]);
    }
}

/// Lines are lost, and nothing else: processes start, answer and end in order.
#[tokio::test]
async fn a_log_without_room_costs_lines_alone() {
    let model = models::tiny("llama3");
    let model = model.to_str().expect("UTF-8");
    let mut args = vec!["up", "--model", model, "--threads", "1", "--kv-cache-memory-bytes", "16MiB"];
    args.extend(["--http", "127.0.0.1:0"]);
    args.extend(["--log-level", "debug"]);
    let mut process = Process::start_without_log(BINARY, &args);
    let ready = process.stdout_line();
    let address = ready.split_once("http://").and_then(|(_, rest)| rest.split_once('/'));
    let address = address.unwrap_or_else(|| panic!("{ready}")).0;
    let mut stream = TcpStream::connect(address).expect("it listens");
    assert!(scrape(&mut stream).value("thalweg_router_accept_errors_total") == 0.0);
    process.signal("TERM");
    assert_eq!(process.ended(Duration::from_secs(30)).await, Some(0));
}
