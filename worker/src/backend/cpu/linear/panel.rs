//! Reads and writes single lanes of a panel: packing, embedding look-up, and the reference that the kernels are held to.

use half::{bf16, f16};

use super::decode::{Block, Super};
use super::format::{BLOCK, BLOCKS_PER_SUPER, Format, GROUPS, Geometry, LANES, Scales};

/// Writes block `index` of one lane.
pub(super) fn write_block(panel: &mut [u8], geometry: &Geometry, lane: usize, index: usize, block: &Block) {
    let Format::Quants { bits, scales } = geometry.format else { return };
    let quants = &mut panel[index * geometry.quant_bytes..][..geometry.quant_bytes];
    if bits == 8 {
        write_bytes(quants, lane, &block.quants);
    } else {
        write_planes(quants, lane, &block.quants, bits);
    }
    let at = geometry.scales_at + index * geometry.scale_bytes;
    let into = &mut panel[at..][..geometry.scale_bytes];
    match scales {
        Scales::Offset => put_half(into, lane, block.first),
        Scales::Minimum => {
            put_half(into, lane, block.first);
            put_half(into, LANES + lane, block.second);
        }
        Scales::SuperMinimum | Scales::SuperHalves => {
            into[lane] = block.first as u8;
            into[LANES + lane] = block.second as u8;
        }
    }
}

/// Writes the outer scales of one lane's 256 weights number `index`.
pub(super) fn write_super(panel: &mut [u8], geometry: &Geometry, lane: usize, index: usize, outer: Super) {
    let into = &mut panel[geometry.supers_at + index * geometry.super_bytes..][..geometry.super_bytes];
    put_half(into, lane, outer.d);
    if into.len() > 2 * LANES {
        put_half(into, LANES + lane, outer.e);
    }
}

/// Writes one lane of an unquantised panel from a stored row.
pub(super) fn write_plain(panel: &mut [u8], size: usize, lane: usize, row: &[u8]) {
    for (k, element) in row.chunks_exact(size).enumerate() {
        panel[(k * LANES + lane) * size..][..size].copy_from_slice(element);
    }
}

/// Scale of a lane's quants, what is taken from them first, and what is added to the product.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct LaneScales {
    /// Of the first and second 16 weights of the block.
    pub(super) d: [f32; 2],
    /// Whether the two differ, so that their products are summed apart.
    pub(super) halves: bool,
    pub(super) offset: i32,
    pub(super) minimum: Option<f32>,
}

/// Scales of block `index` of one lane.
pub(super) fn lane_scales(panel: &[u8], geometry: &Geometry, lane: usize, index: usize) -> LaneScales {
    let Format::Quants { bits, scales } = geometry.format else {
        unreachable!("plain panels have no scales")
    };
    let inner = &panel[geometry.scales_at + index * geometry.scale_bytes..][..geometry.scale_bytes];
    let outer = &panel[geometry.supers_at + index / BLOCKS_PER_SUPER * geometry.super_bytes..];
    let offset = 1 << (bits - 1);
    match scales {
        Scales::Offset => LaneScales { d: [get_half(inner, lane); 2], halves: false, offset, minimum: None },
        Scales::Minimum => {
            let minimum = Some(get_half(inner, LANES + lane));
            LaneScales { d: [get_half(inner, lane); 2], halves: false, offset: 0, minimum }
        }
        Scales::SuperMinimum => {
            let d = get_half(outer, lane) * f32::from(inner[lane]);
            let minimum = Some(-(get_half(outer, LANES + lane) * f32::from(inner[LANES + lane])));
            LaneScales { d: [d; 2], halves: false, offset: 0, minimum }
        }
        Scales::SuperHalves => {
            let d = |at: usize| get_half(outer, lane) * f32::from(inner[at] as i8);
            LaneScales { d: [d(lane), d(LANES + lane)], halves: true, offset, minimum: None }
        }
    }
}

/// Quants of block `index` of one lane.
pub(super) fn lane_quants(panel: &[u8], geometry: &Geometry, lane: usize, index: usize) -> [u8; BLOCK] {
    let Format::Quants { bits, .. } = geometry.format else { unreachable!("plain panels have no quants") };
    let quants = &panel[index * geometry.quant_bytes..][..geometry.quant_bytes];
    let mut out = [0; BLOCK];
    for (k, quant) in out.iter_mut().enumerate() {
        let (group, byte) = (k / 4, 4 * lane + k % 4);
        *quant = match bits {
            8 => quants[group * 64 + byte],
            _ => {
                quants[group % 4 * 64 + byte] >> (group / 4 * 4) & 15
                    | high_bits(quants, bits, group, byte) << 4
            }
        };
    }
    out
}

/// Weights of one lane, `geometry.cols` of them.
pub(super) fn lane_to_f32(panel: &[u8], geometry: &Geometry, lane: usize, out: &mut [f32]) {
    let element = |k: usize, size: usize| &panel[(k * LANES + lane) * size..][..size];
    let half = |k: usize| u16::from_le_bytes([element(k, 2)[0], element(k, 2)[1]]);
    for (index, weights) in out.chunks_mut(BLOCK).enumerate() {
        let first = index * BLOCK;
        match geometry.format {
            Format::Quants { .. } => block_to_f32(panel, geometry, lane, index, weights),
            Format::Bf16 => fill(weights, |i| bf16::from_bits(half(first + i)).to_f32()),
            Format::F16 => fill(weights, |i| f16::from_bits(half(first + i)).to_f32()),
            Format::F32 => fill(weights, |i| {
                let bytes = element(first + i, 4);
                f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]])
            }),
        }
    }
}

/// Product and minimum are rounded apart, as the reference of the file's format does.
fn block_to_f32(panel: &[u8], geometry: &Geometry, lane: usize, index: usize, out: &mut [f32]) {
    let scales = lane_scales(panel, geometry, lane, index);
    let quants = lane_quants(panel, geometry, lane, index);
    fill(out, |i| {
        scales.d[i / 16] * (i32::from(quants[i]) - scales.offset) as f32 + scales.minimum.unwrap_or(0.0)
    });
}

fn fill(out: &mut [f32], value: impl Fn(usize) -> f32) {
    for (i, x) in out.iter_mut().enumerate() {
        *x = value(i);
    }
}

fn write_bytes(into: &mut [u8], lane: usize, quants: &[u8; BLOCK]) {
    for group in 0..GROUPS {
        into[group * 64 + 4 * lane..][..4].copy_from_slice(&quants[4 * group..][..4]);
    }
}

fn write_planes(into: &mut [u8], lane: usize, quants: &[u8; BLOCK], bits: usize) {
    for i in 0..BLOCK / 2 {
        into[i / 4 * 64 + 4 * lane + i % 4] = quants[i] & 15 | (quants[i + 16] & 15) << 4;
    }
    let planes = &mut into[256..];
    for b in 0..4 {
        let top = |group: usize| quants[4 * group + b] >> 4;
        match bits {
            5 => planes[4 * lane + b] = (0..8).fold(0, |byte, group| byte | top(group) << group),
            6 => {
                planes[4 * lane + b] = (0..4).fold(0, |byte, group| byte | top(group) << (2 * group));
                planes[64 + 4 * lane + b] =
                    (0..4).fold(0, |byte, group| byte | top(4 + group) << (2 * group));
            }
            _ => {}
        }
    }
}

fn high_bits(quants: &[u8], bits: usize, group: usize, byte: usize) -> u8 {
    match bits {
        5 => quants[256 + byte] >> group & 1,
        6 => quants[256 + group / 4 * 64 + byte] >> (group % 4 * 2) & 3,
        _ => 0,
    }
}

fn put_half(into: &mut [u8], index: usize, bits: u16) {
    into[2 * index..][..2].copy_from_slice(&bits.to_le_bytes());
}

fn get_half(from: &[u8], index: usize) -> f32 {
    f16::from_bits(u16::from_le_bytes([from[2 * index], from[2 * index + 1]])).to_f32()
}
