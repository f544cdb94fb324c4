//! etcd frozen, killed, wiped and compacted, leases lost one by one and all together: the last known members serve on.

use std::time::Duration;

use serde_json::json;
use thalweg_harness::client::assert_no_failures;
use thalweg_harness::fleet::{eventually, within};
use thalweg_harness::{Etcd, Fleet, FleetPlan, Load, Proxy, Running};

use crate::support::{
    SLOW_PREFILL, STEADY, all_have, answers, ask_all, prompt, seconds, short_or_long, sim, stream, whole,
    with,
};

const PREFIX: &str = "/faults";
const LEASE: u64 = 2;
const CANNOT_FOLLOW: &str = "cannot follow the members in etcd, going on with the last known ones";
/// Whoever lost its key has it back within this time.
const BACK: Duration = Duration::from_secs(LEASE + 5);

/// etcd frozen beyond the lease, killed and restarted with its data, wiped, compacted under the watchers: no request fails,
/// no process ends, every member is back within TTL + 5 s, and a worker that comes afterwards is found.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn etcd_in_trouble_fails_no_request() {
    // membership-01.
    let mut etcd = Etcd::start();
    let mut fleet = members(&etcd, 3).routers(2).start().await;
    let both = [&fleet.routers[0].http, &fleet.routers[1].http];
    let load = Load::start(8, &both, "/v1/completions", |n| stream(&prompt(n, 50), 20));
    load.goes_on(40).await;
    let pause = short_or_long(seconds(LEASE + 1), seconds(30));

    etcd.freeze();
    within(seconds(10), "it is noticed", async || is_degraded(&fleet).await).await;
    serves_for(&load, pause).await;
    etcd.thaw();
    all_back(&etcd, &fleet, "frozen beyond the lease").await;

    etcd.kill();
    within(seconds(10), "it is noticed", async || is_degraded(&fleet).await).await;
    serves_for(&load, pause).await;
    etcd.restart();
    all_back(&etcd, &fleet, "killed and restarted").await;

    etcd.restart_wiped();
    all_back(&etcd, &fleet, "wiped").await;

    etcd.compact();
    load.goes_on(40).await;
    all_back(&etcd, &fleet, "compacted").await;

    assert_no_failures("etcd in trouble", &load.stop().await);
    let new = fleet.add_worker();
    fleet.all_ready().await;
    assert!((0..=new).all(|worker| fleet.worker_runs(worker)), "no worker ended");
    fleet.finish().await;
}

/// A router restarted while etcd does not answer: it listens and says what is wrong, refuses with 503 once it had time to find
/// workers, ends in order when told to, and serves as soon as etcd answers.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_router_restarted_while_etcd_is_frozen_serves_once_it_thaws() {
    // membership-01.
    let etcd = Etcd::start();
    let mut fleet = members(&etcd, 2).start().await;
    etcd.freeze();
    for _ in 0..2 {
        fleet.routers[0].signal("TERM");
        assert_eq!(fleet.router_ended(0, seconds(10)).await, Some(0), "it ends without etcd");
        fleet.restart_router(0);
    }
    let event = fleet.routers[0].process().logged(CANNOT_FOLLOW);
    assert_eq!((event["level"].as_str(), event["workers"].as_u64()), (Some("WARN"), Some(0)), "{event}");
    assert!(is_degraded(&fleet).await);
    assert_eq!(fleet.http().get("/health").await.status.as_u16(), 200);
    let early = fleet.ask(whole(&prompt(0, 50), 10)).outcome().await;
    assert_eq!(early.status, 503, "{:?}", early.error);
    assert!(early.error.as_ref().is_some_and(|error| error.contains("no worker")), "{:?}", early.error);
    assert!(!early.header("retry-after").is_empty());

    etcd.thaw();
    all_back(&etcd, &fleet, "thawed").await;
    assert_no_failures(
        "a router that found its workers",
        &answers(&fleet, &[whole(&prompt(1, 50), 10)]).await,
    );
    fleet.finish().await;
}

/// All leases are revoked at once while connections live: streams go on, new requests are served, all register anew, and
/// SIGTERM afterwards ends them with 0.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn losing_all_leases_loses_no_worker() {
    let etcd = Etcd::start();
    let fleet = members(&etcd, 3).start().await;
    let bodies: Vec<_> = (0..16).map(|i| stream(&prompt(i, 50), 200)).collect();
    let running = ask_all(&fleet, &bodies);
    all_have(&running, 10).await;
    for lease in etcd.leases() {
        etcd.ctl(&["lease", "revoke", &lease]);
    }
    let late: Vec<_> = (100..132).map(|i| whole(&prompt(i, 50), 10)).collect();
    assert_no_failures("asked after the loss", &answers(&fleet, &late).await);
    assert_no_failures("streams across the loss", &Running::outcomes(running).await);
    let resumes = fleet.router_metrics(0).await.count("thalweg_router_resumes_total", "");
    assert_eq!(resumes, 0.0, "nobody was taken for dead");
    all_back(&etcd, &fleet, "leases revoked").await;
    fleet.finish().await;
}

/// The workers' way to etcd is blocked until their leases lapse, while routers read etcd and see them all vanish: they are kept
/// for as long as they answer, the gauge says so, and they register anew within TTL + 5 s.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn workers_that_vanish_from_etcd_but_answer_are_kept() {
    let etcd = Etcd::start();
    let proxy = Proxy::start(etcd.address());
    let (theirs, lease) = (format!("etcd://{}{PREFIX}", proxy.address()), LEASE.to_string());
    let plan = sim(STEADY).workers(3).args(&["--membership-lease-ttl", &lease]);
    let plan = plan.worker_args(&["--membership", &theirs]).router_args(&["--membership", &etcd.url(PREFIX)]);
    let fleet = plan.start().await;
    let load = Load::start(8, &[fleet.http()], "/v1/completions", |n| stream(&prompt(n, 50), 20));
    load.goes_on(20).await;
    proxy.blackhole();
    let keys = format!("{PREFIX}/workers/");
    let vanished = async || etcd.ctl(&["get", "--prefix", "--keys-only", &keys]).trim().is_empty();
    within(BACK, "their keys are gone", vanished).await;
    let said = async || fleet.router_metrics(0).await.value("thalweg_membership_mass_loss") == 3.0;
    within(seconds(5), "the router says so", said).await;
    load.goes_on(short_or_long(80, 800)).await;
    assert_eq!(fleet.worker_state(0, 0).await, "ready", "it answers, so it is kept");
    proxy.forward();
    proxy.cut();
    all_back(&etcd, &fleet, "cut off").await;
    let over = async || fleet.router_metrics(0).await.value("thalweg_membership_mass_loss") == 0.0;
    within(seconds(5), "nobody is missing", over).await;
    assert_no_failures("workers cut off from etcd", &load.stop().await);
    fleet.finish().await;
}

/// One worker's way to etcd alone is blocked beyond its lease: it is served on as long as it answers, the others register as ever,
/// and it is back within TTL + 5 s. Its lease is revoked by hand, and it is told twice to end: it exits with 0.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_worker_cut_off_from_etcd_is_kept_and_ends_in_order() {
    // membership-01, membership-03.
    let etcd = Etcd::start();
    let proxy = Proxy::start(etcd.address());
    let its = format!("etcd://{}{PREFIX}", proxy.address());
    let mut fleet = members(&etcd, 3).of_worker(0, "--membership", &its).start().await;
    let load = Load::start(8, &[fleet.http()], "/v1/completions", |n| stream(&prompt(n, 50), 20));
    load.goes_on(20).await;
    proxy.blackhole();
    let key = format!("{PREFIX}/workers/w0");
    within(BACK, "its key is gone", async || etcd.get(&key).is_none()).await;
    load.goes_on(short_or_long(80, 800)).await;
    assert_eq!(fleet.worker_state(0, 0).await, "ready", "it answers, so it is kept");
    proxy.forward();
    proxy.cut();
    all_back(&etcd, &fleet, "one worker cut off").await;

    for lease in etcd.leases() {
        etcd.ctl(&["lease", "revoke", &lease]);
    }
    fleet.workers[0].signal("TERM");
    fleet.workers[0].process().logged("draining");
    fleet.workers[0].signal("TERM");
    assert_eq!(fleet.worker_ended(0, seconds(5)).await, Some(0));
    assert_no_failures("a worker cut off from etcd", &load.stop().await);
    fleet.restart_worker(0);
    all_back(&etcd, &fleet, "leases revoked while one ends").await;
    fleet.finish().await;
}

/// A second worker under a name that is taken: both say so, one of them gets no work, nobody fails, and with a name of its own it
/// is welcome.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_workers_of_one_name_are_told_so() {
    let etcd = Etcd::start();
    let plan = members(&etcd, 1).of_worker(1, "--worker-id", "w0");
    let mut fleet = plan.start().await;
    let load = Load::start(4, &[fleet.http()], "/v1/completions", |n| whole(&prompt(n, 50), 10));
    load.goes_on(20).await;
    fleet.add_worker();
    let said = "somebody else wrote this process's key in etcd; give each worker a --worker-id, and each router a \
                --router-id, of its own";
    fleet.workers[0].process().logged(said);
    load.goes_on(80).await;
    let known = fleet.router_metrics(0).await.count("thalweg_router_worker_state", "state=\"ready\"");
    assert_eq!(known, 1.0, "one of them gets the work");
    fleet.workers[1].signal("TERM");
    assert_eq!(fleet.worker_ended(1, seconds(10)).await, Some(0));
    let back = async || fleet.worker_state(0, 0).await == "ready";
    within(BACK, "the other one is found again", back).await;
    load.goes_on(20).await;
    let outcomes = load.stop().await;
    assert_no_failures("two workers of one name", &outcomes);
    fleet.finish().await;
}

/// A worker that crashed and came back under the same name at another address: the new one is used within 2 s, others are left
/// alone. A value that nobody can read is ignored.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_address_that_changes_under_the_same_key_is_followed() {
    // membership-06.
    let etcd = Etcd::start();
    let mut fleet = members(&etcd, 2).start().await;
    let load = Load::start(4, &[fleet.http()], "/v1/completions", |n| whole(&prompt(n, 50), 10));
    etcd.ctl(&["put", &format!("{PREFIX}/workers/w7"), "no record"]);
    for _ in 0..short_or_long(2, 10) {
        load.goes_on(20).await;
        fleet.kill_worker(0);
        fleet.restart_worker_elsewhere(0);
        let took = within(seconds(2), "found", async || fleet.worker_state(0, 0).await == "ready").await;
        eprintln!("found at its new address after {took:?}");
    }
    load.goes_on(20).await;
    let outcomes = load.stop().await;
    assert_no_failures("an address that changes", &outcomes);
    let malformed = fleet.router_metrics(0).await.count("thalweg_membership_malformed_values_total", "");
    assert_eq!(malformed, 1.0);
    fleet.finish().await;
}

/// A conversation whose worker is replaced by one of another name goes on with the next turn.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_conversation_outlives_its_worker() {
    // routing-08.
    let etcd = Etcd::start();
    // What the prefix is worth stands above all noise in the measured speed of steps.
    let mut fleet = members_like(&etcd, SLOW_PREFILL, 2).start().await;
    let mut text = prompt(1, 200);
    let mut served = Vec::new();
    for turn in 0..6 {
        let outcome = fleet.ask(with(whole(&text, 5), json!({"user": "somebody"}))).outcome().await;
        assert_no_failures(&format!("turn {turn}"), [&outcome]);
        served.push(outcome.header("x-thalweg-worker").to_owned());
        text += " and then";
        if turn == 2 {
            let pinned = fleet.workers.iter().position(|worker| worker.name == served[turn]);
            fleet.kill_worker(pinned.expect("a worker of ours"));
            fleet.add_worker();
            eventually("the new one is ready", async || fleet.worker_state(0, 2).await == "ready").await;
        }
    }
    assert!(
        served[..3].iter().all(|worker| *worker == served[0]),
        "turns stay with their prefix: {served:?}"
    );
    assert!(served[3..].iter().all(|worker| *worker == served[3]), "and do so again: {served:?}");
    assert_ne!(served[2], served[3]);
    // What nobody has any more is forgotten: the dead one leaves the list with its lease.
    let gone = async || fleet.router_metrics(0).await.values("thalweg_router_worker_bookings").len() == 2;
    within(BACK, "the dead worker leaves the list", gone).await;
    fleet.finish().await;
}

fn members(etcd: &Etcd, workers: usize) -> FleetPlan {
    members_like(etcd, STEADY, workers)
}

fn members_like(etcd: &Etcd, profile: &str, workers: usize) -> FleetPlan {
    let (url, lease) = (etcd.url(PREFIX), LEASE.to_string());
    sim(profile).workers(workers).args(&["--membership", &url, "--membership-lease-ttl", &lease])
}

async fn is_degraded(fleet: &Fleet) -> bool {
    let mut all = true;
    for router in 0..fleet.routers.len() {
        all &= fleet.router_metrics(router).await.value("thalweg_membership_degraded") > 0.0;
    }
    all
}

/// Answers keep coming for so long.
async fn serves_for(load: &Load, time: Duration) {
    let until = tokio::time::Instant::now() + time;
    while tokio::time::Instant::now() < until {
        load.goes_on(8).await;
    }
}

/// Every worker's key is there, and every router is content and has every worker, within TTL + 5 s.
async fn all_back(etcd: &Etcd, fleet: &Fleet, what: &str) {
    let keys = async || {
        let names = fleet.workers.iter().map(|worker| format!("{PREFIX}/workers/{}", worker.name));
        names.into_iter().all(|key| etcd.get(&key).is_some()) && !is_degraded(fleet).await
    };
    let took = within(BACK, what, keys).await;
    eprintln!("{what}: every member is back after {took:?}");
    fleet.all_ready().await;
}
