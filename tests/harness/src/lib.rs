//! What tests of whole processes share: start them, talk to them, read their metrics, and see that they end in order.
#![forbid(unsafe_code)]

pub mod cluster;
pub mod http;
pub mod metrics;
pub mod models;
pub mod process;
pub mod random;

pub use cluster::Cluster;
pub use http::{EventStream, HttpClient, Reply};
pub use metrics::Scrape;
pub use process::Process;
pub use random::Random;
