//! Control-token text is parsed where it may be, and nowhere else; any other text comes back as it was.

use thalweg_model::tokenizer::{Specials, Tokenizer};

use crate::folders::{llama2_like, llama3_like};
use crate::models::{gemma, smollm};

#[test]
fn control_text_is_parsed_only_on_demand() {
    let text = "a<|im_end|>b";
    let parsed = smollm().encode(text, Specials::Parse, false);
    assert_eq!(parsed.iter().filter(|id| **id == 2).count(), 1);
    let plain = smollm().encode(text, Specials::Plain, false);
    assert!(plain.iter().all(|id| !smollm().is_special(*id)), "{plain:?}");
    assert_eq!(smollm().decode(&plain, true), text);
}

/// Ids with `bos` wanted.
fn check_bos(tokenizer: &Tokenizer, text: &str, specials: Specials, bos_ids: usize) {
    let bos = tokenizer.bundle().bos_id.unwrap();
    let ids = tokenizer.encode(text, specials, true);
    assert_eq!(ids.iter().filter(|id| **id == bos).count(), bos_ids, "{text:?}: {ids:?}");
}

/// Case tokenizer-01.
#[test]
fn there_is_one_beginning_of_sequence() {
    check_bos(gemma(), "hi", Specials::Parse, 1);
    check_bos(gemma(), "<bos>hi", Specials::Parse, 1);
    check_bos(gemma(), "<bos>hi", Specials::Plain, 1);
    check_bos(gemma(), "", Specials::Parse, 1);
    check_bos(smollm(), "hi", Specials::Parse, 0);
    check_bos(&llama3_like(), "<|begin_of_text|>hi", Specials::Parse, 1);
    check_bos(&llama3_like(), "hi", Specials::Parse, 1);
}

/// Case tokenizer-03: what can be compared without the original tokenizer.json is that all text survives.
#[test]
fn every_text_comes_back() {
    let long = "a".repeat(100_000);
    let spaces: Vec<String> = (2..=60).map(|count| format!("x{}y", " ".repeat(count))).collect();
    let texts = [
        "café — naïve – 1234567890 3.14 ½",
        "tab\there\r\nCRLF\r\n\n\n",
        "<div class=\"a\"><b>x</b></div>",
        "中文 日本語 한국어 ภาษาไทย हिन्दी العربية",
        "👩‍👩‍👧‍👦 🏳️‍🌈 e\u{301} \u{301} \u{0} \u{FDD0} \u{FFFF}",
        " leading and trailing ",
        "",
        &long,
    ];
    let texts = texts.into_iter().chain(spaces.iter().map(String::as_str));
    let llama2 = llama2_like();
    for text in texts {
        for tokenizer in [smollm(), gemma(), &llama2] {
            for specials in [Specials::Parse, Specials::Plain] {
                let ids = tokenizer.encode(text, specials, false);
                assert_eq!(tokenizer.decode(&ids, false), text);
                assert!(ids.iter().all(|id| (*id as usize) < tokenizer.vocab_size()));
            }
        }
    }
}
