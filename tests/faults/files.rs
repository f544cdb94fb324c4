//! A process without file descriptors to spare, and one whose log has no room.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use thalweg_harness::metrics::Scrape;
use thalweg_harness::{Process, models};

use crate::support::BINARY;

/// Files that a process may open here, and connections that are too many for it.
const FILES: usize = 64;
const CONNECTIONS: usize = 128;
/// A rate limit shows only where many accepts fail.
const FAILURES: f64 = 20.0;
const WARNING: &str = "connections wait because none can be accepted; raise `ulimit -n`";

/// Servers of HTTP and of gRPC say once what is wrong and what to do, count on, and accept again as soon as they can.
#[test]
fn whoever_has_no_file_left_says_so_once_and_accepts_again_later() {
    let router =
        ["router", "--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0", "--worker", "grpc://127.0.0.1:1"];
    check(&router, "router listens", ["http", "http"], "thalweg_router_accept_errors_total");
    check(&router, "router listens", ["grpc", "http"], "thalweg_router_accept_errors_total");
    let model = models::tiny("llama3");
    let model = model.to_str().expect("UTF-8");
    let mut worker = vec!["worker", "--model", model, "--threads", "1", "--kv-cache-memory-bytes", "16MiB"];
    worker.extend(["--grpc", "127.0.0.1:0", "--metrics", "127.0.0.1:0"]);
    check(&worker, "worker serves", ["grpc", "metrics"], "thalweg_worker_accept_errors_total");
}

/// Floods the first address; the second one has the metrics.
fn check(args: &[&str], listens: &str, [flooded, metrics]: [&str; 2], counter: &str) {
    let limited = format!("ulimit -n {FILES}; exec \"$0\" \"$@\"");
    let mut process = Process::start("sh", &[&["-c", &limited, BINARY], args].concat());
    let event = process.logged(listens);
    let address = |name: &str| -> SocketAddr {
        event[name]
            .as_str()
            .and_then(|text| text.parse().ok())
            .unwrap_or_else(|| panic!("no {name}: {event}"))
    };
    let mut scraper = TcpStream::connect(address(metrics)).expect("it listens");
    assert_eq!(scrape(&mut scraper).value(counter), 0.0, "{flooded}");
    let connect = |_| TcpStream::connect(address(flooded)).expect("the backlog has room");
    let flood: Vec<_> = (0..CONNECTIONS).map(connect).collect();
    process.logged(WARNING);
    while scrape(&mut scraper).value(counter) < FAILURES {}
    let warnings = process.log().iter().filter(|event| event["level"] == "WARN");
    let warnings: Vec<_> = warnings.filter(|event| event["message"] == WARNING).collect();
    assert_eq!(warnings.len(), 1, "{flooded}: {warnings:?}");
    drop(flood);
    let mut late = TcpStream::connect(address(metrics)).expect("it listens");
    assert!(scrape(&mut late).value(counter) >= FAILURES, "{flooded}");
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
