//! Times the matrix products of one step: `linear_speed [threads] [seconds per line]`.
//!
//! The matrices have the shapes and types of the two models that the benchmarks use, with random contents. Each line is the best of
//! many passes over all layers, so that a busy machine disturbs it little; a pass reads every weight once, as a step does.
#![allow(missing_docs, clippy::print_stdout)]
#![allow(clippy::disallowed_types, clippy::disallowed_methods, reason = "measures wall time of real kernels")]

use std::time::{Duration, Instant};

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use thalweg_model::checkpoint::Matrix;
use thalweg_model::dtype::DType;
use thalweg_worker::backend::cpu::linear::{Activations, Compute, PackedMatrix, matmul};
use thalweg_worker::backend::cpu::pool::Pool;

/// Name, layers, inputs, joined parts.
type Group = (&'static str, usize, usize, &'static [(DType, usize)]);

const SMOLLM2: &[Group] = &[
    ("qkv", 30, 576, &[(DType::Q4_1, 576), (DType::Q4_1, 192), (DType::Q4_1, 192)]),
    ("o", 30, 576, &[(DType::Q4_1, 576)]),
    ("gate_up", 30, 576, &[(DType::Q4_1, 1536), (DType::Q4_1, 1536)]),
    ("down", 30, 1536, &[(DType::Q4_1, 576)]),
    ("head", 1, 576, &[(DType::Q8_0, 49152)]),
];

const GEMMA3: &[Group] = &[
    ("qkv q8", 9, 640, &[(DType::Q5_0, 1024), (DType::Q5_0, 256), (DType::Q8_0, 256)]),
    ("qkv", 9, 640, &[(DType::Q5_0, 1024), (DType::Q5_0, 256), (DType::Q5_0, 256)]),
    ("o", 18, 1024, &[(DType::Q4_K, 640)]),
    ("gate_up", 18, 640, &[(DType::Q5_0, 2048), (DType::Q5_0, 2048)]),
    ("down q4", 9, 2048, &[(DType::Q4_K, 640)]),
    ("down q6", 9, 2048, &[(DType::Q6_K, 640)]),
    ("head", 1, 640, &[(DType::Q8_0, 262144)]),
];

/// One shape in all layers, and what goes through it.
struct Stack {
    name: &'static str,
    layers: Vec<PackedMatrix>,
    best: Duration,
}

fn main() {
    let mut arguments = std::env::args().skip(1).map(|argument| argument.parse().expect("a number"));
    let threads: u32 = arguments.next().unwrap_or(2);
    let seconds: u32 = arguments.next().unwrap_or(2);
    let pool = Pool::new(threads as usize);
    println!("{pool:?}");
    for (model, groups) in [("SmolLM2-135M Q4_1", SMOLLM2), ("Gemma-3-270M Q4_K_M", GEMMA3)] {
        let started = Instant::now();
        let mut stacks: Vec<Stack> = groups.iter().map(|group| build(&pool, group)).collect();
        let bytes: usize = stacks.iter().flat_map(|stack| &stack.layers).map(PackedMatrix::bytes).sum();
        println!(
            "\n{model}: {:.1} MB, built in {:.2} s",
            bytes as f64 / 1e6,
            started.elapsed().as_secs_f64()
        );
        for tokens in [1, 2, 4, 8, 32, 512] {
            measure(&pool, &mut stacks, tokens, Duration::from_secs(seconds.into()));
        }
    }
}

fn build(pool: &Pool, &(name, layers, cols, parts): &Group) -> Stack {
    let mut rng = StdRng::seed_from_u64(1);
    let stored: Vec<(DType, usize, Vec<u8>)> = parts
        .iter()
        .map(|&(dtype, rows)| (dtype, rows, random_bytes(&mut rng, dtype, rows * cols)))
        .collect();
    let parts: Vec<Matrix<'_>> = stored
        .iter()
        .map(|(dtype, rows, data)| Matrix { dtype: *dtype, rows: *rows, cols, data, interleaved: false })
        .collect();
    let pack = |_| PackedMatrix::pack(pool, &parts, 64, Compute::Int8, &|_| {}).expect("shapes that fit");
    Stack { name, layers: (0..layers).map(pack).collect(), best: Duration::MAX }
}

/// Any bits do for quants; halves with a small exponent keep the sums finite.
fn random_bytes(rng: &mut StdRng, dtype: DType, elements: usize) -> Vec<u8> {
    let mut bytes = vec![0; dtype.row_bytes(elements).expect("whole blocks")];
    rng.fill_bytes(&mut bytes);
    bytes.iter_mut().for_each(|byte| *byte &= 0x9f);
    bytes
}

fn measure(pool: &Pool, stacks: &mut [Stack], tokens: usize, limit: Duration) {
    let widest = stacks.iter().map(|stack| stack.layers[0].cols()).max().unwrap_or(0);
    let input: Vec<f32> = (0..tokens * widest).map(|i| (i % 97) as f32 / 97.0 - 0.5).collect();
    let mut activations = Activations::new(tokens, widest);
    stacks.iter_mut().for_each(|stack| stack.best = Duration::MAX);
    let mut quantising = Duration::MAX;
    let started = Instant::now();
    while started.elapsed() < limit {
        let mut prepared = Duration::ZERO;
        for stack in stacks.iter_mut() {
            // Only the last token of each prompt meets the vocabulary.
            let tokens = if stack.name == "head" && tokens > 32 { 1 } else { tokens };
            let mut out = vec![0.0; tokens * stack.layers[0].rows()];
            let mut spent = Duration::ZERO;
            for layer in &stack.layers {
                let start = Instant::now();
                activations.prepare(
                    pool,
                    &input[..tokens * layer.cols()],
                    tokens,
                    layer.cols(),
                    layer.inputs(),
                );
                let between = Instant::now();
                matmul(pool, layer, &activations, &mut out);
                spent += between.elapsed();
                prepared += between - start;
            }
            stack.best = stack.best.min(spent);
        }
        quantising = quantising.min(prepared);
    }
    report(pool, stacks, tokens, quantising);
}

fn report(pool: &Pool, stacks: &[Stack], tokens: usize, quantising: Duration) {
    let total: Duration = stacks.iter().map(|stack| stack.best).sum::<Duration>() + quantising;
    let per_second = tokens as f64 / total.as_secs_f64();
    println!("M {tokens:3}: {:8.3} ms, at most {per_second:.0} tokens/s", total.as_secs_f64() * 1e3);
    for stack in stacks {
        let tokens = if stack.name == "head" && tokens > 32 { 1 } else { tokens };
        let seconds = stack.best.as_secs_f64();
        let bytes: usize = stack.layers.iter().map(PackedMatrix::bytes).sum();
        let macs: usize = stack.layers.iter().map(|w| w.rows() * w.cols() * tokens).sum();
        let threads = pool.threads() as f64;
        println!(
            "    {:8} {:8.3} ms  {:6.1} GB/s  {:6.1} GMAC/s per thread",
            stack.name,
            seconds * 1e3,
            bytes as f64 / seconds / 1e9,
            macs as f64 / seconds / 1e9 / threads
        );
    }
    println!("    {:8} {:8.3} ms", "quantise", quantising.as_secs_f64() * 1e3);
}
