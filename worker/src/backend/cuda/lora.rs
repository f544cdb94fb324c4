//! LoRA adapters on a GPU: their matrices in bf16, and what rows that have one add to their products.

use std::sync::Arc;

use half::bf16;
use thalweg_model::adapter::{self, Adapter};
use thalweg_model::config::ModelConfig;

use super::abi::{Plain, bytes_of};
use super::config::CudaBackendConfig;
use super::context::{Gpu, Stream};
use super::device::CudaBackend;
use super::error::CudaError;
use super::kernels::{LoraArgs, Store};
use super::memory::{ALIGNMENT, Address, DeviceMemory, Pinned};
use crate::backend::cpu::Product;
use crate::plan::StepPlan;
use crate::runner::STEPS_IN_FLIGHT_MAX;

/// Parts of a product at most: q, k and v.
const PARTS_MAX: usize = 3;

/// What an adapter adds to some of a product's outputs; kernels/lora.cu has the same.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct LoraPart {
    /// `[rank][inputs]`; 0: it adds nothing.
    pub a: Address,
    /// `[outputs][rank]`.
    pub b: Address,
    pub rank: i32,
    /// Outputs of the product from here on.
    pub first: i32,
    pub outputs: i32,
    pub scale: f32,
}

const _: () = assert!(size_of::<LoraPart>() == 32);

// SAFETY: numbers whose sizes add up to the struct's, as asserted above.
unsafe impl Plain for LoraPart {}

/// Matrices of all adapters, and for each layer and product a table `[adapter][part]` of them.
#[derive(Debug)]
pub(super) struct CudaAdapters {
    memory: DeviceMemory,
    pub(super) count: usize,
    pub(super) rank_max: usize,
    tables: Vec<[Address; Product::ALL.len()]>,
}

/// Bytes of adapters, and of what a step needs for them.
pub fn adapter_bytes(adapters: &[Adapter], model: &ModelConfig, config: &CudaBackendConfig) -> u64 {
    if adapters.is_empty() {
        return 0;
    }
    let parts = (Product::ALL.iter().map(|product| product.parts().len())).sum::<usize>();
    let pieces = (model.num_layers() * (2 * parts * adapters.len() + Product::ALL.len())) as u64;
    let elements = adapters.iter().map(Adapter::elements).sum::<u64>();
    let [slots, low] = step_bytes(rank_max(adapters), config);
    2 * elements + pieces * ALIGNMENT + slots + low
}

fn rank_max(adapters: &[Adapter]) -> usize {
    adapters.iter().map(Adapter::rank).max().unwrap_or(0)
}

/// Of the tokens' adapters, and of A x.
fn step_bytes(rank_max: usize, config: &CudaBackendConfig) -> [u64; 2] {
    let tokens = config.max_tokens_per_step as u64;
    [4 * tokens, 4 * tokens * (PARTS_MAX * rank_max) as u64]
}

impl CudaAdapters {
    /// None where there are no adapters. The calling thread must be bound.
    pub(super) fn load(
        stream: &Stream,
        adapters: &[Adapter],
        model: &ModelConfig,
    ) -> Result<Option<Self>, CudaError> {
        if adapters.is_empty() {
            return Ok(None);
        }
        let mut image = Image::default();
        let tables: Vec<_> = (0..model.num_layers())
            .map(|layer| Product::ALL.map(|product| image.table(adapters, model, layer, product)))
            .collect();
        let memory = DeviceMemory::new(stream.gpu(), image.bytes.len() as u64, "adapters")?;
        image.relocate(memory.address());
        memory.write(stream, 0, &image.bytes)?;
        let tables = tables.into_iter().map(|offsets| offsets.map(|offset| memory.address() + offset));
        let (tables, count, rank_max) = (tables.collect(), adapters.len(), rank_max(adapters));
        Ok(Some(Self { memory, count, rank_max, tables }))
    }

    pub(super) fn table(&self, layer: usize, product: Product) -> Address {
        self.tables[layer][product as usize]
    }

    pub(super) fn bytes(&self) -> u64 {
        self.memory.bytes()
    }
}

/// Adapters' memory before it has an address.
#[derive(Default)]
struct Image {
    bytes: Vec<u8>,
    /// Where entries of tables stand, and what they will be.
    entries: Vec<(usize, LoraPart)>,
}

impl Image {
    /// Adds the matrices of one product, and room for its table; the table's offset.
    fn table(&mut self, adapters: &[Adapter], model: &ModelConfig, layer: usize, product: Product) -> u64 {
        let mut parts = Vec::with_capacity(adapters.len() * PARTS_MAX);
        for adapter in adapters {
            let mut first = 0;
            for part in product.parts() {
                let (outputs, _) = adapter::dims(model, *part);
                parts.push(adapter.low_rank(layer, *part).map_or(LoraPart::default(), |pair| LoraPart {
                    a: self.put(&pair.a),
                    b: self.put(&pair.b),
                    rank: adapter.rank() as i32,
                    first: first as i32,
                    outputs: outputs as i32,
                    scale: adapter.scale(),
                }));
                first += outputs;
            }
        }
        let table = self.align();
        for part in parts {
            self.entries.push((self.bytes.len(), part));
            self.bytes.resize(self.bytes.len() + size_of::<LoraPart>(), 0);
        }
        table as u64
    }

    fn align(&mut self) -> usize {
        self.bytes.resize(self.bytes.len().next_multiple_of(ALIGNMENT as usize), 0);
        self.bytes.len()
    }

    /// A matrix in bf16; its offset.
    fn put(&mut self, values: &[f32]) -> u64 {
        // Never at 0, which means none.
        if self.bytes.is_empty() {
            self.bytes.push(0);
        }
        let offset = self.align();
        self.bytes.extend(values.iter().flat_map(|value| bf16::from_f32(*value).to_le_bytes()));
        offset as u64
    }

    /// Writes the tables, offsets having become addresses.
    fn relocate(&mut self, base: Address) {
        for (at, mut part) in std::mem::take(&mut self.entries) {
            if part.a != 0 {
                part.a += base;
                part.b += base;
            }
            self.bytes[at..][..size_of::<LoraPart>()].copy_from_slice(bytes_of(&[part]));
        }
    }
}

/// Adapters of the tokens of the step in work, and memory for A x.
#[derive(Debug)]
pub(super) struct LoraStep {
    /// One per token; empty in a step without adapters.
    tokens: Vec<i32>,
    slots: DeviceMemory,
    low: DeviceMemory,
    /// A step's copy is read while the next one is written.
    sides: [Pinned; STEPS_IN_FLIGHT_MAX],
    next: usize,
    count: usize,
}

impl LoraStep {
    pub(super) fn new(
        gpu: &Arc<Gpu>,
        adapters: &CudaAdapters,
        config: &CudaBackendConfig,
    ) -> Result<Self, CudaError> {
        let [slots, low] = step_bytes(adapters.rank_max, config);
        let side = || Pinned::new(gpu, slots as usize);
        Ok(Self {
            tokens: Vec::with_capacity(config.max_tokens_per_step),
            slots: DeviceMemory::new(gpu, slots, "adapters of tokens")?,
            low: DeviceMemory::new(gpu, low, "adapters' results")?,
            sides: [side()?, side()?],
            next: 0,
            count: adapters.count,
        })
    }

    /// Takes over a plan's adapters; an error says which there is not.
    pub(super) fn load(&mut self, plan: &StepPlan) -> Result<(), String> {
        self.tokens.clear();
        if !has_adapters(plan) {
            return Ok(());
        }
        for row in &plan.rows {
            check(row.adapter.0, self.count)?;
            self.tokens.extend(std::iter::repeat_n(row.adapter.0 as i32, row.input.len()));
        }
        Ok(())
    }

    /// Some row of the step in work has an adapter.
    pub(super) fn is_active(&self) -> bool {
        !self.tokens.is_empty()
    }

    /// Enqueues the copy of a step's adapters. The side is free: the step that used it last has been collected.
    pub(super) fn send(&mut self, stream: &Stream) -> Result<(), CudaError> {
        let bytes = bytes_of(&self.tokens);
        let side = &mut self.sides[self.next];
        side[..bytes.len()].copy_from_slice(bytes);
        self.slots.copy_from(stream, 0, &side[..bytes.len()])?;
        self.next = (self.next + 1) % STEPS_IN_FLIGHT_MAX;
        Ok(())
    }
}

/// Refuses a plan with adapters where there are none.
pub(super) fn check_none(plan: &StepPlan) -> Result<(), String> {
    plan.rows.iter().try_for_each(|row| check(row.adapter.0, 0))
}

fn has_adapters(plan: &StepPlan) -> bool {
    plan.rows.iter().any(|row| row.adapter.0 > 0)
}

fn check(adapter: u32, count: usize) -> Result<(), String> {
    if adapter as usize <= count { Ok(()) } else { Err(format!("adapter {adapter} of {count}")) }
}

impl CudaBackend {
    /// Some row of the step in work has an adapter.
    pub(super) fn has_adapters(&self) -> bool {
        self.lora.as_ref().is_some_and(LoraStep::is_active)
    }

    /// Adds to a product's outputs what the adapters of rows with one change of it.
    pub(super) fn adapt(
        &self,
        (layer, product): (usize, Product),
        inputs: Address,
        outputs: Address,
        store: Store,
    ) -> Result<(), CudaError> {
        let (Some(adapters), Some(step)) = (self.model.adapters(), &self.lora) else { return Ok(()) };
        if !step.is_active() {
            return Ok(());
        }
        let model = self.model.config();
        let dims = product.parts().iter().map(|part| adapter::dims(model, *part));
        let (n, part_max, k) =
            dims.fold((0, 0, 0), |(n, most, _), (outputs, inputs)| (n + outputs, most.max(outputs), inputs));
        let args = LoraArgs {
            counts: self.at(self.layout.counts),
            slots: step.slots.address(),
            parts: adapters.table(layer, product),
            n_parts: product.parts().len(),
            inputs,
            k,
            low: step.low.address(),
            rank_max: adapters.rank_max,
            outputs,
            n,
            part_max,
            is_bf16: store == Store::Bf16,
        };
        // SAFETY: adapters fit the model, and slots were checked when the step was loaded; buffers hold the largest step.
        unsafe { self.kernels.lora(self.launcher(), self.tokens(), args) }
    }
}
