//! Draws with a temperature: their distribution against its definition in f64, and their seeds.

use thalweg_worker::backend::cuda::abi::{LogitRow, Sampled, SlotParams};

use crate::sampling::{Slot, Slots, draw, greedy};
use crate::support::numbers;

/// Probabilities after temperature, top-k, top-p and min-p.
fn distribution(logits: &[f32], params: &SlotParams) -> Vec<f64> {
    let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let weights: Vec<f64> =
        logits.iter().map(|x| (f64::from(x - largest) / f64::from(params.temperature)).exp()).collect();
    let mut order: Vec<usize> = (0..logits.len()).collect();
    order.sort_by(|a, b| logits[*b].total_cmp(&logits[*a]).then(a.cmp(b)));
    if params.top_k > 0 {
        order.truncate(params.top_k as usize);
    }
    let total: f64 = order.iter().map(|id| weights[*id]).sum();
    let (mut sum, mut kept) = (0.0, Vec::new());
    for id in order {
        if sum >= f64::from(params.top_p) * total && !kept.is_empty() {
            break;
        }
        sum += weights[id];
        kept.push(id);
    }
    kept.retain(|id| weights[*id] >= f64::from(params.min_p));
    let sum: f64 = kept.iter().map(|id| weights[*id]).sum();
    let mut probabilities = vec![0.0; logits.len()];
    kept.iter().for_each(|id| probabilities[*id] = weights[*id] / sum);
    probabilities
}

#[test]
fn draws_follow_the_distribution() {
    let base = SlotParams { temperature: 0.8, seed: 1234, ..greedy() };
    let settings = [
        base,
        SlotParams { top_k: 5, ..base },
        SlotParams { top_p: 0.7, ..base },
        SlotParams { min_p: 0.2, ..base },
        SlotParams { top_k: 40, top_p: 0.9, min_p: 0.05, temperature: 1.3, ..base },
        SlotParams { choice: 3, seed: u64::MAX - 5, temperature: 2.0, ..base },
    ];
    for vocab in [320, 49_152] {
        // A few likely tokens among many unlikely ones.
        let mut logits: Vec<f32> = numbers(vocab, 3).into_iter().map(|x| x - 8.0).collect();
        (0..30).for_each(|i| logits[(i * 7919 + 13) % vocab] = 4.0 - 0.15 * i as f32);
        for params in settings {
            let slots = Slots::new(vocab, &[Slot { params, ..Slot::default() }]);
            let probabilities = distribution(&logits, &params);
            let draws = 4096;
            let mut seen = vec![0usize; vocab];
            for batch in 0..draws / 64 {
                let rows: Vec<LogitRow> = (0..64).map(|i| draw(0, batch * 64 + i)).collect();
                let all: Vec<f32> = rows.iter().flat_map(|_| logits.clone()).collect();
                for result in slots.sample(&rows, &all) {
                    seen[result.token as usize] += 1;
                }
            }
            check_frequencies(&format!("{vocab} {params:?}"), &seen, &probabilities, draws as f64);
        }
    }
}

/// Few rows have several blocks each, many have one: the results are the same bits.
#[test]
fn rows_give_the_same_alone_and_among_many() {
    let base = SlotParams { temperature: 0.8, seed: 99, ..greedy() };
    let ways = [
        greedy(),
        base,
        SlotParams { top_k: 5, ..base },
        SlotParams { top_p: 0.7, ..base },
        SlotParams { top_p: 0.9999, temperature: 4.0, ..base },
        SlotParams { min_p: 0.2, ..base },
        SlotParams { top_k: 3000, top_p: 0.9, ..base },
        SlotParams { min_tokens: 9, ..base },
        SlotParams { frequency: 0.3, repetition: 1.2, ..base },
    ];
    for vocab in [6, 333, 5003, 49_152, 128_256] {
        let logits: Vec<f32> = numbers(vocab, 21).into_iter().map(|x| 3.0 * x).collect();
        let results = [1, 40, 100, 300].map(|repeats: usize| {
            let of = |i: usize| ways[i % ways.len()];
            let count = repeats.max(ways.len());
            let slot =
                |i: usize| Slot { params: of(i), output: vec![1, 2, 2], ends: vec![3], ..Slot::default() };
            let slots = Slots::new(vocab, &(0..count).map(slot).collect::<Vec<_>>());
            let row = |i: usize| LogitRow { target: 2, top: [-1, 3][i % 2], ..draw(i as i32, 4) };
            let all: Vec<f32> = (0..count).flat_map(|_| logits.clone()).collect();
            let mut rows = slots.sample(&(0..count).map(row).collect::<Vec<_>>(), &all);
            rows.truncate(ways.len());
            let told = |result: Sampled| {
                let has_logprobs = !result.logprob.is_nan();
                let logprobs = [result.logprob, result.target_logprob].map(f32::to_bits);
                (
                    result.token,
                    has_logprobs.then_some((
                        result.rank,
                        result.target_rank,
                        logprobs,
                        result.top_ids[..3].to_vec(),
                    )),
                )
            };
            rows.into_iter().map(told).collect::<Vec<_>>()
        });
        assert!(results.iter().all(|rows| *rows == results[0]), "{vocab}: {results:?}");
    }
}

/// Chi-square over tokens that are expected often enough, the rest as one.
fn check_frequencies(what: &str, seen: &[usize], probabilities: &[f64], draws: f64) {
    let (mut chi, mut freedom, mut rest_seen, mut rest) = (0.0, -1.0, 0.0, 0.0);
    for (seen, probability) in seen.iter().zip(probabilities) {
        assert!(*seen == 0 || *probability > 0.0, "{what}: a token that was filtered out was drawn");
        let expected = probability * draws;
        if expected >= 8.0 {
            chi += (*seen as f64 - expected).powi(2) / expected;
            freedom += 1.0;
        } else {
            rest_seen += *seen as f64;
            rest += expected;
        }
    }
    if rest >= 8.0 {
        chi += (rest_seen - rest).powi(2) / rest;
        freedom += 1.0;
    }
    // Five standard deviations of a chi-square of so many degrees of freedom.
    let limit = freedom + 5.0 * f64::sqrt(2.0 * f64::max(freedom, 1.0)) + 8.0;
    println!("{what}: chi-square {chi:.1} of {freedom} degrees");
    assert!(chi <= limit, "{what}: chi-square {chi} of {freedom} degrees of freedom");
}

#[test]
fn draws_repeat_by_seed_choice_and_index() {
    let vocab = 1000;
    let logits = numbers(vocab, 4);
    let base = SlotParams { temperature: 1.0, seed: 5, ..greedy() };
    let slots = [base, base, SlotParams { seed: 6, ..base }, SlotParams { choice: 1, ..base }]
        .map(|params| Slot { params, ..Slot::default() });
    let slots = Slots::new(vocab, &slots);
    let all: Vec<f32> = (0..4).flat_map(|_| logits.clone()).collect();
    let draws: Vec<Vec<i32>> = (0..20).map(|index| slots.tokens(index, &all)).collect();
    let stream = |slot: usize| draws.iter().map(|tokens| tokens[slot]).collect::<Vec<_>>();
    assert_eq!(stream(0), stream(1));
    assert!(stream(0) != stream(2) && stream(0) != stream(3) && stream(2) != stream(3));
}
