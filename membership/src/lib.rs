//! Who is there: the addresses of workers, and every change of them.
#![forbid(unsafe_code)]

mod etcd;
mod member;
mod static_list;

use std::sync::Arc;

use tokio::sync::watch;

pub use etcd::{
    Etcd, EtcdConfig, EtcdError, EtcdMembership, EtcdUrl, LEASE_TTL_DEFAULT, LEASE_TTL_MIN, MembershipStats,
    ParseUrlError, Password, Record, Registration,
};
pub use member::{GrpcAddress, Member, ParseAddressError};
pub use static_list::StaticMembership;

/// All members at one moment, in a stable order.
pub type MemberList = Arc<[Member]>;

/// Where a router learns of workers.
pub trait Membership: Send + Sync {
    /// The members now and, through the receiver's `changed`, every later list. A slow reader sees the newest only.
    fn watch(&self) -> watch::Receiver<MemberList>;

    /// Live routers, this one included, now and at every change: at least 1. Limits are divided by it.
    fn routers(&self) -> watch::Receiver<usize>;

    /// How it stands with the source, for metrics; a source that cannot fail has nothing to tell.
    fn stats(&self) -> MembershipStats {
        MembershipStats::default()
    }
}
