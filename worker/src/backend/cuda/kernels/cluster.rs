//! Products of few rows, though too many for `gemm_small` at its best, on Hopper: blocks of a cluster share rows, and divide sums over K.

use super::super::context::Gpu;
use super::super::error::CudaError;
use super::super::launch::{Args, Grid, Kernel, Launcher, resident_clusters};
use super::super::memory::Address;
use super::load::kv_dtype;
use super::maps::{self, Weights};
use super::{Gemm, Kernels, QkvArgs, Store};

/// Fewest and most rows of a product that clusters take; fewer come sooner from `gemm_small`.
pub const CLUSTER_ROWS_MIN: usize = 13;
pub const CLUSTER_ROWS: usize = 64;
/// Rows of weights of a tile, a block's.
pub const CLUSTER_TILE: usize = 128;
/// Two warp groups that multiply, two warps that fetch, and two that make factors.
const THREADS: usize = 384;
/// Blocks with which weights stream nearly as fast as the card can.
const BLOCKS_MIN: usize = 80;

/// How blocks of a cluster divide a product.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Division {
    /// Tiles, whose blocks share what they fetch of the rows.
    features: usize,
    /// Parts of K.
    splits: usize,
    shared_bytes: usize,
}

/// In the order in which they are preferred. One without parts of K takes any number of tiles, the others as many as run at once.
const DIVISIONS: [Division; 3] = [
    Division { features: 4, splits: 1, shared_bytes: 196_608 },
    Division { features: 2, splits: 2, shared_bytes: 229_376 },
    Division { features: 2, splits: 3, shared_bytes: 208_896 },
];

impl Division {
    const fn blocks(self) -> usize {
        self.features * self.splits
    }

    fn grid(self, clusters: usize) -> Grid {
        let blocks = self.blocks();
        Grid::of(clusters * blocks, THREADS).with_shared(self.shared_bytes).with_cluster(blocks)
    }
}

/// Kernels of a division, and how many of its clusters the card runs at once.
#[derive(Clone, Copy, Debug)]
pub(super) struct Clustered {
    division: Division,
    /// By what becomes of the sums.
    gemm: [Kernel; 4],
    qkv: Kernel,
    resident: usize,
}

/// Rows that are a norm's but for a factor of each, and the sums of squares that it comes from: `parts` a row.
#[derive(Clone, Copy, Debug)]
pub struct Factors {
    pub squares: Address,
    pub parts: usize,
    pub epsilon: f32,
}

/// What a product that adds leaves for the one behind it: `rows`, bf16, are the outputs times the norm's `weight`; `squares` have a sum a tile.
#[derive(Clone, Copy, Debug)]
pub struct Behind {
    pub weight: Address,
    pub rows: Address,
    pub squares: Address,
}

/// The first division that gives a product of so many tiles enough blocks, all of which run at once where they wait for one another.
fn choose(tiles: usize, resident: [usize; DIVISIONS.len()]) -> Option<usize> {
    let fits = |(division, resident): (&Division, usize)| {
        let clusters = tiles.div_ceil(division.features);
        tiles * division.splits >= BLOCKS_MIN && (division.splits == 1 || clusters <= resident)
    };
    DIVISIONS.iter().zip(resident).position(fits)
}

impl Clustered {
    /// All divisions, from `find(name, shared_bytes)`.
    pub(super) fn load(
        gpu: &Gpu,
        find: impl Fn(String, usize) -> Result<Kernel, CudaError>,
    ) -> Result<Option<[Self; DIVISIONS.len()]>, CudaError> {
        let has_room = DIVISIONS.iter().all(|division| division.shared_bytes < gpu.shared_bytes());
        if !gpu.is_hopper() || !has_room {
            return Ok(None);
        }
        let load = |division: Division| {
            let Division { features, splits, shared_bytes } = division;
            let of = |name: &str| find(format!("gemm_cluster_{name}_{features}_{splits}"), shared_bytes);
            let qkv = of("qkv")?;
            Ok::<_, CudaError>(Self {
                division,
                gemm: [of("bf16")?, of("f32")?, of("add")?, of("gated")?],
                qkv,
                resident: resident_clusters(qkv, division.grid(1))?,
            })
        };
        let [a, b, c] = DIVISIONS;
        Ok(Some([load(a)?, load(b)?, load(c)?]))
    }

    fn gemm(&self, store: Store) -> Kernel {
        let [bf16, f32, add, gated] = self.gemm;
        match store {
            Store::Bf16 => bf16,
            Store::F32 => f32,
            Store::AddF32 => add,
            Store::Gated(_) => gated,
        }
    }

    fn grid(&self, tiles: usize) -> Grid {
        self.division.grid(tiles.div_ceil(self.division.features).min(self.resident))
    }
}

impl Kernels {
    fn clustered(&self, m: usize, n: usize, store: Store) -> Option<&Clustered> {
        let granule = if matches!(store, Store::Gated(_)) { 8 } else { 16 };
        if !(CLUSTER_ROWS_MIN..=CLUSTER_ROWS).contains(&m) || !n.is_multiple_of(granule) {
            return None;
        }
        let all = self.clustered.as_ref()?;
        choose(tiles(n, store), all.map(|of| of.resident)).map(|index| &all[index])
    }

    /// Whether clusters take a product of `m` rows and `n` columns.
    pub fn has_clusters(&self, m: usize, n: usize, store: Store) -> bool {
        self.clustered(m, n, store).is_some()
    }

    /// Whether they also leave, of a product that adds, what the norm behind it needs.
    pub fn leaves_norm(&self, m: usize, n: usize) -> bool {
        self.clustered(m, n, Store::AddF32).is_some_and(|of| of.division.splits > 1)
    }

    /// A product for which `has_clusters`; with `behind`, one that adds and for which `leaves_norm`.
    ///
    /// # Safety
    /// See `embed`.
    pub unsafe fn gemm_cluster(
        &self,
        to: Launcher<'_>,
        gemm: Gemm,
        factors: Option<Factors>,
        behind: Option<Behind>,
    ) -> Result<(), CudaError> {
        debug_assert!(self.has_clusters(gemm.m, gemm.n, gemm.store), "{gemm:?}");
        debug_assert!(behind.is_none() || self.leaves_norm(gemm.m, gemm.n), "{gemm:?}");
        let Some(of) = self.clustered(gemm.m, gemm.n, gemm.store) else { return Ok(()) };
        let layout = if matches!(gemm.store, Store::Gated(_)) { Weights::Gated } else { Weights::Plain };
        let args = with_factors(args(&gemm).i32(gemm.store.number()), factors);
        let behind = behind.map_or([0; 3], |behind| [behind.weight, behind.rows, behind.squares]);
        let args = behind.into_iter().fold(args, Args::address);
        let maps = maps::gemm_maps(&gemm, layout, CLUSTER_ROWS / of.division.features)?;
        // SAFETY: the caller's promise.
        unsafe { to.launch_with_maps(of.gemm(gemm.store), of.grid(tiles(gemm.n, gemm.store)), args, &maps) }
    }

    /// Queries, keys and values as `qkv_finish` leaves them, heads having no norms of their own.
    ///
    /// # Safety
    /// See `embed`.
    pub unsafe fn gemm_cluster_qkv(
        &self,
        to: Launcher<'_>,
        gemm: Gemm,
        factors: Option<Factors>,
        a: QkvArgs,
    ) -> Result<(), CudaError> {
        debug_assert!(self.has_clusters(gemm.m, gemm.n, Store::Bf16), "{gemm:?}");
        let Some(of) = self.clustered(gemm.m, gemm.n, Store::Bf16) else { return Ok(()) };
        let args = args(&gemm).address(a.positions).address(a.places).address(a.bias).address(a.rope);
        let args = args.address(a.keys).address(a.values).int(a.q_heads).int(a.kv_heads).int(self.head_dim);
        let args = args.i32(kv_dtype(a.dtype).map_or(0, |(number, _)| number));
        let layout = Weights::Heads { head_dim: self.head_dim };
        let maps = maps::gemm_maps(&gemm, layout, CLUSTER_ROWS / of.division.features)?;
        let grid = of.grid(tiles(gemm.n, Store::Bf16));
        // SAFETY: the caller's promise.
        unsafe { to.launch_with_maps(of.qkv, grid, with_factors(args, factors), &maps) }
    }
}

/// Half of a gated tile's rows are factors.
fn tiles(n: usize, store: Store) -> usize {
    n.div_ceil(if matches!(store, Store::Gated(_)) { CLUSTER_TILE / 2 } else { CLUSTER_TILE })
}

fn args(gemm: &Gemm) -> Args {
    Args::new().address(gemm.outputs).int(gemm.n).int(gemm.k).int(gemm.m).address(gemm.m_at)
}

fn with_factors(args: Args, factors: Option<Factors>) -> Args {
    let Factors { squares, parts, epsilon } =
        factors.unwrap_or(Factors { squares: 0, parts: 0, epsilon: 0.0 });
    args.address(squares).int(parts).f32(epsilon)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn products_are_divided_into_blocks_that_fill_a_card() {
        // As an H200 has it: 30 clusters of four blocks, 17 of six.
        let chosen = |tiles| choose(tiles, [30, 30, 17]).map(|index| DIVISIONS[index].splits);
        // Llama 3.1 8B: gate and up, queries with keys and values, the others.
        assert_eq!([224, 48, 32].map(chosen), [Some(1), Some(2), Some(3)]);
        assert_eq!([1002, 80, 79, 60, 40].map(chosen), [Some(1), Some(1), None, Some(2), Some(2)]);
        // Too few to fill a card; and more clusters than run at once, which wait for one another.
        assert_eq!([26, 27, 34, 35].map(chosen), [None, Some(3), Some(3), None]);
    }
}
