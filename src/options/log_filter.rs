//! What `--log-level` may say.

use std::str::FromStr;

use tracing_subscriber::EnvFilter;
use tracing_subscriber::filter::LevelFilter;

/// Levels, for all or per module, known to be a filter.
#[derive(Clone, Debug)]
pub(crate) struct LogFilter(String);

impl LogFilter {
    /// As the logger takes it.
    pub(crate) fn build(&self) -> EnvFilter {
        EnvFilter::new(&self.0)
    }
}

impl FromStr for LogFilter {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let is_level = |text: &str| text.parse::<LevelFilter>().is_ok() && !text.is_empty();
        // The parser takes any word for a module to be traced.
        let sound = |part: &str| match part.rsplit_once('=') {
            Some((module, level)) => !module.is_empty() && is_level(level),
            None => is_level(part),
        };
        if text.split(',').all(sound) && EnvFilter::try_new(text).is_ok() {
            return Ok(Self(text.to_owned()));
        }
        Err("expected off, error, warn, info, debug or trace, or MODULE=LEVEL, several with commas between")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn levels_are_taken_and_words_refused() {
        for text in ["info", "off", "WARN", "warn,thalweg_router=debug", "info,hyper::client=error"] {
            assert!(text.parse::<LogFilter>().is_ok(), "{text}");
        }
        for text in ["", " ", "verbose", "info,", "a=b", "=info", "info,a=", "a://u:hunter2@h", "[=", "\0"] {
            let error = text.parse::<LogFilter>().expect_err(text);
            assert!(error.contains("trace"), "{text}");
        }
    }
}
