//! Router and worker that prove themselves to each other, as processes.

use std::path::{Path, PathBuf};
use std::time::Duration;

use thalweg_harness::pki::{Authority, Identity};
use thalweg_harness::{HttpClient, Process, Scrape, models};

const BINARY: &str = env!("CARGO_BIN_EXE_thalweg");

fn worker(trust: &[impl AsRef<str>]) -> (Process, String) {
    let model = models::smollm2();
    let model = model.to_str().expect("a path in UTF-8");
    let mut args = vec!["worker", "--model", model, "--kv-cache-memory-bytes", "64MiB"];
    // Every address of this machine: refused without trust.
    args.extend(["--grpc", "0.0.0.0:0", "--metrics", "127.0.0.1:0"]);
    args.extend(trust.iter().map(AsRef::as_ref));
    let mut worker = Process::start(BINARY, &args);
    let serves = worker.logged("worker serves");
    let port = serves["grpc"].as_str().and_then(|grpc| grpc.rsplit_once(':')).expect("an address").1;
    (worker, format!("grpc://127.0.0.1:{port}"))
}

fn router(worker: &str, trust: &[impl AsRef<str>]) -> (Process, HttpClient) {
    let mut args = vec!["router", "--http", "127.0.0.1:0", "--worker", worker];
    args.extend(trust.iter().map(AsRef::as_ref));
    let mut router = Process::start(BINARY, &args);
    let listens = router.logged("router listens");
    let address = listens["http"].as_str().and_then(|http| http.parse().ok()).expect("an address");
    (router, HttpClient::new(address))
}

async fn becomes_ready(router: &HttpClient) {
    let ready = async {
        loop {
            let scrape = Scrape::parse(&router.get("/metrics").await.text);
            if scrape.sum("thalweg_router_worker_state", "state=\"ready\"") == Some(1.0) {
                return;
            }
        }
    };
    tokio::time::timeout(Duration::from_secs(60), ready).await.expect("a ready worker");
}

/// The reason that the router logs for not using its worker.
fn refusal(router: &mut Process) -> String {
    router.logged("worker is not usable yet")["reason"].as_str().expect("text").to_owned()
}

/// A new folder of this test process alone.
fn folder(name: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("{}-{name}", std::process::id()));
    std::fs::create_dir_all(&folder).expect("a writable folder");
    folder
}

fn path(path: &Path) -> &str {
    path.to_str().expect("a path in UTF-8")
}

#[tokio::test(flavor = "multi_thread")]
async fn a_token_lets_in_those_who_have_it() {
    let folder = folder("tokens");
    let file = |name: &str, text: &str| {
        let file = folder.join(name);
        std::fs::write(&file, text).expect("a writable folder");
        file
    };
    let (token, guess) = (file("token", &"t".repeat(32)), file("guess", &"g".repeat(32)));
    let right = ["--cluster-token-file", path(&token)];
    let (worker, address) = worker(&right);
    let (friend, http) = router(&address, &right);
    becomes_ready(&http).await;
    let (mut stranger, _) = router(&address, &["--cluster-token-file", path(&guess)]);
    let reason = refusal(&mut stranger);
    assert!(reason.contains("not one of this worker's"), "{reason}");
    let (mut nobody, _) = router(&address, &[] as &[&str]);
    let reason = refusal(&mut nobody);
    assert!(reason.contains("--cluster-token-file"), "{reason}");
    friend.stop();
    worker.stop();
}

#[tokio::test(flavor = "multi_thread")]
async fn certificates_let_in_those_whom_the_authority_knows() {
    let authority = Authority::new(&folder("certificates"), "authority");
    let stranger = Authority::new(&folder("forged"), "stranger");
    let ca = authority.file();
    let flags = |identity: &Identity| {
        let files = [&identity.certificate, &identity.key, &ca].map(|file| path(file).to_owned());
        ["--tls-cert-file", "--tls-key-file", "--tls-ca-file"].map(str::to_owned).into_iter().zip(files)
    };
    let of = |identity: &Identity| flags(identity).flat_map(|(flag, file)| [flag, file]).collect::<Vec<_>>();
    let (serving, known) = (of(&authority.issue("worker")), of(&authority.issue("router")));
    let forged = of(&stranger.issue("router"));
    let (_worker, address) = worker(&serving);
    let (mut refused, _) = router(&address, &forged);
    let reason = refusal(&mut refused);
    assert!(reason.contains("UnknownCA"), "{reason}");
    let (friend, http) = router(&address, &known);
    becomes_ready(&http).await;
    friend.stop();
}
