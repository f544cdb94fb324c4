//! The block types of GGUF, taken apart without rounding: 32 unsigned quants and the bytes of their scales.

use thalweg_model::dtype::DType;

use super::format::{BLOCK, BLOCKS_PER_SUPER};

/// One block of 32 weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Block {
    /// Signed types are shifted up by half of their range.
    pub(super) quants: [u8; BLOCK],
    /// What a lane has in the block's first 16 scales, in its low bytes (f16 d, or byte s).
    pub(super) first: u16,
    /// What a lane has in the second 16 (f16 m, or byte t, or byte s of the second half).
    pub(super) second: u16,
}

/// Outer scales of 256 weights, in f16: d, and e where the type has minima.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Super {
    pub(super) d: u16,
    pub(super) e: u16,
}

/// Block `index` of a stored row of a quantised type.
pub(super) fn block(dtype: DType, row: &[u8], index: usize) -> Block {
    let small = |bytes: usize| &row[index * bytes..][..bytes];
    match dtype {
        DType::Q4_0 => q4(small(18), 2),
        DType::Q4_1 => q4(small(20), 4),
        DType::Q5_0 => q5(small(22), 2),
        DType::Q5_1 => q5(small(24), 4),
        DType::Q8_0 => q8(small(34)),
        DType::Q4_K => q4_k(large(dtype, row, index), index % BLOCKS_PER_SUPER),
        DType::Q5_K => q5_k(large(dtype, row, index), index % BLOCKS_PER_SUPER),
        DType::Q6_K => q6_k(large(dtype, row, index), index % BLOCKS_PER_SUPER),
        DType::F32 | DType::F16 | DType::BF16 => unreachable!("{dtype:?} has no blocks"),
    }
}

/// Outer scales of the 256 weights around block `index`; zeros for types without.
pub(super) fn outer(dtype: DType, row: &[u8], index: usize) -> Super {
    match dtype {
        DType::Q4_K | DType::Q5_K => {
            let bytes = large(dtype, row, index);
            Super { d: half_at(bytes, 0), e: half_at(bytes, 2) }
        }
        DType::Q6_K => Super { d: half_at(large(dtype, row, index), 208), e: 0 },
        _ => Super { d: 0, e: 0 },
    }
}

fn large(dtype: DType, row: &[u8], index: usize) -> &[u8] {
    &row[index / BLOCKS_PER_SUPER * dtype.block_bytes()..][..dtype.block_bytes()]
}

fn half_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([bytes[at], bytes[at + 1]])
}

/// d, perhaps m, then 16 bytes with the first 16 quants in the low nibbles.
fn q4(bytes: &[u8], quants_at: usize) -> Block {
    let (low, high) = nibbles(&bytes[quants_at..][..16]);
    let mut quants = [0; BLOCK];
    quants[..16].copy_from_slice(&low);
    quants[16..].copy_from_slice(&high);
    Block { quants, first: half_at(bytes, 0), second: if quants_at == 4 { half_at(bytes, 2) } else { 0 } }
}

/// As `q4`, with a bit field of the 32 fifth bits before the nibbles.
fn q5(bytes: &[u8], bits_at: usize) -> Block {
    let field =
        u32::from_le_bytes([bytes[bits_at], bytes[bits_at + 1], bytes[bits_at + 2], bytes[bits_at + 3]]);
    let (low, high) = nibbles(&bytes[bits_at + 4..][..16]);
    let mut quants = [0; BLOCK];
    for i in 0..16 {
        quants[i] = low[i] | ((field >> i & 1) as u8) << 4;
        quants[i + 16] = high[i] | ((field >> (i + 16) & 1) as u8) << 4;
    }
    Block { quants, first: half_at(bytes, 0), second: if bits_at == 4 { half_at(bytes, 2) } else { 0 } }
}

fn q8(bytes: &[u8]) -> Block {
    let mut quants = [0; BLOCK];
    for (quant, byte) in quants.iter_mut().zip(&bytes[2..]) {
        *quant = byte ^ 0x80;
    }
    Block { quants, first: half_at(bytes, 0), second: 0 }
}

/// d, e, 12 bytes of 6-bit scales and minima, 128 bytes of nibbles: a pair of blocks shares 32 of them.
fn q4_k(bytes: &[u8], index: usize) -> Block {
    let (first, second) = scale_and_minimum(&bytes[4..16], index);
    Block { quants: shared_nibbles(&bytes[16 + index / 2 * 32..], index % 2), first, second }
}

/// As `q4_k`, with 32 bytes of fifth bits before the nibbles: bit j of each belongs to block j.
fn q5_k(bytes: &[u8], index: usize) -> Block {
    let (first, second) = scale_and_minimum(&bytes[4..16], index);
    let mut quants = shared_nibbles(&bytes[48 + index / 2 * 32..], index % 2);
    for (quant, bits) in quants.iter_mut().zip(&bytes[16..48]) {
        *quant |= (bits >> index & 1) << 4;
    }
    Block { quants, first, second }
}

/// 128 bytes of low nibbles, 64 bytes of high bit pairs, 16 signed scales, d. Each half of 128 weights has blocks 0 and 1 in the
/// low and 2 and 3 in the high nibbles of 64 bytes, and block j in bit pair j of 32 bytes.
fn q6_k(bytes: &[u8], index: usize) -> Block {
    let (half, within) = (index / 4, index % 4);
    let mut quants = shared_nibbles(&bytes[half * 64 + within % 2 * 32..], within / 2);
    for (quant, bits) in quants.iter_mut().zip(&bytes[128 + half * 32..]) {
        *quant |= (bits >> (2 * within) & 3) << 4;
    }
    Block { quants, first: bytes[192 + 2 * index].into(), second: bytes[193 + 2 * index].into() }
}

fn nibbles(bytes: &[u8]) -> ([u8; 16], [u8; 16]) {
    let (mut low, mut high) = ([0; 16], [0; 16]);
    for i in 0..16 {
        low[i] = bytes[i] & 15;
        high[i] = bytes[i] >> 4;
    }
    (low, high)
}

fn shared_nibbles(bytes: &[u8], high: usize) -> [u8; BLOCK] {
    let mut quants = [0; BLOCK];
    for (quant, byte) in quants.iter_mut().zip(bytes) {
        *quant = byte >> (4 * high) & 15;
    }
    quants
}

/// 6-bit scale and minimum of block `j` out of 12 bytes: the first four pairs lie in the low 6 bits of bytes j and j + 4, the
/// others in nibbles of byte j + 4 and the top bits of the bytes before.
fn scale_and_minimum(bytes: &[u8], j: usize) -> (u16, u16) {
    let (scale, minimum) = if j < 4 {
        (bytes[j] & 63, bytes[j + 4] & 63)
    } else {
        (bytes[j + 4] & 15 | bytes[j - 4] >> 6 << 4, bytes[j + 4] >> 4 | bytes[j] >> 6 << 4)
    };
    (scale.into(), minimum.into())
}
