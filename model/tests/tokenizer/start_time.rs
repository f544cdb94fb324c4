//! The largest vocabulary must not delay a worker's start.

use thalweg_model::tokenizer::Tokenizer;

use crate::models::bundle;

#[test]
fn a_vocabulary_of_262144_loads_fast() {
    let start = cpu_seconds();
    let bundle = bundle("gemma-3-270m-q4_k_m.gguf");
    let read = cpu_seconds() - start;
    let tokenizer = Tokenizer::new(&bundle).unwrap();
    let built = cpu_seconds() - start;
    println!("bundle of {} bytes after {read} s, tokenizer after {built} s", bundle.tokenizer_json.len());
    assert_eq!(tokenizer.vocab_size(), 262_144);
    assert!(built < 2.0, "took {built} s");
}

/// What this thread has computed, other work on the machine aside.
fn cpu_seconds() -> f64 {
    let statistics = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap();
    statistics.split(' ').next().unwrap().parse::<f64>().unwrap() / 1e9
}
