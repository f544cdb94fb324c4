//! What adapters add to a product, against plain sums in f64.

use thalweg_worker::backend::cpu::KvDtype;
use thalweg_worker::backend::cuda::abi::{COUNTS, N_TOKENS};
use thalweg_worker::backend::cuda::kernels::LoraArgs;
use thalweg_worker::backend::cuda::lora::LoraPart;

use crate::support::{Bench, close, halves, wide};

/// A product of `k` inputs and parts of these outputs, and the ranks of two adapters; one of them leaves the second part alone.
struct Case {
    k: usize,
    outputs: &'static [usize],
    ranks: [usize; 2],
    is_bf16: bool,
}

const RANK_MAX: usize = 24;
const SCALES: [f32; 2] = [0.5, 2.0];

#[test]
fn rows_get_what_their_adapter_adds() {
    for case in [
        Case { k: 64, outputs: &[96, 32, 32], ranks: [4, 24], is_bf16: true },
        Case { k: 1056, outputs: &[300, 300], ranks: [8, 3], is_bf16: true },
        Case { k: 512, outputs: &[257], ranks: [16, 1], is_bf16: false },
    ] {
        for tokens in [1, 5, 64, 65, 203] {
            case.check(tokens);
        }
    }
}

impl Case {
    fn check(&self, tokens: usize) {
        let bench = Bench::new(64, KvDtype::Bf16);
        let n: usize = self.outputs.iter().sum();
        let mut counts = [0i32; COUNTS];
        counts[N_TOKENS] = tokens as i32;
        // Long runs of one adapter, with single rows of others between them.
        let slots: Vec<i32> =
            (0..tokens).map(|token| [1, 1, 1, 0, 2, 1, 2, 2, 2, 2, 2, 0, 0][token * 7 / 5 % 13]).collect();
        let x = halves(tokens * self.k, 1);
        let before: Vec<f32> = halves(tokens * n, 2).into_iter().map(|bits| wide(bits) as f32).collect();
        let matrices: Vec<_> = (0..2 * self.outputs.len())
            .map(|index| {
                let (rank, outputs) =
                    (self.ranks[index / self.outputs.len()], self.outputs[index % self.outputs.len()]);
                let seed = 10 + 2 * index as u64;
                (halves(rank * self.k, seed), halves(outputs * rank, seed + 1))
            })
            .collect();
        let on_gpu: Vec<_> = matrices.iter().map(|(a, b)| (bench.put(a), bench.put(b))).collect();
        let parts: Vec<LoraPart> = on_gpu
            .iter()
            .enumerate()
            .map(|(index, (a, b))| {
                let (adapter, part) = (index / self.outputs.len(), index % self.outputs.len());
                let none = Self::is_left_alone(adapter, part);
                LoraPart {
                    a: if none { 0 } else { a.at() },
                    b: if none { 0 } else { b.at() },
                    rank: self.ranks[adapter] as i32,
                    first: self.outputs[..part].iter().sum::<usize>() as i32,
                    outputs: self.outputs[part] as i32,
                    scale: SCALES[adapter],
                }
            })
            .collect();
        let (counts, slots_at, parts) = (bench.put(&counts), bench.put(&slots), bench.put(&parts));
        let inputs = bench.put(&x);
        let low = bench.poisoned((tokens * self.outputs.len() * RANK_MAX * 4) as u64);
        let bits: Vec<u16> = before.iter().map(|value| half::bf16::from_f32(*value).to_bits()).collect();
        let outputs = if self.is_bf16 { bench.put(&bits) } else { bench.put(&before) };
        let args = LoraArgs {
            counts: counts.at(),
            slots: slots_at.at(),
            parts: parts.at(),
            n_parts: self.outputs.len(),
            inputs: inputs.at(),
            k: self.k,
            low: low.at(),
            rank_max: RANK_MAX,
            outputs: outputs.at(),
            n,
            part_max: *self.outputs.iter().max().expect("a part"),
            is_bf16: self.is_bf16,
        };
        // SAFETY: every array has the size that the arguments say, and lives until it is read below.
        unsafe { bench.kernels.lora(bench.launcher(), tokens, args) }.expect("launches");
        let got: Vec<f64> = match self.is_bf16 {
            true => bench.get::<u16>(&outputs, tokens * n).into_iter().map(wide).collect(),
            false => bench.get::<f32>(&outputs, tokens * n).into_iter().map(f64::from).collect(),
        };
        let expected = self.expected(&slots, &x, &before, &matrices);
        let tolerance = |index: usize| match (slots[index / n], self.is_bf16) {
            // Rows without an adapter stay to the bit.
            (0, _) => 0.0,
            (_, true) => expected[index].abs() * 2f64.powi(-8) + 1e-4,
            (_, false) => expected[index].abs() * 1e-5 + 1e-4,
        };
        close(
            &format!("LoRA, {tokens} tokens, k {}, {:?}", self.k, self.outputs),
            &got,
            &expected,
            tolerance,
        );
    }

    fn is_left_alone(adapter: usize, part: usize) -> bool {
        adapter == 1 && part == 1
    }

    fn expected(
        &self,
        slots: &[i32],
        x: &[u16],
        before: &[f32],
        matrices: &[(Vec<u16>, Vec<u16>)],
    ) -> Vec<f64> {
        let n: usize = self.outputs.iter().sum();
        let mut expected: Vec<f64> = before.iter().map(|value| f64::from(*value)).collect();
        for (token, slot) in slots.iter().enumerate().filter(|(_, slot)| **slot > 0) {
            let adapter = *slot as usize - 1;
            let (rank, x) = (self.ranks[adapter], &x[token * self.k..][..self.k]);
            let mut first = token * n;
            for (part, outputs) in self.outputs.iter().enumerate() {
                let (a, b) = &matrices[adapter * self.outputs.len() + part];
                let dot = |row: &[u16]| row.iter().zip(x).map(|(a, x)| wide(*a) * wide(*x)).sum::<f64>();
                let low: Vec<f64> = a.chunks(self.k).map(dot).collect();
                for (j, row) in b.chunks(rank).enumerate().filter(|_| !Self::is_left_alone(adapter, part)) {
                    let sum: f64 = row.iter().zip(&low).map(|(b, low)| wide(*b) * low).sum();
                    expected[first + j] += f64::from(SCALES[adapter]) * sum;
                }
                first += outputs;
            }
        }
        expected
    }
}
