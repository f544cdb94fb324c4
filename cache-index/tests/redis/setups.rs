//! Sentinel, TLS, ACL, Cluster.

use std::time::Duration;

use thalweg_cache_index::redis::inspect;
use thalweg_cache_index::{CacheIndex, RedisConfig, RedisIndex};
use thalweg_harness::redis::{Redis, RedisCluster};

use crate::support::{PATIENCE, TestWorker, eventually, open};

#[tokio::test]
async fn sentinel_fails_over_without_a_restart() {
    let mut master = Redis::start();
    let replica = Redis::replica_of(&master);
    let sentinel = Redis::sentinel_of(&master, "index");
    let url = format!("redis+sentinel://127.0.0.1:1,127.0.0.1:{}/index", sentinel.port);
    let (workers, router) = (open(&url), open(&url));
    let mut worker = TestWorker::new(&workers, "w", 1);
    let mut idle = TestWorker::new(&workers, "idle", 1);
    worker.store(0..100);
    idle.store(0..100);
    let known = || worker.is_known_to(&router) && idle.is_known_to(&router);
    eventually("both are known", PATIENCE, known).await;
    master.kill();
    worker.store(100..200);
    worker.remove(0..10);
    replica.eventually(&["ROLE"], |text| text.contains("master"));
    let recovered = || worker.is_known_to(&router) && !workers.stats().degraded && !router.stats().degraded;
    let took = eventually("recovery", Duration::from_secs(5), recovered).await;
    eprintln!("recovered {took:?} after the replica became master");
    let late = open(&url);
    late.replica();
    let known = || worker.is_known_to(&late) && idle.is_known_to(&late);
    eventually("a late router finds both", PATIENCE, known).await;
}

#[tokio::test]
async fn over_tls_the_certificate_counts() {
    let redis = Redis::with_tls();
    let url = format!("rediss://127.0.0.1:{}", redis.tls_port);
    let config = RedisConfig { ca_file: Some(redis.ca_file()), ..RedisConfig::new(url.parse().unwrap()) };
    let (workers, router) =
        (RedisIndex::open(config.clone()).unwrap(), RedisIndex::open(config.clone()).unwrap());
    let mut worker = TestWorker::new(&workers, "w", 1);
    worker.store(0..100);
    eventually("it is known", PATIENCE, || worker.is_known_to(&router)).await;
    let stranger = Redis::with_tls();
    let wrong = RedisConfig { ca_file: Some(stranger.ca_file()), ..config.clone() };
    let error = inspect::workers(&wrong).await.unwrap_err().to_string();
    assert!(error.contains("ertificate"), "{error}");
    let missing = RedisConfig { ca_file: Some("/nowhere/ca.pem".into()), ..config };
    let error = inspect::workers(&missing).await.unwrap_err().to_string();
    assert!(error.contains("/nowhere/ca.pem"), "{error}");
}

#[tokio::test]
async fn acl_users_need_their_password_and_no_more_than_the_index_uses() {
    let user = "thalweg on >hunter2 ~{tw1:* +xadd +xread +xrange +xrevrange +set +get +getrange +strlen +expire +zadd +zrange \
                +zremrangebyscore +ping +role +cluster|slots +multi +exec";
    let mut args = vec!["--user"];
    args.extend(user.split_whitespace());
    let redis = Redis::with(&args);
    let address = format!("127.0.0.1:{}", redis.port);
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("password");
    std::fs::write(&file, "wrong\n").unwrap();
    let url = format!("redis://thalweg:ignored@{address}");
    let config = RedisConfig { password_file: Some(file.clone()), ..RedisConfig::new(url.parse().unwrap()) };
    let error = inspect::workers(&config).await.unwrap_err().to_string();
    for says in ["the URL's user", &address, "--index-password-file", "THALWEG_INDEX_PASSWORD"] {
        assert!(error.contains(says), "{error}");
    }
    assert!(
        ["thalweg", "wrong", "ignored"].iter().all(|secret| !error.contains(&format!(" {secret}"))),
        "{error}"
    );

    let index = RedisIndex::open(config).unwrap();
    let mut worker = TestWorker::new(&index, "w", 1);
    worker.store(0..10);
    index.replica();
    eventually("the wrong password is noticed", PATIENCE, || index.stats().degraded).await;
    std::fs::write(&file, "hunter2\n").unwrap();
    eventually("the new password is read", PATIENCE, || worker.is_known_to(&index)).await;
    eventually("all is well", PATIENCE, || !index.stats().degraded).await;

    let reply = redis.command(&["ACL", "SETUSER", "reader", "on", ">pw", "~other:*", "+@all"]);
    assert_eq!(reply, "+OK\r\n");
    let url = format!("redis://reader:pw@{address}");
    let error = inspect::workers(&RedisConfig::new(url.parse().unwrap())).await.unwrap_err().to_string();
    assert!(error.contains("ACL SETUSER USER") && !error.contains("reader"), "{error}");
}

#[tokio::test]
async fn a_cluster_works() {
    let cluster = RedisCluster::start();
    let (workers, router) = (open(&cluster.url()), open(&cluster.url()));
    let mut all: Vec<_> = (0..8).map(|i| TestWorker::new(&workers, &format!("w{i}"), 1)).collect();
    all.iter_mut().for_each(|worker| worker.store(0..3_000));
    let known = || all.iter().all(|worker| worker.is_known_to(&router));
    eventually("all are known", PATIENCE, known).await;
    all.iter_mut().for_each(|worker| worker.remove(10..20));
    let known = || all.iter().all(|worker| worker.is_known_to(&router));
    eventually("removals are known", PATIENCE, known).await;
    let late = open(&cluster.url());
    late.replica();
    eventually("a late router knows all", PATIENCE, || all.iter().all(|worker| worker.is_known_to(&late)))
        .await;
}
