//! Who gets in and who does not, over real sockets.

use std::net::SocketAddr;
use std::path::Path;
use std::time::Duration;

use tempfile::TempDir;
use thalweg_harness::pki::{Authority, Identity};
use thalweg_serve::trust::{ClientTrust, ServerTrust, TlsFiles, TrustConfig, TrustedChannel};
use tokio::net::TcpListener;
use tokio_util::sync::{CancellationToken, DropGuard};
use tonic::service::InterceptorLayer;
use tonic::transport::{Endpoint, Server};
use tonic::{Code, Status};
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_client::HealthClient;

/// A server that answers health checks of those whom it trusts.
struct Scene {
    folder: TempDir,
    authority: Authority,
    address: SocketAddr,
    _stop: DropGuard,
}

impl Scene {
    /// `change` turns mutual TLS by a common authority into what the server is to have.
    async fn start(change: impl FnOnce(&mut TrustConfig, &Path)) -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let authority = Authority::new(folder.path(), "authority");
        let mut config = trust(&authority, &authority.issue("server"));
        change(&mut config, folder.path());
        let trust = ServerTrust::load(&config).expect("sound files");
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let address = listener.local_addr().expect("an address");
        let (_, health) = tonic_health::server::health_reporter();
        let stop = CancellationToken::new();
        let server = Server::builder()
            .layer(InterceptorLayer::new(trust.guard()))
            .add_service(health)
            .serve_with_incoming_shutdown(trust.incoming(listener), stop.clone().cancelled_owned());
        tokio::spawn(server);
        Self { folder, authority, address, _stop: stop.drop_guard() }
    }

    fn client(&self, config: &TrustConfig) -> HealthClient<TrustedChannel> {
        let trust = ClientTrust::load(config).expect("sound files");
        let endpoint = Endpoint::from_shared(format!("http://{}", self.address)).expect("a URI");
        HealthClient::new(trust.channel(&endpoint.connect_timeout(Duration::from_secs(5))))
    }

    /// A new connection each time.
    async fn ask(&self, config: &TrustConfig) -> Result<(), Status> {
        ask(&mut self.client(config)).await
    }
}

async fn ask(client: &mut HealthClient<TrustedChannel>) -> Result<(), Status> {
    client.check(HealthCheckRequest::default()).await.map(drop)
}

fn trust(authority: &Authority, identity: &Identity) -> TrustConfig {
    let tls = TlsFiles {
        certificate: identity.certificate.clone(),
        key: identity.key.clone(),
        authority: authority.file(),
    };
    TrustConfig { tls: Some(tls), ..TrustConfig::default() }
}

fn tokens(folder: &Path, name: &str, text: &str) -> TrustConfig {
    let file = folder.join(name);
    std::fs::write(&file, text).expect("a writable folder");
    TrustConfig { token_file: Some(file), ..TrustConfig::default() }
}

/// The error and what lies beneath it.
fn story(status: &Status) -> String {
    let mut text = status.to_string();
    let mut source = std::error::Error::source(status);
    while let Some(error) = source {
        text = format!("{text}: {error}");
        source = error.source();
    }
    text
}

#[tokio::test(flavor = "multi_thread")]
async fn only_peers_with_a_certificate_of_the_authority_talk() {
    let scene = Scene::start(|_, _| {}).await;
    let good = trust(&scene.authority, &scene.authority.issue("client"));
    scene.ask(&good).await.expect("let in");
    let named = TrustConfig { server_name: Some("localhost".to_owned()), ..good.clone() };
    scene.ask(&named).await.expect("the certificate is made out to that too");

    let refused = async |config: TrustConfig, why: &str| {
        let error = story(&scene.ask(&config).await.expect_err(why));
        assert!(error.contains(why), "{why:?}: {error}");
    };
    let elsewhere = tempfile::tempdir().expect("a folder");
    let stranger = Authority::new(elsewhere.path(), "stranger");
    let forged = stranger.issue("client");
    refused(trust(&scene.authority, &forged), "UnknownCA").await;
    refused(trust(&stranger, &forged), "UnknownIssuer").await;
    refused(trust(&scene.authority, &scene.authority.issue_expired("late")), "CertificateExpired").await;
    let wrong_name = Some("worker.example".to_owned());
    refused(TrustConfig { server_name: wrong_name, ..good.clone() }, "not valid for name").await;
    refused(TrustConfig::default(), "").await;
    scene.ask(&good).await.expect("still let in");
}

#[tokio::test(flavor = "multi_thread")]
async fn certificates_change_on_disk_while_connections_live() {
    let scene = Scene::start(|_, _| {}).await;
    let client = trust(&scene.authority, &scene.authority.issue("client"));
    let mut open = scene.client(&client);
    ask(&mut open).await.expect("let in");

    // A certificate whose key is still to come changes nothing.
    let other = scene.authority.issue("other");
    let server = scene.folder.path().join("server.pem");
    let former = std::fs::read(&server).expect("the server's certificate");
    std::fs::copy(&other.certificate, &server).expect("a copy");
    scene.ask(&client).await.expect("the former one is used");
    std::fs::write(&server, former).expect("as before");

    // One that has expired is shown, and refused by clients.
    scene.authority.issue_expired("server");
    let error = story(&scene.ask(&client).await.expect_err("expired"));
    assert!(error.contains("xpired"), "{error}");
    scene.authority.issue("server");
    scene.ask(&client).await.expect("renewed");

    // A new authority with new certificates, in the same files; the client's own process reads them as well.
    let mut waiting = scene.client(&client);
    let old = tempfile::tempdir().expect("a folder");
    for name in ["authority.pem", "client.pem", "client.key"] {
        std::fs::copy(scene.folder.path().join(name), old.path().join(name)).expect("a copy");
    }
    let renewed = Authority::new(scene.folder.path(), "authority");
    renewed.issue("server");
    renewed.issue("client");
    scene.ask(&client).await.expect("both sides have read the new ones");
    ask(&mut waiting).await.expect("a channel made before connects with the new ones");
    ask(&mut open).await.expect("an open connection lives on");
    let outdated = TlsFiles {
        certificate: old.path().join("client.pem"),
        key: old.path().join("client.key"),
        authority: scene.folder.path().join("authority.pem"),
    };
    let outdated = TrustConfig { tls: Some(outdated), ..TrustConfig::default() };
    scene.ask(&outdated).await.expect_err("the old authority is trusted no more");
}

#[tokio::test(flavor = "multi_thread")]
async fn tokens_are_checked_on_every_call() {
    let (new, old, other) = ("a".repeat(32), "b".repeat(32), "c".repeat(32));
    let both = format!("{new}\n{old}\n");
    let scene = Scene::start(|config, folder| *config = tokens(folder, "tokens", &both)).await;
    let folder = scene.folder.path();
    for (name, text) in [("both", &both), ("new", &new), ("old", &old)] {
        scene.ask(&tokens(folder, name, text)).await.unwrap_or_else(|error| panic!("{name}: {error}"));
    }
    let refused = async |config: TrustConfig, says: &str| {
        let error = scene.ask(&config).await.expect_err(says);
        assert_eq!(error.code(), Code::Unauthenticated);
        assert!(error.message().contains(says), "{error}");
    };
    refused(tokens(folder, "other", &other), "not one of this worker's").await;
    refused(tokens(folder, "longer", &format!("{new}a")), "not one of this worker's").await;
    refused(TrustConfig::default(), "was shown none").await;
    // A token proves nothing to a server that wants none, and does no harm there.
    let open = Scene::start(|config, _| *config = TrustConfig::default()).await;
    open.ask(&tokens(folder, "other", &other)).await.expect("let in");
    // Both at once.
    let strict = Scene::start(|config, folder| {
        config.token_file = tokens(folder, "tokens", &new).token_file;
    })
    .await;
    let certificate = trust(&strict.authority, &strict.authority.issue("client"));
    assert_eq!(strict.ask(&certificate).await.expect_err("no token").code(), Code::Unauthenticated);
    let whole = TrustConfig { token_file: tokens(folder, "new", &new).token_file, ..certificate };
    strict.ask(&whole).await.expect("let in");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_peer_that_says_nothing_holds_up_nobody() {
    let scene = Scene::start(|_, _| {}).await;
    let mut silent = Vec::new();
    for _ in 0..20 {
        silent.push(tokio::net::TcpStream::connect(scene.address).await.expect("accepted"));
    }
    let good = trust(&scene.authority, &scene.authority.issue("client"));
    tokio::time::timeout(Duration::from_secs(3), scene.ask(&good)).await.expect("in time").expect("let in");
}

/// Also without encryption: a server would wait for the rest of the preface without end.
#[tokio::test(flavor = "multi_thread")]
async fn a_peer_that_never_speaks_http2_is_left() {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    let scene = Scene::start(|config, _| *config = TrustConfig::default()).await;
    for said in ["", "PRI * HTTP/2.0"] {
        let mut peer = tokio::net::TcpStream::connect(scene.address).await.expect("accepted");
        peer.write_all(said.as_bytes()).await.expect("a connection");
        let end = tokio::time::timeout(Duration::from_secs(60), peer.read(&mut [0; 64]))
            .await
            .expect("not for ever");
        assert!(matches!(end, Ok(0) | Err(_)), "{end:?}");
    }
    scene.ask(&TrustConfig::default()).await.expect("let in");
}

#[test]
fn files_that_are_of_no_use_are_named() {
    let folder = tempfile::tempdir().expect("a folder");
    let authority = Authority::new(folder.path(), "authority");
    let (one, two) = (authority.issue("one"), authority.issue("two"));
    let refused = |config: TrustConfig, part: &str| {
        let errors = [
            ServerTrust::load(&config).err().map(|error| error.to_string()),
            ClientTrust::load(&config).err().map(|error| error.to_string()),
        ];
        for error in errors {
            let error = error.unwrap_or_else(|| panic!("{config:?} was taken"));
            assert!(error.contains(part), "{config:?}: {error}");
        }
    };
    let with = |change: fn(&mut TlsFiles, &Path)| {
        let mut config = trust(&authority, &one);
        change(config.tls.as_mut().expect("there"), folder.path());
        config
    };
    refused(with(|tls, folder| tls.certificate = folder.join("none.pem")), "none.pem");
    refused(with(|tls, folder| tls.certificate = folder.join("one.key")), "one.key holds no certificate");
    refused(with(|tls, folder| tls.key = folder.join("one.pem")), "one.pem holds no private key");
    refused(with(|tls, folder| tls.authority = folder.join("one.key")), "holds no certificate");
    let mixed = Identity { key: two.key, ..one.clone() };
    refused(trust(&authority, &mixed), "cannot be used for TLS");
    for text in ["", "\n\n", "short", "with a blank in it, though long"] {
        refused(tokens(folder.path(), "token", text), "holds no token");
    }
    let debug = format!("{:?}", ClientTrust::load(&tokens(folder.path(), "token", &"s".repeat(20))));
    assert!(!debug.contains("sss"), "{debug}");
}
