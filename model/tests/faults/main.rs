//! Crafted and damaged GGUF files: each is refused with a clear error, quickly, and within twice the file's size of
//! memory. One test, as the allocator counts for the whole process.

#![allow(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "a test fails by panicking, and prints its seed"
)]

#[path = "../support/mod.rs"]
mod support;

use std::alloc::System;
use std::path::Path;
use std::time::{Duration, SystemTime};

use cap::Cap;
use rand::{RngExt, SeedableRng, rngs::StdRng};
use support::gguf::{Gguf, HIDDEN, Value, put_string};
use thalweg_model::checkpoint::Checkpoint;

#[global_allocator]
static ALLOCATOR: Cap<System> = Cap::new(System, usize::MAX);

/// Tables and messages of a file of a few kilobytes; far below what any of the claimed sizes would take.
const FLOOR_BYTES: usize = 128 * 1024;
const TIME_MAX: Duration = Duration::from_secs(2);

/// A fault, and words that the error must hold.
type Fault = (&'static str, fn(&mut Gguf), &'static [&'static str]);

const FAULTS: &[Fault] = &[
    (
        "zero dimension",
        |g| g.tensor("blk.0.attn_q.weight").dims[0] = 0,
        &["blk.0.attn_q.weight", "dimensions"],
    ),
    (
        "dimension 2^43 + 7",
        |g| g.tensor("blk.0.attn_q.weight").dims[1] = (1 << 43) + 7,
        &["blk.0.attn_q.weight"],
    ),
    ("product over 2^64", |g| g.tensor("blk.0.attn_q.weight").dims = vec![1 << 40, 1 << 40], &["dimensions"]),
    ("bytes over 2^64", |g| g.tensor("blk.0.attn_q.weight").dims = vec![1 << 62, 1], &["dimensions"]),
    ("rank 0", |g| g.tensor("output_norm.weight").dims.clear(), &["output_norm.weight", "0 dimensions"]),
    ("rank 5", |g| g.tensor("output_norm.weight").dims = vec![1; 5], &["output_norm.weight", "5 dimensions"]),
    (
        "offset past the end",
        |g| g.tensor("output_norm.weight").offset = Some(1 << 40),
        &["output_norm.weight", "end"],
    ),
    (
        "offset near 2^64",
        |g| g.tensor("output_norm.weight").offset = Some(u64::MAX - 31),
        &["output_norm.weight"],
    ),
    (
        "unaligned offset",
        |g| g.tensor("output_norm.weight").offset = Some(4),
        &["output_norm.weight", "alignment"],
    ),
    ("overlap", |g| g.tensor("output_norm.weight").offset = Some(0), &["output_norm.weight", "overlap"]),
    ("duplicate tensor", |g| g.tensors.push(g.tensors[0].clone()), &["token_embd.weight", "twice"]),
    ("missing tensor", |g| drop(g.tensors.remove(5)), &["blk.0.attn_v.weight", "missing"]),
    (
        "wrong shape",
        |g| g.tensor("output_norm.weight").dims = vec![16],
        &["output_norm.weight", "[16]", "[32]"],
    ),
    ("stray tensor", |g| g.tensors[3].name = "blk.7.attn_q.weight".into(), &["attn_q.weight"]),
    ("unknown type", |g| g.tensor("output_norm.weight").kind = 200, &["output_norm.weight", "200"]),
    ("unserved type", |g| g.tensor("output_norm.weight").kind = 10, &["output_norm.weight", "Q2_K", "use"]),
    ("row of half a block", |g| g.tensor("output_norm.weight").kind = 12, &["output_norm.weight", "Q4_K"]),
    ("empty tensor name", |g| g.tensor("output_norm.weight").name.clear(), &["name of tensor 1"]),
    ("2^60 tensors", |g| g.tensor_count = Some(1 << 60), &["tensors"]),
    ("more tensors than there are", |g| g.tensor_count = Some(60_000), &["tensor 20"]),
    ("2^60 keys", |g| g.key_count = Some(1 << 60), &["keys"]),
    ("more keys than there are", |g| g.key_count = Some(4000), &["key"]),
    ("empty key", |g| g.keys[0].0.clear(), &["metadata key 0"]),
    ("duplicate key", |g| g.keys.push(g.keys[0].clone()), &["general.architecture", "twice"]),
    ("unknown value type", |g| g.set("x", Value::Raw(99, vec![])), &["`x`", "99"]),
    (
        "string of 2^63",
        |g| g.set("x", Value::Raw(8, (1u64 << 63).to_le_bytes().to_vec())),
        &["`x`", "cut short"],
    ),
    ("array of 2^63 strings", |g| g.set("x", array(8, 1 << 63)), &["`x`", "cut short"]),
    ("array of 2^62 floats", |g| g.set("x", array(6, 1 << 62)), &["`x`", "cut short"]),
    ("array of arrays", |g| g.set("x", array(9, 1)), &["`x`", "array of arrays"]),
    ("unknown element type", |g| g.set("x", array(77, 1)), &["`x`", "77"]),
    ("text that is not UTF-8", |g| g.set("x", not_utf8()), &["`x`", "UTF-8"]),
    ("alignment 0", |g| g.set("general.alignment", Value::U32(0)), &["general.alignment", "power of two"]),
    ("alignment 24", |g| g.set("general.alignment", Value::U32(24)), &["general.alignment", "power of two"]),
    ("version 99", |g| g.version = 99, &["version 99"]),
    ("version 1", |g| g.version = 1, &["version 1"]),
    ("big-endian", |g| g.version = 3u32.swap_bytes(), &["big-endian"]),
    (
        "a million layers",
        |g| g.set("llama.block_count", Value::U32(1_000_000)),
        &["llama.block_count", "1000000"],
    ),
    ("no layers", |g| g.set("llama.block_count", Value::U32(0)), &["llama.block_count"]),
    ("no heads", |g| g.set("llama.attention.head_count", Value::U32(0)), &["llama.attention.head_count"]),
    ("no key/value heads", |g| g.set("llama.attention.head_count_kv", Value::U32(0)), &["head_count_kv"]),
    (
        "heads that do not divide",
        |g| g.set("llama.attention.head_count", Value::U32(5)),
        &["embedding_length"],
    ),
    ("negative size", |g| g.set("llama.embedding_length", Value::I32(-1)), &["embedding_length", "-1"]),
    (
        "size as text",
        |g| g.set("llama.embedding_length", Value::String("32".into())),
        &["embedding_length", "string"],
    ),
    (
        "odd head width",
        |g| g.set("llama.attention.key_length", Value::U32(15)),
        &["llama.rope.dimension_count"],
    ),
    (
        "NaN epsilon",
        |g| g.set("llama.attention.layer_norm_rms_epsilon", Value::F32(f32::NAN)),
        &["epsilon", "NaN"],
    ),
    ("zero rope base", |g| g.set("llama.rope.freq_base", Value::F32(0.0)), &["llama.rope.freq_base"]),
    ("unserved rope scaling", |g| g.set("llama.rope.scaling.type", Value::String("yarn".into())), &["yarn"]),
    ("missing key", |g| g.remove("llama.context_length"), &["llama.context_length", "missing"]),
    ("no architecture", |g| g.remove("general.architecture"), &["general.architecture"]),
    (
        "unserved architecture",
        |g| g.set("general.architecture", Value::String("mamba".into())),
        &["mamba", "use"],
    ),
    ("mixture of experts", |g| g.set("llama.expert_count", Value::U32(8)), &["mixture of experts", "dense"]),
    ("wrong vocabulary", |g| g.set("llama.vocab_size", Value::U32(33)), &["llama.vocab_size", "33"]),
];

fn array(element: u32, count: u64) -> Value {
    Value::Raw(9, [element.to_le_bytes().as_slice(), &count.to_le_bytes()].concat())
}

fn not_utf8() -> Value {
    let mut bytes = Vec::new();
    put_string(&mut bytes, "ab");
    bytes[8] = 0xff;
    Value::Raw(8, bytes)
}

#[test]
fn faulty_files_are_refused_clearly_quickly_and_in_little_memory() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let path = folder.path().join("tiny.gguf");
    let whole = Gguf::tiny(1).bytes();
    check(&path, &whole).expect("the tiny model is sound");
    for (name, fault, words) in FAULTS {
        let mut gguf = Gguf::tiny(1);
        fault(&mut gguf);
        let message = check(&path, &gguf.bytes()).expect_err(name);
        support::assert_says(&message, words);
        support::assert_says(&message, &["tiny.gguf"]);
    }
    assert_eq!(HIDDEN % 32, 0, "rows of the tiny model are whole blocks");
    for length in (0..whole.len()).step_by(61).chain((0..whole.len()).step_by(1024)) {
        let message = check(&path, &whole[..length]).expect_err("truncated file");
        support::assert_says(&message, &["tiny.gguf"]);
    }
    check_bit_flips(&path, &whole);
}

/// Whatever a flipped bit does, nothing panics, takes long or allocates much.
fn check_bit_flips(path: &Path, whole: &[u8]) {
    let seed = std::env::var("THALWEG_TEST_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or(7);
    println!("seed {seed}");
    let mut rng = StdRng::seed_from_u64(seed);
    let header = 2400.min(whole.len());
    for _ in 0..500 {
        let mut bytes = whole.to_vec();
        for _ in 0..rng.random_range(1..4) {
            bytes[rng.random_range(4..header)] ^= 1 << rng.random_range(0..8);
        }
        // Sound or not is for the flipped bit to say.
        let _ = check(path, &bytes);
    }
}

/// Opens a file of these bytes, holding it to its limits of time and memory.
fn check(path: &Path, bytes: &[u8]) -> Result<(), String> {
    // Overwriting in place would make some file systems flush each of them to disk.
    let _ = std::fs::remove_file(path);
    std::fs::write(path, bytes).expect("a writable folder");
    let before = ALLOCATOR.allocated();
    ALLOCATOR.set_limit(before + 2 * bytes.len() + FLOOR_BYTES).expect("a limit above what is allocated");
    let start = SystemTime::now();
    let opened = Checkpoint::open(path).map(drop).map_err(|error| error.to_string());
    let took = start.elapsed().unwrap_or_default();
    ALLOCATOR.set_limit(usize::MAX).expect("no limit");
    assert!(took < TIME_MAX, "took {took:?}");
    opened
}
