//! Plain Rust: the fallback, and what the other instruction sets must reproduce. A product of quants is summed in integers, so
//! it is exact everywhere; each block then adds to the f32 sum of its output by fused multiply-adds, in this order.

use super::activations::{TILE, TINY, TileBlock};
use super::format::{BLOCK, Geometry, LANES, SEGMENTS_MAX};
use super::job::PanelJob;
use super::panel::{LaneScales, lane_quants, lane_scales, lane_to_f32};

/// Quantises one row into lane `lane` of a tile.
pub(super) fn quantise_row(row: &[f32], tile: &mut [TileBlock], lane: usize) {
    for (values, block) in row.as_chunks::<BLOCK>().0.iter().zip(tile) {
        // By their bits, so that a NaN wins and shows in every output.
        let largest = f32::from_bits(values.iter().fold(0, |max, x| max.max(x.abs().to_bits())));
        let inverse = if largest <= TINY { 0.0 } else { 127.0 / largest };
        let scale = if largest <= TINY { 0.0 } else { largest * (1.0 / 127.0) };
        let quants = values.map(|x| (x * inverse).round_ties_even() as i8);
        for (four, quants) in block.quants[lane].iter_mut().zip(quants.as_chunks::<4>().0) {
            *four = i32::from_le_bytes(quants.map(|q| q as u8));
        }
        let sum = |quants: &[i8]| quants.iter().map(|&q| i32::from(q)).sum::<i32>();
        let first = sum(&quants[..BLOCK / 2]);
        let total = first + sum(&quants[BLOCK / 2..]);
        block.scale[lane] = scale;
        block.scaled_sum[lane] = scale * total as f32;
        block.negated_sum[lane] = -total;
        block.negated_first[lane] = -first;
    }
}

/// Quantised panel by int8 activations.
pub(super) fn quants(job: &PanelJob<'_>) {
    let geometry = job.geometry;
    let per_segment = geometry.blocks() / geometry.segments;
    for lane in 0..job.lanes {
        let blocks: Vec<(LaneScales, [u8; BLOCK])> = (0..geometry.blocks())
            .map(|b| (lane_scales(job.panel, geometry, lane, b), lane_quants(job.panel, geometry, lane, b)))
            .collect();
        for token in job.tokens.clone() {
            let tile = job.input.tile(token);
            let mut partials = [0.0; SEGMENTS_MAX];
            for (segment, partial) in partials[..geometry.segments].iter_mut().enumerate() {
                let range = segment * per_segment..(segment + 1) * per_segment;
                for (weights, input) in blocks[range.clone()].iter().zip(&tile[range]) {
                    *partial = add_block(*partial, weights, input, token % TILE);
                }
            }
            job.store(token, lane, &[tree(&mut partials[..geometry.segments])]);
        }
    }
}

fn add_block(sum: f32, (scales, quants): &(LaneScales, [u8; BLOCK]), input: &TileBlock, token: usize) -> f32 {
    let inputs =
        input.quants[token].iter().flat_map(|four| four.to_le_bytes()).map(|byte| i32::from(byte as i8));
    let products = quants.iter().zip(inputs).map(|(&w, x)| (i32::from(w) - scales.offset) * x);
    let scale = input.scale[token];
    if !scales.halves {
        let sum = (products.sum::<i32>() as f32).mul_add(scales.d[0] * scale, sum);
        return scales.minimum.map_or(sum, |minimum| minimum.mul_add(input.scaled_sum[token], sum));
    }
    let first: i32 = products.clone().take(BLOCK / 2).sum();
    let second: i32 = products.skip(BLOCK / 2).sum();
    let sum = (first as f32).mul_add(scales.d[0] * scale, sum);
    (second as f32).mul_add(scales.d[1] * scale, sum)
}

/// Panel of f32, k-major, by f32 activations.
pub(super) fn plain(job: &PanelJob<'_>, weights: &[f32]) {
    let per_segment = job.geometry.cols / job.geometry.segments;
    for token in job.tokens.clone() {
        let mut sums = [[0.0_f32; LANES]; SEGMENTS_MAX];
        for (k, (x, w)) in job.input.row(token).iter().zip(weights.as_chunks::<LANES>().0).enumerate() {
            for (sum, w) in sums[k / per_segment].iter_mut().zip(w) {
                *sum = w.mul_add(*x, *sum);
            }
        }
        let mut out = [0.0; LANES];
        for (lane, out) in out.iter_mut().enumerate() {
            let mut partials = sums.map(|sum| sum[lane]);
            *out = tree(&mut partials[..job.geometry.segments]);
        }
        job.store(token, 0, &out[..job.lanes]);
    }
}

/// Weights of a panel of any type, k-major, `LANES` for each of `cols`.
pub(super) fn widen(panel: &[u8], geometry: &Geometry, weights: &mut [f32]) {
    let mut row = vec![0.0; geometry.cols];
    for lane in 0..LANES {
        lane_to_f32(panel, geometry, lane, &mut row);
        for (weights, &w) in weights.as_chunks_mut::<LANES>().0.iter_mut().zip(&row) {
            weights[lane] = w;
        }
    }
}

/// Adds neighbours until one is left.
fn tree(partials: &mut [f32]) -> f32 {
    let mut width = partials.len();
    while width > 1 {
        width /= 2;
        for i in 0..width {
            partials[i] = partials[2 * i] + partials[2 * i + 1];
        }
    }
    partials[0]
}
