//! What would take long or much is refused within the bounds, and nothing waits for it.
#![expect(clippy::disallowed_types, clippy::disallowed_methods, reason = "what is measured is real time")]

use std::time::{Duration, Instant};

use serde_json::{Value, json};
use thalweg_model::grammar::{GrammarError, GrammarSource, JsonBlanks, limits};

use crate::tiny::{bytes, compile, grammars, schema};

/// Refused or compiled, but soon: the bound, and what a slow and busy machine adds.
fn check(source: &GrammarSource) -> Result<(), GrammarError> {
    let begun = Instant::now();
    let result = compile(source).map(|_| ());
    let took = begun.elapsed();
    assert!(took < limits::COMPILE_TIME_MAX + Duration::from_secs(1), "{took:?}: {result:?}");
    result
}

fn nested_one_of(depth: usize, width: usize) -> Value {
    let inner = if depth == 0 { json!({"type": "string"}) } else { nested_one_of(depth - 1, width) };
    let options: Vec<Value> = (0..width)
        .map(|at| {
            json!({"type": "object", "properties": {"kind": {"const": at}, "value": inner}, "required": ["kind", "value"],
                   "additionalProperties": false})
        })
        .collect();
    json!({ "oneOf": options })
}

#[test]
fn nested_one_of_ends_within_the_bound() {
    // structured-04.
    for depth in [2, 4, 6, 8, 10, 14] {
        let _ = check(&schema(&nested_one_of(depth, 2)));
    }
}

#[test]
fn schemas_that_explode_are_refused() {
    // structured-01, structured-04.
    let all: Vec<Value> =
        (0..14).map(|at| json!({"anyOf": [{"minLength": at}, {"maxLength": 99 - at}]})).collect();
    check(&schema(&json!({ "type": "string", "allOf": all }))).unwrap_err();
    let lengths: Vec<Value> =
        (0..40).map(|at| json!({"type": "string", "minLength": at * 50, "maxLength": 9000})).collect();
    let _ = check(&schema(&json!({ "anyOf": lengths })));
    check(&schema(&json!({"type": "array", "items": {"type": "null"}, "minItems": 1_000_000}))).unwrap();
    let names: Vec<String> = (0..50_000).map(|at| format!("value-{at}")).collect();
    check(&schema(&json!({ "enum": names }))).unwrap_err();
    check(&GrammarSource::Choice(names)).unwrap_err();
}

#[test]
fn regular_expressions_that_explode_are_refused() {
    // structured-04.
    for regex in [
        "(a|aa){1,60}b",
        "(.*a){40}",
        "(a{1,1000}){1,1000}",
        "[a-z]{100000}",
        "(((((a{9}){9}){9}){9}){9}){9}",
    ] {
        let _ = check(&GrammarSource::Regex(regex.into()));
    }
}

#[test]
fn deep_nesting_is_refused_and_overflows_no_stack() {
    let deep = |depth: usize| {
        (0..depth).fold(json!({"type": "null"}), |inner, _| json!({"type": "array", "items": inner}))
    };
    check(&schema(&deep(limits::NESTING_MAX - 2))).unwrap();
    assert!(matches!(check(&schema(&deep(1000))), Err(GrammarError::TooLarge { .. })));
    let brackets = |depth: usize| format!("start: {}\"a\"{}", "(".repeat(depth), ")".repeat(depth));
    check(&GrammarSource::Lark(brackets(25))).unwrap();
    assert!(matches!(check(&GrammarSource::Lark(brackets(20_000))), Err(GrammarError::TooLarge { .. })));
    for depth in [200, 20_000] {
        let _ = check(&GrammarSource::Regex(format!("{}a{}", "(".repeat(depth), ")?".repeat(depth))));
        let _ = check(&GrammarSource::Regex(format!("a{}", "?".repeat(depth))));
    }
    let chain: String = (0..5000).map(|at| format!("r{at}: \"a\" r{}\n", at + 1)).collect();
    let _ = check(&GrammarSource::Lark(format!("start: r0\n{chain}r5000: \"b\"\n")));
}

#[test]
fn many_at_once_wait_no_longer_than_one() {
    // structured-04.
    let begun = Instant::now();
    std::thread::scope(|scope| {
        for at in 0..30 {
            scope.spawn(move || {
                let source = schema(&json!({"type": "string", "maxLength": 200 + at, "pattern": format!("^(a|b){{0,{at}}}$")}));
                let _ = check(&source);
            });
        }
    });
    assert!(begun.elapsed() < limits::COMPILE_TIME_MAX + Duration::from_secs(2));
}

#[test]
fn a_refusal_and_a_grammar_are_remembered() {
    let source = schema(&json!({"type": "object", "properties": {"remembered": {"type": "string"}}}));
    assert_eq!(compile(&source).unwrap(), compile(&source).unwrap());
    let bad = schema(&json!({"type": "remembered"}));
    assert_eq!(compile(&bad).unwrap_err(), compile(&bad).unwrap_err());
}

#[test]
fn blanks_between_two_tokens_of_json_are_bounded() {
    let object = json!({"type": "object", "properties": {"a": {"const": true}}, "required": ["a"],
                        "additionalProperties": false});
    for source in [schema(&object), GrammarSource::JsonObject] {
        let check = |most: usize, text: String, fits: bool| {
            let grammar = grammars().compile(&source, JsonBlanks(most as u32)).unwrap();
            let taken = grammar.matcher().consume(&bytes(&text));
            assert_eq!(taken.is_ok(), fits, "{text:?} with {most} blanks: {taken:?}");
        };
        for most in [1, 7, limits::JSON_BLANKS_DEFAULT as usize] {
            let (blanks, one_more) = (" ".repeat(most), "\n".repeat(most + 1));
            check(most, format!("{{{blanks}\"a\"{blanks}:{blanks}true{blanks}}}"), true);
            check(most, format!("{{{one_more}"), false);
            check(most, format!("{{\"a\":{one_more}"), false);
        }
        check(0, "{\"a\":true}".to_owned(), true);
        check(0, "{ ".to_owned(), false);
        check(0, "{\"a\": ".to_owned(), false);
        let too_many = JsonBlanks(limits::JSON_BLANKS_MAX + 1);
        assert!(matches!(grammars().compile(&source, too_many), Err(GrammarError::TooLarge { .. })));
    }
}
