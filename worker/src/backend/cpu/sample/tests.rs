//! Draws against distributions computed apart, edits against their formulas, logprobs against f64.

use std::sync::Arc;

use super::super::slots::Slots;
use super::super::testing::{numbers, slot};
use super::*;
use crate::plan::{SlotId, SlotInit};
use crate::sampling::SamplingParams;

/// One position of one sequence.
struct Position {
    logits: Vec<f32>,
    sampling: SamplingParams,
    prompt: Vec<u32>,
    output: Vec<u32>,
    mask: Option<TokenMask>,
}

impl Position {
    fn new(logits: &[f32], sampling: SamplingParams) -> Self {
        Self { logits: logits.to_vec(), sampling, prompt: Vec::new(), output: Vec::new(), mask: None }
    }

    fn sample(&self, output_index: u32) -> Logprobs {
        let (prompt, output) = (self.prompt.clone().into(), self.output.clone());
        let sampling = Arc::new(self.sampling.clone());
        let mut slots = Slots::new(1);
        slots.init(&SlotInit { slot: SlotId(0), sampling, choice: 0, prompt, output }).expect("a slot");
        let row = LogitRow { row: 0, token: 0, target: None, sample: Some(output_index) };
        let mut logits = self.logits.clone();
        let mut workspace = Workspace::default();
        let draw = slots.draw(0).map(|draw| (draw, self.mask.as_ref()));
        let result = sample_row(Isa::best(), &row, draw, &mut logits, &mut workspace);
        let restored = logits.iter().zip(&self.logits).all(|(a, b)| a == b || !b.is_finite());
        assert!(restored, "edits stay");
        result.sampled.expect("a token")
    }

    fn token(&self) -> u32 {
        self.sample(0).token
    }

    /// Draws many tokens and holds their counts against weights.
    fn check_distribution(&self, weights: &[f64]) {
        const DRAWS: u32 = 20_000;
        let mut counts = vec![0u32; self.logits.len()];
        (0..DRAWS).for_each(|index| counts[self.sample(index).token as usize] += 1);
        let total: f64 = weights.iter().sum();
        let (mut chi, mut degrees) = (0f64, -1f64);
        for (id, (count, weight)) in counts.iter().zip(weights).enumerate() {
            let expected = f64::from(DRAWS) * weight / total;
            assert!(*count == 0 || expected > 0.0, "token {id} was drawn {count} times");
            if expected > 5.0 {
                chi += (f64::from(*count) - expected).powi(2) / expected;
                degrees += 1.0;
            }
        }
        // Mean plus five standard deviations of the chi-square distribution.
        let limit = degrees + 5.0 * (2.0 * degrees).sqrt();
        assert!(chi <= limit.max(1.0), "seed {}: chi-square {chi:.1} above {limit:.1}", self.sampling.seed);
    }
}

fn random(seed: u64) -> SamplingParams {
    SamplingParams { temperature: 1.0, seed, ..SamplingParams::greedy() }
}

/// e^(logit / temperature) for those of `kept` ids.
fn weights(logits: &[f32], temperature: f64, kept: impl Fn(usize) -> bool) -> Vec<f64> {
    let weigh = |(id, x): (usize, &f32)| if kept(id) { (f64::from(*x) / temperature).exp() } else { 0.0 };
    logits.iter().enumerate().map(weigh).collect()
}

/// Ids from the most likely down.
fn ranked(logits: &[f32]) -> Vec<usize> {
    let mut ids: Vec<usize> = (0..logits.len()).collect();
    ids.sort_by(|a, b| logits[*b].total_cmp(&logits[*a]).then(a.cmp(b)));
    ids
}

#[test]
fn draws_follow_the_distribution() {
    let logits: Vec<f32> = numbers(40, 5).iter().map(|x| 3.0 * x).collect();
    let order = ranked(&logits);
    let rank = |id: usize| order.iter().position(|other| *other == id).expect("an id");
    for seed in [1, 2, 1 << 40] {
        Position::new(&logits, random(seed)).check_distribution(&weights(&logits, 1.0, |_| true));
        let warm = SamplingParams { temperature: 1.7, ..random(seed) };
        Position::new(&logits, warm).check_distribution(&weights(&logits, 1.7, |_| true));
        let top_k = SamplingParams { top_k: 5, ..random(seed) };
        Position::new(&logits, top_k).check_distribution(&weights(&logits, 1.0, |id| rank(id) < 5));
        let all: f64 = weights(&logits, 1.0, |_| true).iter().sum();
        let before = |id: usize| weights(&logits, 1.0, |other| rank(other) < rank(id)).iter().sum::<f64>();
        let top_p = SamplingParams { top_p: 0.6, ..random(seed) };
        Position::new(&logits, top_p).check_distribution(&weights(&logits, 1.0, |id| before(id) < 0.6 * all));
        let heaviest = f64::from(logits[order[0]]).exp();
        let min_p = SamplingParams { min_p: 0.2, ..random(seed) };
        let likely = |id: usize| f64::from(logits[id]).exp() >= 0.2 * heaviest;
        Position::new(&logits, min_p).check_distribution(&weights(&logits, 1.0, likely));
    }
}

#[test]
fn draws_over_many_segments() {
    let logits = vec![0.0; 5000];
    let position = Position::new(&logits, random(3));
    let mut counts = [0u32; 5];
    (0..20_000).for_each(|index| counts[position.sample(index).token as usize / 1000] += 1);
    assert!(counts.iter().all(|count| (3700..4300).contains(count)), "seed 3: {counts:?}");
}

#[test]
fn top_p_applies_to_what_top_k_left() {
    // Weights 4, 3, 2, 1: of the two best, 4/7 reach 0.5 alone.
    let logits = [4f32, 3.0, 2.0, 1.0].map(f32::ln);
    let sampling = SamplingParams { top_k: 2, top_p: 0.5, ..random(1) };
    Position::new(&logits, sampling).check_distribution(&[1.0, 0.0, 0.0, 0.0]);
    let sampling = SamplingParams { top_k: 2, top_p: 0.6, ..random(1) };
    Position::new(&logits, sampling).check_distribution(&[4.0, 3.0, 0.0, 0.0]);
}

#[test]
fn greedy_takes_the_lowest_of_equals() {
    let check = |logits: &[f32], expected| {
        assert_eq!(Position::new(logits, SamplingParams::greedy()).token(), expected)
    };
    check(&[1.0, 3.0, 3.0], 1);
    check(&[0.0; 300], 0);
    let mut logits = vec![-1.0; 300];
    (logits[130], logits[200]) = (2.0, 2.0);
    check(&logits, 130);
}

#[test]
fn tiny_temperatures_are_greedy() {
    // sampling-01.
    let logits = [1.0, 2.5, 2.0, -3.0];
    for temperature in [f32::MIN_POSITIVE, 1e-30, 1e-6, 1e-5, 1e-3, 0.01] {
        for top_p in [1.0, 0.5] {
            let sampling = SamplingParams { temperature, top_p, ..random(9) };
            assert_eq!(Position::new(&logits, sampling).token(), 1, "temperature {temperature}");
        }
    }
}

#[test]
fn numbers_that_are_none() {
    // sampling-01.
    let nan = f32::NAN;
    let check = |logits: &[f32], expected| {
        assert_eq!(Position::new(logits, SamplingParams::greedy()).token(), expected, "{logits:?}");
        let drawn = Position::new(logits, SamplingParams { top_p: 0.9, ..random(1) }).token();
        assert!((drawn as usize) < logits.len());
    };
    check(&[nan, 1.0, 2.0], 2);
    check(&[nan, nan, nan], 0);
    check(&[f32::NEG_INFINITY; 20], 0);
    check(&[0.0, f32::INFINITY, nan], 1);
    let mut long = vec![nan; 100];
    long[50] = -3.0;
    check(&long, 50);
    let logprobs = SamplingParams { logprobs: Some(2), ..SamplingParams::greedy() };
    let result = Position::new(&[nan; 3], logprobs).sample(0);
    assert!(result.token == 0 && result.logprob.is_nan() && result.top.is_empty());
}

#[test]
fn bias_and_minimum_length() {
    let logits = [1.0, 2.0, 3.0, 0.5];
    let check = |sampling, index, expected| {
        assert_eq!(Position::new(&logits, sampling).sample(index).token, expected);
    };
    check(SamplingParams { logit_bias: vec![(0, 5.0), (2, -1.5)], ..SamplingParams::greedy() }, 0, 0);
    let minimum = SamplingParams { min_tokens: 2, end_ids: vec![2], ..SamplingParams::greedy() };
    check(minimum.clone(), 0, 1);
    check(minimum.clone(), 1, 1);
    check(minimum.clone(), 2, 2);
    check(SamplingParams { logit_bias: vec![(2, 90.0)], ..minimum }, 0, 1);
    check(SamplingParams { logit_bias: vec![(7, 90.0)], ..SamplingParams::greedy() }, 0, 2);
}

#[test]
fn penalties() {
    let check = |sampling, prompt: &[u32], output: &[u32], logits: &[f32], expected| {
        let (prompt, output) = (prompt.to_vec(), output.to_vec());
        let position = Position { logits: logits.to_vec(), sampling, prompt, output, mask: None };
        assert_eq!(position.token(), expected);
    };
    let repetition = SamplingParams { repetition_penalty: 2.0, ..SamplingParams::greedy() };
    check(repetition.clone(), &[0], &[], &[3.0, 2.0], 1);
    check(repetition.clone(), &[], &[0], &[3.0, 2.0], 1);
    check(repetition, &[0], &[], &[-1.0, -1.5], 1);
    let presence = SamplingParams { presence_penalty: 1.0, ..SamplingParams::greedy() };
    check(presence.clone(), &[], &[0, 0], &[2.5, 2.0, 1.9], 1);
    check(presence.clone(), &[0], &[], &[2.5, 2.0, 1.9], 0);
    check(presence, &[], &[0, 0], &[3.5, 2.0, 1.9], 0);
    let frequency = SamplingParams { frequency_penalty: 1.0, ..SamplingParams::greedy() };
    check(frequency, &[], &[0, 0], &[3.5, 2.0, 1.9], 1);
    let rewarded = SamplingParams { presence_penalty: -1.0, ..SamplingParams::greedy() };
    check(rewarded, &[], &[1], &[2.5, 2.0], 1);
}

#[test]
fn a_drawn_token_counts_for_the_next() {
    let mut slots = Slots::new(1);
    slots
        .init(&slot(0, SamplingParams { frequency_penalty: 1.0, ..SamplingParams::greedy() }))
        .expect("a slot");
    let row = LogitRow { row: 0, token: 0, target: None, sample: Some(0) };
    let tokens: Vec<u32> = (0..5)
        .map(|_| {
            let mut logits = [2.4, 2.0, 1.0];
            let draw = slots.draw(0).map(|draw| (draw, None));
            let result = sample_row(Isa::best(), &row, draw, &mut logits, &mut Workspace::default());
            let token = result.sampled.expect("a token").token;
            slots.push(0, token);
            token
        })
        .collect();
    assert_eq!(tokens, [0, 1, 0, 1, 2]);
    slots.init(&slot(0, SamplingParams::greedy())).expect("a slot");
    assert!(slots.last_sampled(SlotId(0)).is_err(), "a new sequence has sampled nothing");
}

#[test]
fn logprobs_are_of_the_raw_logits() {
    let logits: Vec<f32> = numbers(3000, 8).iter().map(|x| 8.0 * x).collect();
    let bias = vec![(1234, 100.0)];
    let sampling = SamplingParams { logprobs: Some(5), logit_bias: bias, temperature: 0.7, ..random(1) };
    let result = Position::new(&logits, sampling).sample(0);
    let normaliser = logits.iter().map(|x| f64::from(*x).exp()).sum::<f64>().ln();
    let order = ranked(&logits);
    let check = |id: usize, logprob: f32| {
        let expected = f64::from(logits[id]) - normaliser;
        assert!((f64::from(logprob) - expected).abs() < 2e-6 * (1.0 + expected.abs()), "{id}: {logprob}");
    };
    assert_eq!(result.token, 1234);
    check(1234, result.logprob);
    assert_eq!(result.rank as usize, order.iter().position(|id| *id == 1234).expect("an id") + 1);
    assert_eq!(result.top.iter().map(|(id, _)| *id as usize).collect::<Vec<_>>(), order[..5]);
    result.top.iter().for_each(|(id, logprob)| check(*id as usize, *logprob));
}

/// A masked draw is one over the allowed tokens alone, by whatever way it is drawn, and its logprobs are those of all.
#[test]
fn masks_leave_only_what_they_allow() {
    let logits: Vec<f32> = numbers(3000, 8).iter().map(|x| 4.0 * x).collect();
    let allowed = [7, 31, 32, 1500, 2999];
    let mask = TokenMask::of(logits.len(), &allowed);
    let ways = [
        random(1),
        SamplingParams { top_k: 3, ..random(2) },
        SamplingParams { top_p: 0.999_999, ..random(3) },
        SamplingParams { logit_bias: vec![(7, 2.0), (8, 100.0)], ..random(4) },
    ];
    for sampling in ways {
        let with_bias = |id: usize| {
            let bias =
                sampling.logit_bias.iter().find(|(of, _)| *of as usize == id).map_or(0.0, |(_, bias)| *bias);
            f64::from(logits[id] + bias)
        };
        let mut likeliest: Vec<usize> = allowed.iter().map(|id| *id as usize).collect();
        likeliest.sort_by(|a, b| with_bias(*b).total_cmp(&with_bias(*a)));
        likeliest.truncate(if sampling.top_k > 0 { sampling.top_k as usize } else { allowed.len() });
        let mut weights = vec![0.0; logits.len()];
        for id in likeliest {
            weights[id] = (with_bias(id) / f64::from(sampling.temperature)).exp();
        }
        Position { mask: Some(mask.clone()), ..Position::new(&logits, sampling) }
            .check_distribution(&weights);
    }
    let greedy = SamplingParams { logprobs: Some(2), ..SamplingParams::greedy() };
    let masked = Position { mask: Some(mask), ..Position::new(&logits, greedy.clone()) }.sample(0);
    let free = Position::new(&logits, greedy).sample(0);
    let best = allowed.into_iter().max_by(|a, b| logits[*a as usize].total_cmp(&logits[*b as usize]));
    assert_eq!((Some(masked.token), &masked.top), (best, &free.top));
    assert!(masked.rank > 1 && masked.logprob < free.logprob);
}

#[test]
fn no_logprobs_unless_asked_for() {
    let result = Position::new(&[0.0, 1.0], SamplingParams::greedy()).sample(0);
    assert!(result.logprob.is_nan() && result.rank == 0 && result.top.is_empty());
}

#[test]
fn instruction_sets_draw_alike() {
    let logits: Vec<f32> = numbers(4099, 4).iter().map(|x| 6.0 * x).collect();
    let mut slots = Slots::new(1);
    let sampling = SamplingParams { top_p: 0.8, top_k: 300, logprobs: Some(4), ..random(6) };
    slots.init(&slot(0, sampling)).expect("a slot");
    for index in 0..50 {
        let row = LogitRow { row: 0, token: 0, target: Some((9, 3)), sample: Some(index) };
        let draw = || slots.draw(0).map(|draw| (draw, None));
        let run = |isa| sample_row(isa, &row, draw(), &mut logits.clone(), &mut Workspace::default());
        Isa::available().into_iter().for_each(|isa| assert_eq!(run(isa), run(Isa::Scalar), "{isa:?}"));
    }
}

#[test]
fn a_mask_copies_what_it_allows_and_nothing_else() {
    let rules: [fn(usize) -> bool; 5] =
        [|_| true, |_| false, |id| id % 3 == 0, |id| id / 32 % 2 == 0, |id| !(70..75).contains(&id)];
    for size in [1, 31, 32, 33, 64, 100, 1000] {
        let logits = numbers(size, 7);
        for (rule, narrower) in rules.iter().flat_map(|rule| [(rule, 0), (rule, 9)]) {
            let vocab = size.saturating_sub(narrower).max(1);
            let allowed: Vec<u32> = (0..vocab).filter(|id| rule(*id)).map(|id| id as u32).collect();
            let mut out = vec![7.0; 3];
            let largest = edit::masked(&logits, &TokenMask::of(vocab, &allowed), &mut out);
            let expected: Vec<f32> = (0..size)
                .map(|id| if id < vocab && rule(id) { logits[id] } else { f32::NEG_INFINITY })
                .collect();
            assert_eq!(out, expected, "{size} {vocab}");
            assert_eq!(largest, expected.iter().copied().fold(f32::NEG_INFINITY, f32::max), "{size} {vocab}");
        }
    }
}
