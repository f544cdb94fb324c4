//! Embeddings of whole models: against the CPU backend, and to the bit the same however the prompt is cut and whoever runs beside it.

use thalweg_worker::backend::cuda::CudaBackendConfig;
use thalweg_worker::plan::AdapterSlot;
use thalweg_worker::pooling::Pooling;

use crate::models::{FAMILIES, config, ids, load, on_cpu, runner, tiny};
use crate::plans::{Embed, bits};

const LENGTHS: [usize; 10] = [1, 7, 8, 9, 63, 64, 65, 255, 256, 257];
const POOLINGS: [Pooling; 2] = [Pooling::Last, Pooling::Mean];
/// Pieces of a prompt, and the sequences beside it.
const WAYS: [(usize, usize); 8] = [(1, 0), (7, 2), (8, 3), (9, 1), (63, 2), (64, 3), (65, 0), (256, 3)];
const SLOTS: usize = 4;
/// Between two vectors of length 1, one of them of weights, activations, keys and values rounded to bf16.
const DISTANCE_MAX: f64 = 0.05;

fn distance(a: &[f32], b: &[f32]) -> f64 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).map(|(a, b)| (f64::from(*a) - f64::from(*b)).powi(2)).sum::<f64>().sqrt()
}

#[test]
fn vectors_are_those_of_the_cpu() {
    for family in FAMILIES {
        let model = load(&tiny(family));
        let mut on_cpu = on_cpu(family, 1);
        let whole = Embed::alone(AdapterSlot::BASE);
        let cut = Embed { piece: 60, mates: 3, ..whole };
        for deterministic in [true, false] {
            let mut on_gpu = runner(&model, CudaBackendConfig { deterministic, ..config(SLOTS) });
            for pooling in POOLINGS {
                let mut worst = 0f64;
                for len in LENGTHS {
                    let tokens = ids(len, 1, 320);
                    let expected = whole.run(&mut on_cpu, &tokens, pooling);
                    for way in [whole, cut] {
                        let found = distance(&way.run(&mut on_gpu, &tokens, pooling), &expected);
                        assert!(
                            found < DISTANCE_MAX,
                            "{family}, {len} tokens, {pooling:?}, {way:?}, deterministic {deterministic}: {found}"
                        );
                        worst = worst.max(found);
                    }
                }
                println!("{family}, {pooling:?}, deterministic {deterministic}: vectors within {worst:.4}");
            }
        }
    }
}

#[test]
fn vectors_are_those_of_the_prompt_alone() {
    for family in FAMILIES {
        let model = load(&tiny(family));
        let mut alone = runner(&model, CudaBackendConfig { graphs: false, ..config(1) });
        for overlapped in [false, true] {
            let mut together = runner(&model, CudaBackendConfig { overlapped, ..config(SLOTS) });
            for (len, pooling) in LENGTHS.into_iter().flat_map(|len| POOLINGS.map(|pooling| (len, pooling))) {
                let tokens = ids(len, 2, 320);
                let expected = Embed::alone(AdapterSlot::BASE).run(&mut alone, &tokens, pooling);
                for (piece, mates) in WAYS {
                    // Keys and values of prompts before are nobody's now.
                    together.device().fill_kv(0xff).expect("a fill");
                    let way = Embed { piece, mates, adapter: AdapterSlot::BASE };
                    let ours = way.run(&mut together, &tokens, pooling);
                    assert!(
                        bits(&ours) == bits(&expected),
                        "{family}, {len} tokens, {pooling:?}, overlapped {overlapped}: {way:?} differs"
                    );
                }
            }
        }
    }
}
