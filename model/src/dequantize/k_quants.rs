//! K-quants: super-blocks of 256 weights whose sub-blocks have quantised scales.

use super::half_at;

/// `[scale][minimum][12 bytes of 6-bit scales and minima][128 bytes]`: each 32 bytes hold two sub-blocks, the first in
/// low nibbles.
pub(super) fn q4(block: &[u8], out: &mut [f32]) {
    let quants = &block[16..144];
    for (sub, out) in out.chunks_exact_mut(32).enumerate() {
        let (scale, minimum) = sub_block(block, sub);
        for (out, byte) in out.iter_mut().zip(&quants[sub / 2 * 32..][..32]) {
            *out = scale * f32::from(nibble(*byte, sub)) - minimum;
        }
    }
}

/// As Q4_K, with 32 bytes of fifth bits before the nibbles: bit `sub` of byte `i` belongs to weight i of that sub-block.
pub(super) fn q5(block: &[u8], out: &mut [f32]) {
    let (fifths, quants) = (&block[16..48], &block[48..176]);
    for (sub, out) in out.chunks_exact_mut(32).enumerate() {
        let (scale, minimum) = sub_block(block, sub);
        let bytes = quants[sub / 2 * 32..][..32].iter().zip(fifths);
        for (out, (byte, fifth)) in out.iter_mut().zip(bytes) {
            let quant = nibble(*byte, sub) | (fifth >> sub & 1) << 4;
            *out = scale * f32::from(quant) - minimum;
        }
    }
}

/// `[128 bytes of low nibbles][64 bytes of upper pairs of bits][16 signed scales][scale]`, by halves of 128 weights:
/// quarter q of a half has its nibbles in 32 bytes shared with quarter q + 2 or q - 2, its upper bits at 2q of 32 bytes.
pub(super) fn q6(block: &[u8], out: &mut [f32]) {
    let scale = half_at(block, 208);
    for (part, out) in out.chunks_exact_mut(32).enumerate() {
        let (half, quarter) = (part / 4, part % 4);
        let low = &block[half * 64 + quarter % 2 * 32..][..32];
        let high = &block[128 + half * 32..][..32];
        for (index, out) in out.iter_mut().enumerate() {
            let quant = nibble(low[index], quarter / 2) | (high[index] >> (2 * quarter) & 3) << 4;
            let sub_scale = block[192 + part * 2 + index / 16] as i8;
            *out = scale * f32::from(sub_scale) * (f32::from(quant) - 32.0);
        }
    }
}

/// Scale and minimum of a sub-block of Q4_K and Q5_K. The first four have six bits in a byte each; the last four have
/// their upper two bits in the top of those bytes.
fn sub_block(block: &[u8], sub: usize) -> (f32, f32) {
    let packed = &block[4..16];
    let (scale, minimum) = if sub < 4 {
        (packed[sub] & 63, packed[sub + 4] & 63)
    } else {
        let scale = packed[sub + 4] & 15 | packed[sub - 4] >> 6 << 4;
        let minimum = packed[sub + 4] >> 4 | packed[sub] >> 6 << 4;
        (scale, minimum)
    };
    (half_at(block, 0) * f32::from(scale), half_at(block, 2) * f32::from(minimum))
}

/// The low nibble for even numbers, the high one for odd.
fn nibble(byte: u8, number: usize) -> u8 {
    if number.is_multiple_of(2) { byte & 15 } else { byte >> 4 }
}
