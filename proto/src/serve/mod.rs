//! What every server of the cluster has in common: limits on connections, and how they end.

pub mod grpc;
pub mod http;
mod stall_guard;

pub use stall_guard::{GuardedListener, StallGuard};
