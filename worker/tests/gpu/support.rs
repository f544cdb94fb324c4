//! A GPU, memory on it with guards around, and numbers.

use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use half::bf16;
use thalweg_worker::backend::cpu::KvDtype;
use thalweg_worker::backend::cuda::Gpu;
use thalweg_worker::backend::cuda::abi::{Plain, bytes_of, bytes_of_mut};
use thalweg_worker::backend::cuda::context::Stream;
use thalweg_worker::backend::cuda::kernels::Kernels;
use thalweg_worker::backend::cuda::launch::Launcher;
use thalweg_worker::backend::cuda::memory::{Address, DeviceMemory};

/// The first GPU, opened once, bound to the calling thread.
pub(crate) fn gpu() -> Arc<Gpu> {
    static GPU: OnceLock<Arc<Gpu>> = OnceLock::new();
    let gpu = GPU.get_or_init(|| {
        Gpu::open(0, libraries().as_deref()).unwrap_or_else(|error| panic!("these tests need a GPU: {error}"))
    });
    gpu.bind().expect("a context");
    gpu.clone()
}

/// Folder of NVIDIA's libraries, where the usual places have none.
pub(crate) fn libraries() -> Option<PathBuf> {
    std::env::var_os("THALWEG_CUDA_LIBRARY_PATH").map(PathBuf::from)
}

/// A file of the workspace; on a machine without it, of the folder that the tests were brought in.
pub(crate) fn workspace(path: &str) -> PathBuf {
    let here = || Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    std::env::var_os("THALWEG_TEST_ROOT").map_or_else(here, PathBuf::from).join(path)
}

/// A folder or file of a test model.
pub(crate) fn model(variable: &str, default: &str, name: &str) -> PathBuf {
    let path = std::env::var_os(variable).map_or_else(|| workspace(default), PathBuf::from).join(name);
    assert!(path.exists(), "{} is missing: run make test-models", path.display());
    path
}

/// Kernels and a stream of their own.
pub(crate) struct Bench {
    pub(crate) gpu: Arc<Gpu>,
    pub(crate) stream: Stream,
    pub(crate) kernels: Kernels,
}

/// Bytes on each side of an array that nobody may touch.
const GUARD: u64 = 1024;
const GUARD_BYTE: u8 = 0xff;

/// An array on the GPU, between guards of NaN.
pub(crate) struct Array {
    memory: DeviceMemory,
    bytes: u64,
}

impl Array {
    pub(crate) fn at(&self) -> Address {
        self.memory.address() + GUARD
    }
}

impl Bench {
    pub(crate) fn new(head_dim: usize, dtype: KvDtype) -> Self {
        let gpu = gpu();
        let stream = Stream::new(&gpu).expect("a stream");
        let kernels = Kernels::load(&gpu, head_dim, dtype).expect("kernels");
        Self { gpu, stream, kernels }
    }

    pub(crate) fn launcher(&self) -> Launcher<'_> {
        Launcher { stream: &self.stream, overlapped: false }
    }

    /// A copy of these values.
    pub(crate) fn put<T: Plain>(&self, values: &[T]) -> Array {
        let array = self.poisoned(size_of_val(values) as u64);
        array.memory.write(&self.stream, GUARD, bytes_of(values)).expect("a copy");
        array
    }

    /// So many bytes of NaN.
    pub(crate) fn poisoned(&self, bytes: u64) -> Array {
        let memory = DeviceMemory::new(&self.gpu, bytes + 2 * GUARD, "a test").expect("memory");
        memory.fill(&self.stream, GUARD_BYTE).expect("a fill");
        self.stream.synchronize().expect("a stream");
        Array { memory, bytes }
    }

    /// The first `count` values, once all work is done; the guards must be whole.
    pub(crate) fn get<T: Plain + Default>(&self, array: &Array, count: usize) -> Vec<T> {
        self.stream.synchronize().expect("kernels that end");
        let mut values = vec![T::default(); count];
        assert!(size_of_val(&*values) as u64 <= array.bytes);
        array.memory.read(&self.stream, GUARD, bytes_of_mut(&mut values)).expect("a copy");
        for offset in [0, GUARD + array.bytes] {
            let mut guard = vec![0u8; GUARD as usize];
            array.memory.read(&self.stream, offset, &mut guard).expect("a copy");
            assert!(guard.iter().all(|byte| *byte == GUARD_BYTE), "a kernel wrote beyond its memory");
        }
        values
    }
}

/// Numbers between -1 and 1, the same for a seed.
pub(crate) fn numbers(count: usize, seed: u64) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f32 / 8_388_608.0 - 1.0
    };
    (0..count).map(|_| next()).collect()
}

/// The same as bf16.
pub(crate) fn halves(count: usize, seed: u64) -> Vec<u16> {
    numbers(count, seed).into_iter().map(|x| bf16::from_f32(x).to_bits()).collect()
}

/// The number that a bf16 stands for.
pub(crate) fn wide(bits: u16) -> f64 {
    f64::from(bf16::from_bits(bits).to_f32())
}

/// Sums in f64, `[m][n]`, of what `halves` gives for these seeds.
pub(crate) fn sums((m, n, k): (usize, usize, usize), (inputs, weights): (u64, u64)) -> Vec<f64> {
    let [inputs, weights] = [halves(m * k, inputs), halves(n * k, weights)]
        .map(|values| values.into_iter().map(wide).collect::<Vec<f64>>());
    let dot = |(row, column): (&[f64], &[f64])| row.iter().zip(column).map(|(a, b)| a * b).sum::<f64>();
    let rows = inputs.chunks(k);
    rows.flat_map(|row| weights.chunks(k).map(move |column| (row, column))).map(dot).collect()
}

/// A gate of that number times its factor.
pub(crate) fn gated(activation: i32, gate: f64, up: f64) -> f64 {
    let x = gate;
    match activation {
        0 => x / (1.0 + (-x).exp()) * up,
        _ => 0.5 * x * (1.0 + (0.797_884_560_802_865_4 * (x + 0.044715 * x * x * x)).tanh()) * up,
    }
}

/// Fails with the first value that is farther from what it should be than `tolerance` of it.
pub(crate) fn close(what: &str, got: &[f64], expected: &[f64], tolerance: impl Fn(usize) -> f64) {
    assert_eq!(got.len(), expected.len(), "{what}");
    let mut worst = 0f64;
    for (index, (got, expected)) in got.iter().zip(expected).enumerate() {
        let difference = (got - expected).abs();
        let tolerance = tolerance(index);
        assert!(
            difference <= tolerance,
            "{what}: value {index} is {got}, expected {expected} within {tolerance}"
        );
        worst = worst.max(difference / tolerance.max(f64::MIN_POSITIVE));
    }
    println!("{what}: {} values, worst at {:.3} of the tolerance", got.len(), worst);
}

/// Every KV dtype that the kernels have, and how to read it.
pub(crate) const KV_DTYPES: [KvDtype; 3] = [KvDtype::Bf16, KvDtype::Fp8E4m3, KvDtype::Fp8E5m2];

/// The number that a stored element stands for.
pub(crate) fn stored(dtype: KvDtype, bytes: &[u8]) -> f64 {
    let small = |mantissa_bits: i32, bias: i32| {
        let byte = i32::from(bytes[0]);
        let sign = if byte & 0x80 != 0 { -1.0 } else { 1.0 };
        let exponent = (byte & 0x7f) >> mantissa_bits;
        let mantissa = f64::from(byte & ((1 << mantissa_bits) - 1)) / f64::from(1 << mantissa_bits);
        match exponent {
            0 => sign * mantissa * 2f64.powi(1 - bias),
            _ => sign * (1.0 + mantissa) * 2f64.powi(exponent - bias),
        }
    };
    match dtype {
        KvDtype::F32 => unreachable!("no kernel stores f32"),
        KvDtype::Bf16 => wide(u16::from_le_bytes([bytes[0], bytes[1]])),
        KvDtype::Fp8E4m3 => small(3, 7),
        KvDtype::Fp8E5m2 => small(2, 15),
    }
}
