//! Whose turn it is: who passes whom, who is preempted, and what a step has of each.

use super::*;

/// Whoever decodes waits for the whole step.
#[test]
fn prompts_take_smaller_steps_while_many_decode() {
    let many = MANY_DECODING as u64;
    let tokens_of = |decoding: u64| {
        let config = SchedulerConfig { max_num_mixed_tokens: 160, ..config(400, 150, 1024) };
        let mut sim = simulation(config);
        (0..decoding).for_each(|request| sim.add(sequence(request, &ids(request, 3), 8)));
        sim.step();
        sim.scheduler.add(sequence(many, &ids(many, 1000), 8));
        let rows = sim.scheduler.plan().unwrap().plan.rows;
        rows.iter().map(|row| row.input.len()).sum::<usize>()
    };
    assert_eq!([many - 1, many].map(tokens_of), [1024, 160]);
}

/// vllm#36390: a request that needs much held up the whole queue.
#[test]
fn small_requests_pass_a_big_one_which_still_finishes() {
    // scheduler-03.
    let mut sim = simulation(config(64, 32, 1024));
    sim.add(sequence(1, &ids(1, 39 * 16), 16));
    sim.step();
    sim.add(sequence(2, &ids(2, 49 * 16), 16));
    (3..13).for_each(|request| sim.add(sequence(request, &ids(request, 20), 8)));
    (0..3).for_each(|_| assert!(sim.step()));
    let started: Vec<u64> = sim.started.iter().map(|s| s.key.request).collect();
    assert!(!started.contains(&2) && (3..13).all(|small| started.contains(&small)), "{started:?}");
    sim.finish();
    assert_eq!(sim.finished.len(), 12);
}

/// The other side of it: the big one is overtaken a bounded number of times while small ones keep coming.
#[test]
fn a_big_request_is_overtaken_a_bounded_number_of_times() {
    // scheduler-03.
    let mut sim = simulation(config(64, 8, 1024));
    sim.add(sequence(1, &ids(1, 20), 60));
    sim.step();
    sim.add(sequence(2, &ids(2, 63 * 16), 8));
    let mut request = 2;
    while !sim.finished.iter().any(|key| key.request == 2) {
        request += 1;
        sim.add(sequence(request, &ids(request, 20), 8));
        sim.step();
        assert!(request < 1000, "the big one starves");
    }
    let before = sim.started.iter().position(|s| s.key.request == 2).unwrap();
    assert!(before <= 1 + OVERTAKEN_MAX as usize, "{before} started before it");
    sim.finish();
}

/// vllm#16832 and vllm#41951: answers cut short after a preemption; the same one preempted again and again.
#[test]
fn preempted_sequences_answer_in_full_and_keep_their_place() {
    // scheduler-05, scheduler-08.
    let mut sim = simulation(config(64, 8, 256));
    let mut request = 0;
    let mut rounds = 0;
    while request < 60 {
        if rounds % 12 == 0 {
            request += 1;
            sim.add(sequence(request, &ids(request, 40), 300));
        }
        rounds += 1;
        assert!(sim.step());
    }
    sim.finish();
    assert!(sim.scheduler.preemptions() > 10, "the pool is not tight: {}", sim.scheduler.preemptions());
    assert_eq!(sim.finished.len(), 60);
    for (place, key) in sim.finished.iter().enumerate() {
        let late = (place as u64 + 1).abs_diff(key.request);
        assert!(late <= 8, "request {} finished as number {}", key.request, place + 1);
    }
}

/// The same under priorities: groups of those that matter more come on and on, and each time something has to give way.
#[test]
fn a_sequence_is_preempted_a_bounded_number_of_times_whatever_comes() {
    // scheduler-08.
    let mut sim = simulation(config(64, 8, 256));
    let long = sequence(1, &ids(1, 40), 900);
    let urgent = |request| NewSequence {
        key: SequenceKey { priority: -1, request, choice: 0 },
        ..sequence(request, &ids(request, 40), 150)
    };
    sim.add(long.clone());
    for round in 0.. {
        if sim.finished.contains(&long.key) {
            break;
        }
        if round % 200 == 0 {
            (0..3).for_each(|at| sim.add(urgent(2 + round + at)));
        }
        assert!(sim.step());
        assert!(round < 10_000, "it starves");
    }
    sim.finish();
    assert_eq!(sim.most_preemptions(), PREEMPTIONS_MAX as usize, "the bound is reached, and holds");
}

/// Two that lost their blocks too often, and whose whole needs do not fit together: one waits for the end of the other, and
/// whoever comes meanwhile passes it, since it loses nothing to them.
#[test]
fn newcomers_pass_one_that_waits_for_its_whole_need() {
    // scheduler-08.
    let mut sim = simulation(config(256, 40, 256));
    let [first, second] = [1, 2].map(|request| sequence(request, &ids(request, 40), 2100));
    [&first, &second].into_iter().for_each(|long| sim.add(long.clone()));
    let returns = |sim: &Simulation, long: &NewSequence| {
        sim.started.iter().filter(|started| started.again && started.key == long.key).count()
    };
    let most = PREEMPTIONS_MAX as usize;
    // Each wave of urgent ones takes both their blocks.
    for wave in 1..=u64::from(PREEMPTIONS_MAX) {
        for request in 100 * wave..100 * wave + 30 {
            let key = SequenceKey { priority: -1, request, choice: 0 };
            sim.add(NewSequence { key, ..sequence(request, &ids(request, 16), 150) });
        }
        while sim.live.len() > 2 {
            assert!(sim.step());
        }
        (0..20).for_each(|_| assert!(sim.step()));
    }
    assert_eq!([&first, &second].map(|long| returns(&sim, long)), [most, most - 1], "one is back, one waits");
    let said = sim.live[&second.key].got.len();
    (1000..1020).for_each(|request| sim.add(sequence(request, &ids(request, 20), 8)));
    while sim.live.len() > 2 {
        assert!(sim.step());
        assert_eq!(sim.live[&second.key].got.len(), said, "it waits");
    }
    assert!(sim.live.contains_key(&first.key), "nobody waited for the one that runs");
    sim.finish();
    assert_eq!(sim.finished[sim.finished.len() - 2..], [first.key, second.key]);
    assert_eq!(returns(&sim, &second), most);
}

/// vllm#1026: a long prompt stopped all who were decoding.
#[test]
fn long_prompts_do_not_stop_decoding() {
    // scheduler-07.
    let mut sim = simulation(config(2048, 8, 256));
    // Alone, one of them takes so many steps to its first token.
    let mut alone = simulation(config(2048, 8, 256));
    alone.add(sequence(2, &ids(2, 4000), 4));
    let steps_alone =
        (1..1000).find(|_| alone.step() && alone.live.values().any(|live| !live.got.is_empty()));
    sim.add(sequence(1, &ids(1, 20), 200));
    while sim.step() && sim.live.values().all(|live| live.got.len() < 5) {}
    (2..7).for_each(|request| sim.add(sequence(request, &ids(request, 4000), 4)));
    let (mut tokens, mut first) = (5, None);
    while tokens < 60 {
        sim.step();
        let now = sim.live.values().next().unwrap().got.len();
        assert_eq!(now, tokens + 1, "every step brings a token");
        tokens = now;
        let begun = sim.live.iter().any(|(key, live)| key.request == 2 && !live.got.is_empty());
        first = first.or(begun.then_some(tokens - 5));
    }
    assert!(first < steps_alone.map(|steps| 2 * steps), "first token after {first:?}, alone {steps_alone:?}");
    assert!(sim.runner.step_tokens.iter().all(|tokens| *tokens <= 256));
    sim.finish();
}

/// vllm#5578: many samples of one prompt stored it many times, and preempted ones came behind new ones.
#[test]
fn choices_share_their_prompt_and_preempted_ones_come_first() {
    // kv-cache-04.
    let mut sim = simulation(config(80, 12, 256));
    let prompt = ids(1, 30 * 16 + 5);
    let leader = SequenceKey { priority: 0, request: 1, choice: 0 };
    let choice = |request, choice| NewSequence {
        key: SequenceKey { priority: 0, request, choice },
        leader: (choice > 0).then_some(SequenceKey { request, ..leader }),
        ..sequence(request, &prompt, 60)
    };
    (1..11).for_each(|request| (0..4).for_each(|c| sim.add(choice(request, c))));
    (0..6).for_each(|_| assert!(sim.step()));
    let held = sim.scheduler.usage(FULL).in_use;
    assert!(sim.step_rows > 4 && held <= 30 + 2 * 12, "{held} blocks for {} sequences", sim.step_rows);
    sim.finish();
    assert_eq!(sim.finished.len(), 40);
    for (at, again) in sim.started.iter().enumerate().filter(|(_, s)| s.again) {
        let first = sim.started[..at].iter().rposition(|s| s.key == again.key).unwrap();
        let passed = sim.started[first..at].iter().filter(|s| s.key > again.key).count();
        assert!(passed <= 12, "{passed} newer ones started before {:?} could go on", again.key);
    }
}

/// A request of many choices, on a worker with few places, takes turns with those that come after it.
#[test]
fn many_choices_do_not_hold_up_later_requests() {
    let mut sim = simulation(config(64, 1, 256));
    for choice in 0..4 {
        let first = sequence(1, &ids(1, 20), 4);
        let leader = (choice > 0).then_some(first.key);
        sim.add(NewSequence { key: SequenceKey { choice, ..first.key }, leader, ..first });
    }
    let waiting = |sim: &Simulation| {
        let load = sim.scheduler.load();
        (load.waiting, load.waiting_ahead)
    };
    assert_eq!(waiting(&sim), (4, 2), "the next one stands behind its second choice");
    sim.step();
    (2..4).for_each(|request| sim.add(sequence(request, &ids(request, 20), 4)));
    assert_eq!(waiting(&sim), (5, 5));
    sim.finish();
    let order: Vec<_> = sim.started.iter().map(|s| (s.key.request, s.key.choice)).collect();
    assert_eq!(order, [(1, 0), (1, 1), (2, 0), (1, 2), (3, 0), (1, 3)]);
}
