//! Which constraint a body asks for, and which bodies ask for none that there is.

use serde_json::{Value, json};
use thalweg_model::grammar::{GrammarSource, limits};
use thalweg_proto::code::ErrorCode;

use super::*;
use crate::test_support::entry;

fn read(body: Value) -> Result<Option<Structure>, RouterError> {
    let Value::Object(body) = body else { panic!("a body is an object") };
    structure(&Fields::new(&body))
}

fn check(body: Value, source: GrammarSource, field: &str) {
    let found = read(body.clone()).unwrap_or_else(|error| panic!("{body}: {error}"));
    assert_eq!(found, Some(Structure::new(source, field.to_owned())), "{body}");
}

fn check_refused(body: Value, param: &str, part: &str) {
    let error = read(body.clone()).err().unwrap_or_else(|| panic!("{body} was let through"));
    assert_eq!((error.code, error.param.as_deref()), (ErrorCode::InvalidRequest, Some(param)), "{error}");
    assert!(error.message.contains(part), "{part:?} is not in {:?}", error.message);
}

fn json_schema(schema: Value) -> Value {
    json!({"response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}})
}

#[test]
fn every_spelling_is_understood() {
    let schema = json!({"type": "object", "properties": {"z": {}, "a": {}}});
    let text = schema.to_string();
    check(
        json_schema(schema.clone()),
        GrammarSource::JsonSchema(text.clone()),
        "response_format.json_schema.schema",
    );
    check(json!({"response_format": {"type": "json_object"}}), GrammarSource::JsonObject, "response_format");
    check(
        json!({"response_format": {"type": "json_object", "schema": schema}}),
        GrammarSource::JsonSchema(text.clone()),
        "response_format.schema",
    );
    check(
        json!({"response_format": {"type": "json_object", "schema": {}}}),
        GrammarSource::JsonObject,
        "response_format",
    );
    check(json!({"guided_json": schema}), GrammarSource::JsonSchema(text.clone()), "guided_json");
    check(json!({"guided_json": text}), GrammarSource::JsonSchema(text.clone()), "guided_json");
    check(json!({"guided_regex": "a+"}), GrammarSource::Regex("a+".into()), "guided_regex");
    check(json!({"guided_choice": ["a"]}), GrammarSource::Choice(vec!["a".into()]), "guided_choice");
    check(
        json!({"guided_grammar": "start: \"a\""}),
        GrammarSource::Lark("start: \"a\"".into()),
        "guided_grammar",
    );
    check(
        json!({"structured_outputs": {"json": schema}}),
        GrammarSource::JsonSchema(text),
        "structured_outputs.json",
    );
    check(
        json!({"structured_outputs": {"choice": ["a", "b"], "regex": null}}),
        GrammarSource::Choice(vec!["a".into(), "b".into()]),
        "structured_outputs.choice",
    );
    check(
        json!({"structured_outputs": {"json_object": true}}),
        GrammarSource::JsonObject,
        "structured_outputs.json_object",
    );
    for body in [
        json!({}),
        json!({"response_format": {"type": "text"}}),
        json!({"response_format": null, "guided_json": null, "structured_outputs": null}),
        json!({"structured_outputs": {"json_object": false}, "guided_decoding_backend": "xgrammar"}),
    ] {
        assert_eq!(read(body.clone()).unwrap(), None, "{body}");
    }
}

#[test]
fn malformed_formats_are_refused_by_name() {
    let check = |format: Value, param: &str, part: &str| {
        check_refused(json!({ "response_format": format }), param, part)
    };
    check(json!("json"), "response_format", "object");
    check(json!({}), "response_format.type", "missing");
    check(json!({"type": "melody"}), "response_format.type", "json_schema");
    check(json!({"type": 7}), "response_format.type", "string");
    check(json!({"type": "json_schema"}), "response_format.json_schema", "missing");
    let name = "response_format.json_schema.name";
    let check_schema = |part: Value, param: &str, says: &str| {
        let format = json!({"type": "json_schema", "json_schema": part});
        check_refused(json!({ "response_format": format }), param, says);
    };
    check_schema(json!({"schema": {}}), name, "missing");
    check_schema(json!({"name": "with spaces", "schema": {}}), name, "letters");
    check_schema(json!({"name": "", "schema": {}}), name, "letters");
    check_schema(json!({"name": "n".repeat(65), "schema": {}}), name, "64");
    check_schema(
        json!({"name": "n", "schema": {}, "strict": "yes"}),
        "response_format.json_schema.strict",
        "boolean",
    );
    check_schema(json!({"name": "n"}), "response_format.json_schema.schema", "missing");
    check_schema(json!({"name": "n", "schema": "{}"}), "response_format.json_schema.schema", "object");
    check_schema(json!({"name": "n", "schema": 7}), "response_format.json_schema.schema", "object, not 7");
}

#[test]
fn one_constraint_at_a_time() {
    check_refused(json!({"guided_regex": "a", "guided_choice": ["a"]}), "guided_choice", "guided_regex");
    check_refused(
        json!({"response_format": {"type": "json_object"}, "guided_json": {}}),
        "guided_json",
        "response_format",
    );
    check_refused(
        json!({"structured_outputs": {"json": {}, "regex": "a"}}),
        "structured_outputs.regex",
        "structured_outputs.json",
    );
    check_refused(
        json!({"structured_outputs": {"structural_tag": {}}}),
        "structured_outputs.structural_tag",
        "not supported",
    );
    check_refused(json!({"structured_outputs": {}}), "structured_outputs", "says nothing");
    check_refused(json!({"structured_outputs": {"json": null}}), "structured_outputs", "says nothing");
    let of_responses = json!({"text": {"format": {"type": "json_object"}}});
    check_refused(of_responses, "text", "send `response_format`");
    check_refused(json!({"guided_choice": "a"}), "guided_choice", "array");
    check_refused(json!({"guided_choice": [7]}), "guided_choice", "strings");
    check_refused(json!({"guided_regex": 7}), "guided_regex", "string");
    check_refused(json!({"guided_json": 7}), "guided_json", "schema");
    check_refused(json!({"guided_json_object": 1}), "guided_json_object", "boolean");
}

#[test]
fn json_is_spaced_as_a_pattern_says() {
    let wire = |body: Value| read(body).unwrap().unwrap().with_blanks(8).wire();
    let schema = r#"{"type":"object","x-guidance":{"whitespace_pattern":"\\n?"}}"#;
    let expected = v1::Grammar {
        source: Some(v1::grammar::Source::JsonSchema(schema.to_owned())),
        json_blanks_max: Some(8),
    };
    for body in [
        json!({"guided_whitespace_pattern": "\\n?", "response_format": {"type": "json_object"}}),
        json!({"guided_whitespace_pattern": "\\n?", "guided_json": {"type": "object"}}),
        json!({"structured_outputs": {"whitespace_pattern": "\\n?", "json_object": true}}),
    ] {
        assert_eq!(wire(body.clone()), expected, "{body}");
    }
    assert_eq!(read(json!({"guided_whitespace_pattern": null})).unwrap(), None);
    let guided = "guided_whitespace_pattern";
    check_refused(json!({guided: 7}), guided, "string");
    check_refused(json!({guided: " ?"}), guided, "send `guided_json`");
    check_refused(json!({guided: " ?", "guided_regex": "a"}), guided, "send `guided_json`");
    let newer = "structured_outputs.whitespace_pattern";
    check_refused(
        json!({"structured_outputs": {"whitespace_pattern": " ?", "choice": ["a"]}}),
        newer,
        "guided_json",
    );
    let both = json!({guided: " ?", "structured_outputs": {"whitespace_pattern": " ?", "json": {}}});
    check_refused(both, newer, guided);
    let model = entry("tiny", true);
    let check = |pattern: &str, part: &str| {
        let structure = read(json!({guided: pattern, "guided_json": {}})).unwrap().unwrap().with_blanks(8);
        let error = structure.check(&model).expect_err(pattern);
        assert_eq!(
            (error.code, error.param.as_deref()),
            (ErrorCode::InvalidRequest, Some(guided)),
            "{error}"
        );
        assert!(
            error.message.starts_with("`guided_whitespace_pattern` ") && error.message.contains(part),
            "{error}"
        );
    };
    check("(", "no regular expression");
    check("x?", "blanks only");
    check(" *", "more than 8 blanks");
    check(&" ?".repeat(limits::BLANKS_PATTERN_BYTES_MAX), "at most 256");
    let structure = read(json!({guided: "[ \n]{0,8}", "guided_json": {"type": "object"}})).unwrap().unwrap();
    structure.with_blanks(8).check(&model).expect("a sound pattern");
}

/// What compiles nowhere is refused here, with the field's name; nothing of it reaches a worker.
#[test]
fn what_cannot_be_enforced_is_refused_before_any_answer() {
    let model = entry("tiny", true);
    let check = |body: Value, param: &str| {
        let error = read(body.clone()).unwrap().unwrap().check(&model).expect_err("must be refused");
        assert_eq!(
            (error.code, error.param.as_deref()),
            (ErrorCode::InvalidRequest, Some(param)),
            "{body}: {error}"
        );
        assert!(error.message.starts_with(&format!("`{param}` ")), "{error}");
    };
    let schema = "response_format.json_schema.schema";
    check(json_schema(json!({"type": "wobble"})), schema);
    check(json_schema(json!({"if": {"type": "string"}, "then": {"minLength": 1}})), schema);
    check(json_schema(json!({"type": "string", "pattern": "(?=a)b"})), schema);
    check(json_schema(json!({"$ref": "#/$defs/none"})), schema);
    check(json_schema(json!({"enum": ["x".repeat(limits::GRAMMAR_BYTES_MAX)]})), schema);
    check(json!({"guided_regex": "("}), "guided_regex");
    check(json!({"guided_choice": []}), "guided_choice");
    check(json!({"guided_json": "{"}), "guided_json");
    check(json!({"guided_grammar": "stat: \"a\""}), "guided_grammar");
    read(json_schema(json!({"type": "object"}))).unwrap().unwrap().check(&model).expect("a sound schema");
}
