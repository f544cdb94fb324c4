//! Jinja as the transformers library sets it up.

use std::error::Error as _;

use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, Value, ValueKind};
use minijinja::{Environment, Error, ErrorKind, Output, State, UndefinedBehavior};

use super::{python, strftime};

/// The one template of an environment.
pub(super) const NAME: &str = "chat";
/// Work that a render may do: 10 million instructions (about a second), or 640 MB of text made on the way.
const FUEL: u64 = 10_000_000;
/// Nesting of macros and loops; real templates stay under ten.
const RECURSION_MAX: usize = 100;

/// `raise_exception` of a template, so that its words can be found again.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct Raised(String);

/// Compiles a template.
pub(super) fn compile(source: &str) -> Result<Environment<'static>, Error> {
    let mut environment = Environment::new();
    environment.set_syntax(SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build()?);
    environment.set_undefined_behavior(UndefinedBehavior::Lenient);
    environment.set_auto_escape_callback(|_| minijinja::AutoEscape::None);
    environment.set_recursion_limit(RECURSION_MAX);
    environment.set_fuel(Some(FUEL));
    environment.set_unknown_method_callback(python::call_method);
    environment.set_formatter(format);
    environment.add_filter("tojson", to_json);
    environment.add_filter("string", |value: &Value| python::text(value));
    environment.add_function("raise_exception", raise_exception);
    environment.add_function("strftime_now", |format: &str| strftime::now(format));
    environment.add_template_owned(NAME, without_generation_tags(source))?;
    Ok(environment)
}

/// What to tell a user: the template's own words where it raised.
pub(super) fn words(error: &Error) -> String {
    let mut source = error.source();
    while let Some(cause) = source {
        if let Some(raised) = cause.downcast_ref::<Raised>() {
            return raised.0.clone();
        }
        source = cause.source();
    }
    error.to_string()
}

/// As Python prints values; nothing for none, since a missing content is meant where templates print it.
fn format(out: &mut Output<'_>, _state: &mut State<'_, '_>, value: &Value) -> Result<(), Error> {
    let written = match value.kind() {
        ValueKind::None | ValueKind::Undefined => Ok(()),
        ValueKind::String => out.write_str(value.as_str().unwrap_or_default()),
        _ => out.write_str(&python::text(value)),
    };
    written.map_err(Error::from)
}

fn raise_exception(message: String) -> Result<Value, Error> {
    Err(Error::new(ErrorKind::InvalidOperation, message.clone()).with_source(Raised(message)))
}

fn to_json(value: &Value, indent: Option<usize>, options: Kwargs) -> Result<String, Error> {
    let indent = options.get::<Option<usize>>("indent")?.or(indent);
    let style = python::JsonStyle {
        indent,
        ascii: options.get::<Option<bool>>("ensure_ascii")?.unwrap_or(false),
        sorted: options.get::<Option<bool>>("sort_keys")?.unwrap_or(false),
        separators: separators(options.get::<Option<Vec<String>>>("separators")?, indent),
    };
    options.assert_all_used()?;
    python::to_json(value, &style)
}

fn separators(given: Option<Vec<String>>, indent: Option<usize>) -> (String, String) {
    match given.as_deref() {
        Some([item, key]) => (item.clone(), key.clone()),
        _ => (if indent.is_some() { "," } else { ", " }.to_owned(), ": ".to_owned()),
    }
}

/// `{% generation %}` marks the assistant's words for training: its tags become a condition that always holds.
fn without_generation_tags(source: &str) -> String {
    let mut text = String::with_capacity(source.len());
    let mut rest = source;
    while let Some((before, tag)) = rest.split_once("{%") {
        text.push_str(before);
        text.push_str("{%");
        let Some((inner, after)) = tag.split_once("%}") else { return text + tag };
        match inner.trim_matches(['-', '+', ' ', '\n', '\t']) {
            "generation" => text.push_str(&inner.replacen("generation", "if true", 1)),
            "endgeneration" => text.push_str(&inner.replacen("endgeneration", "endif", 1)),
            _ => text.push_str(inner),
        }
        text.push_str("%}");
        rest = after;
    }
    text + rest
}
