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
    check(&json!({"items": {"not": {"type": "string"}}}), &["`not` at `#/items`", "`anyOf`"]);
    check(&json!({"$ref": "#/$defs/none"}), &["`#/$defs/none`", "define it in `$defs`"]);
    check(&json!({"$ref": "https://example.com/schema.json"}), &["example.com", "copy what is meant"]);
    check(&json!({"$ref": "file:///etc/passwd"}), &[]);
    check(&json!({"$ref": "#"}), &["leads back to itself"]);
    check(&json!({"type": "wobble"}), &["wobble"]);
    check(&json!({"type": "string", "format": "wobble"}), &["wobble"]);
    check(&json!({"type": "array", "uniqueItems": true}), &["uniqueItems"]);
    check(&json!({"x-guidance": {"lenient": true}, "type": "object"}), &["x-guidance"]);
    check(&json!({"oneOf": [{"type": "integer"}, {"type": "number"}]}), &["`oneOf`", "use `anyOf`"]);
    check(&json!({"type": "integer", "minimum": 3, "maximum": 2}), &[]);
    check(&json!({"enum": []}), &[]);
    check(&json!({"properties": 7}), &[]);
    check(&json!(7), &["object"]);
    check(&json!("{}"), &["object"]);
    check(&json!({"description": "é".repeat(200), "type": "é".repeat(200)}), &[]);
}

#[test]
fn references_that_lead_back_to_themselves() {
    let check = |a: Value, b: Value| {
        let within = json!({"type": "object", "properties": {"x": {"$ref": "#/$defs/a"}}, "required": ["x"],
                            "$defs": {"a": a, "b": b}});
        check(&schema(&within), &["`$ref` at `#/properties/x`", "leads back to itself"]);
    };
    let to = |name: &str| json!({"$ref": format!("#/$defs/{name}")});
    check(to("a"), json!({}));
    check(to("b"), to("a"));
    check(json!({"allOf": [{"type": "object"}, to("a")]}), json!({}));
    check(json!({"anyOf": [to("b"), to("a")]}), to("a"));
    let defs: serde_json::Map<_, _> =
        (0..300).map(|at| (at.to_string(), to(&(at + 1).to_string()))).collect();
    let chain = json!({"$ref": "#/$defs/0", "$defs": defs, "x": {}});
    self::check(&schema(&chain), &["`#/$defs/300`"]);
}

#[test]
fn numbers_and_names_that_the_library_would_let_slip() {
    let check = |value: &Value, says: &[&str]| check(&schema(value), says);
    check(
        &json!({"const": 9_007_199_254_740_993_i64}),
        &["`const` at `#`", "9007199254740993", "as a string"],
    );
    check(&json!({"properties": {"x": {"enum": [[{"y": i64::MAX}]]}}}), &["`enum` at `#/properties/x`"]);
    check(&json!({"enum": [i64::MIN, u64::MAX]}), &["`enum`"]);
    check(&json!({"type": "integer", "minimum": i64::MAX}), &["`minimum`", "9007199254740991", "`pattern`"]);
    check(&json!({"type": "number", "maximum": -3e38}), &["`maximum`"]);
    check(&json!({"type": "object", "minProperties": 2}), &["`minProperties` at `#`", "`required`"]);
    check(
        &json!({"propertyNames": {"maxLength": 3}, "additionalProperties": {}}),
        &["`propertyNames`", "`pattern`"],
    );
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
