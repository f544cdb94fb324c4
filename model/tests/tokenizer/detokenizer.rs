//! Text appears token by token, and is the same as of all tokens at once.

use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use thalweg_model::tokenizer::{Detokenizer, Specials, Tokenizer};

use crate::folders::llama2_like;
use crate::models::{gemma, smollm};

const SEED: u64 = 20_251_129;

/// The pieces pushed, and the rest.
fn pieces(tokenizer: &Tokenizer, context: &[u32], ids: &[u32], skip_special: bool) -> (Vec<String>, String) {
    let mut detokenizer = Detokenizer::new(tokenizer, context, skip_special);
    let pushed = ids.iter().map(|id| detokenizer.push(tokenizer, *id)).collect();
    (pushed, detokenizer.finish(tokenizer))
}

fn check_random(tokenizer: &Tokenizer, ids_below: u32, rounds: u64) {
    for round in 0..rounds {
        let seed = SEED + round;
        let mut rng = StdRng::seed_from_u64(seed);
        let length = rng.random_range(0..40);
        let ids: Vec<u32> = (0..length).map(|_| rng.random_range(0..ids_below)).collect();
        for skip_special in [true, false] {
            let (pushed, rest) = pieces(tokenizer, &[], &ids, skip_special);
            let whole = tokenizer.decode(&ids, skip_special);
            assert_eq!(pushed.concat() + &rest, whole, "seed {seed}: {ids:?}");
        }
    }
}

#[test]
fn pushes_add_up_to_decode() {
    check_random(smollm(), 49_152, 300);
    check_random(gemma(), 262_144, 300);
    // Mostly byte-fallback tokens.
    check_random(gemma(), 500, 300);
    check_random(&llama2_like(), 300, 300);
}

#[test]
fn a_text_of_whole_characters_never_shows_a_broken_one() {
    let text = "naïve 中国的首都 🍕🐱 👩‍👩‍👧 ก็ \u{301} \u{0} end";
    for tokenizer in [smollm(), gemma()] {
        let ids = tokenizer.encode(text, Specials::Plain, false);
        let (pushed, rest) = pieces(tokenizer, &[], &ids, true);
        assert!(pushed.iter().all(|piece| !piece.contains('\u{FFFD}')), "{pushed:?}");
        assert_eq!((pushed.concat().as_str(), rest.as_str()), (text, ""));
    }
}

#[test]
fn a_character_comes_with_its_last_byte() {
    let ids = smollm().encode("🍕", Specials::Plain, false);
    assert!(ids.len() > 1);
    let (pushed, rest) = pieces(smollm(), &[], &ids, true);
    assert!(pushed[..ids.len() - 1].iter().all(String::is_empty), "{pushed:?}");
    assert_eq!((pushed[ids.len() - 1].as_str(), rest.as_str()), ("🍕", ""));
    let (pushed, rest) = pieces(smollm(), &[], &ids[..1], true);
    assert_eq!((pushed.concat().as_str(), rest.as_str()), ("", "\u{FFFD}"));
}

#[test]
fn the_encoder_s_own_space_is_dropped_only_at_the_start_of_text() {
    let tokenizer = llama2_like();
    let ids = tokenizer.encode("ab ab", Specials::Plain, false);
    assert_eq!(tokenizer.decode(&ids, true), "ab ab");
    let after = |context: &[u32]| pieces(&tokenizer, context, &ids, true).0.concat();
    assert_eq!(after(&[]), "ab ab");
    assert_eq!(after(&[1]), "ab ab", "BOS is no text");
    assert_eq!(after(&ids), " ab ab");
}

#[test]
fn control_tokens_are_shown_or_left_out() {
    let check = |ids: &[u32], skip_special, expected: &str| {
        assert_eq!(smollm().decode(ids, skip_special), expected);
    };
    check(&[1, 9690, 198, 2], false, "<|im_start|>system\n<|im_end|>");
    check(&[1, 9690, 198, 2], true, "system\n");
    check(&[u32::MAX, 49_152, 9690], true, "system");
    assert_eq!(smollm().token_text(2), "<|im_end|>");
    assert_eq!(smollm().token_bytes(2), b"");
    assert!(smollm().is_special(2) && !smollm().is_special(9690) && !smollm().is_special(u32::MAX));
    assert_eq!(gemma().token_text(138), "  ");
}
