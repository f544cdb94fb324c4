//! Hub folders: what each small file says, and what is said about bad ones.

use std::fs;
use std::path::Path;

use serde_json::{Value, json};
use thalweg_model::checkpoint::Checkpoint;
use thalweg_model::error::ModelError;
use thalweg_model::tokenizer::{Specials, Tokenizer, TokenizerBundle};

use crate::support::hub::Folder;

/// A SentencePiece tokenizer with byte fallback and a space before the text, as Llama 2 has: three control tokens, 256
/// bytes, then a few pieces.
pub(crate) fn llama2_like() -> Tokenizer {
    let bytes = (0..256).map(|byte| format!("<0x{byte:02X}>"));
    let names = ["<unk>", "<s>", "</s>"].map(str::to_owned);
    let pieces = ["▁", "a", "b", "ab", "▁ab"].map(str::to_owned);
    let vocab: serde_json::Map<String, Value> = names
        .into_iter()
        .chain(bytes)
        .chain(pieces)
        .enumerate()
        .map(|(id, text)| (text, json!(id)))
        .collect();
    let special = |id: u32, content: &str| {
        json!({"id": id, "content": content, "special": true, "single_word": false,
        "lstrip": false, "rstrip": false, "normalized": false})
    };
    let json = json!({
        "version": "1.0",
        "added_tokens": [special(0, "<unk>"), special(1, "<s>"), special(2, "</s>")],
        "normalizer": {"type": "Sequence", "normalizers": [
            {"type": "Prepend", "prepend": "▁"},
            {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
        ]},
        "pre_tokenizer": null,
        "post_processor": null,
        "decoder": {"type": "Sequence", "decoders": [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
            {"type": "ByteFallback"}, {"type": "Fuse"},
            {"type": "Strip", "content": " ", "start": 1, "stop": 0},
        ]},
        "model": {"type": "BPE", "unk_token": "<unk>", "fuse_unk": true, "byte_fallback": true, "vocab": vocab,
            "merges": [["a", "b"], ["▁", "ab"]]},
    });
    tokenizer(&json, 300)
}

/// A byte-level tokenizer that begins prompts by its post-processor, as Llama 3 has.
pub(crate) fn llama3_like() -> Tokenizer {
    let folder = tempfile::tempdir().unwrap();
    write_folder(folder.path(), &[]);
    Tokenizer::new(&read(folder.path()).unwrap()).unwrap()
}

fn tokenizer(json: &Value, vocab_size: usize) -> Tokenizer {
    let bundle = TokenizerBundle {
        tokenizer_json: json.to_string(),
        chat_template: None,
        template_tokens: Default::default(),
        bos_id: Some(1),
        add_bos: true,
        text_end_id: None,
        eos_ids: vec![2],
        vocab_size,
        max_position: 128,
    };
    Tokenizer::new(&bundle).unwrap()
}

/// Rows of the tiny models' embedding.
const ROWS: usize = 300;

/// Writes a tiny model whose tokenizer has GPT-2's 256 bytes and three control tokens; `files` replace or add.
fn write_folder(folder: &Path, files: &[(&str, Value)]) {
    let mut model = Folder::tiny();
    model.set("vocab_size", json!(ROWS));
    model.add("model.embed_tokens.weight", &[ROWS, 32]);
    model.write(folder);
    let mut all = vec![("tokenizer.json", llama3_json()), ("tokenizer_config.json", llama3_settings())];
    all.extend(files.iter().cloned());
    for (name, content) in all {
        let text = content.as_str().map_or_else(|| content.to_string(), str::to_owned);
        fs::write(folder.join(name), text).unwrap();
    }
}

fn llama3_settings() -> Value {
    json!({"bos_token": "<|begin_of_text|>", "eos_token": {"content": "<|end_of_text|>"}, "model_max_length": 128,
        "chat_template": [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]})
}

fn llama3_json() -> Value {
    let printable = |byte: u32| matches!(byte, 33..=126 | 161..=172 | 174..=255);
    let hidden = (0..256).filter(|byte| !printable(*byte)).enumerate();
    let hidden: Vec<u32> = hidden.map(|(index, _)| 256 + index as u32).collect();
    let letters = (0..256).filter(|byte| printable(*byte)).chain(hidden).filter_map(char::from_u32);
    let vocab: serde_json::Map<String, Value> =
        letters.enumerate().map(|(id, letter)| (letter.to_string(), json!(id))).collect();
    let names = ["<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>"];
    let added: Vec<Value> = names
        .iter()
        .enumerate()
        .map(|(index, content)| {
            json!({"id": 256 + index, "content": content, "special": true, "single_word": false,
            "lstrip": false, "rstrip": false, "normalized": false})
        })
        .collect();
    json!({
        "version": "1.0",
        "added_tokens": added,
        "normalizer": null,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true},
        "post_processor": {"type": "Sequence", "processors": [
            {"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": false, "use_regex": true},
            {"type": "TemplateProcessing",
                "single": [{"SpecialToken": {"id": "<|begin_of_text|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
                "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
                "special_tokens": {"<|begin_of_text|>": {"id": "<|begin_of_text|>", "ids": [256], "tokens": ["<|begin_of_text|>"]}}},
        ]},
        "decoder": {"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true},
        "truncation": {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0},
        "model": {"type": "BPE", "vocab": vocab, "merges": []},
    })
}

fn read(folder: &Path) -> Result<TokenizerBundle, ModelError> {
    Checkpoint::open(folder)?.tokenizer_bundle()
}

fn check(files: &[(&str, Value)], expected: impl Fn(&TokenizerBundle)) {
    let folder = tempfile::tempdir().unwrap();
    write_folder(folder.path(), files);
    expected(&read(folder.path()).unwrap());
}

#[test]
fn ends_come_from_generation_config_and_the_tokenizer() {
    // stop-03.
    let eos = |value: Value| json!({ "eos_token_id": value });
    check(&[], |bundle| assert_eq!(bundle.eos_ids, [257]));
    check(&[("generation_config.json", eos(json!(258)))], |bundle| assert_eq!(bundle.eos_ids, [257, 258]));
    check(&[("generation_config.json", eos(json!([258, 257])))], |bundle| {
        assert_eq!(bundle.eos_ids, [257, 258])
    });
}

#[test]
fn the_chat_template_is_a_text_a_named_one_or_a_file() {
    let setting = |template: Value| ("tokenizer_config.json", json!({ "chat_template": template }));
    let template = |expected: Option<&'static str>| {
        move |bundle: &TokenizerBundle| assert_eq!(bundle.chat_template.as_deref(), expected)
    };
    check(&[], template(Some("plain")));
    check(&[setting(json!("one"))], template(Some("one")));
    check(&[setting(json!([{"name": "rag", "template": "first"}]))], template(Some("first")));
    check(&[setting(Value::Null)], template(None));
    check(&[("chat_template.jinja", json!("file"))], template(Some("file")));
}

#[test]
fn prompts_begin_as_the_settings_or_the_post_processor_say() {
    let setting =
        |add: bool| ("tokenizer_config.json", json!({"bos_token": "<|eot_id|>", "add_bos_token": add}));
    let adds = |bos_id, expected| {
        move |bundle: &TokenizerBundle| {
            assert_eq!((bundle.bos_id, bundle.add_bos), (bos_id, expected));
        }
    };
    check(&[], adds(Some(256), true));
    check(&[setting(true)], adds(Some(258), true));
    check(&[setting(false)], adds(Some(258), false));
    check(&[("tokenizer_config.json", json!({}))], adds(None, false));
}

/// The setting, else what the post-processor writes behind a text: what is embedded ends with it.
#[test]
fn texts_to_embed_end_as_the_settings_or_the_post_processor_say() {
    let setting = |add: bool| {
        let settings =
            json!({"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>", "add_eos_token": add});
        ("tokenizer_config.json", settings)
    };
    let ends = |expected| move |bundle: &TokenizerBundle| assert_eq!(bundle.text_end_id, expected);
    check(&[], ends(None));
    check(&[setting(true)], ends(Some(258)));
    let mut ending = llama3_json();
    let template = &mut ending["post_processor"]["processors"][1];
    let end = json!({"SpecialToken": {"id": "<|end_of_text|>", "type_id": 0}});
    template["single"].as_array_mut().unwrap().push(end);
    template["special_tokens"]["<|end_of_text|>"] =
        json!({"id": "<|end_of_text|>", "ids": [257], "tokens": ["x"]});
    check(&[("tokenizer.json", ending.clone())], ends(Some(257)));
    check(&[("tokenizer.json", ending), setting(false)], ends(None));
}

#[test]
fn a_file_s_truncation_does_not_cut_prompts() {
    assert_eq!(llama3_like().encode("0123456789", Specials::Plain, false).len(), 10);
}

/// What is said about a folder, by opening it or by building the tokenizer.
fn check_error(files: &[(&str, Value)], expected: &[&str]) {
    let folder = tempfile::tempdir().unwrap();
    write_folder(folder.path(), files);
    let built = read(folder.path()).and_then(|bundle| Tokenizer::new(&bundle));
    let message = built.expect_err("a bad file").to_string();
    assert!(expected.iter().all(|part| message.contains(part)), "{message:?} lacks one of {expected:?}");
}

#[test]
fn bad_files_are_named() {
    check_error(&[("tokenizer.json", json!("{\"model\": "))], &["tokenizer.json", "not a tokenizer.json"]);
    check_error(&[("tokenizer.json", json!({"added_tokens": []}))], &["tokenizer.json", "model"]);
    check_error(
        &[("tokenizer.json", json!({"model": {"type": "Unigram", "vocab": []}}))],
        &["Unigram", "BPE"],
    );
    check_error(&[("tokenizer_config.json", json!("[1]"))], &["tokenizer_config.json", "not a JSON object"]);
    check_error(&[("tokenizer_config.json", json!({"chat_template": 5}))], &["chat_template", "string"]);
    check_error(
        &[("generation_config.json", json!({"eos_token_id": "two"}))],
        &["generation_config.json", "eos_token_id"],
    );
    let mut wide = llama3_json();
    wide["model"]["vocab"]["xyz"] = json!(ROWS);
    check_error(&[("tokenizer.json", wide)], &["id 300", "ends at 300"]);
    let mut stray = llama3_json();
    stray["model"]["merges"] = json!([["a", "nope"]]);
    check_error(&[("tokenizer.json", stray)], &["tokenizer.json", "nope"]);
}

#[test]
fn a_missing_tokenizer_says_what_to_do() {
    let folder = tempfile::tempdir().unwrap();
    write_folder(folder.path(), &[]);
    fs::remove_file(folder.path().join("tokenizer.json")).unwrap();
    let message = read(folder.path()).expect_err("no tokenizer").to_string();
    assert!(message.contains("tokenizer.json") && message.contains("save_pretrained"), "{message}");
}
