//! The order in which waiting requests go: by priority, then in turn by tenant, weighed in tokens. Pure: time is an
//! argument.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use hashbrown::HashMap;
use tokio::time::Instant;

/// Tokens that a tenant may send at each of its turns. What it does not use up is kept for its next one while it has
/// requests waiting, so that a large request waits a few rounds and not for ever; less of it would be more turns for the same.
const QUANTUM_TOKENS: u64 = 256;
/// Waiting so long is worth one step of priority, so that nobody starves.
const AGEING_STEP: Duration = Duration::from_secs(5);

/// A request that waits.
#[derive(Debug)]
pub(super) struct Waiting<T> {
    pub(super) number: u64,
    pub(super) tenant: Arc<str>,
    /// Lower goes earlier.
    pub(super) priority: i32,
    /// Its size: prompt and expected output.
    pub(super) tokens: u64,
    pub(super) since: Instant,
    pub(super) class: Class,
    pub(super) payload: T,
}

/// Whether a request comes for the first time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Class {
    /// It waits its turn, and is sent away when no worker is left.
    New,
    /// It was let through before and lost its worker: it goes ahead of new ones, in order of arrival, and waits for as
    /// long as a worker may come back.
    Again,
}

/// Requests of one model, bounded by the accounts that admit to it.
#[derive(Debug)]
pub(super) struct FairQueue<T> {
    again: VecDeque<Waiting<T>>,
    new: BTreeMap<i32, Priority<T>>,
    len: usize,
}

impl<T> Default for FairQueue<T> {
    fn default() -> Self {
        Self { again: VecDeque::new(), new: BTreeMap::new(), len: 0 }
    }
}

impl<T> FairQueue<T> {
    pub(super) fn len(&self) -> usize {
        self.len
    }

    pub(super) fn push(&mut self, waiting: Waiting<T>) {
        self.len += 1;
        match waiting.class {
            Class::Again => self.again.push_back(waiting),
            Class::New => self.new.entry(waiting.priority).or_default().push(waiting),
        }
    }

    /// The next to go.
    pub(super) fn pop(&mut self, now: Instant) -> Option<Waiting<T>> {
        if let Some(first) = self.again.pop_front() {
            self.len -= 1;
            return Some(first);
        }
        let (_, _, priority) = self.due(now)?;
        let by_age = self.new.keys().next() != Some(&priority);
        let class = self.new.get_mut(&priority)?;
        let next = if by_age { class.pop_oldest() } else { class.pop_in_turn() };
        self.shrink(priority, next.is_some().into());
        next
    }

    /// How urgent the next one is, the least being most urgent: whether it comes for the first time, and its priority with
    /// age counted in.
    pub(super) fn urgency(&self, now: Instant) -> Option<(bool, i64)> {
        if !self.again.is_empty() {
            return Some((false, 0));
        }
        self.due(now).map(|(priority, ..)| (true, priority))
    }

    /// The priority whose turn it is: with age counted in, since when its oldest waits, and as it was given.
    fn due(&self, now: Instant) -> Option<(i64, Instant, i32)> {
        let due = |(priority, class): (&i32, &Priority<T>)| {
            let oldest = class.oldest()?;
            let steps = now.saturating_duration_since(oldest).as_secs() / AGEING_STEP.as_secs();
            Some((i64::from(*priority).saturating_sub_unsigned(steps), oldest, *priority))
        };
        self.new.iter().filter_map(due).min()
    }

    /// Takes out one that no longer waits.
    pub(super) fn remove(&mut self, priority: i32, tenant: &str, number: u64) -> Option<Waiting<T>> {
        if let Some(at) = self.again.iter().position(|w| w.number == number) {
            self.len -= 1;
            return self.again.remove(at);
        }
        let removed = self.new.get_mut(&priority)?.remove(tenant, number);
        self.shrink(priority, removed.is_some().into());
        removed
    }

    /// Takes out all that come for the first time.
    pub(super) fn drain_new(&mut self) -> Vec<Waiting<T>> {
        self.len = self.again.len();
        let classes = std::mem::take(&mut self.new);
        classes.into_values().flat_map(|class| class.lines.into_values().flat_map(|l| l.waiting)).collect()
    }

    /// Takes out all that were let through before.
    pub(super) fn drain_again(&mut self) -> Vec<Waiting<T>> {
        self.len -= self.again.len();
        self.again.drain(..).collect()
    }

    fn shrink(&mut self, priority: i32, removed: usize) {
        self.len -= removed;
        if self.new.get(&priority).is_some_and(|class| class.lines.is_empty()) {
            self.new.remove(&priority);
        }
    }
}

/// Requests of one priority: deficit round robin over tenants.
#[derive(Debug)]
struct Priority<T> {
    lines: HashMap<Arc<str>, Line<T>>,
    /// Tenants with waiting requests, the next one first.
    turns: VecDeque<Arc<str>>,
}

/// Requests of one tenant, first come first served.
#[derive(Debug)]
struct Line<T> {
    waiting: VecDeque<Waiting<T>>,
    /// Tokens that it may send before its turn ends.
    deficit: u64,
    /// Its turn has begun, and with it the quantum.
    has_turn: bool,
}

impl<T> Default for Priority<T> {
    fn default() -> Self {
        Self { lines: HashMap::new(), turns: VecDeque::new() }
    }
}

impl<T> Priority<T> {
    fn push(&mut self, waiting: Waiting<T>) {
        let tenant = Arc::clone(&waiting.tenant);
        let turns = &mut self.turns;
        let line = self.lines.entry(Arc::clone(&tenant)).or_insert_with(|| {
            turns.push_back(tenant);
            Line { waiting: VecDeque::new(), deficit: 0, has_turn: false }
        });
        line.waiting.push_back(waiting);
    }

    fn oldest(&self) -> Option<Instant> {
        self.lines.values().filter_map(|line| line.waiting.front()).map(|w| w.since).min()
    }

    fn pop_in_turn(&mut self) -> Option<Waiting<T>> {
        self.skip_hopeless_rounds();
        loop {
            let tenant = Arc::clone(self.turns.front()?);
            let line = self.lines.get_mut(&tenant)?;
            let tokens = line.waiting.front()?.tokens;
            if !std::mem::replace(&mut line.has_turn, true) {
                line.deficit += QUANTUM_TOKENS;
            }
            if line.deficit >= tokens {
                line.deficit -= tokens;
                return self.pop_of(&tenant);
            }
            line.has_turn = false;
            self.turns.rotate_left(1);
        }
    }

    /// Gives everybody the quanta of all rounds in which nobody could send, at once: the loop above stays short however
    /// large requests are.
    fn skip_hopeless_rounds(&mut self) {
        let rounds_to_go = |line: &Line<T>| {
            let short = line.waiting.front().map_or(0, |w| w.tokens.saturating_sub(line.deficit));
            short.div_ceil(QUANTUM_TOKENS)
        };
        let hopeless = self.lines.values().map(rounds_to_go).min().unwrap_or(0).saturating_sub(1);
        self.lines.values_mut().for_each(|line| line.deficit += hopeless * QUANTUM_TOKENS);
    }

    fn pop_oldest(&mut self) -> Option<Waiting<T>> {
        let first = |line: &Line<T>| line.waiting.front().map(|w| (w.since, w.number));
        let (tenant, _) = self.lines.iter().min_by_key(|(_, line)| first(line))?;
        let tenant = Arc::clone(tenant);
        self.pop_of(&tenant)
    }

    fn pop_of(&mut self, tenant: &str) -> Option<Waiting<T>> {
        let popped = self.lines.get_mut(tenant)?.waiting.pop_front();
        self.leave_if_empty(tenant);
        popped
    }

    fn remove(&mut self, tenant: &str, number: u64) -> Option<Waiting<T>> {
        let line = self.lines.get_mut(tenant)?;
        let at = line.waiting.iter().position(|w| w.number == number)?;
        let removed = line.waiting.remove(at);
        self.leave_if_empty(tenant);
        removed
    }

    fn leave_if_empty(&mut self, tenant: &str) {
        if self.lines.get(tenant).is_some_and(|line| line.waiting.is_empty()) {
            self.lines.remove(tenant);
            self.turns.retain(|t| **t != *tenant);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Clock(Instant);

    impl Clock {
        fn at(&self, seconds: u64) -> Instant {
            self.0 + Duration::from_secs(seconds)
        }
    }

    fn clock() -> Clock {
        Clock(Instant::now())
    }

    /// (tenant, priority, tokens, second of arrival); numbers count from 0.
    fn queue(clock: &Clock, requests: &[(&str, i32, u64, u64)]) -> FairQueue<()> {
        let mut queue = FairQueue::default();
        for (number, &(tenant, priority, tokens, second)) in (0..).zip(requests) {
            let (since, class) = (clock.at(second), Class::New);
            queue.push(Waiting {
                number,
                tenant: tenant.into(),
                priority,
                tokens,
                since,
                class,
                payload: (),
            });
        }
        queue
    }

    fn order(queue: &mut FairQueue<()>, now: Instant) -> Vec<u64> {
        std::iter::from_fn(|| queue.pop(now)).map(|w| w.number).collect()
    }

    #[test]
    fn requests_go_in_their_order() {
        let check = |name: &str, requests: &[(&str, i32, u64, u64)], now: u64, expected: &[u64]| {
            let clock = clock();
            let mut queue = queue(&clock, requests);
            assert_eq!(order(&mut queue, clock.at(now)), expected, "{name}");
            assert_eq!((queue.len(), queue.new.len()), (0, 0), "{name}");
        };
        check("one tenant: first come first served", &[("a", 0, 9_000, 0), ("a", 0, 1, 1)], 1, &[0, 1]);
        check("priority first", &[("a", 1, 10, 0), ("a", -1, 10, 1), ("a", 0, 10, 1)], 1, &[1, 2, 0]);
        check(
            "equal tenants take turns, whoever came first",
            &[("a", 0, 1024, 0), ("a", 0, 1024, 0), ("a", 0, 1024, 0), ("b", 0, 1024, 0), ("b", 0, 1024, 0)],
            0,
            &[0, 3, 1, 4, 2],
        );
        check(
            "turns are weighed in tokens",
            &[("a", 0, 2048, 0), ("a", 0, 2048, 0), ("b", 0, 512, 0), ("b", 0, 512, 0), ("b", 0, 512, 0)],
            0,
            &[2, 3, 4, 0, 1],
        );
        check(
            "ten seconds make up for two steps of priority",
            &[("a", 2, 10, 0), ("a", 0, 10, 11), ("a", 2, 10, 11)],
            11,
            &[0, 1, 2],
        );
        check("nine do not", &[("a", 2, 10, 0), ("a", 0, 10, 9)], 9, &[1, 0]);
        check("huge requests", &[("a", 0, u64::MAX / 4, 0), ("b", 0, 5, 0)], 0, &[1, 0]);
    }

    #[test]
    fn a_flood_of_one_tenant_delays_another_by_one_request() {
        let clock = clock();
        let mut requests = vec![("flood", 0, 1_000, 0); 500];
        requests.push(("calm", 0, 1_000, 1));
        let mut queue = queue(&clock, &requests);
        let position = order(&mut queue, clock.at(1)).iter().position(|n| *n == 500);
        assert!(position <= Some(1), "{position:?}");
    }

    #[test]
    fn a_newcomer_waits_for_the_rest_of_one_turn() {
        let clock = clock();
        let mut queue = queue(&clock, &vec![("flood", 0, 23, 0); 80]);
        (0..3).for_each(|_| drop(queue.pop(clock.at(1))));
        for number in 100..108 {
            let (since, class) = (clock.at(1), Class::New);
            queue.push(Waiting {
                number,
                tenant: "calm".into(),
                priority: 0,
                tokens: 23,
                since,
                class,
                payload: (),
            });
        }
        let order = order(&mut queue, clock.at(1));
        let places = order.iter().enumerate().filter(|(_, number)| **number >= 100).map(|(place, _)| place);
        let turn = (QUANTUM_TOKENS / 23) as usize;
        assert_eq!(places.collect::<Vec<_>>(), (turn - 3..turn + 5).collect::<Vec<_>>());
    }

    #[test]
    fn tokens_of_busy_tenants_are_shared_evenly() {
        let clock = clock();
        let small = std::iter::repeat_n(("small", 0, 100, 0), 2_000);
        let large = std::iter::repeat_n(("large", 0, 3_000, 0), 100);
        let requests: Vec<_> = small.chain(large).collect();
        let mut queue = queue(&clock, &requests);
        let (mut small, mut large) = (0u64, 0u64);
        while small + large < 150_000 {
            let next = queue.pop(clock.at(0)).unwrap();
            *if &*next.tenant == "small" { &mut small } else { &mut large } += next.tokens;
        }
        assert!(small.abs_diff(large) <= 2 * 3_000 + QUANTUM_TOKENS, "{small} and {large} tokens");
    }

    #[test]
    fn a_removed_request_leaves_the_rest_in_order() {
        let clock = clock();
        let mut queue = queue(&clock, &[("a", 0, 10, 0), ("b", 0, 10, 0), ("a", 0, 10, 0)]);
        assert!(queue.remove(0, "a", 7).is_none());
        assert_eq!(queue.remove(0, "b", 1).map(|w| w.number), Some(1));
        assert_eq!(queue.len(), 2);
        assert_eq!(order(&mut queue, clock.at(0)), [0, 2]);
    }

    fn again(number: u64, clock: &Clock) -> Waiting<()> {
        let (tenant, since) = ("a".into(), clock.at(9));
        Waiting { number, tenant, priority: 5, tokens: 10, since, class: Class::Again, payload: () }
    }

    #[test]
    fn whoever_lost_its_worker_goes_ahead_of_new_ones_in_order() {
        let clock = clock();
        let mut queue = queue(&clock, &[("a", -9, 10, 0), ("b", 0, 10, 0)]);
        (7..10).for_each(|number| queue.push(again(number, &clock)));
        assert_eq!(queue.remove(5, "a", 8).map(|w| w.number), Some(8));
        assert_eq!(queue.len(), 4);
        assert_eq!(order(&mut queue, clock.at(9)), [7, 9, 0, 1]);
    }

    #[test]
    fn draining_takes_everybody_of_a_class() {
        let clock = clock();
        let mut queue = queue(&clock, &[("a", 0, 10, 0), ("b", 1, 10, 0), ("a", 2, 10, 0)]);
        queue.push(again(7, &clock));
        assert_eq!((queue.drain_new().len(), queue.len()), (3, 1));
        assert_eq!((queue.drain_again().len(), queue.len()), (1, 0));
        assert!(queue.pop(clock.at(0)).is_none());
    }
}
