//! What launches of the larger kernels take.

use super::super::launch::Args;
use super::super::memory::Address;
use crate::backend::cpu::KvDtype;

/// What attention of one layer works on.
#[derive(Clone, Copy, Debug)]
pub struct AttentionArgs {
    pub counts: Address,
    pub group: usize,
    pub rows: Address,
    pub tables: Address,
    pub split_items: Address,
    pub merge_items: Address,
    pub whole_items: Address,
    pub decode_items: Address,
    pub shared_items: Address,
    pub tickets: Address,
    pub qkv: Address,
    /// That `qkv` has room for.
    pub tokens: usize,
    pub keys: Address,
    pub values: Address,
    pub out: Address,
    pub partial_o: Address,
    pub partial_ml: Address,
    pub q_heads: usize,
    pub kv_heads: usize,
    pub scale: f32,
    pub window: usize,
    /// Blocks along items of each kernel; 0 leaves it out.
    pub blocks: AttentionBlocks,
}

/// Blocks along items, by kernel. Rows of few queries are either split and merged or decoded, the others either whole or prefilled.
#[derive(Clone, Copy, Debug, Default)]
pub struct AttentionBlocks {
    pub split: usize,
    pub merge: usize,
    pub whole: usize,
    pub decode: usize,
    /// Goes ahead of `decode`; blocks take as many of its items as there are.
    pub shared: usize,
    /// Its items are those of `whole`; blocks take as many as there are.
    pub prefill: usize,
}

/// What a product works on.
#[derive(Clone, Copy, Debug)]
pub struct Gemm {
    /// `[n][k]`.
    pub weights: Address,
    /// `[m][k]`.
    pub inputs: Address,
    /// `[m][n]`.
    pub outputs: Address,
    pub m: usize,
    pub n: usize,
    pub k: usize,
    /// Where the true number of rows stands on the GPU; 0: it is `m`.
    pub m_at: Address,
    pub store: Store,
}

/// What becomes of a product's sums.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Store {
    /// Rounded to bf16.
    Bf16,
    /// As they are.
    F32,
    /// Added to what is there, in f32.
    AddF32,
    /// Weights are `n` rows of gates, then `n` of factors; the activation of that number over a gate, times its factor, in bf16.
    /// The library does not have it.
    Gated(i32),
}

/// Where finished projections come from and go.
#[derive(Clone, Copy, Debug)]
pub struct QkvArgs {
    pub counts: Address,
    pub positions: Address,
    pub places: Address,
    pub qkv: Address,
    pub bias: Address,
    pub q_norm: Address,
    pub k_norm: Address,
    pub epsilon: f32,
    pub rope: Address,
    pub q_heads: usize,
    pub kv_heads: usize,
    pub keys: Address,
    pub values: Address,
    pub dtype: KvDtype,
}

/// Where sampling reads and writes.
#[derive(Clone, Copy, Debug)]
pub struct SampleArgs {
    pub counts: Address,
    pub rows: Address,
    pub first: usize,
    pub logits: Address,
    pub vocab: usize,
    pub params: Address,
    pub bias: Address,
    pub ends: Address,
    pub last_token: Address,
    pub seen: Address,
    pub masks: Address,
    pub out: Address,
}

/// What new slots are made of.
#[derive(Clone, Copy, Debug)]
pub struct SlotsArgs {
    pub counts: Address,
    pub starts: Address,
    pub tokens: Address,
    pub start_bias: Address,
    pub start_ends: Address,
    pub params: Address,
    pub bias: Address,
    pub ends: Address,
    pub last_token: Address,
    pub seen: Address,
    pub vocab: usize,
}

impl Gemm {
    /// All but what becomes of the sums.
    pub(super) fn args(&self) -> Args {
        let args = Args::new().address(self.weights).address(self.inputs).address(self.outputs);
        args.int(self.n).int(self.k).int(self.m).address(self.m_at)
    }
}

impl Store {
    /// As kernels have it.
    pub(super) fn number(self) -> i32 {
        match self {
            Self::Bf16 => 0,
            Self::F32 => 1,
            Self::AddF32 => 2,
            Self::Gated(activation) => 3 + activation,
        }
    }
}
