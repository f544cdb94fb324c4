//! What stands between two tokens of JSON.

use llguidance::derivre::RegexBuilder;
use serde_json::{Value, json};

use super::compile::{GrammarError, brief};
use super::limits::{BLANKS_PATTERN_BYTES_MAX, BLANKS_PATTERN_FUEL_MAX, JSON_BLANKS_DEFAULT};

/// Blanks in a row between two tokens of JSON, at most; 0 is compact JSON.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct JsonBlanks(pub u32);

/// Where the library looks for its options: clients must not turn its checks off.
const OPTIONS: &str = "x-guidance";
/// The one that a schema may have: see [`JsonBlanks::check`].
const PATTERN: &str = "whitespace_pattern";

impl Default for JsonBlanks {
    fn default() -> Self {
        Self(JSON_BLANKS_DEFAULT)
    }
}

impl JsonBlanks {
    /// Whether a regular expression may say what stands between two tokens, where it is vLLM's `guided_whitespace_pattern`. The
    /// library's own option leaves blanks out at will, so that it is the same only if the expression does too; and more blanks in a
    /// row than these it must not allow.
    pub fn check(self, pattern: &str) -> Result<(), GrammarError> {
        let invalid = |reason: String| GrammarError::Invalid { reason };
        let bytes = pattern.len();
        if bytes > BLANKS_PATTERN_BYTES_MAX {
            let reason = format!("it has {bytes} bytes, at most {BLANKS_PATTERN_BYTES_MAX} are taken");
            return Err(GrammarError::TooLarge { reason });
        }
        let mut builder = RegexBuilder::new();
        let parsed = builder.mk_regex(pattern);
        let parsed = parsed
            .map_err(|error| invalid(format!("no regular expression: {}", brief(&format!("{error:#}")))))?;
        if !builder.is_nullable(parsed) {
            return Err(invalid("it must match the empty text too, as `[ \\n]?` does".to_owned()));
        }
        let mut is_within = |bound: &str| {
            let contained = builder.is_contained_in(pattern, bound, BLANKS_PATTERN_FUEL_MAX);
            contained
                .map_err(|_| GrammarError::TooLarge { reason: "what it matches cannot be told".to_owned() })
        };
        if !is_within(&format!("{BLANK}*"))? {
            return Err(invalid(
                "it must match blanks only: spaces, tabs, line feeds, carriage returns".to_owned(),
            ));
        }
        let Self(most) = self;
        if !is_within(&format!("{BLANK}{{0,{most}}}"))? {
            let remedy = format!("bound it, as in `[ \\n]{{0,{most}}}`");
            return Err(invalid(format!(
                "it matches more than {most} blanks, the most that may stand in a row; {remedy}"
            )));
        }
        Ok(())
    }

    /// What the library is told of a schema's blanks: they are bounded, or a model may write nothing else. A schema's own pattern has
    /// been checked.
    pub(super) fn put_into(self, schema: &mut Value) {
        let Value::Object(object) = schema else { return };
        let options = match (self, pattern(object)) {
            (Self(0), _) | (_, Some("")) => json!({ "whitespace_flexible": false }),
            (_, Some(pattern)) => json!({ PATTERN: pattern }),
            (Self(most), None) => json!({ PATTERN: format!("{BLANK}{{1,{most}}}") }),
        };
        object.insert(OPTIONS.to_owned(), options);
    }
}

const BLANK: &str = r"[\x20\x0A\x0D\x09]";

type Object = serde_json::Map<String, Value>;

/// What a schema says of its blanks. None: nothing.
fn pattern(schema: &Object) -> Option<&str> {
    schema.get(OPTIONS)?.get(PATTERN)?.as_str()
}

/// A schema tells the library how to read it.
pub(super) fn has_options(schema: &Object) -> bool {
    schema.contains_key(OPTIONS)
}

/// A schema that says what stands between two tokens.
pub(super) fn put_pattern(schema: &mut Object, pattern: &str) {
    schema.insert(OPTIONS.to_owned(), json!({ PATTERN: pattern }));
}

/// That a schema tells the library nothing but what stands between two tokens, and nothing that it may not.
pub(super) fn check_options(schema: &Object, blanks: JsonBlanks) -> Result<(), GrammarError> {
    match (schema.get(OPTIONS), pattern(schema)) {
        (None, _) => Ok(()),
        (Some(Value::Object(options)), Some(pattern)) if options.len() == 1 => blanks.check(pattern),
        _ => {
            let reason =
                format!("`{OPTIONS}` is no keyword of JSON Schema, and may hold no more than `{PATTERN}`");
            Err(GrammarError::Invalid { reason })
        }
    }
}
