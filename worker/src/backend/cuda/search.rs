//! cublasLt's plans for a model, found by time before the first step.

use std::path::PathBuf;
use tokio::time::Instant;

use super::blas::Blas;
use super::buffers::Buffers;
use super::config::{Widths, padded_rows};
use super::device::CudaBackend;
use super::driver::driver_version;
use super::error::CudaError;
use super::kernels::{Gemm, SMALL_ROWS, Store};
use super::memory::Address;
use super::plan::Shape;
use super::plan_cache::{Machine, read, write};
use super::shape::Bucket;

/// How plans of products are found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PlanSearch {
    /// The library's first choice.
    FirstChoice,
    /// The fastest of several, measured; kept in this folder.
    Timed(Option<PathBuf>),
}

/// One of a layer's products, or the logits: the same shape in all layers.
struct Product {
    gemm: Gemm,
    weights: Vec<Address>,
    /// Most rows that it is asked for.
    rows: usize,
}

impl CudaBackend {
    /// Plans of all shapes that recorded steps and whole chunks have. Activations are lost.
    pub(super) fn search_plans(&mut self) -> Result<(), CudaError> {
        let PlanSearch::Timed(folder) = self.config.plans.clone() else { return Ok(()) };
        let Some(mut blas) = self.blas.take() else { return Ok(()) };
        let begin = Instant::now();
        let machine = Machine {
            gpu: self.gpu.name().to_owned(),
            driver: driver_version()?,
            cublas_lt: Blas::version(),
        };
        let path = folder.map(|folder| machine.file(&folder));
        let mut known = path.as_ref().map(|path| read(path, &machine)).unwrap_or_default();
        let (mut cached, mut searched) = (0, 0);
        self.fill_inputs()?;
        for (gemm, weights) in self.shapes() {
            let shape = Shape::of(&gemm);
            if let Some(algorithm) = known.get(&shape)
                && blas.adopt(shape, *algorithm)?
            {
                cached += 1;
                continue;
            }
            // SAFETY: buffers are sized for the largest step, padded rows included; weights are of this shape.
            if let Some(algorithm) = unsafe { blas.search(&self.stream, &gemm, &weights) }? {
                known.insert(shape, algorithm);
            }
            searched += 1;
        }
        let (kept, found) = self.find_gates(&mut blas, &self.searched_rows(), &mut known)?;
        (cached, searched) = (cached + kept, searched + found);
        self.blas = Some(blas);
        self.stream.synchronize()?;
        if let Some(path) = path.filter(|_| searched > 0)
            && let Err(error) = write(&path, &machine, &known)
        {
            tracing::info!(file = %path.display(), %error, "plans of cublasLt not kept: starts will search again");
        }
        tracing::debug!(cached, searched, seconds = begin.elapsed().as_secs_f64(), "plans of cublasLt");
        Ok(())
    }

    /// Products with the numbers of rows that matter, and all weights of that shape; not those that own kernels take.
    fn shapes(&self) -> Vec<(Gemm, Vec<Address>)> {
        let rows = self.searched_rows();
        let mut shapes = Vec::new();
        for Product { gemm, weights, rows: most } in self.products() {
            let fitting = rows.iter().copied().filter(|m| *m <= most);
            let fitting = fitting.filter(|m| !self.kernels.has_clusters(*m, gemm.n, gemm.store));
            shapes.extend(fitting.map(|m| (Gemm { m, ..gemm }, weights.clone())));
        }
        shapes
    }

    /// Padded numbers of rows of recorded steps, and of prompts' chunks: powers of two, and the largest.
    fn searched_rows(&self) -> Vec<usize> {
        let most = self.config.max_tokens_per_step;
        let buckets = Bucket::all(&self.bucket_limits());
        let of_buckets = buckets.into_iter().map(|bucket| match bucket {
            Bucket::Decode(tokens) | Bucket::Shared(tokens) | Bucket::Mixed(tokens) => tokens,
        });
        let chunks = (10..).map(|power| 1 << power).take_while(|chunk| *chunk < most);
        let all = of_buckets.chain(chunks).chain([most]).filter(|rows| *rows > SMALL_ROWS).map(padded_rows);
        all.collect::<std::collections::BTreeSet<_>>().into_iter().collect()
    }

    fn products(&self) -> [Product; 5] {
        let Widths { hidden, query, qkv, mlp } = self.widths;
        let Buffers { normed, attended, activated, residual, projected, gate_up, last, logits, .. } =
            self.buffers;
        let config = self.model.config();
        let layers: Vec<_> = (0..config.num_layers()).map(|layer| *self.model.layer(layer)).collect();
        let rows = padded_rows(self.config.max_tokens_per_step);
        let of_layers =
            |weights: fn(&super::weights::LayerWeights) -> Address| layers.iter().map(weights).collect();
        let product = |inputs, outputs, (n, k), store, weights| Product {
            gemm: Gemm { weights: 0, inputs, outputs, m: 0, n, k, m_at: 0, store },
            weights,
            rows,
        };
        // Projections with a norm of their own are not added to the residual at once.
        let (sums, store) =
            if config.post_norms { (projected, Store::F32) } else { (residual, Store::AddF32) };
        let of_logits =
            product(last, logits, (config.vocab_size, hidden), Store::F32, vec![self.model.output()]);
        [
            product(normed, self.buffers.qkv, (qkv, hidden), Store::Bf16, of_layers(|w| w.qkv)),
            product(attended, sums, (hidden, query), store, of_layers(|w| w.o)),
            product(normed, gate_up, (2 * mlp, hidden), Store::Bf16, of_layers(|w| w.gate_up)),
            product(activated, sums, (hidden, mlp), store, of_layers(|w| w.down)),
            Product { rows: padded_rows(self.rows_per_pass), ..of_logits },
        ]
    }

    /// Products of zeros take less power and less time than others.
    fn fill_inputs(&self) -> Result<(), CudaError> {
        let Widths { hidden, query, mlp, .. } = self.widths;
        let Buffers { normed, attended, activated, last, .. } = self.buffers;
        let tokens = padded_rows(self.config.max_tokens_per_step);
        let arrays = [(normed, tokens * hidden), (attended, tokens * query), (activated, tokens * mlp)];
        for (address, count) in arrays.into_iter().chain([(last, padded_rows(self.rows_per_pass) * hidden)]) {
            // SAFETY: the buffers have this size, see `ActivationBytes`.
            unsafe { self.kernels.fill_random(self.launcher(), address, count as u64, 1, 1.0)? };
        }
        Ok(())
    }
}
