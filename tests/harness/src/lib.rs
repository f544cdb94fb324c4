//! What tests of whole processes share: start them, talk to them, read their metrics, and see that they end in order.
#![forbid(unsafe_code)]

pub mod client;
pub mod cluster;
pub mod etcd;
pub mod fleet;
pub mod http;
pub mod metrics;
pub mod models;
pub mod node;
pub mod pki;
pub mod process;
pub mod proxy;
pub mod random;
pub mod redis;

pub use client::{Load, Outcome, Running};
pub use cluster::Cluster;
pub use etcd::Etcd;
pub use fleet::{Fleet, FleetPlan};
pub use http::{EventStream, HttpClient, Reply};
pub use metrics::Scrape;
pub use node::Node;
pub use process::Process;
pub use proxy::Proxy;
pub use random::Random;
