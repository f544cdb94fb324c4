//! Settings of what clients see, and of who they are.

use std::io;
use std::path::PathBuf;

use http::HeaderValue;
use prometheus_client::registry::Registry;
use thalweg_model::grammar::limits::{JSON_BLANKS_DEFAULT, JSON_BLANKS_MAX};
use thalweg_proto::value;

use crate::auth::Keys;
use crate::dialect::{ReasoningParser, ToolCallParser};
use crate::error::RouterStartError;
use crate::usage_log::{UsageLog, is_stdout};

/// How answers are read before clients get them, and which clients get any.
#[derive(Clone, Debug, PartialEq, clap::Args, serde::Serialize, serde::Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub struct Surface {
    /// How tool calls are told from text
    #[arg(long, env = "THALWEG_TOOL_CALL_PARSER", value_enum, default_value_t = ToolCallParser::default())]
    pub tool_call_parser: ToolCallParser,

    /// How thoughts are told from the answer, to be sent as reasoning_content
    #[arg(long, env = "THALWEG_REASONING_PARSER", value_enum, default_value_t = ReasoningParser::default())]
    pub reasoning_parser: ReasoningParser,

    /// Spaces, tabs and line breaks in a row between two tokens of JSON that an answer is held to, so that no model spends its
    /// tokens on them; 0 is compact JSON
    #[arg(long, env = "THALWEG_JSON_BLANKS_MAX", default_value_t = JSON_BLANKS_DEFAULT)]
    #[arg(value_parser = value::whole(0..=JSON_BLANKS_MAX))]
    pub json_blanks_max: u32,

    /// YAML or JSON file of API keys by their SHA-256; changes are taken up while the router runs
    #[arg(long, env = "THALWEG_API_KEYS_FILE", value_name = "FILE")]
    pub api_keys_file: Option<PathBuf>,

    /// Let /metrics be read without an API key
    #[arg(long, env = "THALWEG_METRICS_PUBLIC")]
    pub metrics_public: bool,

    /// Origins whose pages may call this API from a browser, such as `https://chat.example.org`; * is any
    #[arg(long, env = "THALWEG_CORS_ALLOW_ORIGIN", value_name = "ORIGIN", value_delimiter = ',')]
    pub cors_allow_origin: Vec<String>,

    /// File to which a JSON line is appended for every generation request that has ended; - or /dev/stdout is standard
    /// output
    #[arg(long, env = "THALWEG_USAGE_LOG", value_name = "FILE")]
    pub usage_log: Option<PathBuf>,
}

/// Variable with API keys in plain text, commas between them. There is no flag for them: what stands on a command line can
/// be read by everybody on the host.
pub const API_KEY_VARIABLE: &str = "THALWEG_API_KEY";

impl Surface {
    /// The keys of the file and of the environment.
    pub(crate) fn keys(&self) -> Result<Keys, RouterStartError> {
        let text = std::env::var(API_KEY_VARIABLE).ok();
        let keys = text.iter().flat_map(|text| text.split(','));
        let given: Vec<_> = keys.map(str::trim).filter(|key| !key.is_empty()).collect();
        if given.is_empty() && text.is_some() {
            // What a template makes of names that are not set must not open the door.
            return Err(RouterStartError::NoKey);
        }
        Keys::load(self.api_keys_file.clone(), &given).map_err(|error| RouterStartError::Config {
            option: "api-keys-file".to_owned(),
            reason: error.to_string(),
        })
    }

    /// Standard output is for usage records, and for nothing else.
    pub fn usage_log_is_stdout(&self) -> bool {
        self.usage_log.as_deref().is_some_and(is_stdout)
    }

    pub(crate) fn open_usage_log(
        &self,
        registry: &mut Registry,
    ) -> Result<Option<UsageLog>, RouterStartError> {
        let Some(file) = &self.usage_log else { return Ok(None) };
        let failed = |error: io::Error| RouterStartError::Config {
            option: "usage-log".to_owned(),
            reason: format!("cannot write to {}: {error}", file.display()),
        };
        UsageLog::open(file, registry).map(Some).map_err(failed)
    }

    /// The origins as headers have them.
    pub(crate) fn origins(&self) -> Result<Vec<HeaderValue>, RouterStartError> {
        let origin = |text: &String| {
            let is_origin = text == "*" || (text.contains("://") && !text.ends_with('/'));
            HeaderValue::from_str(text).ok().filter(|_| is_origin).ok_or_else(|| RouterStartError::Config {
                option: "cors-allow-origin".to_owned(),
                reason: format!(
                    "{text:?} is no origin; give scheme and host, such as https://chat.example.org, or *"
                ),
            })
        };
        self.cors_allow_origin.iter().map(origin).collect()
    }
}

impl Default for Surface {
    fn default() -> Self {
        super::flag_defaults()
    }
}
