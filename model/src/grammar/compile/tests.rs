//! What a guided search finds is what the library's own search finds, wherever an answer may come to.

use std::path::Path;

use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use serde_json::json;

use super::*;
use crate::checkpoint::Checkpoint;

const SEED: u64 = 20_261_130;
const WALKS: u64 = 3;
const TOKENS_MAX: usize = 60;

fn models() -> Vec<(Tokenizer, Grammars)> {
    let default = concat!(env!("CARGO_MANIFEST_DIR"), "/../.cache/models").to_owned();
    let folder = std::env::var("THALWEG_TEST_MODELS").unwrap_or(default);
    let open = |file| {
        let bundle = Checkpoint::open(&Path::new(&folder).join(file)).unwrap().tokenizer_bundle().unwrap();
        let tokenizer = Tokenizer::new(&bundle).unwrap();
        let grammars = Grammars::new(&tokenizer).unwrap();
        (tokenizer, grammars)
    };
    ["SmolLM2-135M-Instruct.Q4_1.gguf", "gemma-3-270m-q4_k_m.gguf"].map(open).into()
}

fn check((tokenizer, grammars): &(Tokenizer, Grammars), source: &GrammarSource, blanks: JsonBlanks) {
    let guided = grammars.compile(source, blanks).unwrap();
    let parser = grammars.begin(source, blanks).unwrap();
    let plain = Matcher::new(llguidance::Matcher::new(Ok(parser)), grammars.0.vocabulary.clone());
    for seed in SEED..SEED + WALKS {
        let mut rng = StdRng::seed_from_u64(seed);
        let (mut guided, mut plain, mut answer) = (guided.matcher(), plain.copy(), Vec::new());
        while answer.len() < TOKENS_MAX && !plain.is_stopped() {
            let (mask, expected) = (guided.mask(&[]), plain.mask(&[]));
            assert_eq!(mask, expected, "{source:?} {blanks:?}, seed {seed}: {answer:?}");
            let ids = expected.unwrap().ids();
            let starts = |id: &&u32| {
                tokenizer.token_bytes(**id).first().is_none_or(|byte| b"\"}],:{[ \n0</+".contains(byte))
            };
            let structural: Vec<u32> = ids.iter().filter(starts).copied().collect();
            let from = if structural.is_empty() || rng.random_range(0..3) == 0 { &ids } else { &structural };
            answer.push(from[rng.random_range(0..from.len())]);
            let last = &answer[answer.len() - 1..];
            assert_eq!(guided.consume(last), plain.consume(last), "{source:?}, seed {seed}: {answer:?}");
            assert_eq!(guided.is_stopped(), plain.is_stopped(), "{source:?}, seed {seed}: {answer:?}");
        }
    }
}

#[test]
fn guided_masks_are_those_of_the_librarys_search() {
    let benchmark = include_str!("../../../../docs/benchmarks/structured.schema.json");
    let formats = json!({"type": "object", "properties": {
        "id": {"type": "string", "format": "uuid"}, "when": {"type": "string", "format": "date-time"},
        "code": {"type": "string", "pattern": "^[A-Z]{2}-[0-9 ]{1,6}$"}, "name": {"type": "string", "maxLength": 12},
        "price": {"type": "number", "minimum": 0, "maximum": 99.5}, "ok": {"type": ["boolean", "null"]},
        "any": {}, "tree": {"$ref": "#/$defs/tree"},
    }, "additionalProperties": {"enum": ["a b", "a", "\"", "é"]},
    "$defs": {"tree": {"type": "array", "items": {"$ref": "#/$defs/tree"}}}});
    let sums = "start: term (\" \"* \"+\" term)*\nterm: NUMBER | \"(\" start \")\"\nNUMBER: /[0-9]{1,3}/\n";
    let tags = "start: (\"<a>\" text | /b+/ END)*\ntext[suffix=\"</a>\"]: /(?s:.*)/\nEND: \"!\"\n";
    let choices = ["Zürich", "Zürich Nord", "Genève", " ", "\n\n"].map(String::from).to_vec();
    let schema = |text: &str| GrammarSource::JsonSchema(text.into());
    let sources = [
        schema(benchmark),
        schema(&formats.to_string()),
        GrammarSource::JsonObject,
        GrammarSource::Regex(r"(\s*[a-z]+[,;]){2,9}\s*".into()),
        GrammarSource::Choice(choices),
        GrammarSource::Lark(sums.into()),
        GrammarSource::Lark(tags.into()),
        GrammarSource::JsonObject.behind_thoughts(false, JsonBlanks(5), None).unwrap(),
    ];
    for model in &models() {
        for source in &sources {
            for blanks in [0, 3, 32].into_iter().take(if source.is_json() { 3 } else { 1 }) {
                check(model, source, JsonBlanks(blanks));
            }
        }
    }
}
