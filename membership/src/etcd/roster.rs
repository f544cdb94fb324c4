//! What the keys say: the workers, and how many routers there are. Pure.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use super::keys::{self, Kind};
use super::record::Record;
use super::rpc::KeyValue;
use crate::{Member, MemberList};

/// Members by name, as of the last list and the events since.
pub(super) struct Roster {
    prefix: String,
    /// Of the router that keeps this; empty where a mere watcher does.
    own_router: String,
    workers: BTreeMap<String, Member>,
    routers: BTreeSet<String>,
    /// Revision of each value that cannot be read, so that it is told of once.
    malformed: HashMap<String, i64>,
}

/// A value that cannot be read; told of once.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Malformed {
    pub(super) worker: String,
    pub(super) reason: String,
}

impl Roster {
    pub(super) fn new(prefix: &str, own_router: &str) -> Self {
        Self {
            prefix: prefix.to_owned(),
            own_router: own_router.to_owned(),
            workers: BTreeMap::new(),
            routers: BTreeSet::new(),
            malformed: HashMap::new(),
        }
    }

    /// Everything that there is. A member whose value cannot be read stays as it was.
    pub(super) fn replace(&mut self, found: &[KeyValue]) -> Vec<Malformed> {
        let named = |kind| {
            let key = |kv: &KeyValue| match keys::parse(&self.prefix, &kv.key) {
                Some((of, id)) if of == kind && (kind == Kind::Worker || lives(kv)) => Some(id.to_owned()),
                _ => None,
            };
            found.iter().filter_map(key).collect::<BTreeSet<String>>()
        };
        let (workers, routers) = (named(Kind::Worker), named(Kind::Router));
        self.workers.retain(|id, _| workers.contains(id));
        self.malformed.retain(|id, _| workers.contains(id));
        self.routers = routers;
        found.iter().filter_map(|kv| self.put(kv)).collect()
    }

    /// A key was written.
    pub(super) fn put(&mut self, kv: &KeyValue) -> Option<Malformed> {
        let (kind, id) = keys::parse(&self.prefix, &kv.key)?;
        let id = id.to_owned();
        if kind == Kind::Router {
            if lives(kv) {
                self.routers.insert(id);
            }
            return None;
        }
        match Record::member(&id, &kv.value) {
            Ok(member) => {
                self.malformed.remove(&id);
                self.workers.insert(id, member);
                None
            }
            Err(reason) => {
                let told = self.malformed.insert(id.clone(), kv.mod_revision) == Some(kv.mod_revision);
                (!told).then_some(Malformed { worker: id, reason })
            }
        }
    }

    /// A key was taken away, or went with its lease.
    pub(super) fn delete(&mut self, key: &[u8]) {
        match keys::parse(&self.prefix, key) {
            Some((Kind::Worker, id)) => {
                self.workers.remove(id);
                self.malformed.remove(id);
            }
            Some((Kind::Router, id)) => {
                self.routers.remove(id);
            }
            None => {}
        }
    }

    /// The workers in the order of their names.
    pub(super) fn members(&self) -> MemberList {
        self.workers.values().cloned().collect()
    }

    /// Live routers, the own one included whether it is written or not.
    pub(super) fn routers(&self) -> usize {
        self.routers.iter().filter(|id| **id != self.own_router).count() + 1
    }
}

/// A router's key goes with the router: one without a lease is of somebody else, and would take its share of all limits for ever.
fn lives(kv: &KeyValue) -> bool {
    kv.lease != 0
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kv(key: &str, value: &str, mod_revision: i64) -> KeyValue {
        KeyValue { key: key.into(), value: value.into(), mod_revision, lease: 7, ..KeyValue::default() }
    }

    fn worker(id: &str, port: u16, revision: i64) -> KeyValue {
        let value = format!(r#"{{"id":"{id}","address":"grpc://h:{port}"}}"#);
        kv(&format!("/t/workers/{id}"), &value, revision)
    }

    fn check(roster: &Roster, workers: &str, routers: usize) {
        let members = roster.members();
        let text: Vec<_> = members.iter().map(|m| m.address.to_string().replace("grpc://h:", "")).collect();
        assert_eq!((text.join(" ").as_str(), roster.routers()), (workers, routers));
    }

    #[test]
    fn lists_and_events_make_the_members() {
        let mut roster = Roster::new("/t", "me");
        check(&roster, "", 1);
        let other = kv("/t/else", "x", 1);
        let list = [worker("b", 2, 1), worker("a", 1, 1), kv("/t/routers/me", "{}", 1), other];
        assert_eq!(roster.replace(&list), []);
        check(&roster, "1 2", 1);
        assert_eq!(roster.put(&worker("a", 9, 2)), None);
        assert_eq!(roster.put(&kv("/t/routers/you", "", 3)), None);
        let left = KeyValue { lease: 0, ..kv("/t/routers/left", "{}", 3) };
        assert_eq!((roster.put(&left), roster.routers()), (None, 2));
        check(&roster, "9 2", 2);
        roster.delete(b"/t/workers/b");
        roster.delete(b"/t/routers/me");
        roster.delete(b"/t/workers/never");
        check(&roster, "9", 2);
        roster.replace(&[worker("c", 3, 4)]);
        check(&roster, "3", 1);
    }

    #[test]
    fn what_cannot_be_read_is_told_once_and_changes_nothing() {
        let mut roster = Roster::new("/t", "");
        roster.put(&worker("a", 1, 1));
        let told = roster.put(&kv("/t/workers/a", "rubbish", 2)).expect("told of");
        assert_eq!(told.worker, "a");
        assert_eq!(roster.replace(&[kv("/t/workers/a", "rubbish", 2)]), [], "the same again");
        check(&roster, "1", 1);
        assert!(roster.put(&kv("/t/workers/a", "other rubbish", 3)).is_some());
        assert_eq!(roster.put(&worker("a", 4, 5)), None);
        check(&roster, "4", 1);
        assert!(roster.put(&kv("/t/workers/new", "rubbish", 6)).is_some());
        check(&roster, "4", 1);
    }
}
