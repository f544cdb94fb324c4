//! What must survive: real processes are killed, frozen and misled under load, and failures that clients see are counted.
//!
//! `THALWEG_TEST_LONG=1` runs the long forms; `THALWEG_TEST_SEED` varies what is random.

mod embeddings;
mod etcd;
mod files;
mod kills;
mod memory;
mod overload;
mod redis;
mod responses;
mod routers;
mod starts;
mod streams;
mod structured;
mod support;
mod workers;
