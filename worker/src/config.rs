//! Everything that a worker can be told, as one struct: flags, environment and the YAML file derive from it. Names are
//! vLLM's where the meaning is the same.

use std::fmt;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use clap::{ArgAction, Args, ValueEnum};
use thalweg_proto::value::{self, SECONDS_MAX};

mod gpu;
mod lora;

pub use gpu::{GpuConfig, LoadFormat};
pub use lora::{LoraConfig, LoraModule};

/// Tokens of a step in which many sequences decode, where nothing else is asked for: of 8B on an H200 some 100 ms.
const MIXED_TOKENS: usize = 4096;

/// What a worker serves, and with how much of the machine.
#[derive(Args, Clone, Debug)]
pub struct WorkerConfig {
    /// GGUF file, folder of safetensors, or hub id (owner/name)
    #[arg(long, env = "THALWEG_MODEL", value_name = "MODEL")]
    #[arg(value_parser = clap::builder::NonEmptyStringValueParser::new())]
    pub model: String,

    /// Names that requests may use; the first is reported. Default: the file's stem or folder's name
    #[arg(long, env = "THALWEG_SERVED_MODEL_NAME", value_name = "NAME", num_args = 1.., value_delimiter = ',',
        value_parser = value::label)]
    pub served_model_name: Vec<String>,

    /// Jinja file that replaces the model's own chat template
    #[arg(long, env = "THALWEG_CHAT_TEMPLATE", value_name = "FILE", value_parser = value::file)]
    pub chat_template: Option<PathBuf>,

    /// Longest prompt plus output, in tokens. Default: what the model was made for, as far as the KV cache holds it
    #[arg(long, env = "THALWEG_MAX_MODEL_LEN", value_name = "TOKENS")]
    #[arg(value_parser = value::whole(1..=u32::MAX))]
    pub max_model_len: Option<u32>,

    /// Where the model runs
    #[arg(long, env = "THALWEG_DEVICE", value_enum, default_value_t = Device::Auto)]
    pub device: Device,

    /// What computes: the model, or a simulation that takes the time which --profile says and needs no weights
    #[arg(long, env = "THALWEG_ENGINE", value_enum, default_value_t = EngineKind::Model)]
    pub engine: EngineKind,

    /// YAML file of --engine sim: seconds per step, what is put out, faults
    #[arg(long, env = "THALWEG_PROFILE", value_name = "FILE", value_parser = value::file)]
    pub profile: Option<PathBuf>,

    /// Arithmetic: auto multiplies quantised weights with int8 activations; float32 quantises no activation
    #[arg(long, env = "THALWEG_DTYPE", value_enum, default_value_t = Dtype::Auto)]
    pub dtype: Dtype,

    /// How keys and values are stored
    #[arg(long, env = "THALWEG_KV_CACHE_DTYPE", value_enum, default_value_t = KvCacheDtype::Auto)]
    pub kv_cache_dtype: KvCacheDtype,

    /// KV cache of each worker, such as 512MiB, 2GiB or a number of bytes. Default: 512MiB on a CPU, what is left of a GPU
    #[arg(long, env = "THALWEG_KV_CACHE_MEMORY_BYTES", value_name = "BYTES")]
    pub kv_cache_memory_bytes: Option<ByteSize>,

    /// Keep finished prompts' blocks for requests that begin alike
    #[arg(long, env = "THALWEG_ENABLE_PREFIX_CACHING", value_name = "BOOL", action = ArgAction::Set)]
    #[arg(default_value_t = true, num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    pub enable_prefix_caching: bool,

    /// Same as --enable-prefix-caching=false
    #[arg(long, env = "THALWEG_NO_ENABLE_PREFIX_CACHING", hide = true)]
    pub no_enable_prefix_caching: bool,

    /// Sequences that run at once
    #[arg(long, env = "THALWEG_MAX_NUM_SEQS", value_name = "N", default_value_t = 64)]
    #[arg(value_parser = value::whole(1..=4096u32))]
    pub max_num_seqs: u32,

    /// Tokens that one step computes at most: larger is faster for prompts, smaller is smoother for streams. Default: 256 on a
    /// CPU, 8192 on a GPU
    #[arg(long, env = "THALWEG_MAX_NUM_BATCHED_TOKENS", value_name = "TOKENS")]
    #[arg(value_parser = value::whole(1..=65536u32))]
    pub max_num_batched_tokens: Option<u32>,

    /// The same of a step in which 128 sequences decode, or more: each of them waits for what prompts take of it. Default: 4096, or
    /// what --max-num-batched-tokens and --max-num-seqs ask for
    #[arg(long, env = "THALWEG_MAX_NUM_MIXED_TOKENS", value_name = "TOKENS")]
    #[arg(value_parser = value::whole(1..=65536u32))]
    pub max_num_mixed_tokens: Option<u32>,

    /// Ranks that share one model. This build has 1: add workers instead
    #[arg(long, env = "THALWEG_TENSOR_PARALLEL_SIZE", value_name = "N", default_value_t = 1)]
    #[arg(value_parser = value::whole(1..=1u32))]
    pub tensor_parallel_size: u32,

    /// Threads of this process for the model, shared by its workers. Default: one per core
    #[arg(long, env = "THALWEG_THREADS", value_name = "N")]
    #[arg(value_parser = value::whole(1..=1024u32))]
    pub threads: Option<u32>,

    /// How /v1/embeddings makes a vector of a text: from the last token, or as the mean of all. Default: what the model's makers
    /// say, else last
    #[arg(long, env = "THALWEG_POOLING_TYPE", value_enum, ignore_case = true)]
    pub pooling_type: Option<PoolingType>,

    /// LoRA adapters
    #[command(flatten)]
    pub lora: LoraConfig,

    /// What only GPUs know
    #[command(flatten)]
    pub gpu: GpuConfig,
}

/// Where one worker is reached. `thalweg up` chooses these itself.
#[derive(Args, Clone, Debug)]
pub struct WorkerPlace {
    /// Address of the gRPC service
    #[arg(long, env = "THALWEG_GRPC", value_name = "ADDR", default_value = "127.0.0.1:50061", value_parser = value::address)]
    pub grpc: SocketAddr,

    /// Address of /metrics, /health and /ready
    #[arg(long, env = "THALWEG_METRICS", value_name = "ADDR", default_value = "127.0.0.1:9090", value_parser = value::address)]
    pub metrics: SocketAddr,

    /// Name of this worker, kept across restarts. Default: the host's name and the gRPC port, or the process id where that is 0
    #[arg(long, env = "THALWEG_WORKER_ID", value_name = "NAME", value_parser = value::name)]
    pub worker_id: Option<String>,

    /// Seconds that running requests may take to finish once a signal has come; 0 ends all at once
    #[arg(long, env = "THALWEG_DRAIN_TIMEOUT", value_name = "SECONDS", default_value = "30")]
    #[arg(value_parser = value::seconds(0.0..=SECONDS_MAX))]
    pub drain_timeout: Duration,

    /// Allow a gRPC address that other hosts reach without certificates and without a cluster token
    #[arg(long, env = "THALWEG_INSECURE")]
    pub insecure: bool,
}

/// Devices by name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Device {
    /// A GPU where this build and machine have one, else the CPU.
    Auto,
    /// This machine's cores.
    Cpu,
    /// An NVIDIA GPU: the first that CUDA_VISIBLE_DEVICES shows.
    Cuda,
}

/// What stands behind the engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum EngineKind {
    /// The model on a device.
    Model,
    /// A profile that pretends to be one.
    Sim,
}

/// Arithmetic of the forward pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Dtype {
    /// Int8 activations against quantised weights, else as `Bfloat16`.
    Auto,
    /// f32 activations against dequantised weights.
    Float32,
    /// As `Auto` on the CPU.
    Bfloat16,
}

/// What an embedding is made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum PoolingType {
    /// The hidden state of the last token.
    Last,
    /// The mean of all tokens' hidden states.
    Mean,
}

/// Elements of the KV cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum KvCacheDtype {
    /// bfloat16.
    Auto,
    /// 4 bytes.
    Float32,
    /// 2 bytes.
    Bfloat16,
    /// fp8_e4m3.
    Fp8,
    /// 1 byte, 3 bits of mantissa.
    #[value(name = "fp8_e4m3")]
    Fp8E4m3,
    /// 1 byte, 2 bits of mantissa.
    #[value(name = "fp8_e5m2")]
    Fp8E5m2,
}

impl WorkerConfig {
    /// Whether finished blocks are kept for reuse.
    pub fn prefix_caching(&self) -> bool {
        self.enable_prefix_caching && !self.no_enable_prefix_caching
    }

    /// Bytes of a CPU worker's KV cache.
    pub fn kv_cache_bytes(&self) -> u64 {
        self.kv_cache_memory_bytes.map_or(512 << 20, |size| size.0)
    }

    /// Tokens of a step, where `default` is the device's.
    pub fn batched_tokens(&self, default: u32) -> usize {
        self.max_num_batched_tokens.unwrap_or(default) as usize
    }

    /// Of these, in a step in which many decode; twice the sequences at least, so that prompts get on whatever decodes.
    pub fn mixed_tokens(&self, batched: usize) -> usize {
        let default = MIXED_TOKENS.max(2 * self.max_num_seqs as usize);
        self.max_num_mixed_tokens.map_or(default, |tokens| tokens as usize).min(batched)
    }

    /// Threads of the whole process.
    pub fn threads_total(&self) -> usize {
        match self.threads {
            Some(threads) => threads as usize,
            None => std::thread::available_parallelism().map_or(1, usize::from),
        }
    }
}

/// A number of bytes, written with or without a unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ByteSize(pub u64);

/// Text that is no number of bytes.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error(
    "expected bytes as a whole number from 1, or with a unit of KiB, MiB, GiB, TiB, KB, MB, GB or TB, such as 512MiB"
)]
pub struct ByteSizeError;

const UNITS: [(&str, u64); 14] = [
    ("kib", 1 << 10),
    ("mib", 1 << 20),
    ("gib", 1 << 30),
    ("tib", 1 << 40),
    ("kb", 1_000),
    ("mb", 1_000_000),
    ("gb", 1_000_000_000),
    ("tb", 1_000_000_000_000),
    ("k", 1 << 10),
    ("m", 1 << 20),
    ("g", 1 << 30),
    ("t", 1 << 40),
    ("b", 1),
    ("", 1),
];

impl FromStr for ByteSize {
    type Err = ByteSizeError;

    fn from_str(text: &str) -> Result<Self, ByteSizeError> {
        let text = text.trim();
        let digits = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
        let (number, unit) = (&text[..digits], text[digits..].trim().to_ascii_lowercase());
        let (_, factor) = UNITS.iter().find(|(name, _)| *name == unit).ok_or(ByteSizeError)?;
        let bytes = match number.parse::<u64>() {
            Ok(whole) => whole.checked_mul(*factor).ok_or(ByteSizeError)?,
            Err(_) if *factor > 1 => {
                (number.parse::<f64>().map_err(|_| ByteSizeError)? * *factor as f64) as u64
            }
            Err(_) => return Err(ByteSizeError),
        };
        if bytes == 0 { Err(ByteSizeError) } else { Ok(Self(bytes)) }
    }
}

impl fmt::Display for ByteSize {
    /// In the largest binary unit that makes it at least 1: exact where it is whole, else with one decimal.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let units = [("TiB", 1u64 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)];
        match units.into_iter().find(|(_, factor)| self.0 >= *factor) {
            None => write!(f, "{}", self.0),
            Some((unit, factor)) if self.0.is_multiple_of(factor) => write!(f, "{}{unit}", self.0 / factor),
            Some((unit, factor)) => write!(f, "{:.1}{unit}", self.0 as f64 / factor as f64),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(text: &str, expected: Option<u64>) {
        assert_eq!(text.parse::<ByteSize>().ok().map(|b| b.0), expected, "{text:?}");
    }

    #[test]
    fn byte_sizes() {
        check("1048576", Some(1 << 20));
        check("512MiB", Some(512 << 20));
        check("512 mib", Some(512 << 20));
        check("1GiB", Some(1 << 30));
        check("1.5G", Some(3 << 29));
        check("2GB", Some(2_000_000_000));
        check("7b", Some(7));
        check("", None);
        check("MiB", None);
        check("0", None);
        check("1.5", None);
        check("-1", None);
        check("1.2.3G", None);
        check("1 parsec", None);
        check("99999999999999999999", None);
        check("18446744073709551615KiB", None);
    }

    #[test]
    fn byte_sizes_print_as_they_are_read() {
        for (bytes, text) in
            [(512u64 << 20, "512MiB"), (1 << 30, "1GiB"), (3 << 29, "1.5GiB"), (1000, "1000")]
        {
            assert_eq!(ByteSize(bytes).to_string(), text);
        }
    }

    #[derive(clap::Parser)]
    struct Flags {
        #[command(flatten)]
        config: WorkerConfig,
    }

    fn parse(args: &str) -> Result<WorkerConfig, String> {
        let args = std::iter::once("x").chain(args.split_whitespace());
        <Flags as clap::Parser>::try_parse_from(args).map(|f| f.config).map_err(|e| e.to_string())
    }

    #[test]
    fn flags_are_parsed() {
        let config =
            parse("--model m.gguf --kv-cache-dtype fp8_e5m2 --served-model-name a b --max-num-seqs 8")
                .unwrap();
        assert_eq!(config.kv_cache_dtype, KvCacheDtype::Fp8E5m2);
        assert_eq!(config.served_model_name, ["a", "b"]);
        assert_eq!(config.max_num_seqs, 8);
        assert_eq!((config.kv_cache_memory_bytes, config.kv_cache_bytes()), (None, 512 << 20));
        assert!(config.prefix_caching());
        assert_eq!((config.batched_tokens(2048), config.gpu.load_format), (2048, LoadFormat::Auto));
        let config = parse("--model m --gpu-memory-utilization 0.5 --load-format dummy --seed 7").unwrap();
        assert_eq!((config.gpu.gpu_memory_utilization, config.gpu.seed), (0.5, 7));
        assert!(!parse("--model m --no-enable-prefix-caching").unwrap().prefix_caching());
        assert!(!parse("--model m --enable-prefix-caching=false").unwrap().prefix_caching());
    }

    #[test]
    fn bad_flags_are_named() {
        for (args, name) in [
            ("", "--model"),
            ("--model m --max-num-seqs 0", "--max-num-seqs"),
            ("--model m --max-model-len 0", "--max-model-len"),
            ("--model m --kv-cache-dtype int4", "--kv-cache-dtype"),
            ("--model m --kv-cache-memory-bytes lots", "--kv-cache-memory-bytes"),
            ("--model m --device tpu", "--device"),
            ("--model m --gpu-memory-utilization 1.5", "--gpu-memory-utilization"),
            ("--model m --gpu-memory-utilization 0", "--gpu-memory-utilization"),
            ("--model m --gpu-step-timeout 0", "--gpu-step-timeout"),
            ("--model m --load-format npcache", "--load-format"),
            ("--model m --pooling-type cls", "--pooling-type"),
            ("--model m --lora-modules a", "name and a folder"),
            ("--model m --max-lora-rank 1024", "--max-lora-rank"),
            ("--model m --max-sequences 3", "--max-sequences"),
        ] {
            let error = parse(args).unwrap_err();
            assert!(error.contains(name), "{args}: {error}");
        }
    }
}
