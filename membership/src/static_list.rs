//! Members given on the command line; the list never changes by itself.

use tokio::sync::watch;

use crate::{GrpcAddress, Member, MemberList, Membership};

/// A list that its owner sets.
pub struct StaticMembership {
    members: watch::Sender<MemberList>,
    routers: watch::Sender<usize>,
}

impl StaticMembership {
    /// Workers at these addresses; one that is named twice counts once.
    pub fn new(addresses: impl IntoIterator<Item = GrpcAddress>) -> Self {
        Self { members: watch::Sender::new(list(addresses)), routers: watch::Sender::new(1) }
    }

    /// Replaces the list: `up` learns the ports of its workers one by one.
    pub fn set(&self, addresses: impl IntoIterator<Item = GrpcAddress>) {
        self.members.send_replace(list(addresses));
    }
}

impl Membership for StaticMembership {
    fn watch(&self) -> watch::Receiver<MemberList> {
        self.members.subscribe()
    }

    fn routers(&self) -> watch::Receiver<usize> {
        self.routers.subscribe()
    }
}

fn list(addresses: impl IntoIterator<Item = GrpcAddress>) -> MemberList {
    let mut members: Vec<Member> = Vec::new();
    for address in addresses {
        if members.iter().all(|m| m.address != address) {
            members.push(Member { id: None, address, draining: false });
        }
    }
    members.into()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn addresses(texts: &[&str]) -> Vec<GrpcAddress> {
        texts.iter().map(|t| t.parse().unwrap()).collect()
    }

    #[tokio::test]
    async fn a_watcher_sees_the_list_and_its_changes() {
        let membership = StaticMembership::new(addresses(&["grpc://a:1", "grpc://b:2", "grpc://a:1"]));
        let mut watch = membership.watch();
        assert_eq!(watch.borrow_and_update().len(), 2, "a duplicate counts once");
        membership.set(addresses(&["grpc://c:3"]));
        watch.changed().await.unwrap();
        let now: Vec<String> = watch.borrow_and_update().iter().map(|m| m.address.to_string()).collect();
        assert_eq!(now, ["grpc://c:3"]);
    }
}
