//! `tools` and `tool_choice`: functions stand here without the wrapping that a chat puts around them.

use serde_json::{Map, Value, json};

use crate::error::{RouterError, echo as shown};
use crate::request::fields::{Fields, invalid};

/// The tools as a chat has them. What else is wrong with one is found there.
pub(super) fn definitions(fields: &Fields<'_>) -> Result<Option<Value>, RouterError> {
    let Some(list) = fields.array("tools")? else { return Ok(None) };
    let wrapped: Result<Vec<_>, _> =
        list.iter().enumerate().map(|(at, tool)| wrapped(&format!("tools[{at}]"), tool)).collect();
    wrapped.map(|tools| Some(Value::Array(tools)))
}

/// The choice as a chat has it.
pub(super) fn choice(fields: &Fields<'_>) -> Result<Option<Value>, RouterError> {
    let choice = match fields.get("tool_choice") {
        Some(Value::Object(choice)) => choice,
        // Words are the same, and so is what is said of wrong ones.
        other => return Ok(other.cloned()),
    };
    let parts = Fields::within(choice, "tool_choice.");
    match parts.string("type")? {
        Some("function") => match parts.string("name")? {
            Some(name) => Ok(Some(json!({"type": "function", "function": {"name": name}}))),
            None => Err(parts.error("name", "is missing; it is the function's name")),
        },
        Some("allowed_tools") => {
            let tools = parts.array("tools")?.unwrap_or_default();
            let tools: Result<Vec<_>, _> = tools
                .iter()
                .enumerate()
                .map(|(at, tool)| wrapped(&format!("tool_choice.tools[{at}]"), tool))
                .collect();
            let allowed = json!({"mode": parts.get("mode"), "tools": tools?});
            Ok(Some(json!({"type": "allowed_tools", "allowed_tools": allowed})))
        }
        Some(other) => {
            let message = format!("is {:?}; here it is \"function\" or \"allowed_tools\"", shown(other));
            Err(parts.error("type", message))
        }
        None => Err(parts.error("type", "is missing; it is \"function\" or \"allowed_tools\"")),
    }
}

/// The tools as the reply repeats them: SDKs expect every field.
pub(super) fn echo(fields: &Fields<'_>) -> Result<Value, RouterError> {
    let tool = |tool: &Value| {
        let mut whole = Map::from_iter([
            ("description".to_owned(), Value::Null),
            ("parameters".to_owned(), Value::Null),
            ("strict".to_owned(), Value::Null),
        ]);
        whole.extend(
            tool.as_object().into_iter().flatten().map(|(name, value)| (name.clone(), value.clone())),
        );
        Value::Object(whole)
    };
    Ok(Value::Array(fields.array("tools")?.unwrap_or_default().iter().map(tool).collect()))
}

fn wrapped(path: &str, tool: &Value) -> Result<Value, RouterError> {
    let Some(object) = tool.as_object() else {
        let message = format!("`{path}` must be an object with `type` and `name`");
        return Err(invalid(path.to_owned(), message));
    };
    let prefix = format!("{path}.");
    let parts = Fields::within(object, &prefix);
    match parts.string("type")? {
        Some("function") => {}
        Some(hosted) => {
            let message = format!(
                "is {:?}, which nobody runs here; send a function of your own (\"type\": \"function\") and run it \
                 yourself",
                shown(hosted)
            );
            return Err(parts.error("type", message));
        }
        None => return Err(parts.error("type", "is missing; it is \"function\"")),
    }
    if parts.get("name").is_none() {
        return Err(parts.error("name", "is missing; it is the function's name"));
    }
    let mut function = object.clone();
    function.remove("type");
    Ok(json!({"type": "function", "function": function}))
}
