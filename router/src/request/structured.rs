//! What the answer must be a text of: OpenAI's `response_format`, vLLM's `structured_outputs` and `guided_*`.

use std::time::Duration;

use serde_json::{Map, Value};
use thalweg_model::grammar::{GrammarError, GrammarSource, JsonBlanks};
use thalweg_proto::code::ErrorCode;
use thalweg_proto::v1;

use crate::error::RouterError;
use crate::models::ModelEntry;

use super::fields::{Fields, invalid};
use super::json::kind;

/// When others have been compiled.
const RETRY_AFTER: Duration = Duration::from_secs(1);
/// Characters of a schema's name, as OpenAI has it.
const NAME_CHARS_MAX: usize = 64;

/// A constraint on the answer, and the field that it came from.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Structure {
    source: GrammarSource,
    field: String,
    blanks: JsonBlanks,
    pattern: Option<BlanksPattern>,
}

/// What a client lets stand between two tokens of JSON, and the field that says it.
#[derive(Clone, Debug, PartialEq)]
struct BlanksPattern {
    regex: String,
    field: String,
}

/// vLLM's fields of the top level, and those of `structured_outputs`.
const GUIDED: [(&str, &str); 5] = [
    ("guided_json", "json"),
    ("guided_regex", "regex"),
    ("guided_choice", "choice"),
    ("guided_grammar", "grammar"),
    ("guided_json_object", "json_object"),
];

/// vLLM's field for what stands between two tokens of JSON, and its newer spelling.
const GUIDED_BLANKS: (&str, &str) = ("guided_whitespace_pattern", "whitespace_pattern");

/// The one constraint of a request, if it has any.
pub(super) fn structure(fields: &Fields<'_>) -> Result<Option<Structure>, RouterError> {
    let mut patterns: Vec<BlanksPattern> = blanks_pattern(fields, GUIDED_BLANKS.0)?.into_iter().collect();
    let mut found = response_format(fields)?.into_iter().collect::<Vec<_>>();
    for (field, form) in GUIDED {
        found.extend(constraint(fields, field, form)?);
    }
    let known = |name: &str| name == GUIDED_BLANKS.0 || GUIDED.iter().any(|(field, _)| *field == name);
    let unknown = |name: &&str| name.starts_with("guided_") && !known(name);
    // Which library enforces it makes no difference to what is enforced.
    if let Some(name) = fields.names().filter(|name| *name != "guided_decoding_backend").find(unknown) {
        return Err(fields.error(name, "is not supported; leave it out"));
    }
    if fields.get("text").is_some_and(|text| text.get("format").is_some_and(|format| !format.is_null())) {
        return Err(fields.error("text", "is a field of /v1/responses; send `response_format`"));
    }
    if let Some(object) = fields.object("structured_outputs")? {
        let parts = Fields::within(object, "structured_outputs.");
        if parts.names().next().is_none() {
            return Err(
                fields.error("structured_outputs", "says nothing; send one of its members, or leave it out")
            );
        }
        for (_, form) in GUIDED {
            found.extend(constraint(&parts, form, form)?);
        }
        patterns.extend(blanks_pattern(&parts, GUIDED_BLANKS.1)?);
        let known = |name: &str| name == GUIDED_BLANKS.1 || GUIDED.iter().any(|(_, form)| *form == name);
        if let Some(name) = parts.names().find(|name| !known(name)) {
            return Err(parts.error(name, "is not supported; leave it out"));
        }
    }
    one_at_a_time(found.iter().map(|it| &it.field))?;
    one_at_a_time(patterns.iter().map(|it| &it.field))?;
    match (found.pop(), patterns.pop()) {
        (Some(structure), pattern) if pattern.is_none() || structure.source.is_json() => {
            Ok(Some(Structure { pattern, ..structure }))
        }
        (_, Some(BlanksPattern { field, .. })) => {
            let message = format!(
                "`{field}` says how JSON is spaced, but nothing asks for JSON; send `guided_json` with it"
            );
            Err(invalid(field, message))
        }
        (structure, None) => Ok(structure),
    }
}

fn one_at_a_time<'a>(mut fields: impl Iterator<Item = &'a String>) -> Result<(), RouterError> {
    match (fields.next(), fields.next()) {
        (Some(first), Some(second)) => {
            let message = format!("`{second}` cannot be combined with `{first}`; send one of them");
            Err(invalid(second.clone(), message))
        }
        _ => Ok(()),
    }
}

fn blanks_pattern(fields: &Fields<'_>, name: &str) -> Result<Option<BlanksPattern>, RouterError> {
    let regex = fields.string(name)?;
    Ok(regex.map(|regex| BlanksPattern { regex: regex.to_owned(), field: fields.path(name) }))
}

fn response_format(fields: &Fields<'_>) -> Result<Option<Structure>, RouterError> {
    let Some(object) = fields.object("response_format")? else { return Ok(None) };
    let format = Fields::within(object, "response_format.");
    match format.string("type")? {
        Some("text") => Ok(None),
        // With a schema as llama.cpp and Together have it.
        Some("json_object") => Ok(Some(match format.object("schema")? {
            Some(schema) if !schema.is_empty() => Structure::new(of_schema(schema), format.path("schema")),
            _ => Structure::new(GrammarSource::JsonObject, "response_format".to_owned()),
        })),
        Some("json_schema") => json_schema(&format).map(Some),
        Some(_) => Err(format.error("type", "must be \"text\", \"json_object\" or \"json_schema\"")),
        None => Err(format.error("type", "is missing; it is \"text\", \"json_object\" or \"json_schema\"")),
    }
}

fn json_schema(format: &Fields<'_>) -> Result<Structure, RouterError> {
    let Some(object) = format.object("json_schema")? else {
        return Err(format.error("json_schema", "is missing; it holds `name` and `schema`"));
    };
    let parts = Fields::within(object, "response_format.json_schema.");
    let is_plain = |char: char| char.is_ascii_alphanumeric() || "_-".contains(char);
    match parts.string("name")? {
        Some(name) if (1..=NAME_CHARS_MAX).contains(&name.len()) && name.chars().all(is_plain) => {}
        Some(_) => {
            let rule = format!("must be 1 to {NAME_CHARS_MAX} letters, digits, underscores and dashes");
            return Err(parts.error("name", rule));
        }
        None => return Err(parts.error("name", "is missing")),
    }
    // What a schema says is enforced whether it is strict or not.
    parts.boolean("strict")?;
    parts.string("description")?;
    match parts.object("schema")? {
        Some(schema) => {
            Ok(Structure::new(of_schema(schema), "response_format.json_schema.schema".to_owned()))
        }
        None => Err(parts.error("schema", "is missing; it is a JSON schema")),
    }
}

/// One of vLLM's fields, in whichever place.
fn constraint(fields: &Fields<'_>, name: &str, form: &str) -> Result<Option<Structure>, RouterError> {
    let Some(value) = fields.get(name) else { return Ok(None) };
    let text = || fields.string(name).map(|text| text.unwrap_or_default().to_owned());
    let source = match (form, value) {
        ("json", Value::Object(schema)) => of_schema(schema),
        ("json", Value::String(text)) => GrammarSource::JsonSchema(text.clone()),
        ("json", other) => {
            return Err(fields
                .error(name, format!("must be a JSON schema, an object or its text, not {}", kind(other))));
        }
        ("regex", _) => GrammarSource::Regex(text()?),
        ("grammar", _) => GrammarSource::Lark(text()?),
        ("choice", _) => GrammarSource::Choice(strings(fields, name)?),
        _ => match fields.boolean(name)? {
            Some(true) => GrammarSource::JsonObject,
            _ => return Ok(None),
        },
    };
    Ok(Some(Structure::new(source, fields.path(name))))
}

fn strings(fields: &Fields<'_>, name: &str) -> Result<Vec<String>, RouterError> {
    let values = fields.array(name)?.unwrap_or_default();
    let strings: Option<Vec<String>> = values.iter().map(|v| v.as_str().map(str::to_owned)).collect();
    strings.ok_or_else(|| fields.error(name, "must be an array of strings"))
}

fn of_schema(schema: &Map<String, Value>) -> GrammarSource {
    // A map of JSON values always has a text.
    GrammarSource::JsonSchema(serde_json::to_string(schema).unwrap_or_default())
}

#[cfg(test)]
mod tests;

impl Structure {
    pub(crate) fn new(source: GrammarSource, field: String) -> Self {
        Self { source, field, blanks: JsonBlanks::default(), pattern: None }
    }

    /// With so many blanks in a row between two tokens of JSON, at most, whatever the client lets stand there.
    pub(super) fn with_blanks(self, blanks: u32) -> Self {
        Self { blanks: JsonBlanks(blanks), ..self }
    }

    /// The same behind a model's thoughts; None where it cannot stand there.
    pub(super) fn behind_thoughts(&self, begun: bool) -> Option<Self> {
        let pattern = self.pattern.as_ref().map(|pattern| pattern.regex.as_str());
        let source = self.source.behind_thoughts(begun, self.blanks, pattern)?;
        Some(Self { source, ..self.clone() })
    }

    /// Compiles it once, so that what cannot be enforced is refused before anything is answered. Waits up to
    /// `grammar::limits::COMPILE_TIME_MAX`: never call it on the reactor.
    pub(crate) fn check(&self, model: &ModelEntry) -> Result<(), RouterError> {
        if let Some(BlanksPattern { regex, field }) = &self.pattern {
            let checked = self.blanks.check(regex);
            checked.map_err(|error| invalid(field.clone(), format!("`{field}` {error}")))?;
        }
        let source = self.spaced();
        let compiled = model.tokenizer.grammars().and_then(|grammars| grammars.compile(&source, self.blanks));
        compiled.map(|_| ()).map_err(|error| {
            let message = format!("`{}` {error}", self.field);
            match error {
                GrammarError::Busy => {
                    RouterError::new(ErrorCode::Overloaded, message).retry_after(RETRY_AFTER)
                }
                _ => invalid(self.field.clone(), message),
            }
        })
    }

    /// With what the client lets stand between two tokens of JSON; behind thoughts the source has it already.
    fn spaced(&self) -> GrammarSource {
        let source = self.source.clone();
        match &self.pattern {
            Some(BlanksPattern { regex, .. }) => source.with_blanks_pattern(regex),
            None => source,
        }
    }

    /// As workers are told.
    pub(crate) fn wire(&self) -> v1::Grammar {
        use v1::grammar::Source;
        let source = match self.spaced() {
            GrammarSource::JsonObject => Source::JsonObject(true),
            GrammarSource::JsonSchema(text) => Source::JsonSchema(text),
            GrammarSource::Regex(text) => Source::Regex(text),
            GrammarSource::Choice(texts) => Source::Choice(v1::GrammarChoice { texts }),
            GrammarSource::Lark(text) => Source::Lark(text),
        };
        let json_blanks_max = self.source.is_json().then_some(self.blanks.0);
        v1::Grammar { source: Some(source), json_blanks_max }
    }
}
