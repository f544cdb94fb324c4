//! An answer is held to all that its schema says, and schemas as programs write them are taken.

use serde_json::{Value, json};

use crate::tiny::{bytes, compile, schema};

/// Which texts are answers.
fn check(value: &Value, right: &[&str], wrong: &[&str]) {
    let grammar = compile(&schema(value)).unwrap_or_else(|error| panic!("{value}: {error}"));
    let is_answer = |text: &&&str| {
        let mut matcher = grammar.matcher();
        matcher.consume(&bytes(text)).is_ok() && matcher.is_accepting()
    };
    let refused: Vec<_> = right.iter().filter(|text| !is_answer(text)).collect();
    let taken: Vec<_> = wrong.iter().filter(is_answer).collect();
    assert_eq!((refused, taken), (vec![], vec![]), "{value}");
}

#[test]
fn bounds_that_are_left_out_stay_out() {
    let number = |low: Value, high: Value| {
        let mut range = json!({"type": "number"});
        for bound in [low, high] {
            range.as_object_mut().unwrap().extend(bound.as_object().unwrap().clone());
        }
        range
    };
    let above = |bound: f64| json!({"exclusiveMinimum": bound});
    let below = |bound: f64| json!({"exclusiveMaximum": bound});
    let most = |bound: f64| json!({"maximum": bound});
    let least = |bound: f64| json!({"minimum": bound});
    check(&number(above(0.0), most(0.5)), &["0.5", "0.01", "0.000001"], &["0", "0.0", "0.00", "0.6", "-0"]);
    check(&number(above(0.0), most(0.9)), &["0.9"], &["0", "0.0"]);
    check(&number(above(1.0), most(1.5)), &["1.5", "1.1", "1.000000001"], &["1", "1.0", "1.6"]);
    check(&number(above(10.0), most(10.5)), &["10.5", "10.25"], &["10", "10.0", "9"]);
    check(&number(least(-0.5), below(0.0)), &["-0.5", "-0.1"], &["-0", "0", "-0.0", "-0.6"]);
    check(&number(least(-1.5), below(-1.0)), &["-1.5", "-1.01"], &["-1", "-1.0"]);
    check(&number(above(0.0), most(1.0)), &["1", "0.5"], &["0", "0.0", "1.1"]);
    check(&number(above(0.0), json!({})), &["3", "0.001", "10.5"], &["0", "0.0", "-1"]);
    check(&number(least(0.0), below(1.0)), &["0", "0.99"], &["1", "1.0"]);
    check(&number(least(0.5), json!({"minimum": 2, "exclusiveMinimum": true})), &["2.5"], &["2", "2.0"]);
    let parts = json!({"allOf": [{"type": "number", "exclusiveMinimum": 0}, {"maximum": 0.5}]});
    check(&parts, &["0.5"], &["0", "0.0"]);
    check(&number(above(-1.0), below(1.0)), &["-0.99", "0", "0.99"], &["-1", "1", "1.0"]);
    check(&number(above(-1.0), most(-0.5)), &["-0.99", "-0.5"], &["-1", "-0.4"]);
    let whole = json!({"type": "integer", "exclusiveMinimum": -1, "exclusiveMaximum": 2});
    check(&whole, &["0", "1"], &["-1", "2"]);
}

#[test]
fn bounds_beyond_what_doubles_hold_are_narrowed() {
    let int64 = json!({"type": "integer", "minimum": i64::MIN, "maximum": i64::MAX});
    check(
        &int64,
        &["0", "-9007199254740991", "9007199254740991"],
        &["9007199254740992", "9223372036854775807"],
    );
    let float = json!({"type": "number", "minimum": -3.4e38, "exclusiveMaximum": 3.4e38});
    check(&float, &["0", "-1.5", "9007199254740991"], &["9007199254740992"]);
    check(&json!({"type": "integer", "minimum": 0, "maximum": u64::MAX}), &["0", "12"], &["-1"]);
    check(
        &json!({"enum": [1_u64 << 60, 0.1]}),
        &["1152921504606846976", "0.1"],
        &["1152921504606846977", "0.2"],
    );
}

#[test]
fn keywords_that_ask_for_nothing_are_taken() {
    for names in [json!(true), json!({}), json!({"type": "string", "description": "a name"})] {
        let record =
            json!({"type": "object", "propertyNames": names, "additionalProperties": {"type": "integer"}});
        check(&record, &["{}", "{\"a\":1}"], &["{\"a\":\"b\"}"]);
    }
    check(&json!({"type": "array", "items": {"const": 1}, "uniqueItems": false}), &["[1,1]"], &["[2]"]);
    check(
        &json!({"type": "string", "minLength": 1.0, "maxLength": 2.0}),
        &["\"a\"", "\"ab\""],
        &["\"\"", "\"abc\""],
    );
    check(
        &json!({"const": {"not": {"minimum": 1e18}}}),
        &["{\"not\":{\"minimum\":1000000000000000000}}"],
        &["{}"],
    );
    check(&json!({"type": "boolean", "$defs": {"unused": {"not": {}}}}), &["true"], &["1"]);
}

#[test]
fn names_of_properties_are_held_to_what_they_may_be() {
    let record = |names: Value| json!({"type": "object", "propertyNames": names, "additionalProperties": {"const": 1}});
    let some = record(json!({"type": "string", "enum": ["a", "b"]}));
    check(&some, &["{}", "{\"a\":1}", "{\"a\":1,\"b\":1}"], &["{\"c\":1}", "{\"a\":2}"]);
    let mut all = some;
    all["required"] = json!(["a", "b"]);
    check(&all, &["{\"a\":1,\"b\":1}"], &["{}", "{\"a\":1}"]);
    check(
        &record(json!({"pattern": "^[a-z]+$"})),
        &["{}", "{\"x\":1,\"yy\":1}"],
        &["{\"X\":1}", "{\"x\":2}"],
    );
}

#[test]
fn references_may_lead_back_behind_something() {
    let list = json!({"$defs": {"A": {"anyOf": [{"type": "null"}, {"type": "array", "items": {"$ref": "#/$defs/A"}}]}},
                      "$ref": "#/$defs/A"});
    check(&list, &["null", "[[null],[]]"], &["1"]);
    let elsewhere = json!({"$ref": "#/parts/a%20b", "parts": {"a b": {"type": "number", "exclusiveMinimum": 0, "maximum": 0.5}}});
    check(&elsewhere, &["0.5"], &["0"]);
    let named = json!({"$ref": "#half", "$defs": {"x": {"$anchor": "half", "type": "number", "exclusiveMinimum": 0, "maximum": 0.5}}});
    check(&named, &["0.5"], &["0"]);
}

#[test]
fn a_least_number_of_properties_is_met_by_as_many_names() {
    let least = |count: u64| {
        json!({"type": "object", "required": ["a"], "minProperties": count,
                                    "properties": {"a": {"const": 1}}, "additionalProperties": {"const": 1}})
    };
    check(&least(2), &["{\"a\":1,\"b\":1}"], &["{\"a\":1}", "{\"a\":1,\"a\":1}"]);
}
