//! `tool_choice`: whether a call is wanted, and of which tools.

use serde_json::Value;

use super::super::fields::{Fields, invalid};
use crate::error::{RouterError, echo};

const FORMS: &str = "must be \"none\", \"auto\", \"required\", {\"type\": \"function\", \"function\": {\"name\": ..}} or \
                     {\"type\": \"allowed_tools\", \"allowed_tools\": {\"mode\": .., \"tools\": [..]}}";

/// Whether a call is wanted.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Choice {
    None,
    Auto,
    Required,
    Named(String),
}

/// The choice, and the places among `names` of the tools that it allows; None: of all.
pub(super) fn read(
    fields: &Fields<'_>,
    names: &[String],
) -> Result<(Choice, Option<Vec<usize>>), RouterError> {
    let (choice, allowed) = match fields.get("tool_choice") {
        None => return Ok((Choice::Auto, None)),
        Some(Value::String(word)) => match word.as_str() {
            "none" => return Ok((Choice::None, None)),
            "auto" => return Ok((Choice::Auto, None)),
            "required" => (Choice::Required, None),
            _ => return Err(fields.error("tool_choice", FORMS)),
        },
        Some(object) => match object.get("type").and_then(Value::as_str) {
            Some("function") => (Choice::Named(name(object, fields)?), None),
            Some("allowed_tools") => {
                let allowed = object.get("allowed_tools");
                (mode(allowed)?, allowed)
            }
            _ => return Err(fields.error("tool_choice", FORMS)),
        },
    };
    if names.is_empty() {
        return Err(fields.error("tool_choice", "asks for calls, but there are no `tools`; send some"));
    }
    if let Choice::Named(name) = &choice {
        place(name, names, "tool_choice.function.name")?;
    }
    let allowed = allowed.map(|allowed| places(allowed, names)).transpose()?;
    Ok((choice, allowed))
}

fn name(choice: &Value, fields: &Fields<'_>) -> Result<String, RouterError> {
    let name = choice.pointer("/function/name").and_then(Value::as_str);
    name.map(str::to_owned).ok_or_else(|| fields.error("tool_choice", FORMS))
}

fn mode(allowed: Option<&Value>) -> Result<Choice, RouterError> {
    const PATH: &str = "tool_choice.allowed_tools";
    let Some(allowed) = allowed.filter(|allowed| allowed.is_object()) else {
        let message = format!("`{PATH}` must be {{\"mode\": .., \"tools\": [..]}}");
        return Err(invalid(PATH.to_owned(), message));
    };
    match allowed.get("mode").and_then(Value::as_str) {
        Some("auto") => Ok(Choice::Auto),
        Some("required") => Ok(Choice::Required),
        _ => {
            let path = format!("{PATH}.mode");
            let message = format!("`{path}` must be \"auto\" or \"required\"");
            Err(invalid(path, message))
        }
    }
}

/// Places of the allowed tools, in the order of all tools, each once.
fn places(allowed: &Value, names: &[String]) -> Result<Vec<usize>, RouterError> {
    let path = "tool_choice.allowed_tools.tools";
    let list = allowed.get("tools").and_then(Value::as_array).filter(|list| !list.is_empty());
    let list = list.ok_or_else(|| {
        invalid(path.to_owned(), format!("`{path}` must be an array of at least one of the `tools`"))
    })?;
    let mut places = Vec::with_capacity(list.len());
    for (at, tool) in list.iter().enumerate() {
        let path = format!("{path}[{at}]");
        let is_function = tool.get("type").and_then(Value::as_str) == Some("function");
        let name = tool.pointer("/function/name").and_then(Value::as_str).filter(|_| is_function);
        let name = name.ok_or_else(|| {
            let form = "{\"type\": \"function\", \"function\": {\"name\": ..}}";
            invalid(path.clone(), format!("`{path}` must be {form}"))
        })?;
        places.push(place(name, names, &format!("{path}.function.name"))?);
    }
    places.sort_unstable();
    places.dedup();
    Ok(places)
}

fn place(name: &str, names: &[String], path: &str) -> Result<usize, RouterError> {
    names.iter().position(|known| known == name).ok_or_else(|| {
        let message = format!("`{path}` is {:?}, which is none of the `tools`", echo(name));
        invalid(path.to_owned(), message)
    })
}
