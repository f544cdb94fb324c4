//! What a client asks for, before anything is compiled.

use std::fmt::Write;

use llguidance::api::TopLevelGrammar;
use serde_json::{Value, json};

use super::blanks::{JsonBlanks, check_options, put_pattern};
use super::compile::GrammarError;
use super::limits::{CHOICES_MAX, GRAMMAR_BYTES_MAX, JSON_BLANKS_MAX, NESTING_MAX};
use super::schema;

/// A set of texts.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum GrammarSource {
    /// Any JSON object.
    JsonObject,
    /// JSON that a schema accepts; the schema's text.
    JsonSchema(String),
    /// What a regular expression matches as a whole.
    Regex(String),
    /// One of these strings.
    Choice(Vec<String>),
    /// A context-free grammar in Lark's notation, from its rule `start`.
    Lark(String),
}

impl GrammarSource {
    /// Key of everything that is kept per grammar.
    pub(super) fn hash(&self, blanks: JsonBlanks) -> [u8; 32] {
        let mut hasher = blake3::Hasher::new();
        let mut part = |bytes: &[u8]| {
            hasher.update(&(bytes.len() as u64).to_le_bytes());
            hasher.update(bytes);
        };
        part(self.kind().as_bytes());
        if self.is_json() {
            part(&blanks.0.to_le_bytes());
        }
        match self {
            Self::JsonObject => {}
            Self::JsonSchema(text) | Self::Regex(text) | Self::Lark(text) => part(text.as_bytes()),
            Self::Choice(choices) => choices.iter().for_each(|choice| part(choice.as_bytes())),
        }
        hasher.finalize().into()
    }

    /// What it is, in messages.
    pub fn kind(&self) -> &'static str {
        match self {
            Self::JsonObject => "JSON object",
            Self::JsonSchema(_) => "JSON schema",
            Self::Regex(_) => "regular expression",
            Self::Choice(_) => "choice",
            Self::Lark(_) => "Lark grammar",
        }
    }

    /// JSON with what a regular expression matches, or nothing, between two tokens; other grammars as they are. Whether it may be
    /// that one is for [`JsonBlanks::check`] to say.
    pub fn with_blanks_pattern(self, pattern: &str) -> Self {
        let text = match &self {
            Self::JsonObject => r#"{"type": "object"}"#,
            Self::JsonSchema(text) => text,
            Self::Regex(_) | Self::Choice(_) | Self::Lark(_) => return self,
        };
        match serde_json::from_str(text) {
            Ok(Value::Object(mut schema)) => {
                put_pattern(&mut schema, pattern);
                Self::JsonSchema(Value::Object(schema).to_string())
            }
            // Refused for what it is.
            _ => self,
        }
    }

    /// Its texts are JSON.
    pub fn is_json(&self) -> bool {
        matches!(self, Self::JsonObject | Self::JsonSchema(_))
    }

    /// The library's form of it, or which bound it is over. Its size has been checked.
    pub(super) fn parse(&self, blanks: JsonBlanks) -> Result<TopLevelGrammar, GrammarError> {
        match self {
            Self::JsonObject => Ok(json_grammar(json!({"type": "object"}), blanks)),
            Self::JsonSchema(text) => parse_schema(text, blanks),
            Self::Regex(text) if text.is_empty() => Err(invalid("it is empty")),
            Self::Regex(text) => Ok(TopLevelGrammar::from_regex(text)),
            Self::Choice(choices) => parse_choice(choices),
            Self::Lark(text) => {
                check_nesting(text.chars())?;
                Ok(TopLevelGrammar::from_lark(text.clone()))
            }
        }
    }

    /// What is too large is not even looked at.
    pub(super) fn check_size(&self, blanks: JsonBlanks) -> Result<(), GrammarError> {
        if blanks.0 > JSON_BLANKS_MAX {
            return Err(too_large(format!("{} blanks in a row are over {JSON_BLANKS_MAX}", blanks.0)));
        }
        let bytes = match self {
            Self::JsonObject => 0,
            Self::JsonSchema(text) | Self::Regex(text) | Self::Lark(text) => text.len(),
            Self::Choice(choices) => choices.iter().map(String::len).sum(),
        };
        if bytes > GRAMMAR_BYTES_MAX {
            return Err(too_large(format!("it has {bytes} bytes, at most {GRAMMAR_BYTES_MAX} are taken")));
        }
        Ok(())
    }
}

fn parse_schema(text: &str, blanks: JsonBlanks) -> Result<TopLevelGrammar, GrammarError> {
    check_nesting(outside_strings(text))?;
    let mut schema: Value =
        serde_json::from_str(text).map_err(|error| invalid(format!("no JSON: {error}")))?;
    match &schema {
        Value::Object(object) => {
            check_options(object, blanks)?;
            schema::prepare(&mut schema)?;
            Ok(json_grammar(schema, blanks))
        }
        _ => Err(invalid("it must be an object")),
    }
}

fn json_grammar(mut schema: Value, blanks: JsonBlanks) -> TopLevelGrammar {
    blanks.put_into(&mut schema);
    TopLevelGrammar::from_json_schema(schema)
}

fn parse_choice(choices: &[String]) -> Result<TopLevelGrammar, GrammarError> {
    if choices.is_empty() {
        return Err(invalid("it has no strings"));
    }
    if choices.len() > CHOICES_MAX {
        return Err(too_large(format!("it has {} strings, at most {CHOICES_MAX} are taken", choices.len())));
    }
    let mut regex = String::new();
    for (at, choice) in choices.iter().enumerate() {
        if choice.is_empty() {
            return Err(invalid(format!("string {at} is empty")));
        }
        regex.push_str(if at == 0 { "(?:" } else { "|" });
        choice.chars().for_each(|char| escape(char, &mut regex));
    }
    regex.push(')');
    Ok(TopLevelGrammar::from_regex(&regex))
}

/// Letters, digits and blanks stand for themselves, whatever flags and dialects there are.
fn escape(char: char, regex: &mut String) {
    if char.is_alphanumeric() || char == ' ' {
        regex.push(char);
    } else {
        // Writing to a string does not fail.
        let _ = write!(regex, "\\x{{{:x}}}", u32::from(char));
    }
}

/// JSON's structure, without what stands in its strings.
fn outside_strings(text: &str) -> impl Iterator<Item = char> {
    let (mut inside, mut escaped) = (false, false);
    text.chars().filter(move |char| {
        let quote = *char == '"' && !escaped;
        escaped = inside && *char == '\\' && !escaped;
        inside ^= quote;
        !inside
    })
}

fn check_nesting(text: impl Iterator<Item = char>) -> Result<(), GrammarError> {
    let mut depth = 0usize;
    for char in text {
        match char {
            '(' | '[' | '{' => depth += 1,
            ')' | ']' | '}' => depth = depth.saturating_sub(1),
            _ => {}
        }
        if depth > NESTING_MAX {
            return Err(too_large(format!("it nests more than {NESTING_MAX} deep")));
        }
    }
    Ok(())
}

fn invalid(reason: impl Into<String>) -> GrammarError {
    GrammarError::Invalid { reason: reason.into() }
}

fn too_large(reason: String) -> GrammarError {
    GrammarError::TooLarge { reason }
}
