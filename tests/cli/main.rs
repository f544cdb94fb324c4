//! The binary as scripts meet it: exit codes, messages, signals.

mod flags;

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use serde_json::json;
use thalweg_harness::{Cluster, HttpClient, Process, Scrape, models};

const BINARY: &str = env!("CARGO_BIN_EXE_thalweg");

/// Needs of a subcommand beside the option that is looked at.
const ROUTER: &[&str] = &["router", "--worker=grpc://127.0.0.1:1", "--http=127.0.0.1:0"];
const WORKER: &[&str] = &["worker", "--model=/nonexistent"];
const UP: &[&str] = &["up", "--model=/nonexistent"];
const SERVE: &[&str] = &["bench", "serve", "--url=http://127.0.0.1:1"];
const ENGINE: &[&str] = &["bench", "engine", "--model=/nonexistent"];
const TOP: &[&str] = &["index", "top", "--index=redis://127.0.0.1:1"];
const WHO_HAS: &[&str] = &["index", "who-has", "--index=redis://127.0.0.1:1"];

/// A file of this test process alone.
fn scratch(name: &str, content: &[u8]) -> PathBuf {
    let file = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("{}-{name}", std::process::id()));
    std::fs::write(&file, content).expect("a writable folder");
    file
}

/// The binary with a clean environment of its own, free ports and JSON logs.
fn thalweg(args: &[&str]) -> Command {
    let mut command = Command::new(BINARY);
    let inherited =
        std::env::vars().map(|(name, _)| name).filter(|n| n.starts_with("THALWEG_") || n == "RUST_LOG");
    for name in inherited {
        command.env_remove(name);
    }
    command.args(args).args(["--log-format", "json"]).env("HF_HUB_OFFLINE", "1");
    command
}

fn worker(model: &Path, args: &[&str]) -> Command {
    let model = model.to_str().expect("a path in UTF-8");
    let mut command = thalweg(&["worker", "--model", model]);
    command.args(["--kv-cache-memory-bytes", "64MiB"]).args(args);
    let has = |flag: &str| args.iter().any(|a| a.starts_with(flag));
    for flag in ["--grpc", "--metrics"].into_iter().filter(|f| !has(f)) {
        command.args([flag, "127.0.0.1:0"]);
    }
    command
}

fn refused(mut command: Command, code: i32, says: &[&str]) {
    let Output { status, stderr, .. } = command.output().expect("a binary");
    let stderr = String::from_utf8(stderr).expect("text");
    assert_eq!(status.code(), Some(code), "{command:?}: {stderr}");
    for part in says {
        assert!(stderr.contains(part), "{command:?} does not say {part:?}: {stderr}");
    }
    assert!(stderr.matches("os error").count() <= 1, "{command:?} says it twice: {stderr}");
}

#[test]
fn models_that_cannot_be_read_are_named() {
    refused(worker(Path::new("/nonexistent/m.gguf"), &[]), 2, &["/nonexistent/m.gguf", "no such file"]);
    refused(worker(Path::new("owner/name"), &[]), 1, &["owner/name", "HF_HUB_OFFLINE"]);
    refused(worker(&scratch("empty.gguf", b""), &[]), 1, &["empty.gguf"]);
    refused(worker(&scratch("text.gguf", b"no model at all"), &[]), 1, &["text.gguf"]);
    let mut head = vec![0; 3 << 20];
    std::fs::File::open(models::smollm2()).unwrap().read_exact(&mut head).unwrap();
    refused(worker(&scratch("cut.gguf", &head), &[]), 1, &["cut.gguf"]);
    head.truncate(1000);
    refused(worker(&scratch("stub.gguf", &head), &[]), 1, &["stub.gguf"]);
}

#[tokio::test]
async fn crafted_files_end_their_own_worker_and_nothing_else() {
    let cluster = Cluster::up(BINARY, &models::smollm2(), 1, &["--kv-cache-memory-bytes", "64MiB"]);
    let mut head = vec![0; 1 << 16];
    std::fs::File::open(models::smollm2()).unwrap().read_exact(&mut head).unwrap();
    // Offsets of a GGUF header: version 4, tensor count 8, metadata count 16, length of the first key 24.
    let crafted: [(&str, usize, &[u8]); 6] = [
        ("version", 4, &99u32.to_le_bytes()),
        ("big-endian", 4, &3u32.to_be_bytes()),
        ("tensors", 8, &((1u64 << 43) + 7).to_le_bytes()),
        ("metadata", 16, &u64::MAX.to_le_bytes()),
        ("key", 24, &(1u64 << 63).to_le_bytes()),
        ("empty-key", 24, &0u64.to_le_bytes()),
    ];
    for (name, offset, bytes) in crafted {
        let mut file = head.clone();
        file[offset..offset + bytes.len()].copy_from_slice(bytes);
        let file_name = format!("{name}.gguf");
        refused(worker(&scratch(&file_name, &file), &[]), 1, &[&file_name]);
    }
    let ask = json!({"model": cluster.model, "prompt": "The capital of France is", "max_tokens": 1, "temperature": 0});
    let reply = cluster.http.post("/v1/completions", &ask).await.json();
    assert_eq!(reply["choices"][0]["text"], " Paris");
    cluster.stop();
}

#[test]
fn what_does_not_fit_is_refused_with_numbers() {
    let model = models::smollm2();
    let flag = "--kv-cache-memory-bytes";
    let too_much = thalweg(&["worker", "--model", model.to_str().unwrap(), flag, "100TiB"]);
    refused(too_much, 1, &["does not fit in memory", "100TiB", flag]);
    let too_little =
        thalweg(&["worker", "--model", model.to_str().unwrap(), flag, "1MiB", "--max-model-len", "2048"]);
    refused(too_little, 1, &["2048 tokens", flag, "--max-model-len to at most 32"]);
    let nothing = thalweg(&["up", "--model", model.to_str().unwrap(), "--http", "127.0.0.1:0", flag, "1KiB"]);
    refused(nothing, 1, &[flag, "not one token fits"]);
    let profile = scratch("fast.yaml", b"step: {base_seconds: 0.001}\n");
    let sim = [
        "worker",
        "--model",
        model.to_str().unwrap(),
        "--engine",
        "sim",
        "--profile",
        profile.to_str().unwrap(),
    ];
    let mut endless = thalweg(&sim);
    endless.args([flag, "900TiB"]);
    refused(endless, 2, &[flag, "900TiB", "keep count", "are available"]);
    refused(worker(&model, &["--max-model-len", "10000000"]), 2, &["--max-model-len 10000000", "tokens"]);
    refused(worker(&model, &["--tensor-parallel-size", "2"]), 2, &["--tensor-parallel-size", "from 1 to 1"]);
}

#[test]
fn ports_in_use_are_named() {
    let model = models::smollm2();
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    refused(worker(&model, &["--grpc", &address]), 1, &[&address, "--grpc"]);
    refused(worker(&model, &["--metrics", &address]), 1, &[&address, "--metrics"]);
    let router = thalweg(&["router", "--http", &address, "--worker", "grpc://127.0.0.1:1"]);
    refused(router, 1, &[&address, "--http"]);
    let up = thalweg(&["up", "--model", model.to_str().unwrap(), "--http", &address]);
    refused(up, 1, &[&address, "--http"]);
}

/// What is wrong with flags and addresses is told before the time that a model takes is spent: this one can never be loaded.
#[test]
fn what_a_model_is_not_needed_for_is_told_before_it_is_loaded() {
    let junk = scratch("never.gguf", b"no model at all");
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    refused(worker(&junk, &["--grpc", &address]), 1, &[&address, "--grpc"]);
    refused(worker(&junk, &["--metrics", &address]), 1, &[&address, "--metrics"]);
    let empty = scratch("empty.pem", b"").to_str().unwrap().to_owned();
    let trust = ["--tls-cert-file", "--tls-key-file", "--tls-ca-file"].map(|flag| format!("{flag}={empty}"));
    refused(worker(&junk, &trust.each_ref().map(String::as_str)), 2, &["empty.pem"]);
    refused(worker(&junk, &["--cluster-token-file", &empty]), 2, &["empty.pem"]);
    let engine = |grammar: &str| {
        thalweg(&["bench", "engine", "--model", junk.to_str().unwrap(), "--grammar", grammar])
    };
    refused(engine("/nonexistent/schema"), 2, &["--grammar", "/nonexistent/schema"]);
    refused(engine(&empty), 2, &["--grammar", "empty.pem", "no JSON"]);
}

/// Whoever looks meanwhile whether it listens finds nobody.
#[test]
fn a_worker_that_loads_its_model_refuses_connections() {
    let folder = tempfile::tempdir().unwrap();
    let template = folder.path().join("template");
    assert!(Command::new("mkfifo").arg(&template).status().unwrap().success());
    let free = || TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let addresses = [free(), free()];
    let [grpc, metrics] = addresses.map(|address| address.to_string());
    let (model, file) = (models::tiny("llama3"), template.to_str().unwrap());
    let mut args = vec!["worker", "--model", model.to_str().unwrap(), "--grpc", &grpc, "--metrics", &metrics];
    args.extend(["--kv-cache-memory-bytes", "16MiB", "--threads", "1", "--chat-template", file]);
    let mut worker = Process::start(BINARY, &args);
    // It is open once the worker reads it, which it goes on to do until there is an end.
    let mut pipe = std::fs::File::options().write(true).open(&template).unwrap();
    for address in addresses {
        let refused = TcpStream::connect(address).expect_err("nobody listens");
        assert_eq!(refused.kind(), std::io::ErrorKind::ConnectionRefused);
    }
    pipe.write_all(b"{{ messages[0].content }}").unwrap();
    drop(pipe);
    worker.logged("worker serves");
    for address in addresses {
        TcpStream::connect(address).expect("it listens");
    }
    worker.stop();
}

/// Where clients would take the last file, nobody is served.
#[test]
fn too_few_files_are_told_at_the_start() {
    for base in [ROUTER, WORKER, UP] {
        let mut command = Command::new("sh");
        command.args(["-c", "ulimit -n 63; exec \"$0\" \"$@\"", BINARY]).args(base);
        refused(command, 1, &["may open 63 files", "64 at least", "raise `ulimit -n`"]);
    }
}

#[tokio::test]
async fn a_worker_serves_metrics_and_health_and_ends_with_0_on_sigterm() {
    let settings =
        scratch("sound.yaml", b"served-model-name: [tiny, alias]\nmax_num_seqs: 5\nmax-model-len: 256\n");
    let (model, settings) = (models::smollm2(), settings.to_str().unwrap().to_owned());
    let free = "127.0.0.1:0";
    let mut args = vec!["worker", "--model", model.to_str().unwrap(), "--config", &settings];
    args.extend(["--kv-cache-memory-bytes", "64MiB", "--grpc", free, "--metrics", free]);
    let mut worker = Process::start(BINARY, &args);
    let serves = worker.logged("worker serves");
    assert_eq!((&serves["model"], &serves["context"]), (&"tiny".into(), &256.into()));
    let http = HttpClient::new(serves["metrics"].as_str().unwrap().parse().unwrap());
    for path in ["/health", "/ready"] {
        let reply = http.get(path).await;
        assert_eq!((reply.status.as_u16(), reply.text.as_str()), (200, "ok\n"), "{path}");
    }
    let reply = http.get("/metrics").await;
    assert_eq!(
        (reply.status.as_u16(), reply.header("content-type")),
        (200, Some("text/plain; version=0.0.4; charset=utf-8"))
    );
    let metrics = Scrape::parse(&reply.text);
    assert_eq!(metrics.sum("vllm:num_requests_running", "model_name=\"tiny\""), Some(0.0));
    assert_eq!(http.get("/nothing").await.status.as_u16(), 404);
    worker.stop();
}

#[test]
fn up_listens_nowhere_before_it_has_found_its_model() {
    for (model, code, says) in [
        ("/nonexistent/m.gguf".into(), 2, "/nonexistent/m.gguf"),
        ("owner/name".into(), 1, "HF_HUB_OFFLINE"),
        (scratch("junk.gguf", b"no model at all").to_str().unwrap().to_owned(), 1, "junk.gguf"),
    ] {
        for more in [&[][..], &["--worker-processes"]] {
            let mut command = thalweg(&["up", "--model", &model, "--http", "127.0.0.1:0"]);
            let Output { status, stderr, .. } = command.args(more).output().expect("a binary");
            let stderr = String::from_utf8(stderr).expect("text");
            assert!(stderr.contains(says) && !stderr.contains("router listens"), "{model}: {stderr}");
            assert_eq!(status.code(), Some(code), "{model}: {stderr}");
        }
    }
}
