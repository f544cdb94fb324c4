//! What all keys say, as one router sees it.

use tokio::sync::watch;
use tokio::task::JoinHandle;

use super::roster::Roster;
use super::watcher::Watcher;
use super::{Etcd, MembershipStats};
use crate::{MemberList, Membership};

/// The members of an etcd cluster. Dropping it ends the watch; the last list stays with whoever has it.
pub struct EtcdMembership {
    etcd: Etcd,
    members: watch::Sender<MemberList>,
    routers: watch::Sender<usize>,
    watcher: JoinHandle<()>,
}

impl EtcdMembership {
    /// Follows the workers and the routers, of which `own_router` is this one, registered or not; empty for a mere
    /// observer. There are no members until etcd has answered.
    pub fn follow(etcd: &Etcd, own_router: &str) -> Self {
        let (members, routers) = (watch::Sender::new(MemberList::from([])), watch::Sender::new(1));
        let watcher = Watcher {
            etcd: etcd.clone(),
            roster: Roster::new(&etcd.prefix, own_router),
            members: members.clone(),
            routers: routers.clone(),
        };
        etcd.counters.watch_degraded(true);
        let watcher = tokio::spawn(watcher.follow());
        Self { etcd: etcd.clone(), members, routers, watcher }
    }
}

impl Membership for EtcdMembership {
    fn watch(&self) -> watch::Receiver<MemberList> {
        self.members.subscribe()
    }

    fn routers(&self) -> watch::Receiver<usize> {
        self.routers.subscribe()
    }

    fn stats(&self) -> MembershipStats {
        self.etcd.stats()
    }
}

impl Drop for EtcdMembership {
    fn drop(&mut self) {
        self.watcher.abort();
    }
}
