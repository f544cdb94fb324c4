//! What `thalweg up` shows of how to ask it, with API keys and without.

use std::path::Path;

use serde_json::{Value, json};
use thalweg_harness::{HttpClient, Process, models};

const BINARY: &str = env!("CARGO_BIN_EXE_thalweg");
/// SHA-256 of `hello`, by sha256sum.
const KEYS: &str =
    "keys: [{name: ci, sha256: 2cf24dba5fb0a30e26e83b2ac5b9e29e1b161e5c1fa7425e73043362938b9824}]";

/// Address and example that it prints when it is ready.
fn up(more: &[&str]) -> (Process, HttpClient, String) {
    let model = models::tiny("llama3");
    let mut args = vec!["up", "--model", model.to_str().expect("UTF-8"), "--http", "127.0.0.1:0"];
    args.extend(["--workers", "1", "--kv-cache-memory-bytes", "16MiB"]);
    args.extend(more);
    let mut process = Process::start(BINARY, &args);
    let ready = process.stdout_line();
    let address = ready.split("http://").nth(1).and_then(|rest| rest.split('/').next()).expect("a URL");
    let http = HttpClient::new(address.parse().expect("an address"));
    let mut line = String::new();
    while !line.trim_start().starts_with("curl ") {
        line = process.stdout_line();
    }
    (process, http, line)
}

/// Sends what the line says; `key` takes the place of the variable.
async fn status(http: &HttpClient, line: &str, key: &str) -> u16 {
    let (headers, body) = line.split_once(" -d '").expect("a body");
    let body = body.trim_end_matches('\'').to_owned();
    let headers: Vec<_> = headers
        .split(" -H ")
        .skip(1)
        .filter_map(|header| header.trim_matches(['\'', '"']).split_once(": "))
        .map(|(name, value)| (name.to_lowercase(), value.replace("$KEY", key)))
        .collect();
    let headers: Vec<_> = headers.iter().map(|(name, value)| (name.as_str(), value.as_str())).collect();
    http.post_with("/v1/chat/completions", &headers, body).await.status.as_u16()
}

/// Whoever reads records from a pipe reads nothing else there, whatever he calls it.
#[tokio::test]
async fn records_on_stdout_are_alone_there() {
    for name in ["-", "/dev/stdout"] {
        check_records_on(name).await;
    }
}

async fn check_records_on(stdout: &str) {
    let model = models::tiny("llama3");
    let mut args = vec!["up", "--model", model.to_str().expect("UTF-8"), "--http", "127.0.0.1:0"];
    args.extend(["--workers", "1", "--kv-cache-memory-bytes", "16MiB", "--usage-log", stdout]);
    let mut process = Process::start(BINARY, &args);
    let url = process.line_on_stderr("ready: ");
    let address = url.split("http://").nth(1).and_then(|rest| rest.split('/').next()).expect("a URL");
    let http = HttpClient::new(address.parse().expect("an address"));
    let body = json!({"model": "llama3", "prompt": "hi", "max_tokens": 1});
    assert_eq!(http.post("/v1/completions", &body).await.status.as_u16(), 200);
    let line = process.stdout_line();
    let record: Value = serde_json::from_str(&line).unwrap_or_else(|error| panic!("{error}: {line}"));
    assert_eq!(record["outcome"], "ok");
}

/// What a template makes of names that are not set, of two and of one.
#[test]
fn a_variable_without_a_key_opens_no_door() {
    for keys in [" , ", ""] {
        let mut command = std::process::Command::new(BINARY);
        command
            .args(["router", "--http", "127.0.0.1:0", "--worker", "grpc://127.0.0.1:1"])
            .env("THALWEG_API_KEY", keys);
        let output = command.output().expect("a binary");
        let stderr = String::from_utf8(output.stderr).expect("text");
        assert_eq!(output.status.code(), Some(2), "{keys:?}: {stderr}");
        assert!(stderr.contains("THALWEG_API_KEY is set but holds no key"), "{stderr}");
    }
}

#[tokio::test]
async fn the_example_that_up_prints_works() {
    let (process, http, line) = up(&[]);
    assert!(!line.contains("Authorization"), "{line}");
    assert_eq!(status(&http, &line, "").await, 200);
    process.stop();

    let file = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("{}-keys.yaml", std::process::id()));
    std::fs::write(&file, KEYS).expect("written");
    let (process, http, line) = up(&["--api-keys-file", file.to_str().expect("UTF-8")]);
    assert!(line.contains("-H \"Authorization: Bearer $KEY\""), "{line}");
    assert_eq!([status(&http, &line, "hello").await, status(&http, &line, "other").await], [200, 401]);
    process.stop();
    std::fs::remove_file(file).expect("removed");
}
