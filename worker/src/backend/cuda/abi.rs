//! Types that kernels and host share; kernels/common.cuh has the same. All are plain numbers without padding.

use crate::plan::KV_GROUPS;

/// Places in the step buffer's `counts`; those of a KV group are followed by the other group's.
pub const COUNTS: usize = 16;
pub const N_TOKENS: usize = 0;
pub const N_LOGIT_ROWS: usize = 1;
pub const N_SPLIT: usize = 2;
pub const N_MERGE: usize = 4;
pub const N_WHOLE: usize = 6;
pub const N_SLOT_INITS: usize = 8;
pub const N_DECODE: usize = 9;
pub const N_SHARED: usize = 11;
pub const N_POOLED: usize = 13;

/// Ids with a bias that a slot holds.
pub const BIAS_MAX: usize = 1024;
/// Ids that end a sequence that a slot holds.
pub const END_IDS_MAX: usize = 272;
/// Alternatives beside a token.
pub const TOP_MAX: usize = 20;
/// Query rows (tokens times query heads per KV head) of a split item.
pub const SPLIT_ROWS: usize = 16;
/// Tokens of an attention chunk.
pub const CHUNK_TOKENS: usize = 256;

/// Types whose bytes the GPU reads or writes.
///
/// # Safety
/// No padding, and every bit pattern is a value.
pub unsafe trait Plain: Copy {}

/// A run of tokens of one sequence.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RowMeta {
    pub start: i32,
    pub len: i32,
    pub context: i32,
    pub slot: i32,
    pub table_offset: [i32; KV_GROUPS],
    pub table_first: [i32; KV_GROUPS],
}

/// Some query rows against one chunk, or against all their chunks from `chunk` to `partial`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AttnItem {
    pub row: i32,
    pub q_start: i32,
    pub chunk: i32,
    pub partial: i32,
}

/// Some query rows against a run of keys. `partial` is -1 where it is the row's only run, whose block meets the row's other parts;
/// else runs meet in the block that ends last. All parts of a row stand together, those of its runs last; of an only run there is none.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DecodeItem {
    pub row: i32,
    /// Of the row, as `RowMeta` has them.
    pub start: i32,
    pub len: i32,
    pub context: i32,
    /// Where its table would begin if it had all blocks.
    pub table: i32,
    pub key_begin: i32,
    pub key_end: i32,
    pub partial: i32,
    pub partial_first: i32,
    pub n_partials: i32,
    pub n_runs: i32,
    pub reserved: i32,
}

impl DecodeItem {
    /// Takes over what the kernel needs of the row: one load behind the other costs it a microsecond.
    pub fn follow(&mut self, row: &RowMeta, group: usize) {
        (self.start, self.len, self.context) = (row.start, row.len, row.context);
        self.table = row.table_offset[group] - row.table_first[group];
    }
}

/// One-token rows that stand one behind the other, against keys that all of them have: whole tiles. The first row's result goes to
/// `partial`, the next one's `stride` behind it.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SharedItem {
    pub row: i32,
    pub n_rows: i32,
    pub key_begin: i32,
    pub key_end: i32,
    pub partial: i32,
    pub stride: i32,
}

/// Partial results of the same query rows, ascending chunks.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MergeItem {
    pub row: i32,
    pub q_start: i32,
    pub partial_first: i32,
    pub n_partials: i32,
}

/// A position whose logits are wanted; -1 for what is not.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LogitRow {
    pub token: i32,
    pub slot: i32,
    pub target: i32,
    pub top: i32,
    pub output_index: i32,
    /// Number of its mask in the step; -1: anything may be drawn.
    pub mask: i32,
}

/// Tokens whose hidden states are added up.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PooledRow {
    /// First of them in the step.
    pub start: i32,
    pub len: i32,
    pub slot: i32,
    /// 1: they are added to the sum that the slot keeps; 0: to nothing.
    pub goes_on: i32,
    /// Which of the step's vectors the sum becomes; -1: the slot keeps it.
    pub vector: i32,
}

/// How a slot draws.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct SlotParams {
    pub temperature: f32,
    pub top_k: i32,
    pub top_p: f32,
    pub min_p: f32,
    pub presence: f32,
    pub frequency: f32,
    pub repetition: f32,
    pub choice: i32,
    pub seed: u64,
    pub min_tokens: i32,
    pub n_bias: i32,
    pub n_end: i32,
    pub has_penalty: i32,
    pub reserved: [i32; 2],
}

/// A slot's new owner.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct SlotStart {
    pub slot: i32,
    pub last_token: i32,
    pub tokens_offset: i32,
    pub n_prompt: i32,
    pub n_output: i32,
    pub bias_offset: i32,
    pub end_offset: i32,
    pub reserved: i32,
    pub params: SlotParams,
}

/// Added to the logit of an id.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Bias {
    pub id: i32,
    pub value: f32,
}

/// What a logit row yielded.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Sampled {
    /// -1: nothing was drawn.
    pub token: i32,
    pub logprob: f32,
    pub rank: i32,
    pub target_logprob: f32,
    pub target_rank: i32,
    pub n_top: i32,
    pub top_ids: [i32; TOP_MAX],
    pub top_logprobs: [f32; TOP_MAX],
}

const _: () = {
    assert!(size_of::<RowMeta>() == 32 && size_of::<AttnItem>() == 16 && size_of::<MergeItem>() == 16);
    assert!(size_of::<LogitRow>() == 24 && size_of::<SlotParams>() == 64 && size_of::<SlotStart>() == 96);
    assert!(size_of::<DecodeItem>() == 48 && size_of::<SharedItem>() == 24);
    assert!(size_of::<PooledRow>() == 20 && size_of::<Bias>() == 8 && size_of::<Sampled>() == 184);
};

// SAFETY: numbers, and structs of them whose sizes are the sums of their fields', as asserted above.
unsafe impl Plain for i32 {}
// SAFETY: as above.
unsafe impl Plain for u32 {}
// SAFETY: as above.
unsafe impl Plain for u16 {}
// SAFETY: as above.
unsafe impl Plain for u8 {}
// SAFETY: as above.
unsafe impl Plain for f32 {}
// SAFETY: as above.
unsafe impl Plain for [i32; 2] {}
// SAFETY: as above.
unsafe impl Plain for [f32; 2] {}
// SAFETY: as above.
unsafe impl Plain for RowMeta {}
// SAFETY: as above.
unsafe impl Plain for AttnItem {}
// SAFETY: as above.
unsafe impl Plain for DecodeItem {}
// SAFETY: as above.
unsafe impl Plain for SharedItem {}
// SAFETY: as above.
unsafe impl Plain for MergeItem {}
// SAFETY: as above.
unsafe impl Plain for LogitRow {}
// SAFETY: as above.
unsafe impl Plain for PooledRow {}
// SAFETY: as above.
unsafe impl Plain for SlotStart {}
// SAFETY: as above.
unsafe impl Plain for Bias {}
// SAFETY: as above.
unsafe impl Plain for Sampled {}

/// A slice as the GPU sees it.
pub fn bytes_of<T: Plain>(values: &[T]) -> &[u8] {
    // SAFETY: plain values have no padding, so that all their bytes are initialised.
    unsafe { std::slice::from_raw_parts(values.as_ptr().cast(), size_of_val(values)) }
}

/// Room for values that come from the GPU.
pub fn bytes_of_mut<T: Plain>(values: &mut [T]) -> &mut [u8] {
    // SAFETY: as above, and every bit pattern is a value.
    unsafe { std::slice::from_raw_parts_mut(values.as_mut_ptr().cast(), size_of_val(values)) }
}

/// Words as bytes.
pub fn bytes_of_words(words: &mut [u64]) -> &mut [u8] {
    // SAFETY: numbers have no padding, and every bit pattern is one.
    unsafe { std::slice::from_raw_parts_mut(words.as_mut_ptr().cast(), size_of_val(words)) }
}

/// Value `index` of an array of them.
///
/// # Panics
/// If it lies beyond the bytes.
pub fn read_at<T: Plain + Default>(bytes: &[u8], index: usize) -> T {
    let mut value = [T::default()];
    bytes_of_mut(&mut value).copy_from_slice(&bytes[index * size_of::<T>()..][..size_of::<T>()]);
    value[0]
}
