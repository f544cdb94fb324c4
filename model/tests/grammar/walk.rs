//! Answers drawn at random from a grammar's masks.

use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use thalweg_model::grammar::Grammar;
use thalweg_model::tokenizer::Tokenizer;

/// What a walk asks of every token of a mask, looked up once: a vocabulary has up to 262,144.
pub(crate) struct Vocabulary {
    ends: Vec<u32>,
    has_text: Vec<bool>,
    closes: Vec<bool>,
}

impl Vocabulary {
    pub(crate) fn new(tokenizer: &Tokenizer) -> Self {
        let ends = tokenizer.bundle().eos_ids.clone();
        let of_each = |is: &dyn Fn(u32, &[u8]) -> bool| {
            (0..tokenizer.vocab_size() as u32).map(|id| is(id, &tokenizer.token_bytes(id))).collect()
        };
        // Random JSON would rarely find an end without these.
        let closing = |bytes: &[u8]| bytes.first().is_some_and(|byte| b"\"}],".contains(byte));
        Self {
            has_text: of_each(&|_, bytes| !bytes.is_empty()),
            closes: of_each(&|id, bytes| ends.contains(&id) || closing(bytes)),
            ends,
        }
    }
}

/// Tokens of an answer that ended within `tokens_max`, or None. Replaying what there is must always lead to the same mask.
pub(crate) fn walk(
    grammar: &Grammar,
    vocabulary: &Vocabulary,
    seed: u64,
    tokens_max: usize,
) -> Option<Vec<u32>> {
    let mut rng = StdRng::seed_from_u64(seed);
    let mut matcher = grammar.matcher();
    let mut answer = Vec::new();
    let Vocabulary { ends, has_text, closes } = vocabulary;
    while answer.len() < tokens_max {
        let mask = matcher.mask(&[]).unwrap();
        let ids = mask.ids();
        assert_eq!(matcher.is_accepting(), ends.iter().all(|id| mask.allows(*id)), "seed {seed}: {answer:?}");
        assert!(ids.iter().all(|id| has_text[*id as usize] || ends.contains(id)), "seed {seed}");
        let closing: Vec<u32> = ids.iter().copied().filter(|id| closes[*id as usize]).collect();
        let from = if closing.is_empty() || rng.random_range(0..3) == 0 { &ids } else { &closing };
        let id = from[rng.random_range(0..from.len())];
        if ends.contains(&id) {
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
