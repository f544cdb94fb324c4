//! Typed reading of a JSON object's fields, with errors that name the field.

use std::ops::RangeInclusive;

use serde_json::{Map, Value};
use thalweg_proto::code::ErrorCode;

use crate::error::{RouterError, echo};

use super::json::kind;

/// A 400 about `param`.
pub(crate) fn invalid(param: impl Into<Option<String>>, message: impl Into<String>) -> RouterError {
    RouterError { param: param.into(), ..RouterError::new(ErrorCode::InvalidRequest, message) }
}

/// A view of an object. `null` counts as absent, as in OpenAI's API.
pub(crate) struct Fields<'a> {
    object: &'a Map<String, Value>,
    /// What stands before a field's name in errors: empty, or `stream_options.`.
    prefix: &'a str,
}

impl<'a> Fields<'a> {
    pub(crate) fn new(object: &'a Map<String, Value>) -> Self {
        Self { object, prefix: "" }
    }

    /// Fields of an object inside the request; `prefix` ends with a dot.
    pub(crate) fn within(object: &'a Map<String, Value>, prefix: &'a str) -> Self {
        Self { object, prefix }
    }

    pub(crate) fn names(&self) -> impl Iterator<Item = &'a str> {
        self.object.iter().filter(|(_, v)| !v.is_null()).map(|(k, _)| k.as_str())
    }

    pub(crate) fn get(&self, name: &str) -> Option<&'a Value> {
        self.object.get(name).filter(|v| !v.is_null())
    }

    pub(crate) fn string(&self, name: &str) -> Result<Option<&'a str>, RouterError> {
        self.typed(name, "a string", Value::as_str)
    }

    pub(crate) fn boolean(&self, name: &str) -> Result<Option<bool>, RouterError> {
        self.typed(name, "a boolean", Value::as_bool)
    }

    pub(crate) fn array(&self, name: &str) -> Result<Option<&'a [Value]>, RouterError> {
        self.typed(name, "an array", |v| v.as_array().map(Vec::as_slice))
    }

    pub(crate) fn object(&self, name: &str) -> Result<Option<&'a Map<String, Value>>, RouterError> {
        self.typed(name, "an object", Value::as_object)
    }

    /// A whole number within `range`; 3.0 is whole too.
    pub(crate) fn integer(&self, name: &str, range: RangeInclusive<i64>) -> Result<Option<i64>, RouterError> {
        let Some(value) = self.typed(name, "a whole number", whole_number)? else { return Ok(None) };
        if range.contains(&value) {
            return Ok(Some(value));
        }
        let (low, high) = range.into_inner();
        let bounds = match high >= i64::from(i32::MAX) {
            true if value < low => format!("at least {low}"),
            true => format!("at most {high}"),
            false => format!("{low} to {high}"),
        };
        Err(self.error(name, format!("must be {bounds}, not {value}")))
    }

    /// A count that fits the wire's 32 bits.
    pub(crate) fn count(&self, name: &str, least: i64) -> Result<Option<u32>, RouterError> {
        let value = self.integer(name, least..=i64::from(u32::MAX))?;
        Ok(value.map(|v| u32::try_from(v).unwrap_or(u32::MAX)))
    }

    /// A finite number for which `holds`; `rule` says in words when that is.
    pub(crate) fn number(
        &self,
        name: &str,
        rule: &str,
        holds: impl Fn(f32) -> bool,
    ) -> Result<Option<f32>, RouterError> {
        let Some(value) = self.typed(name, "a number", Value::as_f64)? else { return Ok(None) };
        // What is above 0 stays there, as rules tell 0 from the rest.
        let single = if value > 0.0 { (value as f32).max(f32::MIN_POSITIVE) } else { value as f32 };
        match single.is_finite() && holds(single) {
            true => Ok(Some(single)),
            false if single.is_finite() => Err(self.error(name, format!("must be {rule}, not {value}"))),
            false => Err(self.error(name, format!("must be {rule}, and fit 32 bits, not {value}"))),
        }
    }

    /// An error about a field: `message` continues a sentence that begins with its name.
    pub(crate) fn error(&self, name: &str, message: impl std::fmt::Display) -> RouterError {
        let path = self.path(name);
        let message = format!("`{path}` {message}");
        invalid(path, message)
    }

    /// A field's name with what it stands in.
    pub(crate) fn path(&self, name: &str) -> String {
        format!("{}{}", self.prefix, echo(name))
    }

    fn typed<T>(
        &self,
        name: &str,
        wanted: &str,
        read: impl Fn(&'a Value) -> Option<T>,
    ) -> Result<Option<T>, RouterError> {
        let Some(value) = self.get(name) else { return Ok(None) };
        match read(value) {
            Some(read) => Ok(Some(read)),
            None => Err(self.error(name, format!("must be {wanted}, not {}", found(value)))),
        }
    }
}

/// A number as people wrote it, anything else by its kind.
fn found(value: &Value) -> String {
    match value {
        Value::Number(number) => number.to_string(),
        other => kind(other).to_owned(),
    }
}

fn whole_number(value: &Value) -> Option<i64> {
    if let Some(integer) = value.as_i64() {
        return Some(integer);
    }
    let float = value.as_f64()?;
    // Beyond 2^53 a float does not say which integer was meant.
    (float.fract() == 0.0 && float.abs() <= 9_007_199_254_740_992.0).then_some(float as i64)
}

/// Reads an array of token ids below `vocab_size`; `path` names the array in errors.
pub(crate) fn token_ids(values: &[Value], vocab_size: usize, path: &str) -> Result<Vec<u32>, RouterError> {
    let mut ids = Vec::with_capacity(values.len());
    for (at, value) in values.iter().enumerate() {
        let id = value.as_u64().and_then(|id| u32::try_from(id).ok());
        match id {
            Some(id) if (id as usize) < vocab_size => ids.push(id),
            _ => return Err(token_id_error(value, vocab_size, format!("{path}[{at}]"))),
        }
    }
    Ok(ids)
}

fn token_id_error(value: &Value, vocab_size: usize, path: String) -> RouterError {
    let message = match value {
        Value::Number(number) => format!(
            "`{path}` is {number}, which is no token id of this model; ids are whole numbers from 0 to {}",
            vocab_size.saturating_sub(1)
        ),
        other => format!("`{path}` must be a token id, not {}", kind(other)),
    };
    invalid(path, message)
}
