//! Workers that crash, hang, crawl and restart.

use std::time::Duration;

use serde_json::{Value, json};
use thalweg_harness::client::{assert_no_failures, quantile};
use thalweg_harness::fleet::within;
use thalweg_harness::{FleetPlan, Load, Outcome, Random, Running, models};

use crate::support::{
    BINARY, SLOW_PREFILL, STEADY, all_have, answers, ask_all, assert_same_answers, longest_gap, prompt,
    seconds, short_or_long, sim, stream, whole, with,
};

/// 32 streams survive `kill -9` of a worker mid-stream: greedy, seeded, n = 2, stop strings, logprobs and usage are those
/// of an undisturbed run.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_worker_killed_mid_stream_changes_no_answer() {
    // streaming-07.
    let mut fleet = sim(STEADY).workers(3).start().await;
    let plain: Vec<_> = (0..8).map(|i| stream(&prompt(i, 40), 150)).collect();
    let texts = answers(&fleet, &plain).await;
    let bodies: Vec<Value> = (0..32)
        .map(|i| {
            let body = stream(&prompt(i, 40), 150);
            match i {
                0..8 => with(body, json!({"stop": [stop_string(&texts[i].choices[0].text)]})),
                8..16 => with(body, json!({"logprobs": 2})),
                16..24 => with(body, json!({"temperature": 0.8, "seed": i, "n": 2})),
                _ => body,
            }
        })
        .collect();
    let undisturbed = answers(&fleet, &bodies).await;
    assert_no_failures("undisturbed", &undisturbed);
    let running = ask_all(&fleet, &bodies);
    all_have(&running, 20).await;
    fleet.kill_worker(0);
    let disturbed = Running::outcomes(running).await;
    assert_no_failures("a worker killed mid-stream", &disturbed);
    assert_same_answers(&disturbed, &undisturbed);
    assert!(disturbed[..8].iter().all(|stopped| stopped.choices[0].finish_reason == "stop"));
    assert!(disturbed[8..16].iter().all(|outcome| outcome.choices[0].logprobs.len() == 150));
    let resumes = fleet.router_metrics(0).await.count("thalweg_router_resumes_total", "");
    assert!(resumes >= 8.0, "only {resumes} streams were on the killed worker");
    eprintln!("{resumes} resumes, longest pause {:?}", longest_gap(&disturbed));
    fleet.restart_worker(0);
    fleet.all_ready().await;
    fleet.at_rest().await;
    fleet.finish().await;
}

/// Two characters of the second half that come nowhere before.
fn stop_string(text: &str) -> String {
    let characters: Vec<char> = text.chars().collect();
    let pairs = characters.windows(2).enumerate().skip(characters.len() / 2);
    let mut unique = pairs.filter(|(at, pair)| {
        pair.iter().all(char::is_ascii_graphic)
            && !characters[..at + 1].windows(2).any(|earlier| earlier == *pair)
    });
    unique.next().map(|(_, pair)| pair.iter().collect()).expect("random text has such a pair")
}

/// The same with real arithmetic: logits, sampling and the KV cache are rebuilt to the bit by another worker.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_model_resumes_to_the_bit() {
    let (model, tokens) = short_or_long((models::tiny("qwen3"), 440), (models::smollm2(), 60));
    let name = model.file_stem().expect("a name").to_string_lossy().into_owned();
    let mut fleet = FleetPlan::model(BINARY, model).alone().start().await;
    let body = |i: usize| {
        let sampling = json!({"model": name, "temperature": 0.7 * (i % 2) as f32, "seed": i, "logprobs": 1});
        with(stream(&format!("Chapter {i}. The river"), tokens), sampling)
    };
    let bodies: Vec<_> = (0..32).map(body).collect();
    let running = ask_all(&fleet, &bodies);
    all_have(&running, 4).await;
    fleet.kill_worker(1);
    let disturbed = Running::outcomes(running).await;
    assert_no_failures("a model's worker killed mid-stream", &disturbed);
    fleet.restart_worker(1);
    fleet.all_ready().await;
    let undisturbed = answers(&fleet, &bodies).await;
    assert_same_answers(&disturbed, &undisturbed);
    // A model this small may have told a router everything before the kill that its clients have not read yet.
    let resumes = fleet.router_metrics(0).await.count("thalweg_router_resumes_total", "");
    assert!(resumes >= 1.0, "no stream was on the killed worker");
    fleet.finish().await;
}

/// A worker killed before it is asked, and one killed while it prefills: the requests are tried elsewhere.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_worker_killed_before_the_first_token_is_passed_over() {
    let mut fleet = sim(SLOW_PREFILL).workers(3).start().await;
    let bodies: Vec<_> = (0..32).map(|i| stream(&prompt(i, 60 + 8 * i), 20)).collect();
    fleet.kill_worker(0);
    let after_a_kill = answers(&fleet, &bodies).await;
    assert_no_failures("a worker killed before", &after_a_kill);

    fleet.restart_worker(0);
    fleet.all_ready().await;
    let bodies: Vec<_> = (100..132).map(|i| stream(&prompt(i, 300), 20)).collect();
    let running = ask_all(&fleet, &bodies);
    let prefilling = async || fleet.worker_metrics(2).await.value("vllm:num_requests_running") >= 1.0;
    within(seconds(10), "a prefill", prefilling).await;
    let begun = running.iter().filter(|one| one.tokens() > 0).count();
    fleet.kill_worker(2);
    let disturbed = Running::outcomes(running).await;
    assert_no_failures(&format!("a worker killed in prefill, {begun} begun"), &disturbed);
    let retries = fleet.router_metrics(0).await.count("thalweg_router_retries_total", "");
    assert!(retries >= 1.0, "nobody was in prefill");
    fleet.restart_worker(2);
    fleet.all_ready().await;
    assert_same_answers(&disturbed, &answers(&fleet, &bodies).await);
    fleet.finish().await;
}

/// SIGTERM and restart of each worker in turn under load: streams are finished or handed over, and each exits with 0.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_rolling_restart_is_not_seen_by_clients() {
    let mut fleet = sim(STEADY).workers(3).worker_args(&["--drain-timeout", "1"]).start().await;
    let load = Load::start(short_or_long(24, 64), &[fleet.http()], "/v1/completions", |number| {
        // Some outlast the drain timeout and must be handed over.
        stream(&prompt(number, 50), if number.is_multiple_of(4) { 250 } else { 60 })
    });
    for _ in 0..short_or_long(1, 5) {
        for number in 0..3 {
            load.goes_on(8).await;
            fleet.workers[number].signal("TERM");
            assert_eq!(fleet.worker_ended(number, seconds(10)).await, Some(0));
            fleet.restart_worker(number);
            fleet.all_ready().await;
        }
    }
    let outcomes = load.stop().await;
    assert_no_failures("a rolling restart", &outcomes);
    let metrics = fleet.router_metrics(0).await;
    let handed_over = metrics.count("thalweg_router_resumes_total", "reason=\"draining\"");
    assert!(handed_over >= 1.0, "no stream outlasted the drain timeout");
    eprintln!("{handed_over} hand-overs, longest pause {:?}", longest_gap(&outcomes));
    fleet.at_rest().await;
    fleet.finish().await;
}

/// SIGTERM while streams run within the drain limit: all end whole, new requests go elsewhere at once, and the process leaves
/// right behind its last stream.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_draining_worker_finishes_what_it_runs() {
    // drain-01.
    let mut fleet = sim(STEADY).workers(2).start().await;
    let bodies: Vec<_> = (0..20).map(|i| stream(&prompt(i, 30), short_or_long(150, 450))).collect();
    let running = ask_all(&fleet, &bodies);
    all_have(&running, 10).await;
    fleet.workers[0].signal("TERM");
    let draining = async || fleet.worker_state(0, 0).await == "draining";
    let took = within(Duration::from_millis(500), "the router knows", draining).await;
    let late: Vec<_> = (100..120).map(|i| stream(&prompt(i, 30), 5)).collect();
    let late = answers(&fleet, &late).await;
    assert_no_failures("asked while a worker drains", &late);
    assert!(late.iter().all(|outcome| outcome.header("x-thalweg-worker") == "w1"), "w0 gets no new work");
    let outcomes = Running::outcomes(running).await;
    let ended = tokio::time::Instant::now();
    assert_no_failures("a draining worker", &outcomes);
    assert_eq!(fleet.worker_ended(0, seconds(2)).await, Some(0));
    eprintln!("known as draining after {took:?}, ended {:?} after its last stream", ended.elapsed());
    let resumes = fleet.router_metrics(0).await.count("thalweg_router_resumes_total", "");
    assert_eq!(resumes, 0.0, "nothing had to be handed over");
    fleet.finish().await;
}

/// A frozen process (SIGSTOP) of three: others keep their pace, its streams go on elsewhere within Gone + 1 s, it returns.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_frozen_worker_delays_only_its_own_streams() {
    // routing-05.
    let fleet = sim(STEADY).workers(3).start().await;
    let load = Load::start(50, &[fleet.http()], "/v1/completions", |number| {
        let body = if number.is_multiple_of(2) { stream } else { whole };
        body(&prompt(number, 50), 40)
    });
    load.goes_on(100).await;
    fleet.workers[1].signal("STOP");
    let gone = async || fleet.worker_state(0, 1).await == "gone";
    let took = within(seconds(5), "the frozen worker is given up", gone).await;
    load.goes_on(100).await;
    fleet.workers[1].signal("CONT");
    let back = within(seconds(5), "it is back", async || fleet.worker_state(0, 1).await == "ready").await;
    let outcomes = load.stop().await;
    assert_no_failures("a frozen worker", &outcomes);
    let slow = outcomes.iter().filter(|outcome| outcome.took > seconds(2)).count();
    let median = quantile(outcomes.iter().map(|outcome| outcome.took), 0.5);
    eprintln!("given up after {took:?}, back {back:?} after it thawed; {slow} of {} slow", outcomes.len());
    assert!(slow <= 60, "{slow} requests of {} were slow, more than the frozen worker had", outcomes.len());
    assert!(median < seconds(1), "the others lost their pace: {median:?}");
    assert!(longest_gap(&outcomes) < seconds(5), "{:?}", longest_gap(&outcomes));
    fleet.at_rest().await;
    fleet.finish().await;
}

/// A worker whose engine hangs while its reports go on: its step counter stands still for 10 s, then its work moves.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_hanging_engine_is_given_up() {
    let mut fleet = sim(STEADY).workers(2).start().await;
    fleet.switch_faults(0, "{stall: true}");
    let bodies: Vec<_> = (0..16).map(|i| stream(&prompt(i, 50), 20)).collect();
    let outcomes = answers(&fleet, &bodies).await;
    assert_no_failures("a hanging engine", &outcomes);
    let slowest = outcomes.iter().map(|outcome| outcome.took).max().unwrap_or_default();
    assert!((seconds(9)..seconds(14)).contains(&slowest), "{slowest:?}");
    fleet.switch_faults(0, "");
    fleet.all_ready().await;
    assert_same_answers(&outcomes, &answers(&fleet, &bodies).await);
    fleet.at_rest().await;
    fleet.finish().await;
}

/// A path that carries a byte a second, one that swallows everything, and one that breaks: streams go on elsewhere.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_bad_path_to_a_worker_is_left() {
    let fleet = sim(STEADY).workers(2).proxies().start().await;
    let proxy = fleet.workers[0].proxy.as_ref().expect("with proxies");
    let bodies: Vec<_> = (0..16).map(|i| stream(&prompt(i, 50), 120)).collect();
    let undisturbed = answers(&fleet, &bodies).await;
    let disturb = async |what: &str, fault: &dyn Fn(), longest: Duration| {
        let running = ask_all(&fleet, &bodies);
        all_have(&running, 10).await;
        fault();
        let outcomes = Running::outcomes(running).await;
        assert_no_failures(what, &outcomes);
        assert_same_answers(&outcomes, &undisturbed);
        eprintln!("{what}: longest pause {:?}", longest_gap(&outcomes));
        assert!(longest_gap(&outcomes) < longest, "{what}: {:?}", longest_gap(&outcomes));
        proxy.forward();
        proxy.cut();
        fleet.all_ready().await;
    };
    disturb("a byte a second", &|| proxy.throttle(1), seconds(5)).await;
    disturb("packets dropped", &|| proxy.blackhole(), seconds(5)).await;
    disturb("connections cut", &|| proxy.cut(), seconds(1)).await;
    fleet.at_rest().await;
    fleet.finish().await;
}

/// A prompt that aborts its worker takes three at most, is told so, and is refused from then on; the streams that ran beside
/// it survive all three.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_poison_prompt_kills_three_workers_at_most() {
    let mut fleet = sim(STEADY).workers(5).start().await;
    (0..5).for_each(|number| fleet.switch_faults(number, "{abort_on: POISON}"));
    let bodies: Vec<_> = (0..20).map(|i| stream(&prompt(i, 50), 200)).collect();
    let running = ask_all(&fleet, &bodies);
    all_have(&running, 20).await;
    let poison = whole("a POISON prompt", 5);
    let outcome = fleet.ask(poison.clone()).outcome().await;
    assert_eq!(outcome.status, 500, "{:?}", outcome.error);
    assert!(
        outcome.error.as_ref().is_some_and(|error| error.contains("worker_crashed")),
        "{:?}",
        outcome.error
    );
    let beside = Running::outcomes(running).await;
    assert_no_failures("streams beside a poison prompt", &beside);
    let again = fleet.ask(poison).outcome().await;
    assert_eq!(again.status, 500);
    assert!(again.took < seconds(1), "refused at once, not after {:?}", again.took);
    let alive = (0..5).filter(|number| fleet.worker_runs(*number)).count();
    assert_eq!(alive, 2, "three workers are the price");
    assert_eq!(fleet.router_metrics(0).await.value("thalweg_router_poisoned_prompts"), 1.0);
    for number in 0..5 {
        if !fleet.worker_runs(number) {
            assert_eq!(fleet.worker_ended(number, seconds(1)).await, None, "it was aborted");
            fleet.restart_worker(number);
        }
    }
    fleet.all_ready().await;
    assert_same_answers(&beside, &answers(&fleet, &bodies).await);
}

/// A worker that dies and returns on the same port ten times is back in rotation each time.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_flapping_worker_comes_back_each_time() {
    // routing-09.
    let mut fleet = sim(STEADY).workers(2).start().await;
    let load = Load::start(8, &[fleet.http()], "/v1/completions", |number| whole(&prompt(number, 30), 20));
    let mut random = Random::from_env(30);
    for round in 0..short_or_long(5, 30) {
        fleet.kill_worker(0);
        load.goes_on(random.below(20)).await;
        if round == 0 {
            // Away for long enough to be given up, as it is when it is away for minutes.
            within(seconds(5), "it is given up", async || fleet.worker_state(0, 0).await == "gone").await;
        }
        fleet.restart_worker(0);
        let back = within(seconds(4), "it is back", async || fleet.worker_state(0, 0).await == "ready").await;
        eprintln!("back after {back:?}");
        load.goes_on(20).await;
    }
    let outcomes = load.stop().await;
    assert_no_failures("a flapping worker", &outcomes);
    let served = |name: &str| outcomes.iter().filter(|one| one.header("x-thalweg-worker") == name).count();
    assert!(served("w0") > 0 && served("w1") > 0);
    let known = fleet.router_metrics(0).await.values("thalweg_router_worker_bookings").len();
    assert_eq!(known, 2, "each worker is known once");
    fleet.at_rest().await;
    fleet.finish().await;
}

/// 50 requests a second while one of two workers is killed, and while packets to one are dropped: none fails, and what the
/// lost worker had is answered within Gone + 1 s.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_constant_rate_outlives_a_lost_worker() {
    // routing-12.
    let mut fleet = sim(STEADY).workers(2).proxies().start().await;
    let rate = async |fleet: &thalweg_harness::Fleet, first: usize, requests: usize| -> Vec<Running> {
        let mut ticks = tokio::time::interval(Duration::from_millis(20));
        let mut running = Vec::new();
        for number in first..first + requests {
            ticks.tick().await;
            running.push(fleet.ask(whole(&prompt(number, 30), 10)));
        }
        running
    };
    let mut running = rate(&fleet, 0, 50).await;
    fleet.kill_worker(0);
    running.extend(rate(&fleet, 50, 100).await);
    fleet.restart_worker(0);
    fleet.all_ready().await;
    running.extend(rate(&fleet, 150, 50).await);
    fleet.workers[0].proxy.as_ref().expect("with proxies").blackhole();
    running.extend(rate(&fleet, 200, 250).await);
    let outcomes: Vec<Outcome> = Running::outcomes(running).await;
    assert_no_failures("a constant rate", &outcomes);
    let slowest = outcomes.iter().map(|outcome| outcome.took).max().unwrap_or_default();
    eprintln!("slowest {slowest:?}");
    assert!(slowest < seconds(5), "{slowest:?}");
    let proxy = fleet.workers[0].proxy.as_ref().expect("with proxies");
    proxy.forward();
    proxy.cut();
    fleet.all_ready().await;
    fleet.finish().await;
}

/// Workers that stream what no worker should: the router resumes elsewhere and shows none of it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn garbage_from_a_worker_reaches_no_client() {
    let mut fleet = sim(STEADY).workers(2).start().await;
    let bodies: Vec<_> = (0..8).map(|i| stream(&prompt(i, 50), 40)).collect();
    let undisturbed = answers(&fleet, &bodies).await;
    for garbage in ["invalid_ids", "unknown_choice", "truncated"] {
        fleet.switch_faults(0, &format!("{{garbage: {garbage}}}"));
        let outcomes = answers(&fleet, &bodies).await;
        assert_no_failures(garbage, &outcomes);
        assert_same_answers(&outcomes, &undisturbed);
    }
    fleet.switch_faults(0, "");
    fleet.at_rest().await;
    fleet.finish().await;
}
