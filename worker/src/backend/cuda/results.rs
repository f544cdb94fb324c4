//! What the rows of a step yielded, from the results as the GPU has written them. Pure: no GPU is needed.

use super::abi::{Sampled, bytes_of_mut, read_at};
use super::step::Wanted;
use crate::plan::{Logprobs, RowOutput};
use crate::pooling::normalise;

/// Outputs of so many rows, from one result for each of `wanted`.
pub(super) fn outputs(rows: usize, wanted: &[Wanted], results: &[u8]) -> Vec<RowOutput> {
    let mut outputs = Vec::new();
    outputs.resize_with(rows, RowOutput::default);
    for (index, wanted) in wanted.iter().enumerate() {
        let result = read_at(results, index);
        outputs[wanted.row].prompt.extend(prompt_logprobs(wanted, &result));
        outputs[wanted.row].sampled.extend(sampled(wanted, &result));
    }
    outputs
}

/// Vectors of pooled states, `[vector][width]`, to the rows that they are for. The direction of a sum is that of the mean.
pub(super) fn embed(outputs: &mut [RowOutput], embedded: &[usize], vectors: &[u8]) {
    if embedded.is_empty() {
        return;
    }
    for (row, bytes) in embedded.iter().zip(vectors.chunks_exact(vectors.len() / embedded.len())) {
        let mut vector = vec![0.0; bytes.len() / size_of::<f32>()];
        bytes_of_mut(&mut vector).copy_from_slice(bytes);
        normalise(&mut vector);
        outputs[*row].embedding = Some(vector);
    }
}

fn prompt_logprobs(wanted: &Wanted, result: &Sampled) -> Option<Logprobs> {
    let (token, top) = wanted.target?;
    let (logprob, rank) = (result.target_logprob, result.target_rank as u32);
    Some(Logprobs { token, logprob, rank, top: alternatives(result, top) })
}

fn sampled(wanted: &Wanted, result: &Sampled) -> Option<Logprobs> {
    let token = result.token.max(0) as u32;
    Some(match wanted.sample? {
        Some(top) => {
            let (logprob, rank) = (result.logprob, result.rank as u32);
            Logprobs { token, logprob, rank, top: alternatives(result, top) }
        }
        None => Logprobs { token, logprob: f32::NAN, rank: 0, top: Vec::new() },
    })
}

fn alternatives(result: &Sampled, top: u32) -> Vec<(u32, f32)> {
    let found = result.top_ids.iter().zip(result.top_logprobs).take(result.n_top.max(0) as usize);
    found.take(top as usize).map(|(id, logprob)| (*id as u32, logprob)).collect()
}

#[cfg(test)]
mod tests {
    use super::super::abi::bytes_of;
    use super::*;

    #[test]
    fn results_go_to_their_rows() {
        let result = |token: i32| {
            let mut result = Sampled { token, logprob: -0.5, rank: 1, ..Sampled::default() };
            (result.target_logprob, result.target_rank, result.n_top) = (-2.0, 9, 2);
            (result.top_ids[0], result.top_ids[1]) = (token, 4);
            (result.top_logprobs[0], result.top_logprobs[1]) = (-0.5, -1.5);
            result
        };
        let wanted = |row: usize, target: Option<(u32, u32)>, sample| Wanted { row, target, sample };
        let wanted = [
            wanted(1, Some((30, 1)), None),
            wanted(1, Some((31, 0)), Some(Some(5))),
            wanted(2, None, Some(None)),
        ];
        let outputs = outputs(4, &wanted, bytes_of(&[result(7), result(8), result(-1)]));
        let target =
            |token: u32, top: &[(u32, f32)]| Logprobs { token, logprob: -2.0, rank: 9, top: top.to_vec() };
        assert_eq!(outputs[1].prompt, [target(30, &[(7, -0.5)]), target(31, &[])]);
        let sampled = Logprobs { token: 8, logprob: -0.5, rank: 1, top: vec![(8, -0.5), (4, -1.5)] };
        assert_eq!(outputs[1].sampled[..], [sampled]);
        assert!(outputs[2].prompt.is_empty() && outputs[2].sampled.len() == 1);
        let bare = &outputs[2].sampled[0];
        assert!(
            bare.token == 0 && bare.logprob.is_nan() && bare.rank == 0 && bare.top.is_empty(),
            "{bare:?}"
        );
        assert_eq!((&outputs[0], &outputs[3]), (&RowOutput::default(), &RowOutput::default()));
    }

    #[test]
    fn vectors_go_to_their_rows_at_length_1() {
        let mut outputs = vec![RowOutput::default(); 4];
        embed(&mut outputs, &[1, 3], bytes_of(&[3f32, -4.0, 0.0, 0.25]));
        let embeddings: Vec<_> = outputs.iter().map(|row| row.embedding.as_deref()).collect();
        assert_eq!(embeddings, [None, Some(&[0.6, -0.8][..]), None, Some(&[0.0, 1.0])]);
        embed(&mut outputs[..1], &[], &[]);
        assert_eq!(outputs[0], RowOutput::default());
    }
}
