//! Flags that several subcommands share.

use std::path::PathBuf;
use std::str::FromStr;
use std::sync::Arc;

use clap::{Args, ValueEnum};
use thalweg_cache_index::{CacheIndex, MemoryIndex};

/// Flags of every subcommand.
#[derive(Args, Clone, Debug)]
pub(crate) struct Global {
    /// YAML file of settings, keyed by flag name; flags and THALWEG_* variables go first
    #[arg(long, global = true, env = "THALWEG_CONFIG", value_name = "FILE")]
    pub(crate) config: Option<PathBuf>,

    /// What to log: error, warn, info, debug, trace or filters per module; RUST_LOG goes first
    #[arg(long, global = true, env = "THALWEG_LOG_LEVEL", value_name = "FILTER", default_value = "info")]
    pub(crate) log_level: String,

    /// How to log
    #[arg(long, global = true, env = "THALWEG_LOG_FORMAT", value_enum, default_value_t = LogFormat::Text)]
    pub(crate) log_format: LogFormat,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum LogFormat {
    /// For people
    Text,
    /// A JSON object a line
    Json,
}

/// Where routers learn which worker holds which prefix.
#[derive(Args, Clone, Debug)]
pub(crate) struct IndexOptions {
    /// Cache index: memory, which reaches no further than this process
    #[arg(long, env = "THALWEG_INDEX", default_value = "memory", value_name = "INDEX")]
    index: Index,
}

/// Cache indexes of this build.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Index {
    Memory,
}

impl IndexOptions {
    pub(crate) fn open(&self) -> Arc<dyn CacheIndex> {
        match self.index {
            Index::Memory => Arc::new(MemoryIndex::new()),
        }
    }
}

impl FromStr for Index {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "memory" => Ok(Self::Memory),
            redis if redis.starts_with("redis://") || redis.starts_with("rediss://") => {
                Err("the Redis index is not in this build yet; `memory` is".to_owned())
            }
            _ => Err("expected `memory`".to_owned()),
        }
    }
}

/// Where routers learn of workers.
#[derive(Args, Clone, Debug)]
pub(crate) struct MembershipOptions {
    /// Membership: static, which is the list of --worker flags
    #[arg(long, env = "THALWEG_MEMBERSHIP", default_value = "static", value_name = "MEMBERSHIP")]
    membership: Membership,
}

/// Memberships of this build.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Membership {
    Static,
}

impl FromStr for Membership {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "static" => Ok(Self::Static),
            etcd if etcd.starts_with("etcd://") => {
                Err("etcd membership is not in this build yet; `static` with --worker grpc://host:port is"
                    .to_owned())
            }
            _ => Err("expected `static`".to_owned()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn backends_that_are_not_built_say_so() {
        assert_eq!("memory".parse(), Ok(Index::Memory));
        assert_eq!("static".parse(), Ok(Membership::Static));
        for text in ["redis://localhost", "rediss://h:1", "memcached", ""] {
            assert!(text.parse::<Index>().unwrap_err().contains("`memory`"), "{text}");
        }
        for text in ["etcd://localhost", "kubernetes", ""] {
            assert!(text.parse::<Membership>().unwrap_err().contains("`static`"), "{text}");
        }
    }
}
