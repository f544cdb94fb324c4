//! The binary as scripts meet it: exit codes, messages, signals.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use serde_json::json;
use thalweg_harness::{Cluster, HttpClient, Process, Scrape, models};

const BINARY: &str = env!("CARGO_BIN_EXE_thalweg");

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

#[test]
fn flags_that_cannot_work_are_refused() {
    let model = models::smollm2();
    refused(worker(&model, &["--index", "memcached"]), 2, &["--index", "memory", "redis://"]);
    refused(worker(&model, &["--membership", "kubernetes"]), 2, &["--membership", "static", "etcd://"]);
    refused(worker(&model, &["--engine", "sim"]), 2, &["--profile"]);
    let few = ["--max-num-batched-tokens", "1", "--max-num-seqs", "64"];
    refused(worker(&model, &few), 2, &["--max-num-batched-tokens", "--max-num-seqs"]);
    // With the CUDA backend and without it, on a machine without a GPU.
    let says = if cfg!(feature = "cuda") { "libcuda" } else { "--features cuda" };
    refused(worker(&model, &["--device", "cuda"]), 1, &[says]);
    refused(worker(&model, &["--grpc", "0.0.0.0:0"]), 2, &["--grpc 0.0.0.0:0", "--insecure"]);
    refused(thalweg(&["router"]), 2, &["--worker"]);
    refused(thalweg(&["router", "--worker", "http://x"]), 2, &["--worker", "grpc://host:port"]);
    refused(thalweg(&["serve"]), 2, &["serve"]);
}

#[test]
fn unknown_keys_of_a_settings_file_are_refused_by_name() {
    let settings = |name: &str, text: &str| scratch(name, text.as_bytes()).to_str().unwrap().to_owned();
    let with = |file: &str| thalweg(&["worker", "--config", file]);
    let unknown = settings("unknown.yaml", "model: m\nmax-num-sequences: 3\n");
    refused(with(&unknown), 2, &["unknown.yaml", "max-num-sequences"]);
    let foreign = settings("foreign.yaml", "model: m\nworkers: 3\n");
    refused(with(&foreign), 2, &["foreign.yaml", "workers"]);
    let nested = settings("nested.yaml", "model: {path: m}\n");
    refused(with(&nested), 2, &["nested.yaml", "model"]);
    let bad = settings("bad.yaml", "model: m\nmax-num-seqs: many\n");
    refused(with(&bad), 2, &["--max-num-seqs", "from 1 to 4096", "bad.yaml"]);
    refused(with(&settings("broken.yaml", "model: [m\n")), 2, &["broken.yaml"]);
    refused(with("/nonexistent.yaml"), 2, &["/nonexistent.yaml"]);
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

/// Needs of a subcommand beside the option that is looked at.
const ROUTER: &[&str] = &["router", "--worker=grpc://127.0.0.1:1", "--http=127.0.0.1:0"];
const WORKER: &[&str] = &["worker", "--model=/nonexistent"];
const UP: &[&str] = &["up", "--model=/nonexistent"];
const SERVE: &[&str] = &["bench", "serve", "--url=http://127.0.0.1:1"];
const ENGINE: &[&str] = &["bench", "engine", "--model=/nonexistent"];
const TOP: &[&str] = &["index", "top", "--index=redis://127.0.0.1:1"];
const WHO_HAS: &[&str] = &["index", "who-has", "--index=redis://127.0.0.1:1"];

const WHOLE: &[&str] = &["0", "-1", "1.5", "many", "", "nan", "inf", "99999999999999999999999"];
const FROM_0: &[&str] = &["-1", "1.5", "many", "", "nan", "inf", "99999999999999999999999"];
const TIME: &[&str] = &["0", "0.0000001", "-1", "nan", "inf", "-inf", "1e300", "31536001", "5s", ""];
const TIME_FROM_0: &[&str] = &["-1", "nan", "inf", "1e300", "31536001", "5s", ""];
const NAMES: &[&str] = &["", " ", "a b", "a\nb", "a\u{7}b", "a/b", "\u{17e}"];
const FILES: &[&str] = &["/nonexistent/file", "/", ""];

/// Subcommands, option, values that it refuses, and what the refusal says.
type Refused<'a> = (&'a [&'a [&'a str]], &'a str, &'a [&'a str], &'a str);

#[test]
fn values_out_of_range_are_refused_by_name_and_range() {
    let long = "x".repeat(300);
    let labels = ["", " ", "a\nb", "a\u{7}b", " a", &long];
    let table: [Refused<'_>; 65] = [
        (&[ROUTER, UP], "queue-timeout", TIME, "seconds from 0.001 to 31536000"),
        (&[ROUTER], "request-timeout", TIME, "seconds from 0.001"),
        (&[ROUTER], "client-stall-timeout", TIME, "seconds from 0.001"),
        (&[ROUTER], "connect-timeout", TIME, "seconds from 0.001"),
        (&[ROUTER], "sse-keep-alive", TIME_FROM_0, "seconds from 0 to 31536000"),
        (&[ROUTER], "drain-delay", TIME_FROM_0, "seconds from 0"),
        (&[ROUTER, WORKER, UP], "drain-timeout", TIME_FROM_0, "seconds from 0"),
        (&[ROUTER], "body-bytes-max", WHOLE, "from 1 to 1099511627776"),
        (&[ROUTER], "body-buffer-bytes-max", WHOLE, "from 1 to 1099511627776"),
        (&[ROUTER], "queue-requests-max", WHOLE, "from 1 to 1000000"),
        (&[ROUTER], "queue-tokens-max", WHOLE, "from 1 to 1000000000000"),
        (&[ROUTER], "tenant-requests-max", WHOLE, "from 1 to 1000000"),
        (&[ROUTER], "tenant-tokens-max", WHOLE, "from 1 to 1000000000000"),
        (&[ROUTER], "attempts-max", WHOLE, "from 1 to 100"),
        (&[ROUTER], "resumes-max", FROM_0, "from 0 to 100"),
        (&[ROUTER], "choices-max", WHOLE, "from 1 to 4096"),
        (&[ROUTER], "stream-buffer-bytes-max", WHOLE, "from 1 to 1099511627776"),
        (&[ROUTER], "harm-weight", &["-1", "nan", "inf", "1001", ""], "a number from 0 to 1000"),
        (&[ROUTER, UP], "json-blanks-max", &["-1", "1.5", "1025", ""], "from 0 to 1024"),
        (&[ROUTER], "router-seed", FROM_0, "whole number from 0"),
        (&[ROUTER], "router-id", NAMES, "ASCII letters"),
        (&[ROUTER], "worker-header", &["", "2", "maybe"], "true, false"),
        (&[ROUTER], "policy", &["", "best"], "round_robin"),
        (&[ROUTER], "http", &["", "localhost:80", "127.0.0.1", "127.0.0.1:70000"], "127.0.0.1:8080"),
        (
            &[ROUTER],
            "worker",
            &["", "127.0.0.1:1", "grpc://h", "grpc://h:0", "grpc://:1"],
            "grpc://host:port",
        ),
        (&[ROUTER, WORKER], "index", &["", "memcached", "redis://", "redis://h/x"], "redis://"),
        (&[ROUTER, WORKER], "membership", &["", "dynamic", "etcd://", "etcd://h:0"], "etcd://"),
        (&[ROUTER], "membership-lease-ttl", WHOLE, "from 2 to 3600"),
        (&[ROUTER, WORKER], "tls-cert-file", FILES, ""),
        (&[ROUTER, WORKER], "tls-key-file", FILES, ""),
        (&[ROUTER, WORKER], "tls-ca-file", FILES, ""),
        (&[ROUTER], "tls-server-name", NAMES, "ASCII letters"),
        (&[ROUTER, WORKER], "cluster-token-file", FILES, ""),
        (&[ROUTER, WORKER, TOP], "index-ca-file", FILES, ""),
        (&[ROUTER, WORKER, TOP], "index-password-file", FILES, ""),
        (&[ROUTER, WORKER], "membership-ca-file", FILES, ""),
        (&[ROUTER, WORKER], "membership-cert-file", FILES, ""),
        (&[ROUTER, WORKER], "membership-key-file", FILES, ""),
        (&[ROUTER, WORKER], "membership-password-file", FILES, ""),
        (&[ROUTER, WORKER, UP, SERVE, TOP], "log-level", &["", "verbose", "info,", "a=b", "="], "warn"),
        (&[ROUTER, WORKER, UP, SERVE, TOP], "config", FILES, ""),
        (&[WORKER, UP, ENGINE], "served-model-name", &labels, "control characters"),
        (&[WORKER], "worker-id", NAMES, "ASCII letters"),
        (&[WORKER], "grpc", &["", "localhost:80", "127.0.0.1"], "127.0.0.1:8080"),
        (&[WORKER], "metrics", &["", "localhost:80", "127.0.0.1"], "127.0.0.1:8080"),
        (&[WORKER], "advertise", &["", "h", "h:0", "http://h:1"], "grpc://host:port"),
        (&[WORKER], "advertise", &["0.0.0.0:5", "grpc://[::]:5"], "an address of this host"),
        (&[WORKER, UP], "chat-template", FILES, ""),
        (&[WORKER, UP], "profile", FILES, ""),
        (&[WORKER, UP], "cuda-library-path", &["/nonexistent", ""], ""),
        (&[WORKER], "max-model-len", WHOLE, "from 1 to 4294967295"),
        (&[WORKER], "max-num-seqs", WHOLE, "from 1 to 4096"),
        (&[WORKER], "max-num-batched-tokens", WHOLE, "from 1 to 65536"),
        (&[WORKER], "max-num-mixed-tokens", WHOLE, "from 1 to 65536"),
        (&[WORKER], "threads", WHOLE, "from 1 to 1024"),
        (&[WORKER], "kv-cache-memory-bytes", WHOLE, "such as 512MiB"),
        (&[WORKER], "gpu-memory-utilization", &["0", "1.5", "-1", "nan", "inf", ""], "above 0, at most 1"),
        (&[WORKER], "gpu-step-timeout", WHOLE, "from 1 to 3600"),
        (&[WORKER], "seed", FROM_0, "whole number from 0"),
        (&[UP], "workers", WHOLE, "from 1 to 256"),
        (&[SERVE], "request-rate", &["0", "-1", "nan", "inf", ""], "a number from 0.000001"),
        (&[SERVE], "temperature", &["-1", "nan", "inf", ""], "a number from 0 to 100"),
        (&[SERVE], "timeout", WHOLE, "from 1 to 31536000"),
        (&[TOP], "limit", WHOLE, "from 1 to 1000000"),
        (&[WHO_HAS], "worker", NAMES, "ASCII letters"),
    ];
    for (bases, flag, values, says) in table {
        for (base, value) in bases.iter().flat_map(|base| values.iter().map(move |value| (base, value))) {
            let flag = format!("--{flag}");
            let needs: Vec<&str> =
                base.iter().filter(|need| need.split('=').next() != Some(&flag)).copied().collect();
            let mut command = thalweg(&needs);
            command.arg(format!("{flag}={value}"));
            let shown = if value.starts_with("/n") { value } else { says };
            refused(command, 2, &[&flag, shown]);
        }
    }
    for flag in ["num-prompts", "concurrency", "prompt", "prefixes", "turns", "output"] {
        for value in WHOLE {
            let mut command = thalweg(SERVE);
            command.arg(format!("--{flag}={value}"));
            refused(command, 2, &[&format!("--{flag}"), "a whole number from 1 to"]);
        }
    }
    for (flag, least) in [("prompt", 1), ("output", 2), ("batch", 1), ("repeat", 1)] {
        for value in WHOLE {
            let mut command = thalweg(ENGINE);
            command.arg(format!("--{flag}={value}"));
            refused(command, 2, &[&format!("--{flag}"), &format!("a whole number from {least} to")]);
        }
    }
}

#[test]
fn options_that_contradict_each_other_are_refused() {
    let file = scratch("some.pem", b"nothing").to_str().unwrap().to_owned();
    let check = |base: &[&str], more: &[String], says: &[&str]| {
        let mut command = thalweg(base);
        command.args(more);
        refused(command, 2, says);
    };
    for flag in ["--index-ca-file", "--index-password-file", "--membership-ca-file", "--membership-cert-file"]
    {
        check(ROUTER, &[format!("{flag}={file}")], &[flag, "alone"]);
        check(WORKER, &[format!("{flag}={file}")], &[flag, "alone"]);
    }
    check(TOP, &[format!("--index-ca-file={file}")], &["--index-ca-file", "rediss://"]);
    for flag in ["--tls-cert-file", "--tls-key-file", "--tls-ca-file"] {
        check(ROUTER, &[format!("{flag}={file}")], &["--tls-cert-file, --tls-key-file and --tls-ca-file"]);
        let settings = scratch("half.yaml", format!("{}: {file}\n", &flag[2..]).as_bytes());
        check(
            WORKER,
            &["--config".into(), settings.to_str().unwrap().into()],
            &["TLS needs", "without --tls"],
        );
    }
    check(ROUTER, &["--tls-server-name=h".into()], &["TLS needs"]);
    let model = format!("--model={}", models::smollm2().display());
    let broken = scratch("broken.jinja", b"{% for message in messages %}").to_str().unwrap().to_owned();
    check(&["worker", &model], &[format!("--chat-template={broken}")], &["--chat-template", "broken.jinja"]);
    check(&["worker", &model], &[format!("--profile={file}")], &["--profile", "--engine sim"]);
    check(&["index", "who-has", "--index=redis://127.0.0.1:1"], &[], &["--worker"]);
    check(&["index", "top"], &[], &["--index"]);
    check(&["index", "who-has", "--index=redis://127.0.0.1:1"], &["+1f".into()], &["hexadecimal"]);
}

#[test]
fn flags_that_would_do_nothing_are_refused() {
    let check = |base: &[&str], more: &[&str], says: &str| {
        let mut command = thalweg(base);
        command.args(more);
        refused(command, 2, &[more[0].split('=').next().unwrap(), says]);
    };
    for base in [ROUTER, UP] {
        check(base, &["--insecure"], "--grpc ADDRESS");
        check(base, &["--metrics-public"], "--api-keys-file");
        for flag in ["--response-ttl=60", "--response-bytes-max=1000", "--response-memory-bytes-max=1000"] {
            check(base, &[flag, "--response-store=none"], "--response-store none");
        }
    }
    check(
        ROUTER,
        &["--response-memory-bytes-max=1000", "--index=redis://127.0.0.1:1"],
        "--response-store memory",
    );
    for policy in ["--policy=round_robin", "--policy=power_of_two", "--policy=prefix_hash"] {
        check(ROUTER, &["--harm-weight=2", policy], "--policy cost");
    }
    check(ROUTER, &["--membership-lease-ttl=20"], "etcd://");
    check(WORKER, &["--membership-lease-ttl=20"], "etcd://");
    check(WORKER, &["--advertise=127.0.0.1:5"], "etcd://");
    check(WORKER, &["--tls-server-name=h"], "a router");
    let gpu =
        ["--gpu-memory-utilization=0.5", "--gpu-step-timeout=9", "--cuda-plan-cache=off", "--enforce-eager"];
    for base in [WORKER, UP, ENGINE] {
        for flag in gpu.into_iter().chain(["--cuda-library-path=/"]) {
            check(base, &[flag, "--device=cpu"], "leave it out with --device cpu");
        }
        check(base, &["--threads=2", "--device=cuda"], "leave it out with --device cuda");
    }
    for base in [WORKER, UP] {
        check(base, &["--enable-lora"], "--lora-modules");
        check(base, &["--max-loras=2"], "--enable-lora");
        check(base, &["--max-lora-rank=8"], "--enable-lora");
        check(base, &["--seed=7"], "--load-format dummy");
        for flag in
            ["--seed=7", "--threads=2", "--dtype=float32", "--deterministic", "--gpu-memory-utilization=0.5"]
        {
            check(base, &[flag, "--engine=sim"], "--engine sim");
        }
    }
    // In a file too; a variable may be for another subcommand.
    let file = scratch("idle.yaml", b"metrics-public: true\n").to_str().unwrap().to_owned();
    let mut command = thalweg(ROUTER);
    command.args(["--config", &file]);
    refused(command, 2, &["--metrics-public"]);
    let mut command = thalweg(WORKER);
    command.args(["--max-loras", "2"]);
    refused(command, 2, &["--max-loras"]);
    let mut off = thalweg(ROUTER);
    off.env("THALWEG_METRICS_PUBLIC", "true").env("THALWEG_INSECURE", "true").arg("--policy=best");
    refused(off, 2, &["--policy"]);
}

/// What may do something, and what is so anyway: the model is what is wrong here.
#[test]
fn flags_that_may_do_something_are_taken() {
    let check = |base: &[&str], more: &[&str]| {
        let mut command = thalweg(base);
        command.args(more);
        refused(command, 2, &["/nonexistent", "no such file"]);
    };
    for base in [WORKER, UP] {
        check(
            base,
            &["--gpu-memory-utilization=0.5", "--cuda-plan-cache=off", "--enforce-eager", "--threads=2"],
        );
        check(base, &["--deterministic", "--device=cpu", "--threads=2"]);
        check(base, &["--enable-lora", "--lora-modules=a=/nonexistent/a"]);
    }
    check(
        WORKER,
        &["--advertise=127.0.0.1:5", "--membership=etcd://127.0.0.1:1", "--membership-lease-ttl=20"],
    );
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
