use std::sync::atomic::AtomicU32;

use super::*;
use crate::admission::Usage;
use crate::test_support::entry;

const AMPLE: Usage = Usage { requests: 1_000, tokens: 1_000_000 };
const GONE: u32 = u32::MAX;
const OTHER_WEIGHTS: u32 = u32::MAX - 1;

/// A gate before workers whose room the test sets.
struct Bench {
    gate: Arc<Gate>,
    room: Arc<AtomicU32>,
    model: Arc<ModelEntry>,
}

fn bench(queued: Usage, tenant: Usage) -> Bench {
    let room = Arc::new(AtomicU32::new(0));
    let room_of = {
        let room = Arc::clone(&room);
        move |_: &ModelEntry| match room.load(Ordering::SeqCst) {
            GONE => Room::NoWorker("all workers are gone".to_owned()),
            OTHER_WEIGHTS => Room::OtherWeights("other weights".to_owned()),
            n => Room::Requests(n),
        }
    };
    let gate = Gate::new(AdmissionLimits { queued, tenant }, Duration::from_secs(10), room_of);
    Bench { gate, room, model: entry("m", false) }
}

impl Bench {
    fn ask(&self, tenant: &str, tokens: u64) -> Ask {
        Ask {
            model: Arc::clone(&self.model),
            tenant: tenant.into(),
            tenant_limit: None,
            priority: 0,
            tokens,
            deadline: Instant::now() + Duration::from_secs(3_600),
        }
    }

    /// Starts a request; it has queued up when this returns.
    async fn start(&self, ask: Ask) -> tokio::task::JoinHandle<Answer> {
        let gate = Arc::clone(&self.gate);
        let task = tokio::spawn(async move { gate.enter(ask).await });
        tokio::task::yield_now().await;
        task
    }

    async fn set_room(&self, room: u32) {
        self.room.store(room, Ordering::SeqCst);
        self.gate.pump(Instant::now());
        for _ in 0..20 {
            tokio::task::yield_now().await;
        }
    }

    fn is_empty(&self) -> bool {
        let inner = self.gate.inner.lock();
        inner.accounts.is_empty() && inner.lines.is_empty()
    }
}

fn code(answer: Answer) -> ErrorCode {
    answer.map(drop).expect_err("refused").code
}

#[tokio::test(start_paused = true)]
async fn exactly_as_many_are_woken_as_there_is_room() {
    let bench = bench(AMPLE, AMPLE);
    let mut tasks = Vec::new();
    for _ in 0..10 {
        tasks.push(bench.start(bench.ask("a", 10)).await);
    }
    assert_eq!(bench.gate.waiting(), 10);
    bench.set_room(3).await;
    let done = tasks.iter().filter(|t| t.is_finished()).count();
    assert_eq!((done, bench.gate.waiting()), (3, 7));
    // Nothing more as long as the three are not booked: the room is theirs.
    bench.set_room(3).await;
    assert_eq!(bench.gate.waiting(), 7);
    for task in tasks.drain(..3) {
        task.await.unwrap().unwrap().booked();
    }
    bench.set_room(1_000).await;
    assert_eq!(bench.gate.waiting(), 0);
    for task in tasks {
        task.await.unwrap().unwrap();
    }
    assert!(bench.is_empty());
}

#[tokio::test(start_paused = true)]
async fn a_permit_given_back_unbooked_lets_the_next_one_in() {
    let bench = bench(AMPLE, AMPLE);
    bench.set_room(1).await;
    let first = bench.gate.enter(bench.ask("a", 10)).await.unwrap();
    let second = bench.start(bench.ask("a", 10)).await;
    assert!(!second.is_finished());
    drop(first);
    second.await.unwrap().unwrap();
    assert!(bench.is_empty());
}

#[tokio::test(start_paused = true)]
async fn above_the_limits_refusal_is_immediate_and_tells_when_to_come_back() {
    let bench = bench(Usage { requests: 2, tokens: 1_000 }, Usage { requests: 2, tokens: 1_000 });
    let waiting = [bench.start(bench.ask("a", 10)).await, bench.start(bench.ask("b", 10)).await];
    let start = Instant::now();
    let refusal = bench.gate.enter(bench.ask("c", 10)).await.map(drop).unwrap_err();
    assert_eq!(bench.gate.refuse_when_full().unwrap_err().code, refusal.code);
    assert_eq!(start.elapsed(), Duration::ZERO);
    assert_eq!(refusal.code, ErrorCode::Overloaded);
    assert!(refusal.retry_after >= Some(RETRY_AFTER_MIN), "{refusal:?}");
    bench.set_room(2).await;
    for task in waiting {
        task.await.unwrap().unwrap();
    }
    assert!(bench.is_empty());
}

#[tokio::test(start_paused = true)]
async fn a_tenant_at_its_limit_does_not_keep_out_others() {
    let bench = bench(AMPLE, Usage { requests: 1, tokens: 1_000 });
    bench.set_room(5).await;
    let mut held = bench.gate.enter(bench.ask("a", 10)).await.unwrap();
    held.booked();
    assert_eq!(code(bench.gate.enter(bench.ask("a", 10)).await), ErrorCode::Overloaded);
    bench.gate.enter(bench.ask("b", 10)).await.unwrap();
    drop(held);
    bench.gate.enter(bench.ask("a", 10)).await.unwrap();
    assert!(bench.is_empty());
}

#[tokio::test(start_paused = true)]
async fn patience_and_deadline_end_the_wait() {
    // limits-03.
    let bench = bench(AMPLE, AMPLE);
    let check = async |deadline: u64, expected: u64| {
        let start = Instant::now();
        let ask = Ask { deadline: start + Duration::from_secs(deadline), ..bench.ask("a", 10) };
        assert_eq!(code(bench.gate.enter(ask).await), ErrorCode::DeadlineExceeded);
        assert_eq!(start.elapsed().as_secs(), expected);
        assert!(bench.is_empty());
    };
    check(3, 3).await;
    check(3_600, 10).await;
}

#[tokio::test(start_paused = true)]
async fn a_client_that_goes_away_leaves_the_queue() {
    let bench = bench(AMPLE, AMPLE);
    let task = bench.start(bench.ask("a", 10)).await;
    assert_eq!(bench.gate.waiting(), 1);
    task.abort();
    assert!(task.await.is_err_and(|e| e.is_cancelled()));
    assert!(bench.is_empty());
}

#[tokio::test(start_paused = true)]
async fn when_all_workers_are_gone_nobody_waits() {
    let bench = bench(AMPLE, AMPLE);
    let task = bench.start(bench.ask("a", 10)).await;
    bench.set_room(GONE).await;
    let error = task.await.unwrap().map(drop).unwrap_err();
    assert_eq!((error.code, error.message.as_str()), (ErrorCode::Unavailable, "all workers are gone"));
    assert_eq!(code(bench.gate.enter(bench.ask("a", 10)).await), ErrorCode::Unavailable);
    assert!(bench.is_empty());
}

impl Bench {
    /// Requests that were let through and booked.
    async fn running(&self, count: u32) -> Vec<Permit> {
        self.set_room(count).await;
        let mut permits = Vec::new();
        for _ in 0..count {
            permits.push(self.gate.enter(self.ask("a", 10)).await.unwrap());
        }
        permits.iter_mut().for_each(Permit::booked);
        self.set_room(0).await;
        permits
    }

    async fn again(&self, permit: Permit) -> tokio::task::JoinHandle<Answer> {
        let gate = Arc::clone(&self.gate);
        let task = tokio::spawn(async move { gate.enter_again(permit).await });
        tokio::task::yield_now().await;
        task
    }
}

#[tokio::test(start_paused = true)]
async fn those_that_lost_their_worker_go_first_and_no_limit_keeps_them_out() {
    let two = Usage { requests: 2, tokens: 1_000 };
    let bench = bench(two, two);
    let running = bench.running(2).await;
    let new = [bench.start(bench.ask("b", 10)).await, bench.start(bench.ask("b", 10)).await];
    let mut again = Vec::new();
    for permit in running {
        again.push(bench.again(permit).await);
    }
    assert_eq!(bench.gate.waiting(), 4);
    assert_eq!(
        code(bench.gate.enter(bench.ask("c", 10)).await),
        ErrorCode::Overloaded,
        "they fill the queue"
    );
    assert_eq!(code(bench.gate.enter(bench.ask("a", 10)).await), ErrorCode::Overloaded, "they are still a's");
    bench.set_room(2).await;
    assert!(again.iter().all(|t| t.is_finished()) && new.iter().all(|t| !t.is_finished()));
    for task in again {
        task.await.unwrap().unwrap().booked();
    }
    bench.set_room(2).await;
    for task in new {
        task.await.unwrap().unwrap();
    }
    assert!(bench.is_empty());
}

#[tokio::test(start_paused = true)]
async fn those_that_lost_their_worker_wait_while_there_is_none_but_not_for_other_weights() {
    for ends in ["in vain", "well", "in other weights", "gives up"] {
        let bench = bench(AMPLE, AMPLE);
        let [again] = bench.running(1).await.try_into().ok().unwrap();
        let again = bench.again(again).await;
        bench.set_room(GONE).await;
        assert!(!again.is_finished(), "{ends}");
        match ends {
            "in vain" => {
                let error = again.await.unwrap().map(drop).unwrap_err();
                assert_eq!(error.code, ErrorCode::Unavailable);
                assert!(error.message.contains("all workers are gone"), "{error}");
            }
            "well" => {
                bench.set_room(1).await;
                again.await.unwrap().unwrap();
            }
            "in other weights" => {
                bench.set_room(OTHER_WEIGHTS).await;
                assert_eq!(again.await.unwrap().map(drop).unwrap_err().message, "other weights");
            }
            _ => {
                again.abort();
                assert!(again.await.is_err());
            }
        }
        assert!(bench.is_empty(), "{ends}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_permit_that_was_not_used_waits_again_without_leaving_room_taken() {
    let bench = bench(AMPLE, AMPLE);
    bench.set_room(1).await;
    let unused = bench.gate.enter(bench.ask("a", 10)).await.unwrap();
    let again = bench.gate.enter_again(unused).await.unwrap();
    drop(again);
    assert!(bench.is_empty());
}

#[tokio::test(start_paused = true)]
async fn limits_may_change_while_requests_are_there() {
    let bench = bench(AMPLE, AMPLE);
    let waiting = bench.start(bench.ask("a", 10)).await;
    let one = Usage { requests: 1, tokens: 10 };
    bench.gate.set_limits(AdmissionLimits { queued: one, tenant: one });
    assert_eq!(code(bench.gate.enter(bench.ask("b", 10)).await), ErrorCode::Overloaded);
    bench.gate.set_limits(AdmissionLimits { queued: AMPLE, tenant: AMPLE });
    let more = bench.start(bench.ask("b", 10)).await;
    bench.set_room(2).await;
    for task in [waiting, more] {
        task.await.unwrap().unwrap();
    }
}

/// The model and two adapters have one worker: what one of them takes of its room the others do not have, and each has its turn.
#[tokio::test(start_paused = true)]
async fn a_model_and_its_adapters_share_the_room_and_take_turns() {
    let bench = bench(AMPLE, AMPLE);
    let names = ["m", "x", "y"];
    let mut tasks = Vec::new();
    for name in names {
        for _ in 0..4 {
            let ask = Ask { model: entry(name, false), ..bench.ask("a", 10) };
            tasks.push((name, bench.start(ask).await));
        }
    }
    let mut running = Vec::new();
    for round in 1..=4 {
        bench.set_room(3).await;
        assert_eq!(bench.gate.waiting(), 12 - 3 * round, "three at a time");
        bench.set_room(3).await;
        assert_eq!(bench.gate.waiting(), 12 - 3 * round, "the room is theirs until they are booked");
        for name in names {
            let at = tasks.iter().position(|(of, task)| *of == name && task.is_finished());
            let mut permit = tasks.remove(at.expect("one of each")).1.await.unwrap().unwrap();
            bench.set_room(0).await;
            permit.booked();
            running.push(permit);
        }
    }
    drop(running);
    assert!(bench.is_empty());
}

#[tokio::test(start_paused = true)]
async fn urgent_requests_of_an_adapter_go_before_others_of_the_model() {
    let bench = bench(AMPLE, AMPLE);
    let usual = bench.start(bench.ask("a", 10)).await;
    let urgent = Ask { model: entry("x", false), priority: -1, ..bench.ask("a", 10) };
    let urgent = bench.start(urgent).await;
    bench.set_room(1).await;
    assert!(urgent.is_finished() && !usual.is_finished());
    urgent.await.unwrap().unwrap().booked();
    bench.set_room(1).await;
    usual.await.unwrap().unwrap();
}
