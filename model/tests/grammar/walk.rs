//! Answers drawn at random from a grammar's masks.

use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use thalweg_model::grammar::Grammar;
use thalweg_model::tokenizer::Tokenizer;

/// Tokens of an answer that ended within `tokens_max`, or None. Replaying what there is must always lead to the same mask.
pub(crate) fn walk(
    grammar: &Grammar,
    tokenizer: &Tokenizer,
    seed: u64,
    tokens_max: usize,
) -> Option<Vec<u32>> {
    let mut rng = StdRng::seed_from_u64(seed);
    let mut matcher = grammar.matcher();
    let mut answer = Vec::new();
    let eos = &tokenizer.bundle().eos_ids;
    while answer.len() < tokens_max {
        let mask = matcher.mask(&[]).unwrap();
        let ids = mask.ids();
        assert_eq!(matcher.is_accepting(), eos.iter().all(|id| mask.allows(*id)), "seed {seed}: {answer:?}");
        assert!(
            ids.iter().all(|id| eos.contains(id) || !tokenizer.token_bytes(*id).is_empty()),
            "seed {seed}"
        );
        // Towards an end: random JSON would rarely find one.
        let closing = |id: &&u32| {
            eos.contains(id) || tokenizer.token_bytes(**id).first().is_some_and(|b| b"\"}],".contains(b))
        };
        let closing: Vec<u32> = ids.iter().filter(closing).copied().collect();
        let from = if closing.is_empty() || rng.random_range(0..3) == 0 { &ids } else { &closing };
        let id = from[rng.random_range(0..from.len())];
        if eos.contains(&id) {
            return Some(answer);
        }
        matcher.consume(&[id]).unwrap();
        answer.push(id);
        if matcher.is_stopped() {
            return Some(answer);
        }
        if rng.random_range(0..8) == 0 {
            let mut again = grammar.matcher();
            again.consume(&answer).unwrap();
            assert_eq!(again.mask(&[]), matcher.copy().mask(&[]), "seed {seed}: {answer:?}");
            matcher = again;
        }
    }
    None
}
