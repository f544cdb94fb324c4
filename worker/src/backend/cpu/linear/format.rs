//! The packed form of a matrix: what the kernels stream.
//!
//! A panel is 16 output rows, one vector lane each, over all of K. Quantised types share one layout. For each block of 32 along
//! K it has unsigned quants in 8 groups of 64 bytes, group g holding for lane r the quants of k = 4g..4g + 4 (what one VNNI
//! instruction takes). Quants of fewer than 8 bits are cut in planes:
//!
//! - low plane, 4 bits: byte v * 64 + 4r + b has group v in its low and group v + 4 in its high nibble;
//! - high plane of 5-bit quants: byte 4r + b has the top bit of group j at bit j;
//! - high planes of 6-bit quants: byte 4r + b of plane p has the top two bits of group 4p + j at bits 2j and 2j + 1.
//!
//! A panel stores all its blocks' quants, then all its blocks' scales, then what the K-quants have per 256 weights. Nothing is
//! rounded: every weight is exactly the one of the file. Unquantised types store k-major, 16 lanes together.

use thalweg_model::dtype::DType;

/// Rows of a panel.
pub(super) const LANES: usize = 16;
/// Weights along K that share a scale; also the block of the activations.
pub(super) const BLOCK: usize = 32;
/// Groups of four along K within a block.
pub(super) const GROUPS: usize = BLOCK / 4;
/// Blocks that share the K-quants' outer scales.
pub(super) const BLOCKS_PER_SUPER: usize = 8;
/// Most parts into which the sum over K is cut.
pub(super) const SEGMENTS_MAX: usize = 8;
/// Levels of the tree that joins their sums.
pub(super) const TREE_LEVELS: usize = 3;

/// How a panel's weights are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Format {
    /// Unsigned quants of 4, 5, 6 or 8 bits with scales.
    Quants { bits: usize, scales: Scales },
    /// IEEE single.
    F32,
    /// bfloat16.
    Bf16,
    /// IEEE half.
    F16,
}

/// How quants become weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Scales {
    /// `d * (q - 2^(bits - 1))`; a block has 16 d in f16.
    Offset,
    /// `d * q + m`; a block has 16 d, then 16 m, in f16.
    Minimum,
    /// `(d * s) * q - (e * t)`; a block has 16 s, then 16 t, in bytes; 256 weights have 16 d, then 16 e, in f16.
    SuperMinimum,
    /// `(d * s) * (q - 2^(bits - 1))`; a block has 16 signed s for its first half and 16 for its second; 256 weights have 16 d in
    /// f16.
    SuperHalves,
}

impl Format {
    /// The packed form of a stored type.
    pub(super) fn of(dtype: DType) -> Self {
        let quants = |bits, scales| Self::Quants { bits, scales };
        match dtype {
            DType::F32 => Self::F32,
            DType::F16 => Self::F16,
            DType::BF16 => Self::Bf16,
            DType::Q4_0 => quants(4, Scales::Offset),
            DType::Q4_1 => quants(4, Scales::Minimum),
            DType::Q5_0 => quants(5, Scales::Offset),
            DType::Q5_1 => quants(5, Scales::Minimum),
            DType::Q8_0 => quants(8, Scales::Offset),
            DType::Q4_K => quants(4, Scales::SuperMinimum),
            DType::Q5_K => quants(5, Scales::SuperMinimum),
            DType::Q6_K => quants(6, Scales::SuperHalves),
        }
    }
}

impl Scales {
    /// Bytes per block of a panel.
    fn bytes(self) -> usize {
        match self {
            Self::Offset | Self::SuperMinimum | Self::SuperHalves => 2 * LANES,
            Self::Minimum => 4 * LANES,
        }
    }

    /// Bytes per 256 weights along K of a panel.
    fn super_bytes(self) -> usize {
        match self {
            Self::Offset | Self::Minimum => 0,
            Self::SuperMinimum => 4 * LANES,
            Self::SuperHalves => 2 * LANES,
        }
    }
}

/// Where things lie in a panel, and how its sums over K are cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Geometry {
    pub(super) format: Format,
    /// K.
    pub(super) cols: usize,
    /// Parts of the sum over K, each `cols / segments` long.
    pub(super) segments: usize,
    /// Bytes of quants per block.
    pub(super) quant_bytes: usize,
    /// Bytes of scales per block.
    pub(super) scale_bytes: usize,
    /// Bytes per 256 weights.
    pub(super) super_bytes: usize,
    /// Where the scales begin.
    pub(super) scales_at: usize,
    /// Where the outer scales begin.
    pub(super) supers_at: usize,
    /// Bytes of a panel, a multiple of 64.
    pub(super) panel_bytes: usize,
}

impl Geometry {
    /// For `cols` weights of `dtype` per row: whole blocks, where the type has blocks.
    pub(super) fn new(dtype: DType, cols: usize) -> Self {
        let format = Format::of(dtype);
        let (quant_bytes, scale_bytes, super_bytes) = match format {
            Format::Quants { bits, scales } => {
                (bits * LANES * BLOCK / 8, scales.bytes(), scales.super_bytes())
            }
            Format::F32 => (4 * LANES * BLOCK, 0, 0),
            Format::Bf16 | Format::F16 => (2 * LANES * BLOCK, 0, 0),
        };
        let scales_at = cols * quant_bytes / BLOCK;
        let supers_at = scales_at + cols / BLOCK * scale_bytes;
        let end = supers_at + cols / (BLOCK * BLOCKS_PER_SUPER) * super_bytes;
        let segments = segments(cols, dtype.block_elements().max(BLOCK));
        let panel_bytes = end.next_multiple_of(64);
        Self {
            format,
            cols,
            segments,
            quant_bytes,
            scale_bytes,
            super_bytes,
            scales_at,
            supers_at,
            panel_bytes,
        }
    }

    /// Blocks of 32 along K.
    pub(super) fn blocks(&self) -> usize {
        self.cols / BLOCK
    }
}

/// The largest power of two up to 8 that cuts `cols` in whole blocks.
fn segments(cols: usize, block: usize) -> usize {
    let cuts = |s: &usize| cols.is_multiple_of(s * block);
    [SEGMENTS_MAX, 4, 2].into_iter().find(cuts).unwrap_or(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn segments_are_whole_blocks() {
        let check = |dtype, cols, expected| {
            assert_eq!(Geometry::new(dtype, cols).segments, expected, "{dtype:?} {cols}")
        };
        check(DType::Q4_1, 576, 2);
        check(DType::Q4_1, 1536, 8);
        check(DType::Q5_0, 640, 4);
        check(DType::Q4_K, 1024, 4);
        check(DType::Q4_K, 2048, 8);
        check(DType::Q6_K, 256, 1);
        check(DType::Q8_0, 32, 1);
        check(DType::F32, 576, 2);
        check(DType::BF16, 100, 1);
    }

    #[test]
    fn packed_bytes_stay_near_the_files() {
        let all = [
            DType::Q4_0,
            DType::Q4_1,
            DType::Q5_0,
            DType::Q5_1,
            DType::Q8_0,
            DType::Q4_K,
            DType::Q5_K,
            DType::Q6_K,
        ];
        for dtype in all.into_iter().chain([DType::F32, DType::F16, DType::BF16]) {
            let packed = Geometry::new(dtype, 2048).panel_bytes as f64;
            let stored = (16 * dtype.row_bytes(2048).unwrap()) as f64;
            assert!((1.0..1.08).contains(&(packed / stored)), "{dtype:?}: {packed} for {stored}");
        }
    }
}
