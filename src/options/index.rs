//! Which cache index a process uses.

use std::path::PathBuf;
use std::str::FromStr;
use std::sync::Arc;

use anyhow::Context;
use clap::Args;
use thalweg_cache_index::redis::RedisUrl;
use thalweg_cache_index::{CacheIndex, MemoryIndex, RedisConfig, RedisIndex, RedisIndexError};
use thalweg_proto::value;

use super::BadOption;

/// Where the password of Redis' user may stand; a flag would show it to everybody.
const PASSWORD_VARIABLE: &str = "THALWEG_INDEX_PASSWORD";

/// Where routers learn which worker holds which prefix.
#[derive(Args, Clone, Debug)]
pub(crate) struct IndexOptions {
    /// Cache index: memory, which reaches no further than this process, or redis://USER@HOST:6379/DB, rediss:// with
    /// TLS, redis+sentinel://HOST:26379,..HOST:26379/MASTER or redis+cluster://HOST:6379,..HOST:6379
    #[arg(long, env = "THALWEG_INDEX", default_value = "memory", value_name = "INDEX")]
    index: Index,

    /// PEM file of the authority that signed Redis' certificate, with rediss://; by default the system's
    #[arg(long, env = "THALWEG_INDEX_CA_FILE", value_name = "FILE", value_parser = value::file)]
    index_ca_file: Option<PathBuf>,

    /// File with the password of Redis' user, read anew for each connection; else the variable THALWEG_INDEX_PASSWORD
    #[arg(long, env = "THALWEG_INDEX_PASSWORD_FILE", value_name = "FILE")]
    #[arg(value_parser = value::file)]
    index_password_file: Option<PathBuf>,
}

impl IndexOptions {
    /// The index; Redis need not be there yet.
    pub(crate) fn open(&self) -> anyhow::Result<Arc<dyn CacheIndex>> {
        Ok(match self.redis()? {
            None => Arc::new(MemoryIndex::new()),
            Some(config) => Arc::new(RedisIndex::open(config).context("--index")?),
        })
    }

    /// How to reach Redis; None where the index is in memory.
    pub(crate) fn redis(&self) -> anyhow::Result<Option<RedisConfig>> {
        let has_tls = matches!(&self.index, Index::Redis(url) if url.tls());
        if self.index_ca_file.is_some() && !has_tls {
            let text = "--index-ca-file is read for TLS alone; set --index rediss://.., or leave it out";
            return Err(BadOption::because(text));
        }
        let url = match &self.index {
            Index::Memory if self.index_password_file.is_some() => {
                let text =
                    "--index-password-file is read for Redis alone; set --index redis://.., or leave it out";
                return Err(BadOption::because(text));
            }
            Index::Memory => return Ok(None),
            Index::Redis(url) => url.clone(),
        };
        Ok(Some(RedisConfig {
            ca_file: self.index_ca_file.clone(),
            password_file: self.index_password_file.clone(),
            password: std::env::var(PASSWORD_VARIABLE).ok(),
            ..RedisConfig::new(url)
        }))
    }
}

/// What `--index` says. Shows neither user nor password.
#[derive(Clone, Debug)]
enum Index {
    Memory,
    Redis(RedisUrl),
}

impl FromStr for Index {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "memory" => Ok(Self::Memory),
            _ if text.starts_with("redis") || text.starts_with("valkey") => {
                text.parse().map(Self::Redis).map_err(|error: RedisIndexError| error.to_string())
            }
            _ => Err("expected `memory` or redis://host:6379".to_owned()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Flags {
        #[command(flatten)]
        index: IndexOptions,
    }

    fn redis(args: &str) -> Result<Option<String>, String> {
        let args = std::iter::once("x").chain(args.split_whitespace());
        let flags = Flags::try_parse_from(args).map_err(|error| {
            // What is said of the value; the binary leaves out the value itself.
            let source = std::error::Error::source(&error).map(ToString::to_string);
            format!("--index: {}", source.unwrap_or_default())
        })?;
        let config = flags.index.redis().map_err(|error| format!("{error:#}"))?;
        Ok(config.map(|config| config.url.to_string()))
    }

    #[test]
    fn indexes_are_chosen_or_refused_without_telling_secrets() {
        assert_eq!(redis(""), Ok(None));
        assert_eq!(redis("--index memory"), Ok(None));
        let shown = |text: &str| Ok(Some(text.to_owned()));
        assert_eq!(redis("--index redis://me:secret@h"), shown("redis://h:6379"));
        assert_eq!(redis("--index redis+sentinel://a,b/m"), shown("redis+sentinel://a:26379,b:26379/m"));
        for (args, says) in [
            ("--index memcached://secret", "`memory`"),
            ("--index redis://me:secret@h/x", "redis+cluster://"),
            ("--index redis:secret", "redis+cluster://"),
            ("--index-password-file /dev/null", "--index-password-file"),
            ("--index-password-file /dev/null", "set --index redis://"),
            ("--index-ca-file /dev/null", "set --index rediss://"),
            ("--index-ca-file /dev/null --index-password-file /dev/null", "set --index rediss://"),
            ("--index redis://h --index-ca-file /dev/null", "set --index rediss://"),
        ] {
            let error = redis(args).unwrap_err();
            assert!(
                error.contains(says) && error.contains("--index") && !error.contains("secret"),
                "{error}"
            );
        }
    }
}
