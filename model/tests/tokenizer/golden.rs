//! Prompt ids equal those of llama.cpp, for every prompt of both models.

use thalweg_model::tokenizer::{Specials, Tokenizer};

use crate::models::{gemma, smollm};

#[derive(serde::Deserialize)]
struct Golden {
    cases: Vec<Case>,
}

#[derive(serde::Deserialize)]
struct Case {
    name: String,
    prompt: String,
    prompt_ids: Vec<u32>,
    kv_f32: Output,
}

#[derive(serde::Deserialize)]
struct Output {
    greedy_ids: Vec<u32>,
    text: String,
}

fn check(tokenizer: &Tokenizer, golden: &str) {
    let golden: Golden = serde_json::from_str(golden).unwrap();
    assert_eq!(golden.cases.len(), 12);
    for case in golden.cases {
        let ids = tokenizer.encode(&case.prompt, Specials::Parse, true);
        assert_eq!(ids, case.prompt_ids, "{}", case.name);
        let has_bos = ids.first() == tokenizer.bundle().bos_id.as_ref() && tokenizer.bundle().add_bos;
        assert_eq!(tokenizer.decode(&ids[usize::from(has_bos)..], false), case.prompt, "{}", case.name);
        assert_eq!(tokenizer.decode(&case.kv_f32.greedy_ids, false), case.kv_f32.text, "{}", case.name);
    }
}

#[test]
fn smollm_ids_are_llama_cpp_s() {
    // tokenizer-03.
    check(smollm(), include_str!("../../../tests/golden/smollm2-135m-instruct-q4_1.json"));
}

#[test]
fn gemma_ids_are_llama_cpp_s() {
    // tokenizer-03.
    check(gemma(), include_str!("../../../tests/golden/gemma3-270m-q4km.json"));
}

#[test]
fn ends_of_generation_are_known() {
    // stop-03.
    assert_eq!(smollm().bundle().eos_ids, [0, 2]);
    assert_eq!(gemma().bundle().eos_ids, [1, 106]);
}
