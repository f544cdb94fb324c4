//! Profiles as they are written, what is said, and how long it takes.

use super::language::Speaker;
use super::*;
use crate::plan::{AdapterSlot, Row, RowInput, SlotId, SlotInit, Want};
use crate::sampling::SamplingParams;

fn parsed(text: &str) -> Profile {
    Profile::parse(text).unwrap_or_else(|error| panic!("{text}: {error}"))
}

#[test]
fn profiles() {
    assert_eq!(parsed(""), Profile::default());
    let whole = parsed(
        "step: {base_seconds: 0.01, prefill_token_seconds: 1e-5, decode_sequence_seconds: 1e-4, \
         context_token_seconds: 1e-8, jitter: 0.1, jitter_seed: 3}\n\
         tokens: {script: ['one two', [5, 6]]}\n\
         output_tokens: {uniform: {min: 2, max: 9}}\n\
         faults: {delay_seconds: 1, stall: true, slow_seconds: 2, garbage: out_of_order, abort_on: poison, \
         panic_on: [1, 2], refuse: true, cache_events: lost, silent: true}\n",
    );
    assert_eq!(whole.step.base_seconds, 0.01);
    assert_eq!(whole.tokens.script, [Text::Text("one two".to_owned()), Text::Ids(vec![5, 6])]);
    assert_eq!(whole.output_tokens, Some(OutputTokens::Uniform { min: 2, max: 9 }));
    assert_eq!(whole.faults.garbage, Some(Garbage::OutOfOrder));
    assert_eq!(whole.faults.cache_events, Some(CacheEventFault::Lost));
    let mut faults = whole.faults;
    let encode: Encode = Box::new(|text| vec![vec![text.len() as u32, 7]]);
    faults.resolve(&encode);
    let (abort_on, panic_on) = (faults.abort_on.unwrap(), faults.panic_on.unwrap());
    for (prompt, aborts, panics) in [
        (&[9, 6, 7, 9][..], true, false),
        (&[1, 1, 2], false, true),
        (&[2, 1, 7, 6], false, false),
        (&[7], false, false),
    ] {
        assert_eq!((abort_on.is_in(prompt), panic_on.is_in(prompt)), (aborts, panics), "{prompt:?}");
    }
    assert_eq!(parsed("output_tokens: {fixed: 3}").output_tokens, Some(OutputTokens::Fixed(3)));
    assert_eq!(parsed("output_tokens: {mean: 3.5}").output_tokens, Some(OutputTokens::Mean(3.5)));
}

#[test]
fn broken_profiles_are_refused_by_name() {
    for (text, says) in [
        ("speed: 1", "speed"),
        ("step: {base: 1}", "base"),
        ("tokens: {sed: 1}", "sed"),
        ("faults: {explode: true}", "explode"),
        ("faults: {garbage: much}", "much"),
        ("output_tokens: {random: 3}", "random"),
        ("step: {base_seconds: -1}", "step.base_seconds is -1"),
        ("step: {prefill_token_seconds: .nan}", "step.prefill_token_seconds is NaN"),
        ("step: {base_seconds: 1e9}", "must be from 0 to 3600"),
        ("step: {jitter: 1.5}", "step.jitter is 1.5"),
        ("faults: {slow_seconds: -0.5}", "faults.slow_seconds is -0.5"),
        ("tokens: {seed: 1, script: [a]}", "a seed and a script"),
        ("tokens: {script: [[]]}", "empty entry"),
        ("output_tokens: {fixed: 0}", "output_tokens must be"),
        ("output_tokens: {uniform: {min: 5, max: 4}}", "output_tokens must be"),
        ("output_tokens: {mean: 0.5}", "output_tokens must be"),
    ] {
        let error = Profile::parse(text).expect_err(text);
        assert!(error.contains(says), "{text}: {error}");
    }
}

fn rows(inputs: &[(u32, RowInput)]) -> StepPlan {
    let row = |(slot, (context, input)): (usize, &(u32, RowInput))| Row {
        slot: SlotId(slot as u32),
        adapter: AdapterSlot::BASE,
        input: input.clone(),
        context: *context,
        tables: Default::default(),
        want: Want::Nothing,
    };
    StepPlan { slots: Vec::new(), rows: inputs.iter().enumerate().map(row).collect(), ..StepPlan::default() }
}

#[test]
fn a_step_takes_what_its_tokens_take() {
    let step = StepTime {
        base_seconds: 1.0,
        prefill_token_seconds: 0.1,
        decode_sequence_seconds: 0.01,
        context_token_seconds: 0.001,
        ..StepTime::default()
    };
    let prompt = |len: usize| RowInput::Tokens(vec![1; len]);
    let check = |plan: StepPlan, expected: f64| {
        assert!((step.seconds(&plan, 5) - expected).abs() < 1e-9, "{plan:?}: {}", step.seconds(&plan, 5));
    };
    check(rows(&[]), 1.0);
    check(rows(&[(0, prompt(4))]), 1.404);
    check(rows(&[(16, prompt(4)), (99, RowInput::LastSampled)]), 1.0 + 0.4 + 0.01 + 0.120);
    let jittery = StepTime { jitter: 0.5, ..step };
    let times: Vec<f64> = (0..200).map(|number| jittery.seconds(&rows(&[]), number)).collect();
    assert!(times.iter().all(|seconds| (0.5..=1.5).contains(seconds)), "{times:?}");
    let mean = times.iter().sum::<f64>() / 200.0;
    assert!((0.9..1.1).contains(&mean) && times[0] != times[1], "{mean}");
    assert_eq!(times[7], jittery.seconds(&rows(&[]), 7));
}

fn language() -> Language {
    Language {
        seed: 1,
        script: Vec::new(),
        output_tokens: None,
        vocab_size: 50,
        eos_ids: vec![2],
        special_ids: vec![0, 1, 2],
        hidden_size: 8,
    }
}

/// Tokens behind `output`, `count` of them.
fn said(
    language: &Language,
    sampling: &SamplingParams,
    choice: u32,
    output: &[u32],
    count: usize,
) -> Vec<u32> {
    let init = SlotInit {
        slot: SlotId(0),
        sampling: Arc::new(sampling.clone()),
        choice,
        prompt: Arc::new([7, 8, 9]),
        output: output.to_vec(),
    };
    let mut speaker = Speaker::new(init);
    (0..count).map(|_| language.say(&mut speaker, None).token).collect()
}

#[test]
fn what_is_said_hangs_on_what_was_said() {
    let (language, greedy) = (language(), SamplingParams::greedy());
    let whole = said(&language, &greedy, 0, &[], 200);
    assert!(whole.iter().all(|id| (3..50).contains(id)), "control tokens are not said: {whole:?}");
    assert_eq!(said(&language, &greedy, 0, &whole[..9], 20), whole[9..29]);
    let mut wrong = whole[..9].to_vec();
    wrong[3] ^= 1;
    assert_ne!(said(&language, &greedy, 0, &wrong, 20), whole[9..29], "a wrong resume shows");
    assert_ne!(said(&language, &greedy, 0, &whole[..8], 20), whole[9..29], "a token lost shows");
    assert_eq!(said(&language, &SamplingParams { seed: 5, ..greedy.clone() }, 3, &[], 20), whole[..20]);
    let drawn = SamplingParams { temperature: 1.0, seed: 5, ..greedy.clone() };
    let first = said(&language, &drawn, 0, &[], 20);
    assert_ne!(first, whole[..20]);
    assert_ne!(first, said(&language, &drawn, 1, &[], 20), "choices differ");
    assert_ne!(first, said(&language, &SamplingParams { seed: 6, ..drawn.clone() }, 0, &[], 20));
    assert_ne!(whole[..20], said(&Language { seed: 2, ..language }, &greedy, 0, &[], 20));
}

#[test]
fn scripts_and_lengths() {
    let script = Language { script: vec![vec![11, 12, 13]], ..language() };
    let mut sampling = SamplingParams { end_ids: vec![2], ..SamplingParams::greedy() };
    assert_eq!(said(&script, &sampling, 0, &[], 7), [11, 12, 13, 11, 12, 13, 11]);
    assert_eq!(said(&script, &sampling, 0, &[11, 12], 2), [13, 11]);
    let two = Language { script: vec![vec![11], vec![12]], ..language() };
    assert_ne!(said(&two, &sampling, 0, &[], 1), said(&two, &sampling, 1, &[], 1), "each choice its own");
    let ends = Language { output_tokens: Some(OutputTokens::Fixed(3)), ..script };
    assert_eq!(said(&ends, &sampling, 0, &[], 3), [11, 12, 2]);
    assert_eq!(said(&ends, &sampling, 0, &[11, 12, 13], 1), [2]);
    sampling.min_tokens = 4;
    assert_eq!(said(&ends, &sampling, 0, &[], 5), [11, 12, 13, 11, 2]);
    sampling.end_ids.clear();
    assert_eq!(said(&ends, &sampling, 0, &[], 4), [11, 12, 13, 11], "the request ignores the end");
    let lengths = |lengths: OutputTokens| (0..1000).map(move |key| lengths.draw(key));
    assert!(lengths(OutputTokens::Uniform { min: 2, max: 4 }).all(|tokens| (2..=4).contains(&tokens)));
    let mean = lengths(OutputTokens::Mean(50.0)).map(f64::from).sum::<f64>() / 1000.0;
    assert!((45.0..55.0).contains(&mean), "{mean}");
}

#[test]
fn logprobs_are_asked_for() {
    let language = language();
    let logprobs = language.predict(4, 49, 3);
    assert_eq!((logprobs.token, logprobs.rank, logprobs.top.len()), (49, 1, 3));
    assert_eq!(logprobs.top[0], (49, logprobs.logprob));
    assert!(logprobs.top.windows(2).all(|pair| pair[0].1 > pair[1].1 && pair[1].0 < 50), "{logprobs:?}");
    assert_eq!(language.predict(4, 49, 0).top, []);
}

fn runner(step: StepTime, faults: Faults) -> (SimRunner, tempfile::NamedTempFile, FaultWatch) {
    let file = tempfile::NamedTempFile::new().expect("a temporary file");
    let watch = FaultWatch::start(file.path(), faults, Box::new(|_| Vec::new())).expect("a thread");
    let config = SimConfig { step, language: Arc::new(language()), faults: watch.switch().clone() };
    (SimRunner::start(config).expect("a thread"), file, watch)
}

#[test]
fn steps_take_real_time_two_in_flight() {
    let step = StepTime { base_seconds: 0.02, ..StepTime::default() };
    let (mut runner, ..) = runner(step, Faults::default());
    let begin = Instant::now();
    let mut in_flight: VecDeque<StepId> = (0..2).map(|_| runner.submit(rows(&[])).expect("room")).collect();
    assert!(begin.elapsed() < Duration::from_millis(20), "submitting does not wait");
    assert!(runner.submit(rows(&[])).expect_err("full").to_string().contains("2 steps are in flight"));
    for _ in 0..8 {
        let oldest = in_flight.pop_front().expect("one in flight");
        assert_eq!(runner.collect(oldest).expect("a step").seconds, 0.02);
        in_flight.push_back(runner.submit(rows(&[])).expect("room"));
    }
    let took = begin.elapsed();
    assert!(took >= Duration::from_millis(160), "{took:?}");
    // Waits that overshoot do not add up, unless the machine stops for longer than the test may take.
    assert!(took < Duration::from_secs(5), "{took:?}");
    let wrong = runner.collect(in_flight[1]).expect_err("not the oldest").to_string();
    assert!(wrong.contains("not the oldest"), "{wrong}");
}

#[test]
fn a_stalled_or_slow_runner_can_be_dropped() {
    let slow = StepTime { base_seconds: 3600.0, ..StepTime::default() };
    for (step, stall) in [(slow, false), (StepTime::default(), true)] {
        let (mut runner, ..) = runner(step, Faults { stall, ..Faults::default() });
        runner.submit(rows(&[])).expect("room");
        let begin = Instant::now();
        drop(runner);
        assert!(begin.elapsed() < Duration::from_secs(60), "{step:?}");
    }
}

#[test]
fn plans_that_make_no_sense_fail() {
    let (mut runner, ..) = runner(StepTime::default(), Faults::default());
    let step = runner.submit(rows(&[(0, RowInput::LastSampled)])).expect("room");
    let error = runner.collect(step).expect_err("no such slot").to_string();
    assert!(error.contains("slot 0 was never set"), "{error}");
    let after = runner.submit(rows(&[])).and_then(|step| runner.collect(step));
    assert_eq!(after.expect_err("it has ended").to_string(), "sim: an earlier step failed");
}
