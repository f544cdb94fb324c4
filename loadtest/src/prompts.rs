//! Synthetic conversations.

use rand::rngs::StdRng;
use rand::seq::IndexedRandom;
use rand::{RngExt, SeedableRng};

use crate::conversation::{Conversation, Message};
use crate::plan::Synthetic;

/// Short and common, so that most tokenizers have each as one token.
const WORDS: [&str; 64] = [
    "the", "river", "of", "and", "to", "stone", "in", "light", "is", "that", "for", "water", "on", "with",
    "as", "tree", "at", "by", "this", "house", "from", "or", "an", "road", "they", "you", "we", "bird",
    "all", "would", "there", "song", "their", "what", "so", "night", "out", "if", "who", "city", "which",
    "go", "me", "green", "when", "make", "can", "like", "time", "no", "just", "north", "know", "take",
    "year", "good", "some", "could", "them", "see", "other", "than", "then", "now",
];

/// Conversation number `index` of a test, the same for the same seed.
pub(crate) fn synthetic(shape: &Synthetic, seed: u64, index: usize) -> Conversation {
    let mut rng = StdRng::seed_from_u64(mix(seed, 1 + index as u64));
    let mut opening = Vec::new();
    if shape.shared_words > 0 {
        let group = rng.random_range(0..shape.groups as u64);
        // Groups count down from the top, where no conversation's number comes.
        let mut shared = StdRng::seed_from_u64(mix(seed, u64::MAX - group));
        opening.push(Message::new("system", words(shape.shared_words, &mut shared)));
    }
    Conversation { opening, turns: (0..shape.turns).map(|_| words(shape.words, &mut rng)).collect() }
}

fn words(count: usize, rng: &mut StdRng) -> String {
    let chosen: Vec<&str> = (0..count).filter_map(|_| WORDS.choose(rng).copied()).collect();
    chosen.join(" ")
}

/// Seeds that are close together give streams that are not.
fn mix(seed: u64, stream: u64) -> u64 {
    seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ stream.wrapping_mul(0xD6E8_FEB8_6659_FD93)
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    const SHAPE: Synthetic = Synthetic { words: 7, shared_words: 20, groups: 3, turns: 2 };

    #[test]
    fn conversations_have_the_shape_asked_for() {
        let conversation = synthetic(&SHAPE, 1, 0);
        let count = |text: &str| text.split(' ').count();
        assert_eq!(conversation.opening.iter().map(|m| count(&m.content)).collect::<Vec<_>>(), [20]);
        assert_eq!(conversation.turns.iter().map(|turn| count(turn)).collect::<Vec<_>>(), [7, 7]);
        assert!(synthetic(&Synthetic { shared_words: 0, ..SHAPE }, 1, 0).opening.is_empty());
    }

    #[test]
    fn groups_share_their_beginning_and_nothing_else() {
        let conversations: Vec<_> = (0..60).map(|index| synthetic(&SHAPE, 1, index)).collect();
        let openings: HashSet<_> = conversations.iter().map(|c| c.opening[0].content.clone()).collect();
        let turns: HashSet<_> = conversations.iter().map(|c| c.turns.clone()).collect();
        assert_eq!((openings.len(), turns.len()), (3, 60));
    }

    #[test]
    fn a_seed_gives_the_same_conversations() {
        assert_eq!(synthetic(&SHAPE, 4, 9), synthetic(&SHAPE, 4, 9));
        assert_ne!(synthetic(&SHAPE, 4, 9), synthetic(&SHAPE, 5, 9));
    }
}
