//! Gates and factors of many rows: in one product with the activation, or the library's product and the activation behind it, whichever
//! took less time before the first step.

use super::abi::bytes_of;
use super::blas::Blas;
use super::buffers::Buffers;
use super::config::{Widths, padded_rows};
use super::device::CudaBackend;
use super::error::CudaError;
use super::kernels::{Gemm, Store};
use super::memory::{Address, DeviceMemory};
use super::plan::{Algorithm, Shape};
use super::plan_cache::Algorithms;
use super::timing::{time, time_in_turn};

/// What the plans' file has in place of an algorithm, by the way that is taken.
const AT_ONCE: Algorithm = [0; 8];
const APART: Algorithm = [1; 8];

#[derive(Clone, Copy, Debug)]
enum Way {
    AtOnce,
    Apart,
}

impl CudaBackend {
    /// Whether gates and factors of the step's tokens are one product of many rows.
    pub(super) fn gates_at_once(&self) -> bool {
        let may = !self.config.deterministic && !self.has_adapters();
        may && self.kernels.has_large(self.tokens(), self.widths.mlp)
            && !self.gates_apart.contains(&padded_rows(self.tokens()))
    }

    fn gated(&self, rows: usize, weights: Address) -> Gemm {
        let Buffers { normed, activated, .. } = self.buffers;
        let Widths { hidden, mlp, .. } = self.widths;
        let store = Store::Gated(self.activation());
        Gemm { weights, inputs: normed, outputs: activated, m: rows, n: mlp, k: hidden, m_at: 0, store }
    }

    pub(super) fn gates_of_step(&self, weights: Address) -> Result<(), CudaError> {
        let gemm = Gemm { m_at: self.tokens_at(), ..self.gated(self.tokens(), weights) };
        // SAFETY: buffers hold the largest step's tokens; weights are of this shape.
        unsafe { self.kernels.gemm_large(self.launcher(), gemm) }
    }

    /// The way for each of these padded numbers of rows that has a choice: as kept, or measured and kept. How many of each there were.
    pub(super) fn find_gates(
        &mut self,
        blas: &mut Blas,
        rows: &[usize],
        known: &mut Algorithms,
    ) -> Result<(usize, usize), CudaError> {
        let (mut cached, mut searched) = (0, 0);
        let layers = 0..self.model.config().num_layers();
        let weights: Vec<Address> = layers.map(|layer| self.model.layer(layer).gate_up).collect();
        for rows in rows.iter().copied().filter(|rows| self.kernels.has_large(*rows, self.widths.mlp)) {
            let shape = Shape::of(&self.gated(rows, 0));
            let way = match known.get(&shape) {
                Some(way) => {
                    cached += 1;
                    *way
                }
                None => {
                    searched += 1;
                    self.search_gates(blas, rows, &weights)?
                }
            };
            known.insert(shape, way);
            if way == APART {
                self.gates_apart.insert(rows);
            }
        }
        Ok((cached, searched))
    }

    /// Times both ways on these weights in turn. Activations are lost.
    fn search_gates(
        &self,
        blas: &mut Blas,
        rows: usize,
        weights: &[Address],
    ) -> Result<Algorithm, CudaError> {
        let Buffers { gate_up, activated, .. } = self.buffers;
        let mlp = self.widths.mlp;
        let counts = DeviceMemory::new(&self.gpu, size_of::<i32>() as u64, "a number of rows")?;
        counts.write(&self.stream, 0, bytes_of(&[rows as i32]))?;
        let mut turn = weights.iter().copied().cycle();
        let mut has_library = true;
        let mut run = |way: Way| {
            let gated = self.gated(rows, turn.next().unwrap_or_default());
            // SAFETY: buffers hold the largest step's tokens, padded rows included; weights are of this shape.
            unsafe {
                match way {
                    Way::AtOnce => self.kernels.gemm_large(self.launcher(), gated),
                    Way::Apart => {
                        let both = Gemm { outputs: gate_up, n: 2 * mlp, store: Store::Bf16, ..gated };
                        has_library &= blas.run(&self.stream, &both)?;
                        let addresses = [counts.address(), gate_up, activated];
                        self.kernels.gate_act(self.launcher(), rows, addresses, mlp, self.activation())
                    }
                }
            }
        };
        let mut ways = [(Way::AtOnce, 0.0), (Way::Apart, 0.0)];
        for (way, alone) in &mut ways {
            // The first launch loads the kernel.
            run(*way)?;
            *alone = time(&self.stream, 1, || run(*way))?;
        }
        let seconds = time_in_turn(&ways, |way, times| time(&self.stream, times, || run(way)))?;
        Ok(if has_library && seconds[1] < seconds[0] { APART } else { AT_ONCE })
    }
}
