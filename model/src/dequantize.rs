//! Stored weights to f32, plainly: the reference of every faster kernel, and the path of types that have none.

mod k_quants;

use half::{bf16, f16};

use crate::dtype::DType;

/// Decodes a row, a whole number of blocks.
///
/// # Panics
/// If `bytes` is not what `out.len()` elements of this type take.
pub fn dequantize_row(dtype: DType, bytes: &[u8], out: &mut [f32]) {
    assert_eq!(Some(bytes.len()), dtype.row_bytes(out.len()), "bytes of {} elements of {dtype:?}", out.len());
    let decode: fn(&[u8], &mut [f32]) = match dtype {
        DType::F32 => f32_element,
        DType::F16 => |block, out| out[0] = half_at(block, 0),
        DType::BF16 => |block, out| out[0] = bf16::from_le_bytes([block[0], block[1]]).to_f32(),
        DType::Q4_0 => q4_0,
        DType::Q4_1 => q4_1,
        DType::Q5_0 => q5_0,
        DType::Q5_1 => q5_1,
        DType::Q8_0 => q8_0,
        DType::Q4_K => k_quants::q4,
        DType::Q5_K => k_quants::q5,
        DType::Q6_K => k_quants::q6,
    };
    let blocks = bytes.chunks_exact(dtype.block_bytes());
    for (block, out) in blocks.zip(out.chunks_exact_mut(dtype.block_elements())) {
        decode(block, out);
    }
}

fn f32_element(block: &[u8], out: &mut [f32]) {
    out[0] = f32::from_le_bytes([block[0], block[1], block[2], block[3]]);
}

/// `[scale][16 bytes]`: low nibbles are weights 0 to 15, high nibbles 16 to 31; so in all 4 and 5-bit types.
fn q4_0(block: &[u8], out: &mut [f32]) {
    let scale = half_at(block, 0);
    for (index, byte) in block[2..18].iter().enumerate() {
        out[index] = scale * (f32::from(byte & 15) - 8.0);
        out[index + 16] = scale * (f32::from(byte >> 4) - 8.0);
    }
}

/// `[scale][minimum][16 bytes]`.
fn q4_1(block: &[u8], out: &mut [f32]) {
    let (scale, minimum) = (half_at(block, 0), half_at(block, 2));
    for (index, byte) in block[4..20].iter().enumerate() {
        out[index] = scale * f32::from(byte & 15) + minimum;
        out[index + 16] = scale * f32::from(byte >> 4) + minimum;
    }
}

/// `[scale][32 fifth bits][16 bytes]`.
fn q5_0(block: &[u8], out: &mut [f32]) {
    let scale = half_at(block, 0);
    for_five_bits(&block[2..6], &block[6..22], |index, quant| out[index] = scale * (quant - 16.0));
}

/// `[scale][minimum][32 fifth bits][16 bytes]`.
fn q5_1(block: &[u8], out: &mut [f32]) {
    let (scale, minimum) = (half_at(block, 0), half_at(block, 2));
    for_five_bits(&block[4..8], &block[8..24], |index, quant| out[index] = scale * quant + minimum);
}

/// `[scale][32 signed bytes]`.
fn q8_0(block: &[u8], out: &mut [f32]) {
    let scale = half_at(block, 0);
    for (out, byte) in out.iter_mut().zip(&block[2..34]) {
        *out = scale * f32::from(*byte as i8);
    }
}

fn for_five_bits(fifths: &[u8], nibbles: &[u8], mut put: impl FnMut(usize, f32)) {
    let fifths = u32::from_le_bytes([fifths[0], fifths[1], fifths[2], fifths[3]]);
    let fifth = |index: usize| ((fifths >> index & 1) << 4) as u8;
    for (index, byte) in nibbles.iter().enumerate() {
        put(index, f32::from(byte & 15 | fifth(index)));
        put(index + 16, f32::from(byte >> 4 | fifth(index + 16)));
    }
}

fn half_at(block: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([block[at], block[at + 1]]).to_f32()
}
