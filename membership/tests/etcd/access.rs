//! Users, passwords and certificates.

use thalweg_harness::etcd;
use thalweg_harness::pki::Authority;
use thalweg_membership::{Etcd, EtcdConfig, EtcdError, EtcdMembership, Password};

use crate::{PATIENCE, config, record, see, until};

#[tokio::test(flavor = "multi_thread")]
async fn users_and_their_tokens() {
    let mut etcd = etcd::Etcd::start();
    let address = etcd.address();
    let with = |user: &str, password: &str| {
        let mut config = config(&format!("etcd://{user}@{address}/test"));
        config.password = Some(Password::new(password));
        Etcd::new(&config).expect("a client")
    };
    // Before authentication is turned on, a user does no harm.
    let early = with("thalweg", "secret").register_worker(record("w1", 1));
    early.registered().await;
    etcd.enable_auth("thalweg", "secret");
    let good = with("thalweg", "secret");
    let router = EtcdMembership::follow(&good, "r");
    see(&router, "1", PATIENCE).await;
    let late = good.register_worker(record("w2", 2));
    see(&router, "1 2", PATIENCE).await;

    let wrong = with("thalweg", "guess");
    let _refused = wrong.register_worker(record("w3", 3));
    until("a wrong password is told", || wrong.stats().degraded).await;
    let nobody = Etcd::new(&config(&format!("etcd://{}/test", etcd.address()))).expect("a client");
    let _refused = nobody.register_worker(record("w4", 4));
    until("a missing user is told", || nobody.stats().degraded).await;

    // etcd keeps tokens in memory: a restart makes all of them invalid.
    etcd.restart();
    let newer = good.register_worker(record("w5", 5));
    newer.registered().await;
    see(&router, "1 2 5", PATIENCE).await;
    late.deregister().await;
    see(&router, "1 5", PATIENCE).await;
    assert!(etcd.get("/test/workers/w3").is_none() && etcd.get("/test/workers/w4").is_none());
}

#[tokio::test(flavor = "multi_thread")]
async fn certificates() {
    let etcd = etcd::Etcd::start_with_tls();
    let tls = etcd.tls();
    let identity = (tls.client.certificate.clone(), tls.client.key.clone());
    let sound = EtcdConfig {
        ca_file: Some(tls.authority.clone()),
        identity: Some(identity.clone()),
        ..config(&etcd.url("/test"))
    };
    let good = Etcd::new(&sound).expect("a client");
    let router = EtcdMembership::follow(&good, "r");
    let _worker = good.register_worker(record("w1", 1));
    see(&router, "1", PATIENCE).await;

    let folder = tempfile::tempdir().expect("a folder");
    let stranger = Authority::new(folder.path(), "stranger");
    let other = stranger.issue("client");
    let refused = async |change: EtcdConfig| {
        let etcd = Etcd::new(&change).expect("a client");
        let _worker = etcd.register_worker(record("w2", 2));
        until("it is refused", || etcd.stats().degraded).await;
    };
    refused(EtcdConfig { ca_file: Some(stranger.file()), ..sound.clone() }).await;
    refused(EtcdConfig { identity: Some((other.certificate, other.key)), ..sound.clone() }).await;
    refused(EtcdConfig { identity: None, ..sound.clone() }).await;
    assert_eq!(etcd.get("/test/workers/w2"), None);
}

#[tokio::test]
async fn settings_that_cannot_work_are_refused_at_once() {
    let folder = tempfile::tempdir().expect("a folder");
    let authority = Authority::new(folder.path(), "authority").file();
    let missing = folder.path().join("missing.pem");
    let check = |config: EtcdConfig, part: &str| {
        let error = Etcd::new(&config).err().map(|error: EtcdError| error.to_string()).unwrap_or_default();
        assert!(error.contains(part) && !error.contains("secret"), "{config:?}: {error:?}");
        assert!(!format!("{config:?}").contains("secret"));
    };
    let password = Some(Password::new("secret"));
    let plain = config("etcd://127.0.0.1:1/t");
    let tls = config("etcds://127.0.0.1:1/t");
    check(EtcdConfig { password: password.clone(), ..plain.clone() }, "etcd://USER@host");
    check(config("etcd://me@127.0.0.1:1/t"), "--membership-password-file");
    check(EtcdConfig { ca_file: Some(authority.clone()), ..plain.clone() }, "etcds://");
    check(tls.clone(), "--membership-ca-file");
    check(EtcdConfig { ca_file: Some(missing.clone()), ..tls.clone() }, "missing.pem");
    let identity = Some((authority.clone(), missing));
    check(EtcdConfig { ca_file: Some(authority), identity, ..tls }, "missing.pem");
}
