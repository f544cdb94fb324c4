//! Which cache index a process uses.

use std::str::FromStr;
use std::sync::Arc;

use clap::Args;
use thalweg_cache_index::{CacheIndex, MemoryIndex};

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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_index_that_is_not_built_says_so() {
        assert_eq!("memory".parse(), Ok(Index::Memory));
        for text in ["redis://localhost", "rediss://h:1", "memcached", ""] {
            assert!(text.parse::<Index>().unwrap_err().contains("`memory`"), "{text}");
        }
    }
}
