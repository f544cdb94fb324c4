//! Membership against a real etcd that is hurt in every way that a network and an operator know.
//!
//! Times are short forms: leases of two seconds instead of ten.

mod access;
mod faults;
mod life;

use std::net::SocketAddr;
use std::time::Duration;

use thalweg_harness::etcd;
use thalweg_membership::{Etcd, EtcdConfig, EtcdMembership, LEASE_TTL_MIN, Membership, Record, Registration};
use tokio::time::{Instant, timeout};

/// Whatever is waited for comes in a fraction of this.
const PATIENCE: Duration = Duration::from_secs(20);
/// What an event may take to be seen, on a busy machine.
const SOON: Duration = Duration::from_secs(2);
const PREFIX: &str = "/test";

/// How often long forms repeat.
fn rounds() -> u32 {
    if std::env::var_os("THALWEG_TEST_LONG").is_some() { 20 } else { 1 }
}

fn config(url: &str) -> EtcdConfig {
    EtcdConfig {
        url: url.parse().expect("a sound URL"),
        password: None,
        ca_file: None,
        identity: None,
        lease_ttl: LEASE_TTL_MIN,
    }
}

/// A client by way of this address, which is etcd's or a proxy's.
fn client(address: SocketAddr) -> Etcd {
    Etcd::new(&config(&format!("etcd://{address}{PREFIX}"))).expect("a client")
}

fn record(id: &str, port: u16) -> Record {
    Record {
        id: id.to_owned(),
        address: format!("grpc://127.0.0.1:{port}"),
        draining: false,
        models: vec!["m".to_owned()],
        version: String::new(),
    }
}

/// A router and workers w1, w2, ... at ports 1, 2, ..., all of them known to each other.
struct Fleet {
    etcd: etcd::Etcd,
    router: EtcdMembership,
    _own: Registration,
    workers: Vec<(Etcd, Registration)>,
}

impl Fleet {
    async fn start(workers: u16) -> Self {
        let etcd = etcd::Etcd::start();
        let way = client(etcd.address());
        let (router, own) = (EtcdMembership::follow(&way, "r"), way.register_router(record("r", 100)));
        let mut fleet = Self { etcd, router, _own: own, workers: Vec::new() };
        for number in 1..=workers {
            fleet.add_by(number, fleet.etcd.address());
        }
        fleet.see(&fleet.all()).await;
        fleet
    }

    fn add_by(&mut self, number: u16, address: SocketAddr) {
        let etcd = client(address);
        let registration = etcd.register_worker(record(&format!("w{number}"), number));
        self.workers.push((etcd, registration));
    }

    fn all(&self) -> String {
        (1..=self.workers.len()).map(|number| number.to_string()).collect::<Vec<_>>().join(" ")
    }

    async fn see(&self, expected: &str) {
        see(&self.router, expected, PATIENCE).await;
    }
}

/// The ports of all members, a `d` behind those that drain.
fn ports(members: &thalweg_membership::MemberList) -> String {
    let port =
        |m: &thalweg_membership::Member| format!("{}{}", m.address.port(), if m.draining { "d" } else { "" });
    members.iter().map(port).collect::<Vec<_>>().join(" ")
}

async fn see(membership: &impl Membership, expected: &str, within: Duration) {
    let mut members = membership.watch();
    let seen = timeout(within, members.wait_for(|members| ports(members) == expected)).await;
    if !matches!(seen, Ok(Ok(_))) {
        panic!("expected {expected:?} within {within:?}, there is {:?}", ports(&membership.watch().borrow()));
    }
}

async fn routers(membership: &impl Membership, expected: usize) {
    let mut routers = membership.routers();
    let seen = timeout(PATIENCE, routers.wait_for(|routers| *routers == expected)).await;
    if !matches!(seen, Ok(Ok(_))) {
        panic!("expected {expected} routers, there are {}", *membership.routers().borrow());
    }
}

/// Waits for what only asking tells.
async fn until(what: &str, holds: impl Fn() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !holds() {
        assert!(Instant::now() < deadline, "{what}: did not come about");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}
