//! What cannot be enforced is refused with a reason, never let through.

use serde_json::{Value, json};
use thalweg_model::grammar::GrammarSource;

use crate::support::assert_says;
use crate::tiny::{compile, schema};

fn check(source: &GrammarSource, says: &[&str]) {
    match compile(source) {
        Ok(_) => panic!("{source:?} compiled"),
        Err(error) => {
            let message = error.to_string();
            assert_says(&message, says);
            assert!(message.len() < 600 && !message.contains('\n'), "{message}");
        }
    }
}

#[test]
fn schemas_that_cannot_be_enforced() {
    let check = |value: &Value, says: &[&str]| check(&schema(value), says);
    check(&json!({"type": "string", "pattern": "("}), &["unclosed"]);
    check(&json!({"type": "string", "pattern": "(?=a)b"}), &["look"]);
    check(&json!({"if": {"type": "string"}, "then": {"minLength": 1}}), &["if"]);
    check(&json!({"not": {"type": "string"}}), &["not"]);
    check(&json!({"$ref": "#/$defs/none"}), &["none"]);
    check(&json!({"$ref": "https://example.com/schema.json"}), &["example.com"]);
    check(&json!({"$ref": "file:///etc/passwd"}), &[]);
    check(&json!({"$ref": "#"}), &["no text matches it"]);
    check(&json!({"type": "wobble"}), &["wobble"]);
    check(&json!({"type": "string", "format": "wobble"}), &["wobble"]);
    check(&json!({"type": "array", "uniqueItems": true}), &["uniqueItems"]);
    check(&json!({"x-guidance": {"lenient": true}, "type": "object"}), &["x-guidance"]);
    check(&json!({"oneOf": [{"type": "integer"}, {"type": "number"}]}), &["oneOf"]);
    check(&json!({"type": "integer", "minimum": 3, "maximum": 2}), &[]);
    check(&json!({"enum": []}), &[]);
    check(&json!({"properties": 7}), &[]);
    check(&json!(7), &["object"]);
    check(&json!("{}"), &["object"]);
    check(&json!({"description": "é".repeat(200), "type": "é".repeat(200)}), &[]);
}

#[test]
fn other_sources_that_are_none() {
    check(&GrammarSource::JsonSchema("{".into()), &["no JSON"]);
    check(&GrammarSource::Regex("(".into()), &[]);
    check(&GrammarSource::Regex("(?!a)b".into()), &["look"]);
    check(&GrammarSource::Regex(String::new()), &["empty"]);
    check(&GrammarSource::Choice(Vec::new()), &["no strings"]);
    check(&GrammarSource::Choice(vec![String::new()]), &["empty"]);
    check(&GrammarSource::Lark(String::new()), &[]);
    check(&GrammarSource::Lark("stat: \"a\"".into()), &["start"]);
    check(&GrammarSource::Lark("start: nothing".into()), &["nothing"]);
    check(&GrammarSource::Lark("start: \"a\n".into()), &[]);
    check(&GrammarSource::Lark("start: start".into()), &[]);
}
