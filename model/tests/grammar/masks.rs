//! What may follow what.

use serde_json::json;
use thalweg_model::grammar::{GrammarSource, Grammars, TokenMask};
use thalweg_model::tokenizer::Tokenizer;

use crate::tiny::{EOS, IM_START, VOCAB, bundle, bytes, compile, schema, tokenizer};

/// After `text`, exactly these tokens may follow.
fn check(source: &GrammarSource, text: &str, expected: &[&str], accepting: bool) {
    let mut matcher = compile(source).unwrap().matcher();
    matcher.consume(&bytes(text)).unwrap();
    let mask = matcher.mask(&[]).unwrap();
    let mut found: Vec<String> =
        mask.ids().iter().filter(|id| !EOS.contains(id)).map(|id| tokenizer().token_text(*id)).collect();
    found.sort();
    assert_eq!(found, expected, "{source:?} behind {text:?}");
    assert_eq!(matcher.is_accepting(), accepting, "{source:?} behind {text:?}");
    assert!(EOS.iter().all(|id| mask.allows(*id) == accepting), "{source:?} behind {text:?}");
}

fn choice(strings: &[&str]) -> GrammarSource {
    GrammarSource::Choice(strings.iter().map(|s| (*s).to_owned()).collect())
}

#[test]
fn masks_have_what_can_go_on_and_every_end_of_sequence_where_it_may_end() {
    let yes_no = choice(&["yes", "no"]);
    check(&yes_no, "", &["n", "no", "y", "yes"], false);
    check(&yes_no, "y", &["e"], false);
    check(&yes_no, "yes", &[], true);
    let plus = GrammarSource::Regex("a+b?".into());
    check(&plus, "", &["a", "ab"], false);
    check(&plus, "a", &["a", "ab", "b"], true);
    check(&plus, "aab", &[], true);
    check(&GrammarSource::Lark("start: \"a\" \"b\" \"c\"".into()), "a", &["b"], false);
    check(&schema(&json!({"const": true})), "", &["t", "true"], false);
    let object = schema(&json!({"type": "object", "properties": {"a": {"const": true}}, "required": ["a"],
                                "additionalProperties": false}));
    check(&object, "{\"a\":", &["\t", "\n", "\r", " ", "t", "true"], false);
    check(&object, "{\"a\":true}", &[], true);
}

#[test]
fn choices_are_taken_to_the_letter() {
    for text in ["a|b", "(", "a/b\\", "\"q\"", "line\nbreak", "ünï 中🍕", ".*", "#x", "a b", "-", "]", "^$"]
    {
        let mut matcher = compile(&choice(&[text])).unwrap().matcher();
        matcher.consume(&bytes(text)).unwrap_or_else(|error| panic!("{text}: {error}"));
        assert!(matcher.is_stopped(), "{text}");
    }
}

#[test]
fn control_tokens_are_no_text() {
    // `<|im_start|>` may be spelt, but never be that token, and a token that a grammar asks for by number is not given.
    let mut matcher = compile(&choice(&["<|im_start|>"])).unwrap().matcher();
    assert_eq!(matcher.mask(&[]).unwrap(), TokenMask::of(VOCAB, &bytes("<")));
    matcher.consume(&bytes("<|im_start|>")).unwrap();
    assert!(matcher.is_stopped());
    for lark in [
        format!("start: \"a\" <[{IM_START}]>"),
        "start: \"a\" <|im_start|>".to_owned(),
        format!("start: <[{}]> \"a\"", EOS[0]),
    ] {
        let Ok(grammar) = compile(&GrammarSource::Lark(lark.clone())) else { continue };
        let mut matcher = grammar.matcher();
        matcher.consume(&bytes("a")).unwrap();
        matcher.mask(&[]).expect_err(&lark);
    }
}

/// Stop ids of a request are as good an end as the model's own, if they are control tokens.
#[test]
fn other_ends_that_are_no_text_are_allowed_where_the_grammar_accepts() {
    let mut matcher = compile(&GrammarSource::Regex("a+".into())).unwrap().matcher();
    let ends = [u32::from(b'b'), IM_START];
    assert!(!matcher.mask(&ends).unwrap().allows(IM_START));
    matcher.consume(&bytes("a")).unwrap();
    let mask = matcher.mask(&ends).unwrap();
    assert!(mask.allows(IM_START) && !mask.allows(u32::from(b'b')));
}

#[test]
fn what_a_grammar_does_not_allow_is_not_consumed() {
    let mut matcher = compile(&choice(&["yes"])).unwrap().matcher();
    matcher.consume(&bytes("n")).unwrap_err();
    matcher.mask(&[]).unwrap_err();
    assert!(!matcher.is_stopped());
}

#[test]
fn copies_go_their_own_way() {
    let mut matcher = compile(&choice(&["yes", "no"])).unwrap().matcher();
    let mut other = matcher.copy();
    matcher.consume(&bytes("ye")).unwrap();
    other.consume(&bytes("n")).unwrap();
    assert_eq!(matcher.mask(&[]).unwrap().ids(), bytes("s"));
    assert_eq!(other.mask(&[]).unwrap().ids(), bytes("o"));
}

#[test]
fn a_model_without_an_end_of_sequence_takes_no_grammar() {
    let tokenizer = Tokenizer::new(&bundle(Vec::new())).unwrap();
    let error = Grammars::new(&tokenizer).unwrap_err().to_string();
    assert!(error.contains("end of sequence"), "{error}");
}

#[test]
fn masks_are_sets() {
    let mut mask = TokenMask::of(40, &[1, 33, 39, 40, 99]);
    assert_eq!((mask.ids(), mask.words()), (vec![1, 33, 39], &[2, 1 << 1 | 1 << 7][..]));
    assert!(!mask.forbid_unless_all(&[33, 5]));
    assert!(mask.forbid_unless_all(&[1, 39, 33]));
    assert_eq!(mask.ids(), [1, 39]);
    assert!(!mask.allows(40) && !mask.allows(u32::MAX));
}
