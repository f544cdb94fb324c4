//! A look at a grammar before anybody follows it: some answers are made up, and their lexer's states noted.
//!
//! It changes what masks cost, not what they are. Sequences copy the lexer behind it, which knows these states by then: else each
//! would work them out anew, at half of a mask's cost.
#![expect(
    clippy::disallowed_types,
    clippy::disallowed_methods,
    reason = "a thread at work takes real time, also where tests pause tokio's"
)]

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use llguidance::TokenParser;
use llguidance::earley::{BiasComputer, ParserRecognizer};
use llguidance::toktrie::{SimpleVob, TokTrie};

use super::guide::{Guide, Reaches, Words};
use super::limits::{SCOUT_TIME_MAX, SCOUTED_BYTES_MAX, SCOUTED_STATES_MAX, SCOUTED_TOKENS_MAX};
use super::reach::{Beginnings, Reach};

/// What ends or separates things in JSON and in much else comes first, or made-up strings would have no end.
const BRISK: &[u8] = b"\",}]:{[0tfn \n";
/// The same, with as many blanks as there may be.
const IDLE: &[u8] = b" \n\",}]:{[0tfn";
/// Answers that are made up.
const ANSWERS: [&[u8]; 4] = [BRISK, IDLE, BRISK, BRISK];
/// Tokens in a row that show nothing new.
const DULL_MAX: usize = 64;

/// Readies a parser at the start of its grammar, and all copies of it. Says whether it did: if not, the parser is of no use any
/// more.
pub(super) fn scout(parser: &mut TokenParser, words: &Arc<Words>, control: &SimpleVob) -> bool {
    let begun = Instant::now();
    let scout = Arc::new(Scout { words: words.clone(), seen: Mutex::default() });
    for (order, number) in ANSWERS.into_iter().zip(0..) {
        // With a lexer in common.
        let mut ahead = parser.clone();
        ahead.bias_computer = scout.clone();
        let is_enough = || {
            let states = parser.parser.lexer_stats().num_states;
            let bytes = scout.seen().bytes;
            states > SCOUTED_STATES_MAX || bytes > SCOUTED_BYTES_MAX || begun.elapsed() > SCOUT_TIME_MAX
        };
        make_up(llguidance::Matcher::new(Ok(ahead)), (&scout, is_enough), control, (order, Dice(number)));
    }
    let reaches = std::mem::take(&mut scout.seen().reaches);
    parser.bias_computer = Arc::new(Guide::new(words.clone(), reaches));
    parser.parser.get_error().is_none() && parser.parser.lexer_stats().num_states <= 2 * SCOUTED_STATES_MAX
}

fn make_up(
    mut matcher: llguidance::Matcher,
    (scout, is_enough): (&Scout, impl Fn() -> bool),
    control: &SimpleVob,
    (order, mut dice): (&[u8], Dice),
) {
    let likely: Vec<Option<u32>> = order.iter().map(|byte| scout.trie().token_id(&[*byte])).collect();
    for _ in 0..SCOUTED_TOKENS_MAX / ANSWERS.len() {
        if matcher.is_stopped() || scout.seen().dull > DULL_MAX || is_enough() {
            break;
        }
        let Ok(mut mask) = matcher.compute_mask() else { break };
        mask.sub(control);
        let first = likely.iter().flatten().copied().find(|id| mask.is_allowed(*id) && !dice.is_one_of(3));
        let Some(id) = first.or_else(|| any_of(&mask, dice.next())) else { break };
        if matcher.consume_tokens(&[id]).is_err() {
            break;
        }
    }
    scout.seen().dull = 0;
}

/// The first token of a word of the set that is drawn by lot.
fn any_of(mask: &SimpleVob, lot: usize) -> Option<u32> {
    let words = mask.as_slice();
    let at = |shift: usize| (lot + shift) % words.len();
    let found = (0..words.len()).map(at).find(|at| words[*at] != 0)?;
    Some((found * 32) as u32 + words[found].trailing_zeros())
}

/// Notes what it sees.
struct Scout {
    words: Arc<Words>,
    seen: Mutex<Seen>,
}

#[derive(Default)]
struct Seen {
    beginnings: Option<Beginnings>,
    reaches: Reaches,
    bytes: usize,
    /// Tokens since the last new state.
    dull: usize,
}

impl Scout {
    fn seen(&self) -> MutexGuard<'_, Seen> {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl BiasComputer for Scout {
    fn compute_bias(&self, rec: &mut ParserRecognizer<'_>, start: &[u8]) -> SimpleVob {
        let Seen { beginnings, reaches, bytes, dull } = &mut *self.seen();
        let beginnings = beginnings.get_or_insert_with(|| Beginnings::new(rec));
        *dull += 1;
        let reach = reaches.entry(rec.lexer_state().as_usize()).or_insert_with(|| {
            let reach = Reach::new(&self.words.trie, rec, beginnings, self.trie().alloc_token_set());
            (*bytes, *dull) = (*bytes + reach.bytes(), 0);
            reach
        });
        let found = reach.tokens(&self.words.trie, rec, self.trie().alloc_token_set());
        found.unwrap_or_else(|| self.words.search.compute_bias(rec, start))
    }

    fn trie(&self) -> &TokTrie {
        self.words.search.trie()
    }
}

/// The same throws for the same grammar.
struct Dice(u64);

impl Dice {
    fn next(&mut self) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize
    }

    fn is_one_of(&mut self, sides: usize) -> bool {
        self.next().is_multiple_of(sides)
    }
}
