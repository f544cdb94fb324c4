//! Coming, changing and going while etcd is well.

use thalweg_harness::etcd;
use thalweg_membership::{EtcdMembership, Membership};
use tokio::time::Instant;

use crate::{Fleet, SOON, client, record, routers, see, until};

const MULTI: &str = "/test/workers/w1";

#[tokio::test(flavor = "multi_thread")]
async fn members_come_drain_and_go() {
    let fleet = Fleet::start(2).await;
    let value = fleet.etcd.get(MULTI).expect("a key");
    assert_eq!(value, r#"{"id":"w1","address":"grpc://127.0.0.1:1","draining":false,"models":["m"]}"#);
    let (_, first) = &fleet.workers[0];
    first.registered().await;
    first.set_draining().await;
    assert!(fleet.etcd.get(MULTI).expect("a key").contains("\"draining\":true"));
    see(&fleet.router, "1d 2", SOON).await;
    let start = Instant::now();
    first.deregister().await;
    first.deregister().await;
    assert!(start.elapsed() < SOON);
    assert_eq!(fleet.etcd.get(MULTI), None);
    see(&fleet.router, "2", SOON).await;
    let ids: Vec<_> = fleet.router.watch().borrow().iter().map(|m| m.id.clone()).collect();
    assert_eq!(ids[0].as_ref().map(|id| id.as_str()), Some("w2"));
    // A crash: nobody takes the key away, the lease lapses.
    let mut fleet = fleet;
    drop(fleet.workers.pop());
    fleet.see("").await;
    assert!(!fleet.router.stats().degraded && fleet.router.stats().lease_losses == 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn routers_are_counted_with_oneself_at_least() {
    let etcd = etcd::Etcd::start();
    let router = |id: &str| {
        let way = client(etcd.address());
        (EtcdMembership::follow(&way, id), way.register_router(record(id, 9)))
    };
    let (a, own) = router("a");
    let (b, other) = router("b");
    routers(&a, 2).await;
    routers(&b, 2).await;
    other.deregister().await;
    routers(&a, 1).await;
    let (_, lapses) = router("c");
    routers(&a, 2).await;
    drop(lapses);
    routers(&a, 1).await;
    routers(&b, 2).await;
    own.deregister().await;
    routers(&b, 1).await;
    assert_eq!(*a.routers().borrow(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_value_that_changes_under_its_key_takes_effect_and_a_bad_one_does_not() {
    // membership-06.
    let fleet = Fleet::start(2).await;
    let put = |value: &str| fleet.etcd.ctl(&["put", MULTI, value]);
    put(r#"{"id":"w1","address":"grpc://127.0.0.1:77","models":["other"],"weight":3}"#);
    see(&fleet.router, "77 2", SOON).await;
    put("rubbish");
    until("the bad value is counted", || fleet.router.stats().malformed == 1).await;
    see(&fleet.router, "77 2", SOON).await;
    put(r#"{"id":"w1","address":"nowhere"}"#);
    until("the bad address is counted", || fleet.router.stats().malformed == 2).await;
    fleet.etcd.ctl(&["put", "/test/workers/", "no name"]);
    fleet.etcd.ctl(&["put", "/test/else", "not ours"]);
    fleet.etcd.ctl(&["put", "/test2/workers/w9", r#"{"id":"w9","address":"grpc://h:9"}"#]);
    put(r#"{"id":"w1","address":"grpc://127.0.0.1:78"}"#);
    see(&fleet.router, "78 2", SOON).await;
    assert_eq!(fleet.router.stats().malformed, 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lease_revoked_by_hand_is_granted_anew() {
    // membership-03.
    let fleet = Fleet::start(3).await;
    // All at once: mass lease loss.
    for lease in fleet.etcd.leases() {
        fleet.etcd.ctl(&["lease", "revoke", &lease]);
    }
    until("every worker noticed", || fleet.workers.iter().all(|(etcd, _)| etcd.stats().lease_losses == 1))
        .await;
    fleet.see("1 2 3").await;
    for (etcd, registration) in &fleet.workers {
        registration.registered().await;
        assert!(!etcd.stats().degraded);
    }
    // A key that is deleted while its lease lives comes back too.
    fleet.etcd.ctl(&["del", MULTI]);
    see(&fleet.router, "2 3", SOON).await;
    fleet.see("1 2 3").await;
    assert_eq!(fleet.workers[0].0.stats().lease_losses, 1);
    // Revoked just before the end: not found is no trouble.
    for lease in fleet.etcd.leases() {
        fleet.etcd.ctl(&["lease", "revoke", &lease]);
    }
    let start = Instant::now();
    fleet.workers[0].1.deregister().await;
    assert!(start.elapsed() < SOON, "{:?}", start.elapsed());
}
