//! What all servers of the cluster share: whom they let in and how clients prove themselves, limits on connections, and how
//! they end.
#![forbid(unsafe_code)]

mod accept;
mod claim;
pub mod grpc;
pub mod http;
mod places;
mod rarely;
mod stall_guard;
pub mod trust;
mod unread;

pub use accept::accept_errors;
pub use claim::Claim;
pub use places::{Place, TooFewFiles, full_listeners, raise_file_limit};
pub use stall_guard::{GuardedListener, StallGuard};
