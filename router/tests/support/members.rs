//! A membership that says what a test wants.

use thalweg_membership::{GrpcAddress, Member, MemberList, Membership};
use tokio::sync::watch;

/// A list of members and a number of routers.
pub(crate) struct Members {
    list: watch::Sender<MemberList>,
    routers: watch::Sender<usize>,
}

impl Members {
    pub(crate) fn new(addresses: impl IntoIterator<Item = GrpcAddress>) -> Self {
        let this = Self { list: watch::Sender::new([].into()), routers: watch::Sender::new(1) };
        this.set(addresses);
        this
    }

    /// Nameless members at these addresses, as a static list has them.
    pub(crate) fn set(&self, addresses: impl IntoIterator<Item = GrpcAddress>) {
        let member = |address| Member { id: None, address, draining: false };
        self.set_members(addresses.into_iter().map(member));
    }

    pub(crate) fn set_members(&self, members: impl IntoIterator<Item = Member>) {
        self.list.send_replace(members.into_iter().collect());
    }

    pub(crate) fn set_routers(&self, routers: usize) {
        self.routers.send_replace(routers);
    }
}

impl Membership for Members {
    fn watch(&self) -> watch::Receiver<MemberList> {
        self.list.subscribe()
    }

    fn routers(&self) -> watch::Receiver<usize> {
        self.routers.subscribe()
    }
}
