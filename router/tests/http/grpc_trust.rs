//! Who may call over gRPC where there are certificates or a token.

use std::path::Path;
use std::sync::Arc;

use thalweg_cache_index::MemoryIndex;
use thalweg_harness::pki::{Authority, Identity};
use thalweg_membership::StaticMembership;
use thalweg_router::config::RouterConfig;
use thalweg_router::router::{Router, RunningRouter};
use thalweg_serve::trust::{ClientTrust, TlsFiles, TrustConfig};
use tonic::transport::Endpoint;
use tonic::{Code, Status};
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_client::HealthClient;

/// A router on an address that other hosts reach.
async fn router(trust: TrustConfig) -> RunningRouter {
    let mut config = RouterConfig { http: ([127, 0, 0, 1], 0).into(), trust, ..RouterConfig::default() };
    config.grpc.grpc = Some(([0, 0, 0, 0], 0).into());
    let membership = Arc::new(StaticMembership::new([]));
    Router::start(config, membership, Arc::new(MemoryIndex::new())).await.expect("the router starts")
}

/// What a caller is told that shows this.
async fn ask(router: &RunningRouter, trust: &TrustConfig) -> Result<(), Status> {
    let port = router.grpc_address().expect("gRPC is served").port();
    let endpoint = Endpoint::from_shared(format!("http://127.0.0.1:{port}")).expect("an address");
    let channel = ClientTrust::load(trust).expect("sound files").channel(&endpoint);
    HealthClient::new(channel).check(HealthCheckRequest { service: String::new() }).await.map(|_| ())
}

fn with_token(folder: &Path, token: char) -> TrustConfig {
    let file = folder.join(token.to_string());
    std::fs::write(&file, token.to_string().repeat(32)).expect("a writable folder");
    TrustConfig { token_file: Some(file), ..TrustConfig::default() }
}

fn with_tls(authority: &Authority, identity: Identity) -> TrustConfig {
    let authority = authority.file();
    let tls = TlsFiles { certificate: identity.certificate, key: identity.key, authority };
    TrustConfig { tls: Some(tls), ..TrustConfig::default() }
}

#[tokio::test]
async fn a_token_lets_in_those_who_have_it() {
    let folder = tempfile::tempdir().expect("a folder");
    let right = with_token(folder.path(), 't');
    let router = router(right.clone()).await;
    ask(&router, &right).await.expect("let in");
    for wrong in [with_token(folder.path(), 'g'), TrustConfig::default()] {
        assert_eq!(ask(&router, &wrong).await.expect_err("refused").code(), Code::Unauthenticated);
    }
}

#[tokio::test]
async fn certificates_let_in_those_whom_the_authority_knows() {
    let folders = [(); 2].map(|()| tempfile::tempdir().expect("a folder"));
    let authority = Authority::new(folders[0].path(), "authority");
    let stranger = Authority::new(folders[1].path(), "stranger");
    let router = router(with_tls(&authority, authority.issue("router"))).await;
    ask(&router, &with_tls(&authority, authority.issue("caller"))).await.expect("let in");
    for wrong in [with_tls(&authority, stranger.issue("caller")), TrustConfig::default()] {
        ask(&router, &wrong).await.expect_err("refused");
    }
}
