//! What membership says of the workers, and whether it lost too many at once to be believed.

use std::time::Duration;

use hashbrown::{HashMap, HashSet};
use thalweg_membership::{GrpcAddress, Member};
use thalweg_proto::ids::WorkerId;
use tokio::time::Instant;

/// Members that leave within this time left together.
const TOGETHER: Duration = Duration::from_secs(10);
/// Of all members; more than this do not die at once while their connections live.
const LOST_SHARE_MAX: f64 = 0.2;

/// The members now, and those that left of late.
#[derive(Debug, Default)]
pub(super) struct Listing {
    members: HashMap<GrpcAddress, Member>,
    left: HashMap<GrpcAddress, Instant>,
    /// Left together and connected all the same.
    kept: HashSet<GrpcAddress>,
}

impl Listing {
    /// Takes in a new list.
    pub(super) fn update(&mut self, list: &[Member], now: Instant) {
        let members: HashMap<GrpcAddress, Member> =
            list.iter().map(|member| (member.address.clone(), member.clone())).collect();
        let before = std::mem::replace(&mut self.members, members);
        // Whoever has said that it goes is not lost.
        let unannounced = before.into_values().filter(|member| !member.draining);
        self.left.extend(unannounced.map(|member| (member.address, now)));
        self.left.retain(|address, _| !self.members.contains_key(address));
    }

    /// Membership names this address.
    pub(super) fn has(&self, address: &GrpcAddress) -> bool {
        self.members.contains_key(address)
    }

    /// The worker gets no new work at this address: it drains, or its name is listed at another address only, where it takes
    /// work.
    pub(super) fn withdraws(&self, address: &GrpcAddress, worker: &WorkerId) -> bool {
        match self.members.get(address) {
            Some(member) => member.draining,
            None => {
                self.members.values().any(|member| member.id.as_ref() == Some(worker) && !member.draining)
            }
        }
    }

    /// Lets time pass. Returns how many workers are kept although membership lost them, if that has changed.
    pub(super) fn lost(&mut self, now: Instant, lives: impl Fn(&GrpcAddress) -> bool) -> Option<usize> {
        let before = self.kept.len();
        self.left.retain(|address, since| now.saturating_duration_since(*since) < TOGETHER && lives(address));
        if self.left.len() as f64 > LOST_SHARE_MAX * (self.members.len() + self.left.len()) as f64 {
            self.kept.extend(self.left.keys().cloned());
        }
        self.kept.retain(|address| !self.members.contains_key(address) && lives(address));
        (self.kept.len() != before).then_some(self.kept.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn member(port: u16, id: Option<&str>, draining: bool) -> Member {
        let address = format!("grpc://w:{port}").parse().unwrap();
        Member { id: id.map(WorkerId::new), address, draining }
    }

    fn members(ports: std::ops::Range<u16>) -> Vec<Member> {
        ports.map(|port| member(port, None, false)).collect()
    }

    #[test]
    fn many_that_leave_together_and_live_are_kept() {
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        // Steps of (second, members left, how many of the lost live), and what is told at each.
        let check = |name: &str, steps: &[(u64, u16, bool)], expected: &[Option<usize>]| {
            let mut listing = Listing::default();
            listing.update(&members(1..11), start);
            let told: Vec<_> = steps
                .iter()
                .map(|&(second, left, live)| {
                    listing.update(&members(1..1 + left), at(second));
                    listing.lost(at(second), |_| live)
                })
                .collect();
            assert_eq!(told, expected, "{name}");
        };
        check("two of ten may die", &[(1, 8, true)], &[None]);
        check("three may not", &[(1, 7, true)], &[Some(3)]);
        check("one after the other", &[(1, 9, true), (5, 8, true), (9, 7, true)], &[None, None, Some(3)]);
        check("slowly", &[(1, 8, true), (12, 7, true), (23, 6, true)], &[None, None, None]);
        check("with their connections", &[(1, 0, false)], &[None]);
        check("all, and back", &[(1, 0, true), (60, 0, true), (61, 10, true)], &[Some(10), None, Some(0)]);
        check("all, then they die", &[(1, 0, true), (60, 0, false)], &[Some(10), Some(0)]);
    }

    #[test]
    fn whoever_announced_it_is_not_lost() {
        let (mut listing, now) = (Listing::default(), Instant::now());
        listing.update(&[member(1, None, true), member(2, None, false)], now);
        listing.update(&[member(2, None, false)], now);
        assert_eq!(listing.lost(now, |_| true), None);
    }

    #[test]
    fn a_worker_is_withdrawn_where_it_drains_and_where_it_moved_from() {
        let mut listing = Listing::default();
        let list = [member(1, Some("a"), false), member(2, Some("b"), true), member(3, None, false)];
        listing.update(&list, Instant::now());
        let check = |port, id: &str, expected: bool| {
            let address = member(port, None, false).address;
            assert_eq!(listing.withdraws(&address, &WorkerId::new(id)), expected, "{id} at {port}");
        };
        check(1, "a", false);
        check(2, "b", true);
        check(3, "c", false);
        check(9, "a", true);
        check(9, "b", false);
        check(9, "d", false);
    }
}
