//! Products of activations and weights: nearly all of a forward pass.
//!
//! Every output is one f32 sum that walks K upward by the same operations for every number of tokens, thread count and
//! instruction set, K cut in fixed segments whose sums meet in a fixed tree. A row's result is therefore bitwise independent of
//! its batch mates, of chunking and of who computed it.

use thalweg_model::checkpoint::Matrix;

use super::pool::{Pool, SendPtr};
use activations::TILE;
use format::{Format, Geometry, LANES};
use job::PanelJob;
use memory::Pages;

pub use activations::{Activations, Inputs};
pub use pack::PackError;

mod activations;
#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod decode;
mod format;
mod job;
#[cfg(target_arch = "x86_64")]
mod kind;
mod memory;
mod pack;
mod panel;
mod scalar;
#[cfg(test)]
mod tests;

/// What quantised weights are multiplied with. Unquantised weights always meet f32 activations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Compute {
    /// Activations quantised to int8 by blocks of 32.
    Int8,
    /// f32 activations, weights dequantised.
    F32,
}

/// An immutable `[rows, cols]` matrix, one or more stored ones joined along rows, in the order that the kernels stream.
pub struct PackedMatrix {
    rows: usize,
    cols: usize,
    slabs: Vec<Slab>,
    data: Pages,
    compute: Compute,
}

/// Rows of one stored matrix.
struct Slab {
    geometry: Geometry,
    first_row: usize,
    rows: usize,
    /// Of its first panel.
    offset: usize,
}

impl Slab {
    fn panels(&self) -> usize {
        self.rows.div_ceil(LANES)
    }
}

impl PackedMatrix {
    /// Joins `parts` along rows. Rows stored for interleaved rope are put in half-split order within their heads of `head_dim`.
    /// `release` is called with each part, or stripes of it, whose bytes are not needed any more.
    pub fn pack(
        pool: &Pool,
        parts: &[Matrix<'_>],
        head_dim: usize,
        compute: Compute,
        release: &dyn Fn(&Matrix<'_>),
    ) -> Result<Self, PackError> {
        pack::pack(pool, parts, head_dim, compute, release)
    }

    /// Outputs.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Inputs.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Memory of the weights.
    pub fn bytes(&self) -> usize {
        self.data.len()
    }

    /// The forms of its activations that a product needs.
    pub fn inputs(&self) -> Inputs {
        let int8 = |slab: &Slab| self.compute == Compute::Int8 && is_quantised(slab);
        Inputs { int8: self.slabs.iter().any(int8), float: !self.slabs.iter().all(int8) }
    }

    /// Weights of one row, `cols` of them: the embedding of a token where the matrix is tied.
    pub fn row_to_f32(&self, row: usize, out: &mut [f32]) {
        assert!(row < self.rows && out.len() == self.cols, "row {row} of {} x {}", self.rows, self.cols);
        let slab = &self.slabs[self.slabs.partition_point(|slab| slab.first_row <= row) - 1];
        let within = row - slab.first_row;
        panel::lane_to_f32(self.panel(slab, within / LANES), &slab.geometry, within % LANES, out);
    }

    fn panel(&self, slab: &Slab, index: usize) -> &[u8] {
        &self.data[slab.offset + index * slab.geometry.panel_bytes..][..slab.geometry.panel_bytes]
    }

    fn panels(&self) -> usize {
        self.slabs.iter().map(Slab::panels).sum()
    }
}

impl std::fmt::Debug for PackedMatrix {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let formats: Vec<Format> = self.slabs.iter().map(|slab| slab.geometry.format).collect();
        f.debug_struct("PackedMatrix")
            .field("rows", &self.rows)
            .field("cols", &self.cols)
            .field("formats", &formats)
            .finish()
    }
}

fn is_quantised(slab: &Slab) -> bool {
    matches!(slab.geometry.format, Format::Quants { .. })
}

/// Tasks per thread: enough that a thread which the system put aside holds up little.
const TASKS_PER_THREAD: usize = 4;
/// Weights of a task, which stay in a core's own cache while the tokens pass.
const TASK_BYTES_MAX: usize = 512 << 10;
/// Tokens that pass all panels of a task before the next ones come, a multiple of the tile.
const TOKENS_PER_PASS: usize = 16 * TILE;

/// `out[token][row] = sum over k of x[token][k] * w[row][k]`, `out` row-major with `w.rows()` per token. `x` must have been
/// prepared with `w.inputs()` or more.
pub fn matmul(pool: &Pool, w: &PackedMatrix, x: &Activations, out: &mut [f32]) {
    let (given, needed) = (x.inputs(), w.inputs());
    assert_eq!(given, given.union(needed), "activations prepared in another form");
    assert_eq!(x.cols(), w.cols, "activations and weights differ in K");
    assert_eq!(out.len(), x.tokens() * w.rows, "outputs of {} tokens and {} rows", x.tokens(), w.rows);
    let panels = w.panels();
    let per_task = panels_per_task(panels, w.bytes(), pool.threads());
    let out = SendPtr::new(out.as_mut_ptr());
    pool.run(panels.div_ceil(per_task), &|task| {
        let first = task * per_task;
        let range = first..panels.min(first + per_task);
        for start in (0..x.tokens()).step_by(TOKENS_PER_PASS) {
            let tokens = start..x.tokens().min(start + TOKENS_PER_PASS);
            // SAFETY: tasks have panels of their own, hence outputs of their own.
            unsafe { run_panels(pool, w, x, range.clone(), tokens, out.get()) };
        }
    });
}

fn panels_per_task(panels: usize, bytes: usize, threads: usize) -> usize {
    let fair = panels.div_ceil(threads * TASKS_PER_THREAD);
    let cached = TASK_BYTES_MAX * panels / bytes.max(1);
    fair.min(cached).max(1)
}

/// # Safety
/// `out` has room for all tokens of `x` by all rows of `w`, and nobody else touches the outputs of these panels.
unsafe fn run_panels(
    pool: &Pool,
    w: &PackedMatrix,
    x: &Activations,
    panels: std::ops::Range<usize>,
    tokens: std::ops::Range<usize>,
    out: *mut f32,
) {
    let mut before = 0;
    for slab in &w.slabs {
        let mine = panels.start.max(before)..panels.end.min(before + slab.panels());
        for index in mine {
            let row = (index - before) * LANES;
            let job = PanelJob {
                geometry: &slab.geometry,
                panel: w.panel(slab, index - before),
                input: x,
                tokens: tokens.clone(),
                // SAFETY: the row is one of the matrix, so token 0's output of it is within `out`.
                out: unsafe { out.add(slab.first_row + row) },
                stride: w.rows,
                lanes: LANES.min(slab.rows - row),
            };
            if w.compute == Compute::F32 && is_quantised(slab) {
                job::run_widened(pool.isa(), &job);
            } else {
                job::run(pool.isa(), &job);
            }
        }
        before += slab.panels();
    }
}
