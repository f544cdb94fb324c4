//! Names of properties, and how many there are.

use std::collections::HashSet;

use serde_json::{Map, Value, json};

use super::{Object, Refusal};
use crate::grammar::limits::GRAMMAR_BYTES_MAX;

/// Keywords that say nothing of what a name may be.
const ANNOTATIONS: [&str; 5] = ["title", "description", "$comment", "examples", "default"];

pub(super) fn prepare(schema: &mut Object) -> Result<(), Refusal> {
    if let Some(names) = schema.get("propertyNames").cloned() {
        prepare_names(schema, &names)?;
    }
    check_least(schema)
}

/// `propertyNames` in keywords that the library knows.
fn prepare_names(schema: &mut Object, names: &Value) -> Result<(), Refusal> {
    let asks: Vec<(&str, &Value)> = match names {
        Value::Bool(true) => Vec::new(),
        Value::Object(asks) => asks
            .iter()
            .map(|(keyword, value)| (keyword.as_str(), value))
            // Names are strings.
            .filter(|(keyword, value)| {
                !ANNOTATIONS.contains(keyword) && (*keyword, *value) != ("type", &json!("string"))
            })
            .collect(),
        _ => vec![("", names)],
    };
    let value = schema.get("additionalProperties").cloned().unwrap_or(Value::Bool(true));
    let is_alone = !schema.contains_key("properties") && !schema.contains_key("patternProperties");
    let (keyword, properties) = match asks[..] {
        [] => {
            schema.shift_remove("propertyNames");
            return Ok(());
        }
        [("enum", Value::Array(names))] if is_alone => ("properties", named(names, &value)),
        [("pattern", Value::String(pattern))] if is_alone => {
            ("patternProperties", Some(Map::from_iter([(pattern.clone(), value)])))
        }
        _ => ("", None),
    };
    let Some(properties) = properties else {
        let remedy =
            "can be an `enum` or a `pattern`, without `properties` beside it; list the names in `properties`";
        return Err(("propertyNames", remedy.to_owned()));
    };
    schema.shift_remove("propertyNames");
    schema.insert(keyword.to_owned(), Value::Object(properties));
    schema.insert("additionalProperties".to_owned(), Value::Bool(false));
    Ok(())
}

/// The same value for each of some names; None if one is no string, or the copies are too large.
fn named(names: &[Value], value: &Value) -> Option<Object> {
    if names.len() * value.to_string().len() > GRAMMAR_BYTES_MAX {
        return None;
    }
    names.iter().map(|name| Some((name.as_str()?.to_owned(), value.clone()))).collect()
}

/// The library counts properties, whatever their names: beyond the required ones all but one may have the same.
fn check_least(schema: &Object) -> Result<(), Refusal> {
    let Some(least) = schema.get("minProperties").and_then(Value::as_u64) else { return Ok(()) };
    let required = schema.get("required").and_then(Value::as_array);
    let required: HashSet<&str> = required.into_iter().flatten().filter_map(Value::as_str).collect();
    if least <= required.len() as u64 + 1 {
        return Ok(());
    }
    let reason = format!(
        "is {least} with {} names in `required`: that the others differ cannot be enforced; list them there, \
         or ask for one more at most",
        required.len()
    );
    Err(("minProperties", reason))
}
