//! Tokenizers from GGUF's metadata: what the keys mean, and what is said about bad ones.

use thalweg_model::checkpoint::Checkpoint;
use thalweg_model::tokenizer::{Specials, Tokenizer};

use crate::support::gguf::{Gguf, Value};

fn build(change: impl Fn(&mut Gguf)) -> Result<Tokenizer, String> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("tiny.gguf");
    let mut file = Gguf::tiny(1);
    change(&mut file);
    file.write(&path);
    let bundle = Checkpoint::open(&path).and_then(|checkpoint| checkpoint.tokenizer_bundle());
    bundle.and_then(|bundle| Tokenizer::new(&bundle)).map_err(|error| error.to_string())
}

fn strings(texts: &[&str]) -> Value {
    Value::Strings(texts.iter().map(|text| (*text).to_owned()).collect())
}

fn floats(values: &[f32]) -> Value {
    let mut bytes = 6u32.to_le_bytes().to_vec();
    bytes.extend((values.len() as u64).to_le_bytes());
    bytes.extend(values.iter().flat_map(|value| value.to_le_bytes()));
    Value::Raw(9, bytes)
}

/// A SentencePiece model in which `abc` can be made of `ab` and `c`, or of `a` and `bc`.
fn set_spm(file: &mut Gguf) {
    let tokens = ["<unk>", "<s>", "</s>", "▁", "a", "b", "c", "ab", "bc", "▁▁", "<0x21>", "▁a"];
    let scores = [0.0, 0.0, 0.0, -9.0, -9.0, -9.0, -9.0, -2.0, -1.0, -3.0, 0.0, -4.0];
    file.set("tokenizer.ggml.model", Value::String("llama".into()));
    file.set("tokenizer.ggml.tokens", strings(&tokens));
    file.set("tokenizer.ggml.scores", floats(&scores));
    file.set("tokenizer.ggml.token_type", Value::Ints(vec![2, 3, 3, 1, 1, 1, 1, 1, 1, 4, 6, 1]));
    file.set("tokenizer.ggml.bos_token_id", Value::U32(1));
    file.set("tokenizer.ggml.eos_token_id", Value::U32(2));
    file.set("tokenizer.ggml.unknown_token_id", Value::U32(0));
}

#[test]
fn pieces_merge_by_score_with_the_space_that_the_metadata_asks_for() {
    let check = |prefix: Option<bool>, text: &str, expected: &[u32]| {
        let tokenizer = build(|file| {
            set_spm(file);
            if let Some(prefix) = prefix {
                file.set("tokenizer.ggml.add_space_prefix", Value::Bool(prefix));
            }
        });
        let tokenizer = tokenizer.unwrap();
        assert_eq!(tokenizer.encode(text, Specials::Parse, true), expected, "{text:?}");
        assert_eq!(tokenizer.decode(&expected[1..], true), text.replace("</s>", ""));
    };
    check(Some(false), "abc", &[1, 4, 8]);
    check(Some(false), "ab a", &[1, 7, 11]);
    check(Some(false), "a  b!", &[1, 4, 9, 5, 10]);
    check(None, "abc", &[1, 11, 8]);
    check(None, "a", &[1, 11]);
    check(Some(true), "  a", &[1, 9, 11]);
}

#[test]
fn bad_metadata_is_named() {
    let check = |change: &dyn Fn(&mut Gguf), expected: &[&str]| {
        let message = build(change).expect_err("bad metadata");
        assert!(expected.iter().all(|part| message.contains(part)), "{message:?} lacks one of {expected:?}");
        assert!(message.contains("tiny.gguf"), "{message}");
    };
    check(&|file| file.remove("tokenizer.ggml.model"), &["tokenizer.ggml.model", "missing"]);
    check(&|file| file.set("tokenizer.ggml.model", Value::String("bert".into())), &["bert", "not supported"]);
    check(
        &|file| file.set("tokenizer.ggml.pre", Value::String("chameleon".into())),
        &["pre-tokenizer `chameleon`"],
    );
    check(&|file| file.remove("tokenizer.ggml.tokens"), &["tokenizer.ggml.tokens", "missing"]);
    check(
        &|file| file.set("tokenizer.ggml.tokens", strings(&["a"; 33])),
        &["33 tokens", "32 embedding rows"],
    );
    check(&|file| file.set("tokenizer.ggml.token_type", Value::Ints(vec![1])), &["token_type", "1 entries"]);
    check(&|file| file.set("tokenizer.ggml.merges", strings(&["A"])), &["merges", "`A`", "two tokens"]);
    check(&|file| file.set("tokenizer.ggml.merges", strings(&["A zz"])), &["merges", "`A zz`"]);
    check(&|file| file.set("tokenizer.ggml.eos_token_id", Value::U32(99)), &["eos_token_id", "99"]);
    let no_scores = |file: &mut Gguf| {
        set_spm(file);
        file.set("tokenizer.ggml.scores", floats(&[0.0]));
    };
    check(&no_scores, &["tokenizer.ggml.scores", "1 entries for 12 tokens"]);
}

#[test]
fn words_are_cut_as_the_pre_tokenizer_s_name_says() {
    let check = |name: &str, expected: &[u32]| {
        let tokenizer = build(|file| {
            file.set(
                "tokenizer.ggml.tokens",
                strings(&["1", "2", "12", "123", "Ġ", "a", "'", "S", "'S", "12 "]),
            );
            file.set("tokenizer.ggml.token_type", Value::Ints(vec![1; 10]));
            file.set("tokenizer.ggml.merges", strings(&["1 2", "' S"]));
            file.set("tokenizer.ggml.pre", Value::String(name.into()));
        });
        assert_eq!(tokenizer.unwrap().encode("12a'S", Specials::Plain, false), expected, "{name}");
    };
    check("gpt-2", &[2, 5, 6, 7]);
    check("smollm", &[0, 1, 5, 6, 7]);
    check("llama-bpe", &[2, 5, 8]);
    check("qwen2", &[0, 1, 5, 8]);
    check("tekken", &[0, 1, 5, 8]);
}

/// What a model made to embed writes behind a text, and only where it is to be embedded.
#[test]
fn texts_to_embed_end_as_the_metadata_says() {
    let check = |ends: bool, specials: bool, expected: &[u32]| {
        let tokenizer = build(|file| {
            set_spm(file);
            file.set("tokenizer.ggml.add_eos_token", Value::Bool(ends));
        });
        let tokenizer = tokenizer.unwrap();
        assert_eq!(tokenizer.encode_to_embed("a", specials), expected);
        assert_eq!(tokenizer.encode("a", Specials::Parse, true), [1, 11], "prompts do not end");
    };
    check(true, true, &[1, 11, 2]);
    check(true, false, &[11]);
    check(false, true, &[1, 11]);
    let tokenizer = build(|file| {
        set_spm(file);
        file.set("tokenizer.ggml.add_eos_token", Value::Bool(true));
    });
    assert_eq!(
        tokenizer.unwrap().encode_to_embed("a</s>", true),
        [1, 11, 2],
        "an end that is there is enough"
    );
}
