//! One process of a fleet by its place: name, addresses, and the process that is there at present.

use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::sync::atomic::{AtomicU16, Ordering};

use crate::http::HttpClient;
use crate::process::Process;
use crate::proxy::Proxy;

/// One router or worker: what stays the same when its process is another one.
pub struct Node {
    /// Its id.
    pub name: String,
    /// Where a router listens, or a worker's gRPC.
    pub address: SocketAddr,
    /// A router's API, or a worker's metrics and health.
    pub http: HttpClient,
    /// In front of a worker, with [`crate::FleetPlan::proxies`].
    pub proxy: Option<Proxy>,
    /// Where a worker's metrics are.
    pub(crate) metrics: SocketAddr,
    pub(crate) process: Option<Process>,
}

impl Node {
    pub(crate) fn new(name: String, proxy: bool) -> Self {
        let [address, metrics] = [(); 2].map(|()| free_address());
        // A router's metrics are part of its API.
        let http = HttpClient::new(if name.starts_with('r') { address } else { metrics });
        Self { name, address, http, proxy: proxy.then(|| Proxy::start(address)), metrics, process: None }
    }

    /// Where routers connect to.
    pub fn reached_at(&self) -> SocketAddr {
        self.proxy.as_ref().map_or(self.address, Proxy::address)
    }

    /// Its process, which must run.
    pub fn process(&mut self) -> &mut Process {
        self.process.as_mut().expect("it runs")
    }

    /// Sends a signal to its process, such as `STOP`.
    pub fn signal(&self, signal: &str) {
        self.process.as_ref().expect("it runs").signal(signal);
    }
}

/// A port that stays free while its process restarts: below those that the system gives to clients.
fn free_address() -> SocketAddr {
    static NEXT: AtomicU16 = AtomicU16::new(0);
    const FIRST: u32 = 10_000;
    const PORTS: u32 = 20_000;
    loop {
        let offset =
            std::process::id().wrapping_mul(64) % PORTS + u32::from(NEXT.fetch_add(1, Ordering::Relaxed));
        let port = (FIRST + offset % PORTS) as u16;
        let address = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
        if TcpListener::bind(address).is_ok() {
            return address;
        }
    }
}
