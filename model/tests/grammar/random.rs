//! Answers drawn at random are texts of their grammar, with a tiny vocabulary and with real ones.

use std::sync::OnceLock;

use serde_json::{Value, json};
use thalweg_model::checkpoint::Checkpoint;
use thalweg_model::grammar::{GrammarSource, Grammars, JsonBlanks};
use thalweg_model::tokenizer::Tokenizer;

use crate::support::real_model;
use crate::tiny::{self, schema};
use crate::walk::{Vocabulary, walk};

const SEED: u64 = 20_251_130;
const TOKENS_MAX: usize = 300;
const WALKS: u64 = 12;

struct Model {
    tokenizer: Tokenizer,
    vocabulary: Vocabulary,
    grammars: Grammars,
}

fn models() -> &'static [Model] {
    static MODELS: OnceLock<Vec<Model>> = OnceLock::new();
    MODELS.get_or_init(|| {
        let real = ["SmolLM2-135M-Instruct.Q4_1.gguf", "gemma-3-270m-q4_k_m.gguf"]
            .map(|file| Checkpoint::open(&real_model(file)).unwrap().tokenizer_bundle().unwrap());
        let bundles = [tiny::bundle(tiny::EOS.to_vec())].into_iter().chain(real);
        bundles
            .map(|bundle| {
                let tokenizer = Tokenizer::new(&bundle).unwrap();
                let vocabulary = Vocabulary::new(&tokenizer);
                Model { grammars: Grammars::new(&tokenizer).unwrap(), vocabulary, tokenizer }
            })
            .collect()
    })
}

/// Most of the walks end, and each that does is right.
fn check(source: &GrammarSource, is_right: impl Fn(&str) -> bool) {
    for model in models() {
        let grammar = model.grammars.compile(source, JsonBlanks::default()).unwrap();
        let texts: Vec<String> = (0..WALKS)
            .filter_map(|round| walk(&grammar, &model.vocabulary, SEED + round, TOKENS_MAX))
            .map(|ids| model.tokenizer.decode(&ids, false))
            .collect();
        assert!(texts.len() >= WALKS as usize / 2, "{source:?}: {} of {WALKS} ended", texts.len());
        texts.iter().for_each(|text| assert!(is_right(text), "{source:?}: {text}"));
    }
}

fn check_json(schema_value: &Value, is_right: impl Fn(&Value) -> bool) {
    check(&schema(schema_value), |text| serde_json::from_str(text).is_ok_and(|value| is_right(&value)));
}

#[test]
fn json_objects() {
    check(&GrammarSource::JsonObject, |text| {
        serde_json::from_str::<Value>(text).is_ok_and(|v| v.is_object())
    });
}

#[test]
fn schemas() {
    let person = json!({
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "minimum": 0, "maximum": 150},
            "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "minItems": 1, "maxItems": 3},
        },
        "required": ["name", "age", "tags"], "additionalProperties": false,
    });
    check_json(&person, |value| {
        let tags = value["tags"].as_array().unwrap();
        value["name"].as_str().is_some_and(|name| name.chars().count() <= 8)
            && value["age"].as_u64().is_some_and(|age| age <= 150)
            && (1..=3).contains(&tags.len())
            && tags.iter().all(|tag| tag == "a" || tag == "b")
    });
    let list = json!({
        "$defs": {"node": {"type": "object", "properties": {"v": {"type": "boolean"}, "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]}},
                           "required": ["v", "next"], "additionalProperties": false}},
        "$ref": "#/$defs/node",
    });
    check_json(&list, |value| value["v"].is_boolean());
    let one_of = json!({"oneOf": [
        {"type": "object", "properties": {"kind": {"const": "cat"}, "lives": {"enum": [7, 9]}}, "required": ["kind", "lives"], "additionalProperties": false},
        {"type": "object", "properties": {"kind": {"const": "dog"}}, "required": ["kind"], "additionalProperties": false},
    ]});
    check_json(&one_of, |value| match value["kind"].as_str() {
        Some("cat") => value["lives"] == 7 || value["lives"] == 9,
        kind => kind == Some("dog"),
    });
}

#[test]
fn regular_expressions_choices_and_lark() {
    let digits = |text: &str| text.len() == 4 && text.bytes().all(|b| b.is_ascii_digit());
    check(&GrammarSource::Regex(r"[0-9]{4}".into()), digits);
    check(&GrammarSource::Regex(r"\d\d:\d\d".into()), |text| {
        text.chars().filter(|c| c.is_numeric()).count() == 4
    });
    let names = ["Zürich", "Genève", "Roma"];
    check(&GrammarSource::Choice(names.map(String::from).to_vec()), |text| names.contains(&text));
    let sums = "start: term (\"+\" term)*\nterm: NUMBER | \"(\" start \")\"\nNUMBER: /[0-9]{1,2}/\n";
    check(&GrammarSource::Lark(sums.into()), |text| {
        text.chars().all(|c| "0123456789+()".contains(c))
            && text.matches('(').count() == text.matches(')').count()
    });
}
