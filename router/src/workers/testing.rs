//! A worker for unit tests, which nobody reaches.

use std::sync::Arc;
use std::time::Duration;

use thalweg_cache_index::{Holder, Replica};
use thalweg_proto::ids::{WorkerEpoch, WorkerId};
use thalweg_proto::v1;
use thalweg_serve::trust::ClientTrust;
use tokio::time::Instant;

use super::tokenizers::TextSide;
use super::{Worker, Workers, connection};

/// A registry that looks blocks up in `replica`, and a worker of 16 tokens a block, with its number there.
pub(super) fn worker(replica: &Arc<Replica>, now: Instant) -> (Arc<Workers>, Arc<Worker>, Holder) {
    let trust = ClientTrust::default();
    let workers =
        Workers::new("me".into(), Duration::ZERO, trust.clone(), Arc::default(), Arc::clone(replica));
    let address = "grpc://localhost:1".parse().expect("an address");
    let channel = connection::channel(&address, Duration::ZERO, &trust).expect("a channel");
    let about = v1::DescribeResponse { worker_id: "w".into(), block_size: 16, ..Default::default() };
    let text = Arc::new(TextSide::of_bytes());
    let holder = replica.enroll(&WorkerId::new("w"), WorkerEpoch(0)).expect("there is room");
    let worker = Worker::new(about, text, address, connection::client(channel), Some(holder), now);
    (Arc::new(workers), Arc::new(worker), holder)
}
