//! Gates and factors of many rows in one product, on Hopper.

use super::super::context::Gpu;
use super::super::error::CudaError;
use super::super::launch::{Args, Grid, Kernel, Launcher, resident_clusters};
use super::cluster::CLUSTER_ROWS;
use super::maps;
use super::{Gemm, Kernels, Store};

/// Rows of a tile, and its gates.
const TILE_ROWS: usize = 128;
pub(super) const TILE_GATES: usize = 112;
const THREADS: usize = 384;
const SHARED_BYTES: usize = 225_280;
/// Blocks of a cluster, whose tiles are neighbours.
const CLUSTER: usize = 2;

/// The kernel, and how many of its clusters the card runs at once.
#[derive(Clone, Copy, Debug)]
pub(super) struct Large {
    gated: Kernel,
    resident: usize,
}

impl Large {
    /// From `find(name, shared_bytes)`; None where the card cannot run it.
    pub(super) fn load(
        gpu: &Gpu,
        find: impl Fn(String, usize) -> Result<Kernel, CudaError>,
    ) -> Result<Option<Self>, CudaError> {
        if !gpu.is_hopper() || gpu.shared_bytes() < SHARED_BYTES {
            return Ok(None);
        }
        let gated = find("gemm_large_gated".into(), SHARED_BYTES)?;
        Ok(Some(Self { gated, resident: resident_clusters(gated, grid(1))? }))
    }
}

impl Kernels {
    /// Whether there is such a kernel for `m` rows and `n` columns of the result.
    pub fn has_large(&self, m: usize, n: usize) -> bool {
        self.large.is_some() && m > CLUSTER_ROWS && n.is_multiple_of(8)
    }

    /// A gated product for which `has_large`.
    ///
    /// # Safety
    /// See `embed`.
    pub unsafe fn gemm_large(&self, to: Launcher<'_>, gemm: Gemm) -> Result<(), CudaError> {
        let (Some(large), Store::Gated(activation)) = (self.large, gemm.store) else { return Ok(()) };
        debug_assert!(self.has_large(gemm.m, gemm.n), "{gemm:?}");
        let args = Args::new().address(gemm.outputs).int(gemm.n).int(gemm.k).int(gemm.m).address(gemm.m_at);
        let maps = maps::large_maps(&gemm, TILE_ROWS / CLUSTER)?;
        let clusters = clusters(gemm.m, gemm.n).min(large.resident);
        // SAFETY: the caller's promise.
        unsafe { to.launch_with_maps(large.gated, grid(clusters), args.i32(activation), &maps) }
    }
}

fn grid(clusters: usize) -> Grid {
    Grid::of(clusters * CLUSTER, THREADS).with_shared(SHARED_BYTES).with_cluster(CLUSTER)
}

/// Pairs of tiles: along rows where their number is even, else along gates.
fn clusters(m: usize, n: usize) -> usize {
    let (rows, gates) = (m.div_ceil(TILE_ROWS), n.div_ceil(TILE_GATES));
    if rows.is_multiple_of(CLUSTER) { rows / CLUSTER * gates } else { rows * gates.div_ceil(CLUSTER) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pairs_lie_along_rows_where_none_is_left_over() {
        assert_eq!(clusters(65, 14_336), 64);
        assert_eq!(clusters(129, 14_336), 128);
        assert_eq!(clusters(257, 14_336), 3 * 64);
        assert_eq!(clusters(8192, 14_336), 32 * 128);
        assert_eq!([clusters(100, 8), clusters(100, 120), clusters(300, 232)], [1, 1, 6]);
    }
}
