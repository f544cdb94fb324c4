//! Settings of GPU workers.

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use thalweg_proto::value;

/// What only GPUs know; with `--device auto`, workers on a CPU take no notice of it.
#[derive(Args, Clone, Debug)]
pub struct GpuConfig {
    /// Share of the GPU's memory that this worker may take, others' use included
    #[arg(long, env = "THALWEG_GPU_MEMORY_UTILIZATION", value_name = "SHARE", default_value_t = 0.9, value_parser = share)]
    pub gpu_memory_utilization: f64,

    /// Folder of NVIDIA's libraries (libcuda.so.1, libcublasLt.so.13). Default: the loader's places, pip's and /usr/local/cuda
    #[arg(long, env = "THALWEG_CUDA_LIBRARY_PATH", value_name = "FOLDER", value_parser = value::folder)]
    pub cuda_library_path: Option<PathBuf>,

    /// Where the fastest plans of large products, which a first start measures, are kept; off: nowhere, every start measures.
    /// Default: thalweg in the user's cache folder
    #[arg(long, env = "THALWEG_CUDA_PLAN_CACHE", value_name = "FOLDER|off")]
    pub cuda_plan_cache: Option<PathBuf>,

    /// Own kernels alone: on one kind of card the same tokens whatever the batch, chunking, cache hits and preemptions. On a CPU it
    /// is so without the flag
    #[arg(long, env = "THALWEG_DETERMINISTIC")]
    pub deterministic: bool,

    /// Launch every kernel by itself instead of recorded steps: slower, for debugging
    #[arg(long, env = "THALWEG_ENFORCE_EAGER")]
    pub enforce_eager: bool,

    /// Seconds after which a step on the GPU counts as hung and the worker ends
    #[arg(long, env = "THALWEG_GPU_STEP_TIMEOUT", value_name = "SECONDS", default_value_t = 60)]
    #[arg(value_parser = value::whole(1..=3600u64))]
    pub gpu_step_timeout: u64,

    /// Where weights come from
    #[arg(long, env = "THALWEG_LOAD_FORMAT", value_enum, default_value_t = LoadFormat::Auto)]
    pub load_format: LoadFormat,

    /// Of the random weights of --load-format dummy
    #[arg(long, env = "THALWEG_SEED", value_name = "N", default_value_t = 0, value_parser = value::whole(0..=u64::MAX))]
    pub seed: u64,
}

impl GpuConfig {
    /// Folder of kept plans, if there is one.
    pub fn plan_cache(&self) -> Option<PathBuf> {
        let usual = || {
            let folder = |name| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
            let users = folder("XDG_CACHE_HOME").or_else(|| Some(folder("HOME")?.join(".cache")));
            users.map(|users| users.join("thalweg"))
        };
        self.cuda_plan_cache.clone().or_else(usual).filter(|folder| folder.as_os_str() != "off")
    }
}

/// Where weights come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum LoadFormat {
    /// The checkpoint.
    Auto,
    /// Random numbers in the shape of config.json: for measurements, on a GPU.
    Dummy,
}

fn share(text: &str) -> Result<f64, String> {
    let value: f64 = text.parse().map_err(|_| "expected a number above 0, at most 1".to_owned())?;
    if value > 0.0 && value <= 1.0 { Ok(value) } else { Err("expected a number above 0, at most 1".into()) }
}
