//! From mapped files to the GPU: through two pinned buffers, one filled while the other is copied.

use half::bf16;
use indicatif::{ProgressBar, ProgressStyle};
use thalweg_model::checkpoint::Matrix;
use thalweg_model::dequantize::dequantize_row;
use thalweg_model::dtype::DType;

use super::context::{Event, Stream};
use super::error::CudaError;
use super::memory::{DeviceMemory, Pinned};

/// One buffer: large enough for the bus, small beside the machine's memory.
const STAGING_BYTES: usize = 64 << 20;
/// How long a copy of one buffer may take.
const COPY_TIMEOUT: std::time::Duration = std::time::Duration::from_secs(60);

/// Copies tensors in order.
pub(super) struct Uploader<'a> {
    stream: &'a Stream,
    memory: &'a DeviceMemory,
    staging: [(Pinned, Event); 2],
    /// Buffer that is filled next.
    next: usize,
    threads: usize,
    progress: ProgressBar,
}

impl<'a> Uploader<'a> {
    pub(super) fn new(stream: &'a Stream, memory: &'a DeviceMemory) -> Result<Self, CudaError> {
        let buffer =
            || Ok::<_, CudaError>((Pinned::new(stream.gpu(), STAGING_BYTES)?, Event::new(stream.gpu())?));
        let style = ProgressStyle::with_template("{msg} {wide_bar} {bytes}/{total_bytes} {bytes_per_sec}");
        let progress = ProgressBar::new(memory.bytes()).with_message("weights");
        if let Ok(style) = style {
            progress.set_style(style);
        }
        let threads = std::thread::available_parallelism().map_or(1, usize::from);
        Ok(Self { stream, memory, staging: [buffer()?, buffer()?], next: 0, threads, progress })
    }

    /// A stored matrix, decoded to bf16, rows of q and k in the order of half-split rope.
    pub(super) fn matrix(
        &mut self,
        offset: u64,
        matrix: &Matrix<'_>,
        head_dim: usize,
    ) -> Result<(), CudaError> {
        let row_bytes = 2 * matrix.cols;
        let rows_at_once = (STAGING_BYTES / row_bytes).max(1);
        for first in (0..matrix.rows).step_by(rows_at_once) {
            let rows = rows_at_once.min(matrix.rows - first);
            let at = offset + (first * row_bytes) as u64;
            let threads = self.threads;
            self.put(at, rows * row_bytes, |out| convert_rows(matrix, first, head_dim, threads, out))?;
        }
        Ok(())
    }

    /// A vector, rounded to bf16.
    pub(super) fn vector(&mut self, offset: u64, values: &[f32]) -> Result<(), CudaError> {
        self.put(offset, 2 * values.len(), |out| to_bf16(values, out))
    }

    /// Waits for all copies.
    pub(super) fn finish(self) -> Result<(), CudaError> {
        self.stream.synchronize()?;
        self.progress.finish_and_clear();
        Ok(())
    }

    fn put(&mut self, offset: u64, bytes: usize, fill: impl FnOnce(&mut [u8])) -> Result<(), CudaError> {
        let (pinned, event) = &mut self.staging[self.next];
        // What this buffer was used for last; nothing at first.
        event.wait(COPY_TIMEOUT)?;
        fill(&mut pinned[..bytes]);
        self.memory.copy_from(self.stream, offset, &pinned[..bytes])?;
        event.record(self.stream)?;
        self.next = 1 - self.next;
        self.progress.inc(bytes as u64);
        Ok(())
    }
}

/// Rows `first..` of a matrix, as many as `out` has room for.
fn convert_rows(matrix: &Matrix<'_>, first: usize, head_dim: usize, threads: usize, out: &mut [u8]) {
    let row_bytes = 2 * matrix.cols;
    let rows = out.len() / row_bytes;
    let rows_each = rows.div_ceil(threads).max(1);
    std::thread::scope(|scope| {
        for (index, part) in out.chunks_mut(rows_each * row_bytes).enumerate() {
            scope.spawn(move || {
                let mut row = vec![0.0; matrix.cols];
                for (i, out) in part.chunks_exact_mut(row_bytes).enumerate() {
                    convert_row(matrix, first + index * rows_each + i, head_dim, &mut row, out);
                }
            });
        }
    });
}

fn convert_row(matrix: &Matrix<'_>, row: usize, head_dim: usize, buffer: &mut [f32], out: &mut [u8]) {
    let stored = if matrix.interleaved { interleaved_row(row, head_dim) } else { row };
    let stored_bytes = matrix.data.len() / matrix.rows;
    let bytes = &matrix.data[stored * stored_bytes..][..stored_bytes];
    if matrix.dtype == DType::BF16 {
        return out.copy_from_slice(bytes);
    }
    dequantize_row(matrix.dtype, bytes, buffer);
    to_bf16(buffer, out);
}

/// Where a row of half-split rope stands among those of interleaved rope.
fn interleaved_row(row: usize, head_dim: usize) -> usize {
    let (head, at) = (row / head_dim, row % head_dim);
    let half = head_dim / 2;
    head * head_dim + if at < half { 2 * at } else { 2 * (at - half) + 1 }
}

fn to_bf16(values: &[f32], out: &mut [u8]) {
    for (value, out) in values.iter().zip(out.chunks_exact_mut(2)) {
        out.copy_from_slice(&bf16::from_f32(*value).to_le_bytes());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_converted_and_reordered() {
        let stored: Vec<u8> = (0..16).flat_map(|i| (i as f32).to_le_bytes()).collect();
        let check = |interleaved: bool, first: usize, expected: &[f32]| {
            let matrix = Matrix { dtype: DType::F32, rows: 8, cols: 2, data: &stored, interleaved };
            let mut out = vec![0; 2 * expected.len()];
            convert_rows(&matrix, first, 4, 3, &mut out);
            let got: Vec<f32> = out.chunks(2).map(|b| bf16::from_le_bytes([b[0], b[1]]).to_f32()).collect();
            assert_eq!(got, expected, "{interleaved} {first}");
        };
        check(false, 1, &[2.0, 3.0, 4.0, 5.0]);
        // Heads of four: rows 0, 2, 1, 3.
        check(true, 0, &[0.0, 1.0, 4.0, 5.0, 2.0, 3.0, 6.0, 7.0]);
        check(true, 5, &[12.0, 13.0, 10.0, 11.0]);
    }
}
