//! From a checkpoint's rows to panels, once, at start. Pages of the file are let go as soon as they have been read.

use thalweg_model::checkpoint::Matrix;
use thalweg_model::dtype::DType;

use super::super::pool::Pool;
use super::decode;
use super::format::{BLOCKS_PER_SUPER, Format, Geometry, LANES};
use super::memory::Pages;
use super::panel;
use super::{Compute, PackedMatrix, Slab};

/// Bytes of the file that are read before their pages are let go: bounds what is held twice.
const STRIPE_BYTES: usize = 16 << 20;

/// Panels that one task packs.
const PANELS_PER_TASK: usize = 8;

/// A matrix cannot be packed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PackError {
    /// Rows have no whole number of blocks, or the bytes are not as many as the shape says.
    #[error("{rows} x {cols} weights of {dtype:?} do not fit {bytes} bytes")]
    Shape {
        /// Element type.
        dtype: DType,
        /// Outputs.
        rows: usize,
        /// Inputs.
        cols: usize,
        /// Bytes that are there.
        bytes: usize,
    },
    /// Matrices that are to be one have different numbers of inputs.
    #[error("a matrix of {cols} inputs cannot be joined to one of {first}")]
    Join {
        /// Inputs of the first.
        first: usize,
        /// Inputs of another.
        cols: usize,
    },
    /// Rows stored for interleaved rope are no whole heads.
    #[error("{rows} rows stored for interleaved rope are no whole heads of {head_dim}")]
    Heads {
        /// Outputs.
        rows: usize,
        /// Rows of a head.
        head_dim: usize,
    },
    /// The system gives no memory.
    #[error("no memory for {bytes} bytes of packed weights: {source}")]
    Memory {
        /// What was asked for.
        bytes: usize,
        /// What the system said.
        source: std::io::Error,
    },
}

pub(super) fn pack(
    pool: &Pool,
    parts: &[Matrix<'_>],
    head_dim: usize,
    compute: Compute,
    release: &dyn Fn(&Matrix<'_>),
) -> Result<PackedMatrix, PackError> {
    let cols = parts.first().map_or(0, |part| part.cols);
    let mut slabs = Vec::with_capacity(parts.len());
    let (mut rows, mut bytes) = (0, 0);
    for part in parts {
        check(part, cols, head_dim)?;
        let geometry = Geometry::new(part.dtype, cols);
        slabs.push(Slab { geometry, first_row: rows, rows: part.rows, offset: bytes });
        rows += part.rows;
        bytes += part.rows.div_ceil(LANES) * geometry.panel_bytes;
    }
    let mut data = Pages::zeroed(bytes).map_err(|source| PackError::Memory { bytes, source })?;
    for (slab, part) in slabs.iter().zip(parts) {
        let panels = &mut data[slab.offset..][..slab.panels() * slab.geometry.panel_bytes];
        pack_part(pool, &slab.geometry, part, head_dim, panels, release);
    }
    Ok(PackedMatrix { rows, cols, slabs, data, compute })
}

fn check(part: &Matrix<'_>, cols: usize, head_dim: usize) -> Result<(), PackError> {
    let Matrix { dtype, rows, data, .. } = *part;
    if part.cols != cols {
        return Err(PackError::Join { first: cols, cols: part.cols });
    }
    let expected = dtype.row_bytes(cols).and_then(|bytes| bytes.checked_mul(rows));
    if expected != Some(data.len()) || rows == 0 || cols == 0 {
        return Err(PackError::Shape { dtype, rows, cols, bytes: data.len() });
    }
    let whole_heads = head_dim > 0 && head_dim.is_multiple_of(2) && rows.is_multiple_of(head_dim);
    if part.interleaved && !whole_heads {
        return Err(PackError::Heads { rows, head_dim });
    }
    Ok(())
}

/// In stripes of whole panels, and of whole heads where rows move within theirs.
fn pack_part(
    pool: &Pool,
    geometry: &Geometry,
    part: &Matrix<'_>,
    head_dim: usize,
    panels: &mut [u8],
    release: &dyn Fn(&Matrix<'_>),
) {
    let row_bytes = part.data.len() / part.rows;
    let unit = if part.interleaved { LANES * head_dim } else { LANES };
    let stripe_rows = (STRIPE_BYTES / row_bytes / unit).max(1) * unit;
    let stripes = part.data.chunks(stripe_rows * row_bytes);
    for (rows, panels) in stripes.zip(panels.chunks_mut(stripe_rows / LANES * geometry.panel_bytes)) {
        let stripe = Matrix { rows: rows.len() / row_bytes, data: rows, ..*part };
        pool.chunks(panels, PANELS_PER_TASK * geometry.panel_bytes, &|task, panels| {
            for (index, panel) in panels.chunks_exact_mut(geometry.panel_bytes).enumerate() {
                pack_panel(geometry, &stripe, head_dim, (task * PANELS_PER_TASK + index) * LANES, panel);
            }
        });
        release(&stripe);
    }
}

fn pack_panel(geometry: &Geometry, part: &Matrix<'_>, head_dim: usize, first_row: usize, panel: &mut [u8]) {
    let row_bytes = part.data.len() / part.rows;
    for lane in 0..LANES.min(part.rows - first_row) {
        let row = first_row + lane;
        let source = if part.interleaved { interleaved_row(row, head_dim) } else { row };
        let stored = &part.data[source * row_bytes..][..row_bytes];
        match geometry.format {
            Format::Quants { .. } => pack_lane(geometry, part.dtype, stored, lane, panel),
            Format::F32 => panel::write_plain(panel, 4, lane, stored),
            Format::F16 | Format::Bf16 => panel::write_plain(panel, 2, lane, stored),
        }
    }
}

fn pack_lane(geometry: &Geometry, dtype: DType, stored: &[u8], lane: usize, panel: &mut [u8]) {
    for index in 0..geometry.blocks() {
        panel::write_block(panel, geometry, lane, index, &decode::block(dtype, stored, index));
        if geometry.super_bytes > 0 && index % BLOCKS_PER_SUPER == 0 {
            let outer = decode::outer(dtype, stored, index);
            panel::write_super(panel, geometry, lane, index / BLOCKS_PER_SUPER, outer);
        }
    }
}

/// Where the row that half-split rope wants at `row` is stored: pairs (2i, 2i + 1) of a head become (i, i + head_dim / 2).
fn interleaved_row(row: usize, head_dim: usize) -> usize {
    let (head, within, half) = (row / head_dim, row % head_dim, head_dim / 2);
    head * head_dim + if within < half { 2 * within } else { 2 * (within - half) + 1 }
}
