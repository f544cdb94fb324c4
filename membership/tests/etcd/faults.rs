//! etcd frozen, killed, wiped, compacted, cut off.

use std::time::Duration;

use thalweg_harness::{Proxy, Random};
use thalweg_membership::{Etcd, EtcdConfig, EtcdMembership, Membership};
use tokio::time::{Instant, sleep, timeout};

use crate::{Fleet, PATIENCE, client, config, record, see, until};

/// Longer than a lease of two seconds and than any silence that a watch bears.
const BEYOND_THE_LEASE: Duration = Duration::from_secs(6);

/// Panics if a list is empty while the future runs.
async fn never_empty(membership: &EtcdMembership, run: impl Future<Output = ()>) {
    let mut members = membership.watch();
    let empty = async {
        // The sender lives in the membership.
        let _ = members.wait_for(|members| members.is_empty()).await;
    };
    tokio::select! {
        biased;
        () = empty => panic!("the members vanished because etcd could not be reached"),
        () = run => {}
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn members_stay_while_etcd_is_frozen_and_return_after_it() {
    // membership-01.
    let fleet = Fleet::start(3).await;
    fleet.etcd.freeze();
    let frozen = async {
        until("the router notices", || fleet.router.stats().degraded).await;
        until("the workers notice", || fleet.workers.iter().all(|(etcd, _)| etcd.stats().degraded)).await;
        sleep(BEYOND_THE_LEASE).await;
    };
    never_empty(&fleet.router, frozen).await;
    assert_eq!(crate::ports(&fleet.router.watch().borrow()), "1 2 3");
    fleet.etcd.thaw();
    until("all are well", || {
        !fleet.router.stats().degraded && fleet.workers.iter().all(|(etcd, _)| !etcd.stats().degraded)
    })
    .await;
    fleet.see("1 2 3").await;
    assert!(fleet.router.stats().relists > 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn members_return_after_a_crash_of_etcd_with_and_without_its_data() {
    // membership-01.
    let mut fleet = Fleet::start(2).await;
    for wiped in [false, true] {
        fleet.etcd.kill();
        never_empty(&fleet.router, until("noticed", || fleet.router.stats().degraded)).await;
        if wiped {
            fleet.etcd.restart_wiped();
        } else {
            fleet.etcd.restart();
        }
        let start = Instant::now();
        until("well", || !fleet.router.stats().degraded).await;
        fleet.see("1 2").await;
        for key in ["/test/workers/w1", "/test/workers/w2", "/test/routers/r"] {
            until(key, || fleet.etcd.get(key).is_some()).await;
        }
        assert!(start.elapsed() < Duration::from_secs(2 + 5), "wiped {wiped}: {:?}", start.elapsed());
        // What comes later is seen too: the watch goes on from the right revision.
        let late = client(fleet.etcd.address()).register_worker(record("w9", 9));
        fleet.see("1 2 9").await;
        late.deregister().await;
        fleet.see("1 2").await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_watcher_that_slept_through_a_compaction_lists_anew() {
    let fleet = Fleet::start(1).await;
    let proxy = Proxy::start(fleet.etcd.address());
    let router = EtcdMembership::follow(&client(proxy.address()), "");
    see(&router, "1", PATIENCE).await;
    until("the watch is open", || !router.stats().degraded).await;
    proxy.freeze();
    let value = |port: u16| format!(r#"{{"id":"w1","address":"grpc://127.0.0.1:{port}"}}"#);
    for port in 10..=30 {
        fleet.etcd.ctl(&["put", "/test/workers/w1", &value(port)]);
    }
    fleet.etcd.compact();
    until("the watch is given up", || router.stats().degraded).await;
    assert_eq!(crate::ports(&router.watch().borrow()), "1");
    proxy.thaw();
    see(&router, "30", PATIENCE).await;
    let relists = router.stats().relists;
    assert!(relists > 0);
    // A compaction beside a watch that is up to date disturbs nobody.
    fleet.etcd.ctl(&["put", "/test/else", "x"]);
    fleet.etcd.compact();
    fleet.etcd.ctl(&["put", "/test/workers/w1", &value(31)]);
    see(&router, "31", PATIENCE).await;
    assert_eq!(router.stats().relists, relists);
}

#[tokio::test(flavor = "multi_thread")]
async fn cuts_at_random_moments_cost_no_lease() {
    // membership-04.
    let fleet = Fleet::start(0).await;
    let proxy = Proxy::start(fleet.etcd.address());
    // So slow that every third renewal or so is cut off in its midst: only the tries that follow save the lease.
    proxy.delay(Duration::from_millis(80));
    let lease_ttl = Duration::from_secs(6);
    let config = EtcdConfig { lease_ttl, ..config(&format!("etcd://{}/test", proxy.address())) };
    let etcd = Etcd::new(&config).expect("a client");
    let _worker = etcd.register_worker(record("w1", 1));
    fleet.see("1").await;
    let leases = fleet.etcd.leases();
    let mut random = Random::from_env(4);
    let cuts = async {
        for _ in 0..15 * crate::rounds() {
            sleep(Duration::from_millis(300 + random.below(1000) as u64)).await;
            proxy.cut();
        }
    };
    never_empty(&fleet.router, cuts).await;
    assert_eq!(fleet.etcd.leases(), leases, "the same leases live");
    assert_eq!(etcd.stats().lease_losses, 0);
    assert!(proxy.accepted() > 2, "the cuts met connections");
}

#[tokio::test(flavor = "multi_thread")]
async fn one_worker_without_a_way_to_etcd_returns_when_there_is_one() {
    let mut fleet = Fleet::start(1).await;
    let proxy = Proxy::start(fleet.etcd.address());
    fleet.add_by(2, proxy.address());
    fleet.see("1 2").await;
    proxy.blackhole();
    fleet.see("1").await;
    assert!(!fleet.router.stats().degraded);
    until("the worker notices", || fleet.workers[1].0.stats().degraded).await;
    // What was swallowed stays lost: the old connection is good for nothing, and nobody closes it.
    proxy.forward();
    fleet.see("1 2").await;
    until("well again", || !fleet.workers[1].0.stats().degraded).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_etcd_that_is_gone_holds_nobody_up() {
    let mut fleet = Fleet::start(1).await;
    fleet.etcd.freeze();
    let start = Instant::now();
    let end = async {
        fleet.workers[0].1.set_draining().await;
        fleet.workers[0].1.deregister().await;
    };
    timeout(Duration::from_secs(4), end).await.expect("bounded");
    fleet.etcd.thaw();
    fleet.etcd.kill();
    let start = start.elapsed();
    assert!(start >= Duration::from_secs(1), "it was tried: {start:?}");
    // Who starts while etcd is down is registered when it is back.
    let router = EtcdMembership::follow(&client(fleet.etcd.address()), "late");
    let worker = client(fleet.etcd.address()).register_worker(record("w7", 7));
    until("noticed", || router.stats().degraded).await;
    fleet.etcd.restart_wiped();
    worker.registered().await;
    see(&router, "7", PATIENCE).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn another_endpoint_is_used_when_one_is_dead_or_frozen() {
    let fleet = Fleet::start(0).await;
    let (dead, proxy) = (Proxy::start(fleet.etcd.address()), Proxy::start(fleet.etcd.address()));
    dead.refuse();
    let url = format!("etcd://{},{},{}/test", dead.address(), proxy.address(), fleet.etcd.address());
    let etcd = Etcd::new(&config(&url)).expect("a client");
    let worker = etcd.register_worker(record("w1", 1));
    worker.registered().await;
    fleet.see("1").await;
    let router = EtcdMembership::follow(&etcd, "");
    see(&router, "1", PATIENCE).await;
    proxy.freeze();
    let other = client(fleet.etcd.address()).register_worker(record("w2", 2));
    see(&router, "1 2", PATIENCE).await;
    // Whichever endpoint was in use, the lease lived through its loss.
    assert_eq!(etcd.stats().lease_losses, 0);
    drop(other);
}
