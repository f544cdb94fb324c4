//! How the elements of a stored tensor are laid out.

/// Stored element types, GGUF's block types included.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(non_camel_case_types)]
pub enum DType {
    /// IEEE single.
    F32,
    /// IEEE half.
    F16,
    /// bfloat16.
    BF16,
    /// 32 weights: f16 scale, 4-bit quants minus 8.
    Q4_0,
    /// 32 weights: f16 scale and minimum, 4-bit quants.
    Q4_1,
    /// 32 weights: f16 scale, fifth bits, 4-bit quants minus 16.
    Q5_0,
    /// 32 weights: f16 scale and minimum, fifth bits, 4-bit quants.
    Q5_1,
    /// 32 weights: f16 scale, signed bytes.
    Q8_0,
    /// 256 weights in 8 sub-blocks with 6-bit scales and minima, 4-bit quants.
    Q4_K,
    /// 256 weights in 8 sub-blocks with 6-bit scales and minima, 5-bit quants.
    Q5_K,
    /// 256 weights in 16 sub-blocks with 8-bit scales, 6-bit quants minus 32.
    Q6_K,
}

impl DType {
    /// Weights per block, 1 for plain types.
    pub fn block_elements(self) -> usize {
        self.row().0
    }

    /// Bytes per block.
    pub fn block_bytes(self) -> usize {
        self.row().1
    }

    /// Bytes of a row of `elements`, or None if it is no whole number of blocks or overflows.
    pub fn row_bytes(self, elements: usize) -> Option<usize> {
        let (per_block, bytes) = self.row();
        (elements.is_multiple_of(per_block)).then(|| (elements / per_block).checked_mul(bytes)).flatten()
    }

    fn row(self) -> (usize, usize) {
        match self {
            Self::F32 => (1, 4),
            Self::F16 | Self::BF16 => (1, 2),
            Self::Q4_0 => (32, 18),
            Self::Q4_1 => (32, 20),
            Self::Q5_0 => (32, 22),
            Self::Q5_1 => (32, 24),
            Self::Q8_0 => (32, 34),
            Self::Q4_K => (256, 144),
            Self::Q5_K => (256, 176),
            Self::Q6_K => (256, 210),
        }
    }
}
