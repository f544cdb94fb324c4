//! Where Jinja shows through to Python: methods, `str()` and `json.dumps`.

use std::fmt::Write as _;

use minijinja::value::{Value, ValueKind};
use minijinja::{Error, ErrorKind, State};

/// Arguments of `json.dumps`.
pub(super) struct JsonStyle {
    pub(super) indent: Option<usize>,
    pub(super) ascii: bool,
    pub(super) sorted: bool,
    pub(super) separators: (String, String),
}

/// Methods of Python's types: minijinja's own set, and a few that it lacks.
pub(super) fn call_method(
    state: &mut State<'_, '_>,
    value: &Value,
    method: &str,
    args: &[Value],
) -> Result<Value, Error> {
    if let Some(text) = value.as_str() {
        let first = args.first().and_then(Value::as_str);
        match (method, first) {
            ("removeprefix", Some(prefix)) => return Ok(text.strip_prefix(prefix).unwrap_or(text).into()),
            ("removesuffix", Some(suffix)) => return Ok(text.strip_suffix(suffix).unwrap_or(text).into()),
            ("rsplit", Some(separator)) if !separator.is_empty() => {
                return Ok(rsplit(text, separator, args.get(1)));
            }
            _ => {}
        }
    }
    minijinja_contrib::pycompat::unknown_method_callback(state, value, method, args)
}

fn rsplit(text: &str, separator: &str, splits: Option<&Value>) -> Value {
    let splits = splits.and_then(|splits| usize::try_from(splits.clone()).ok());
    let mut parts: Vec<&str> = match splits {
        Some(splits) => text.rsplitn(splits + 1, separator).collect(),
        None => text.rsplit(separator).collect(),
    };
    parts.reverse();
    parts.into_iter().map(Value::from).collect()
}

/// `str(value)`.
pub(super) fn text(value: &Value) -> String {
    match value.as_str() {
        Some(text) => text.to_owned(),
        None => {
            let mut out = String::new();
            write_repr(&mut out, value);
            out
        }
    }
}

fn write_repr(out: &mut String, value: &Value) {
    match value.kind() {
        ValueKind::None => out.push_str("None"),
        ValueKind::Undefined => {}
        ValueKind::Bool => out.push_str(if value.is_true() { "True" } else { "False" }),
        ValueKind::String => write_string_repr(out, value.as_str().unwrap_or_default()),
        ValueKind::Seq | ValueKind::Iterable => {
            out.push('[');
            for (index, item) in value.try_iter().into_iter().flatten().enumerate() {
                out.push_str(if index > 0 { ", " } else { "" });
                write_repr(out, &item);
            }
            out.push(']');
        }
        ValueKind::Map => {
            out.push('{');
            for (index, key) in value.try_iter().into_iter().flatten().enumerate() {
                out.push_str(if index > 0 { ", " } else { "" });
                write_repr(out, &key);
                out.push_str(": ");
                write_repr(out, &value.get_item(&key).unwrap_or_default());
            }
            out.push('}');
        }
        _ => out.push_str(&value.to_string()),
    }
}

fn write_string_repr(out: &mut String, text: &str) {
    let quote = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
    out.push(quote);
    for char in text.chars() {
        match char {
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            '\\' => out.push_str("\\\\"),
            _ if char == quote => out.extend(['\\', quote]),
            _ => out.push(char),
        }
    }
    out.push(quote);
}

/// `json.dumps(value)`.
pub(super) fn to_json(value: &Value, style: &JsonStyle) -> Result<String, Error> {
    let value: serde_json::Value = serde_json::to_value(value).map_err(|error| {
        Error::new(ErrorKind::BadSerialization, "cannot write as JSON").with_source(error)
    })?;
    let mut out = String::new();
    style.write(&mut out, &value, 0);
    Ok(out)
}

impl JsonStyle {
    fn write(&self, out: &mut String, value: &serde_json::Value, depth: usize) {
        match value {
            serde_json::Value::String(text) => self.write_string(out, text),
            serde_json::Value::Array(items) if items.is_empty() => out.push_str("[]"),
            serde_json::Value::Object(fields) if fields.is_empty() => out.push_str("{}"),
            serde_json::Value::Array(items) => {
                out.push('[');
                for (index, item) in items.iter().enumerate() {
                    self.begin_item(out, index, depth + 1);
                    self.write(out, item, depth + 1);
                }
                self.end_items(out, depth);
                out.push(']');
            }
            serde_json::Value::Object(fields) => {
                let mut entries: Vec<_> = fields.iter().collect();
                if self.sorted {
                    entries.sort_by_key(|(key, _)| *key);
                }
                out.push('{');
                for (index, (key, item)) in entries.into_iter().enumerate() {
                    self.begin_item(out, index, depth + 1);
                    self.write_string(out, key);
                    out.push_str(&self.separators.1);
                    self.write(out, item, depth + 1);
                }
                self.end_items(out, depth);
                out.push('}');
            }
            plain => out.push_str(&plain.to_string()),
        }
    }

    fn begin_item(&self, out: &mut String, index: usize, depth: usize) {
        if index > 0 {
            out.push_str(&self.separators.0);
        }
        self.end_items(out, depth);
    }

    fn end_items(&self, out: &mut String, depth: usize) {
        if let Some(indent) = self.indent {
            out.push('\n');
            out.extend(std::iter::repeat_n(' ', indent * depth));
        }
    }

    fn write_string(&self, out: &mut String, text: &str) {
        out.push('"');
        for char in text.chars() {
            match char {
                '"' => out.push_str("\\\""),
                '\\' => out.push_str("\\\\"),
                '\n' => out.push_str("\\n"),
                '\r' => out.push_str("\\r"),
                '\t' => out.push_str("\\t"),
                '\u{8}' => out.push_str("\\b"),
                '\u{c}' => out.push_str("\\f"),
                '\0'..='\u{1f}' => push_escaped(out, char),
                _ if self.ascii && (!char.is_ascii() || char == '\u{7f}') => push_escaped(out, char),
                _ => out.push(char),
            }
        }
        out.push('"');
    }
}

fn push_escaped(out: &mut String, char: char) {
    for unit in char.encode_utf16(&mut [0; 2]) {
        // Writing to a String cannot fail.
        let _ = write!(out, "\\u{unit:04x}");
    }
}
