//! Workers killed all together and again and again: nobody is to blame, so nobody is refused.

use std::time::Duration;

use thalweg_harness::client::assert_no_failures;
use thalweg_harness::{Fleet, Running};

use crate::support::{
    STEADY, all_have, answers, ask_all, assert_same_answers, longest_gap, prompt, seconds, short_or_long,
    sim, stream, whole,
};

/// All three workers are killed within a second under 24 streams, and restarted at once: every stream goes on to the same end,
/// and no prompt is held guilty. Half of the streams share one prompt.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn all_workers_killed_back_to_back_break_no_stream() {
    let mut fleet = sim(STEADY).workers(3).start().await;
    let bodies: Vec<_> = (0..24).map(|i| stream(&prompt(if i < 12 { 0 } else { i }, 50), 200)).collect();
    let undisturbed = answers(&fleet, &bodies).await;
    let running = ask_all(&fleet, &bodies);
    all_have(&running, 20).await;
    for _ in 0..short_or_long(1, 4) {
        kill_all(&mut fleet, Duration::from_millis(200)).await;
    }
    let disturbed = Running::outcomes(running).await;
    eprintln!("longest pause {:?}", longest_gap(&disturbed));
    assert_innocent("all workers killed back to back", &fleet, &disturbed).await;
    assert_same_answers(&disturbed, &undisturbed);
    fleet.at_rest().await;
    fleet.finish().await;
}

/// One after the other is killed as soon as the one before is back, three times around: streams that are hit four times and more
/// end whole.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn streams_outlive_one_kill_after_the_other() {
    let mut fleet = sim(STEADY).workers(2).start().await;
    let bodies: Vec<_> = (0..12).map(|i| stream(&prompt(i, 50), 300)).collect();
    let running = ask_all(&fleet, &bodies);
    all_have(&running, 10).await;
    for kill in 0..6 {
        fleet.kill_worker(kill % 2);
        fleet.restart_worker(kill % 2);
    }
    let disturbed = Running::outcomes(running).await;
    assert_innocent("one kill after the other", &fleet, &disturbed).await;
    assert_same_answers(&disturbed, &answers(&fleet, &bodies).await);
    fleet.finish().await;
}

/// A prompt that aborts its worker, sent three times at once: three workers are the price all the same.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn copies_of_a_poison_prompt_kill_three_workers_together() {
    let mut fleet = sim(STEADY).workers(6).start().await;
    (0..6).for_each(|number| fleet.switch_faults(number, "{abort_on: POISON}"));
    let beside: Vec<_> = (0..12).map(|i| stream(&prompt(i, 50), 450)).collect();
    let beside = ask_all(&fleet, &beside);
    all_have(&beside, 10).await;
    let copies = answers(&fleet, &vec![whole("a POISON", 5); 3]).await;
    for outcome in &copies {
        let crashed = outcome.error.as_ref().is_some_and(|error| error.contains("worker_crashed"));
        assert!(crashed, "{outcome:?}");
        assert!(outcome.took < seconds(10), "{:?}", outcome.took);
    }
    let alive = (0..6).filter(|number| fleet.worker_runs(*number)).count();
    assert_eq!(alive, 3, "three workers are the price");
    assert_no_failures("streams beside copies of a poison prompt", &Running::outcomes(beside).await);
    assert_eq!(fleet.router_metrics(0).await.value("thalweg_router_poisoned_prompts"), 1.0);
}

/// Ends all workers like a crash, with a pause between, and starts them again.
async fn kill_all(fleet: &mut Fleet, pause: Duration) {
    for worker in 0..fleet.workers.len() {
        fleet.kill_worker(worker);
        tokio::time::sleep(pause).await;
    }
    (0..fleet.workers.len()).for_each(|worker| fleet.restart_worker(worker));
}

async fn assert_innocent(what: &str, fleet: &Fleet, outcomes: &[thalweg_harness::Outcome]) {
    assert_no_failures(what, outcomes);
    let metrics = fleet.router_metrics(0).await;
    assert_eq!(metrics.value("thalweg_router_poisoned_prompts"), 0.0, "{what}");
    eprintln!("{what}: {} resumes", metrics.count("thalweg_router_resumes_total", ""));
}
