//! Which cache index a process uses.

use std::path::PathBuf;
use std::sync::Arc;

use anyhow::{Context, bail};
use clap::Args;
use thalweg_cache_index::{CacheIndex, MemoryIndex, RedisConfig, RedisIndex};

/// Where the password of Redis' user may stand; a flag would show it to everybody.
const PASSWORD_VARIABLE: &str = "THALWEG_INDEX_PASSWORD";

/// Where routers learn which worker holds which prefix.
#[derive(Args, Clone, Debug)]
pub(crate) struct IndexOptions {
    /// Cache index: memory, which reaches no further than this process, or redis://USER@HOST:6379/DB, rediss:// with
    /// TLS, redis+sentinel://HOST:26379,..HOST:26379/MASTER or redis+cluster://HOST:6379,..HOST:6379
    #[arg(long, env = "THALWEG_INDEX", default_value = "memory", value_name = "INDEX")]
    #[arg(hide_env_values = true)]
    index: String,

    /// PEM file of the authority that signed Redis' certificate; by default the system's
    #[arg(long, env = "THALWEG_INDEX_CA_FILE", value_name = "FILE")]
    index_ca_file: Option<PathBuf>,

    /// File with the password of Redis' user, read anew for each connection; else the variable THALWEG_INDEX_PASSWORD
    #[arg(long, env = "THALWEG_INDEX_PASSWORD_FILE", value_name = "FILE")]
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
        // The text is not repeated in messages: a password may stand in it.
        let url = match self.index.as_str() {
            "memory" => return Ok(None),
            text if text.starts_with("redis") || text.starts_with("valkey") => {
                text.parse().context("--index")?
            }
            _ => bail!("--index: expected `memory` or redis://host:6379"),
        };
        Ok(Some(RedisConfig {
            ca_file: self.index_ca_file.clone(),
            password_file: self.index_password_file.clone(),
            password: std::env::var(PASSWORD_VARIABLE).ok(),
            ..RedisConfig::new(url)
        }))
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
        let flags = Flags::try_parse_from(args).map_err(|error| error.to_string())?;
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
        ] {
            let error = redis(args).unwrap_err();
            assert!(
                error.contains(says) && error.contains("--index") && !error.contains("secret"),
                "{error}"
            );
        }
    }
}
