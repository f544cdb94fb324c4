//! What may stand between two tokens of JSON, where a client says so.

use serde_json::json;
use thalweg_model::grammar::{GrammarSource, JsonBlanks, limits};

use crate::tiny::{bytes, compile, schema};

fn check_refused(pattern: &str, most: u32, says: &str) {
    let error = JsonBlanks(most).check(pattern).expect_err(pattern).to_string();
    assert!(error.contains(says), "{pattern:?}: {says:?} is not in {error:?}");
}

#[test]
fn patterns_that_mean_the_same_here_and_in_vllm_are_taken() {
    for pattern in [r"[ \n]?", r"[ ]{0,32}", r"(\n {0,8})?", r"( |\t|)", "", r"(?:\r\n)?"] {
        assert_eq!(JsonBlanks::default().check(pattern), Ok(()), "{pattern:?}");
    }
    check_refused("(", 32, "no regular expression");
    check_refused(r"(?=a)", 32, "no regular expression");
    check_refused(" ", 32, "match the empty text");
    check_refused(r"\n+", 32, "match the empty text");
    check_refused("a?", 32, "match blanks only");
    check_refused(r"\s?", 32, "match blanks only");
    check_refused(r"[ \n]*", 32, "more than 32 blanks");
    check_refused(r"[ ]{0,33}", 32, r"`[ \n]{0,32}`");
    check_refused(r"[ ]?", 0, "more than 0 blanks");
    check_refused(&format!("[{}]?", " ".repeat(limits::BLANKS_PATTERN_BYTES_MAX)), 32, "at most 256");
    check_refused("(( {0,99}){0,99}){0,99}", 32, "cannot be told");
}

#[test]
fn an_answer_is_spaced_as_the_pattern_says() {
    let object = json!({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": false});
    let sources = [schema(&object), GrammarSource::JsonObject];
    let check = |pattern: &str, text: &str, expected: bool| {
        for source in &sources {
            let grammar = compile(&source.clone().with_blanks_pattern(pattern)).unwrap();
            let mut matcher = grammar.matcher();
            let is_taken = matcher.consume(&bytes(text)).is_ok() && matcher.is_accepting();
            assert_eq!(is_taken, expected, "{source:?} {pattern:?} {text:?}");
        }
    };
    let compact = "{\"a\":1}";
    for pattern in ["", r"\n?", r"[ \n]{0,4}", r"(\n  )?"] {
        check(pattern, compact, true);
    }
    check("", "{ \"a\":1}", false);
    check(r"\n?", "{\n\"a\"\n:\n1\n}", true);
    check(r"\n?", "{\n\n\"a\":1}", false);
    check(r"\n?", "{ \"a\":1}", false);
    check(r"(\n  )?", "{\n  \"a\":1}", true);
    check(r"(\n  )?", "{\n \"a\":1}", false);
    // Within strings anything may stand.
    let text = GrammarSource::JsonSchema(json!({"type": "string"}).to_string()).with_blanks_pattern("");
    assert!(compile(&text).unwrap().matcher().consume(&bytes("\"a  b\"")).is_ok());
}

#[test]
fn a_schema_may_tell_the_library_nothing_else() {
    let with = |options: serde_json::Value| schema(&json!({"type": "object", "x-guidance": options}));
    compile(&with(json!({"whitespace_pattern": " ?"}))).unwrap();
    for options in
        [json!({}), json!({"lenient": true}), json!({"whitespace_pattern": " ?", "lenient": true}), json!(7)]
    {
        let error = compile(&with(options)).unwrap_err().to_string();
        assert!(error.contains("x-guidance"), "{error}");
    }
    let error = compile(&with(json!({"whitespace_pattern": " *"}))).unwrap_err().to_string();
    assert!(error.contains("more than 32 blanks"), "{error}");
    let regex = GrammarSource::Regex("a".into());
    assert_eq!(regex.clone().with_blanks_pattern(" ?"), regex);
    let behind = |source: &GrammarSource| source.behind_thoughts(true, JsonBlanks::default(), Some(r"\n?"));
    let grammar = compile(&behind(&GrammarSource::JsonObject).unwrap()).unwrap();
    assert!(grammar.matcher().consume(&bytes("so</think>{\n\"a\":1}")).is_ok());
    assert!(grammar.matcher().consume(&bytes("so</think>{\n\n\"a\":1}")).is_err());
    assert_eq!(behind(&with(json!({"whitespace_pattern": " ?"}))), None);
}
