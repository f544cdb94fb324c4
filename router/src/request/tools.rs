//! `tools`, `tool_choice` and `parallel_tool_calls`: what calls are wanted, and the schema that forced ones keep to.

mod choice;

use std::sync::Arc;

use serde_json::{Map, Value, json};
use thalweg_model::grammar::GrammarSource;

use crate::error::{RouterError, echo};
use crate::output::tools::{ToolFormat, ToolPlan};

use super::fields::{Fields, invalid};
use super::json::kind;
use super::limits::{TOOL_NAME_CHARS_MAX, TOOLS_MAX};
use super::structured::Structure;
use choice::Choice;

/// The tools of a request, all sound.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Tools {
    /// As the client sent them, for the template; null if the model is not to know of any.
    pub(super) definitions: Value,
    names: Arc<[String]>,
    choice: Choice,
    parallel: bool,
}

impl Tools {
    /// Reads `tools`, which was taken out of the body, and the fields about them.
    pub(super) fn read(tools: Option<Value>, fields: &Fields<'_>) -> Result<Self, RouterError> {
        let mut list = definitions(tools)?;
        let mut names = names(&list)?;
        let (choice, allowed) = choice::read(fields, &names)?;
        if let Some(allowed) = allowed {
            // What it is not told of it cannot call.
            list = allowed.iter().map(|at| list[*at].take()).collect();
            names = allowed.iter().map(|at| std::mem::take(&mut names[*at])).collect();
        }
        let parallel = fields.boolean("parallel_tool_calls")?.unwrap_or(true);
        let unused = list.is_empty() || choice == Choice::None;
        let definitions = if unused { Value::Null } else { Value::Array(list) };
        Ok(Self { definitions, names: names.into(), choice, parallel })
    }

    /// What to look for in the answer. `format` is the model's own; None where calls are to stay text. An answer that
    /// `is_structured` is no call unless one is forced.
    pub(super) fn plan(&self, format: Option<ToolFormat>, is_structured: bool) -> Option<ToolPlan> {
        let named = match &self.choice {
            _ if self.definitions.is_null() => return None,
            Choice::Named(name) => Some(name.clone()),
            Choice::None | Choice::Auto | Choice::Required => None,
        };
        let format = match &self.choice {
            Choice::Required => ToolFormat::Json,
            // The format decides about ids alone.
            Choice::Named(_) => format.unwrap_or(ToolFormat::Json),
            Choice::None | Choice::Auto if is_structured => return None,
            Choice::None | Choice::Auto => format?,
        };
        Some(ToolPlan { format, names: Arc::clone(&self.names), parallel: self.parallel, named })
    }

    /// What holds the answer to a call where one is forced.
    pub(super) fn forced(&self) -> Option<Structure> {
        let field = match &self.choice {
            Choice::Named(name) => {
                let at = self.names.iter().position(|known| known == name)?;
                format!("tools[{at}].function.parameters")
            }
            _ => "tools".to_owned(),
        };
        Some(Structure::new(GrammarSource::JsonSchema(self.forced_schema()?.to_string()), field))
    }

    /// The arguments of the named tool, or an array of calls.
    fn forced_schema(&self) -> Option<Value> {
        let functions = self.definitions.as_array()?.iter().filter_map(|tool| tool.get("function"));
        match &self.choice {
            Choice::None | Choice::Auto => None,
            Choice::Named(name) => {
                functions.into_iter().find(|f| f["name"] == **name).map(|f| parameters(f, "#"))
            }
            Choice::Required => {
                let call = |(at, function): (usize, &Value)| {
                    let root = format!("#/items/anyOf/{at}/properties/parameters");
                    json!({
                        "type": "object",
                        "properties": {"name": {"const": function["name"]}, "parameters": parameters(function, &root)},
                        "required": ["name", "parameters"],
                        "additionalProperties": false,
                    })
                };
                let calls: Vec<_> = functions.enumerate().map(call).collect();
                let mut schema = json!({"type": "array", "minItems": 1, "items": {"anyOf": calls}});
                if !self.parallel {
                    schema["maxItems"] = json!(1);
                }
                Some(schema)
            }
        }
    }
}

/// Refuses forced calls where there are no chats.
pub(super) fn refuse_forced(fields: &Fields<'_>) -> Result<(), RouterError> {
    match fields.get("tool_choice") {
        Some(choice) if choice != "none" && choice != "auto" => {
            Err(fields.error("tool_choice", "is not available here; use /v1/chat/completions"))
        }
        _ => Ok(()),
    }
}

fn definitions(value: Option<Value>) -> Result<Vec<Value>, RouterError> {
    match value {
        None | Some(Value::Null) => Ok(Vec::new()),
        Some(Value::Array(list)) if list.len() > TOOLS_MAX => {
            Err(invalid("tools".to_owned(), format!("`tools` takes at most {TOOLS_MAX} tools")))
        }
        Some(Value::Array(list)) => Ok(list),
        Some(other) => {
            Err(invalid("tools".to_owned(), format!("`tools` must be an array, not {}", kind(&other))))
        }
    }
}

fn names(list: &[Value]) -> Result<Vec<String>, RouterError> {
    let mut names = Vec::with_capacity(list.len());
    for (at, tool) in list.iter().enumerate() {
        let name = check(tool, &format!("tools[{at}]"))?;
        if names.contains(&name) {
            let path = format!("tools[{at}].function.name");
            let message = format!("`{path}` is {:?}, which another tool has already", echo(&name));
            return Err(invalid(path, message));
        }
        names.push(name);
    }
    Ok(names)
}

fn check(tool: &Value, path: &str) -> Result<String, RouterError> {
    let wrong = || {
        let message = format!("`{path}` must be {{\"type\": \"function\", \"function\": {{\"name\": ..}}}}");
        invalid(path.to_owned(), message)
    };
    let is_function = tool.get("type").and_then(Value::as_str) == Some("function");
    let function =
        tool.get("function").and_then(Value::as_object).filter(|_| is_function).ok_or_else(wrong)?;
    let prefix = format!("{path}.function.");
    let fields = Fields::within(function, &prefix);
    let name = fields.string("name")?.ok_or_else(wrong)?;
    let is_part = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.');
    if name.is_empty() || name.len() > TOOL_NAME_CHARS_MAX || !name.chars().all(is_part) {
        let rule = format!("must be 1 to {TOOL_NAME_CHARS_MAX} letters, digits, `_`, `-` or `.`");
        return Err(fields.error("name", format!("{rule}, not {:?}", echo(name))));
    }
    fields.string("description")?;
    if let Some(kind) = fields.object("parameters")?.and_then(|schema| schema.get("type"))
        && !describes_objects(kind)
    {
        let rule = format!(
            "must describe an object: its `type` must be \"object\", not {}",
            echo(&kind.to_string())
        );
        return Err(fields.error("parameters", rule));
    }
    fields.boolean("strict")?;
    Ok(name.to_owned())
}

/// Whether a schema's `type` takes objects, whatever else.
fn describes_objects(kind: &Value) -> bool {
    kind == "object" || kind.as_array().is_some_and(|kinds| kinds.iter().any(|kind| kind == "object"))
}

/// The schema of a function's arguments, always an object's; references follow it to its place below `root`.
fn parameters(function: &Value, root: &str) -> Value {
    let mut schema = match function.get("parameters") {
        Some(Value::Object(schema)) => schema.clone(),
        _ => Map::from_iter([
            ("properties".to_owned(), json!({})),
            ("additionalProperties".to_owned(), json!(false)),
        ]),
    };
    schema.insert("type".to_owned(), json!("object"));
    let mut schema = Value::Object(schema);
    if root != "#" {
        move_references(&mut schema, root);
    }
    schema
}

/// Keywords of a schema that hold data, and those that hold schemas by names which may read like keywords.
const DATA: [&str; 4] = ["const", "enum", "default", "examples"];
const NAMED: [&str; 5] = ["properties", "patternProperties", "dependentSchemas", "$defs", "definitions"];

fn move_references(schema: &mut Value, root: &str) {
    match schema {
        Value::Array(items) => items.iter_mut().for_each(|item| move_references(item, root)),
        Value::Object(fields) => {
            for (key, value) in fields.iter_mut().filter(|(key, _)| !DATA.contains(&key.as_str())) {
                match value {
                    Value::String(to) if key == "$ref" && to.starts_with('#') => to.replace_range(..1, root),
                    Value::Object(schemas) if NAMED.contains(&key.as_str()) => {
                        schemas.values_mut().for_each(|schema| move_references(schema, root));
                    }
                    other => move_references(other, root),
                }
            }
        }
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(body: Value) -> Result<Tools, RouterError> {
        let body = body.as_object().expect("an object");
        Tools::read(body.get("tools").cloned(), &Fields::new(body))
    }

    fn tool(name: &str) -> Value {
        json!({"type": "function", "function": {"name": name, "parameters": {
            "type": "object", "properties": {"x": {"$ref": "#/$defs/x"}}, "$defs": {"x": {"type": "string"}}}}})
    }

    #[test]
    fn refusals_name_the_field() {
        let check = |body: Value, param: &str| {
            let error = read(body.clone()).expect_err("must be refused");
            assert_eq!(error.param.as_deref(), Some(param), "{body}: {}", error.message);
        };
        check(json!({"tools": {}}), "tools");
        check(json!({"tools": [1]}), "tools[0]");
        check(json!({"tools": [{"type": "function"}]}), "tools[0]");
        check(json!({"tools": [{"type": "function", "function": {}}]}), "tools[0]");
        check(json!({"tools": [{"type": "retrieval", "function": {"name": "f"}}]}), "tools[0]");
        check(json!({"tools": [tool("a b")]}), "tools[0].function.name");
        check(json!({"tools": [tool("")]}), "tools[0].function.name");
        check(json!({"tools": [tool("f"), tool("f")]}), "tools[1].function.name");
        let strange = json!({"type": "function", "function": {"name": "f", "parameters": "x"}});
        check(json!({"tools": [strange]}), "tools[0].function.parameters");
        for kind in [json!("string"), json!(["array", "null"]), json!(null), json!(1)] {
            let strange =
                json!({"type": "function", "function": {"name": "f", "parameters": {"type": kind}}});
            check(json!({"tools": [strange]}), "tools[0].function.parameters");
        }
        check(json!({"tools": [tool("f")], "tool_choice": "maybe"}), "tool_choice");
        check(json!({"tools": [tool("f")], "tool_choice": 1}), "tool_choice");
        check(json!({"tools": [tool("f")], "tool_choice": {"type": "function"}}), "tool_choice");
        let named = json!({"type": "function", "function": {"name": "g"}});
        check(json!({"tools": [tool("f")], "tool_choice": named}), "tool_choice.function.name");
        check(json!({"tool_choice": "required"}), "tool_choice");
        check(json!({"tools": [], "tool_choice": named}), "tool_choice");
        check(json!({"tools": [tool("f")], "parallel_tool_calls": 1}), "parallel_tool_calls");
        let allow = |allowed: Value, param: &str| {
            let choice = json!({"type": "allowed_tools", "allowed_tools": allowed});
            check(json!({"tools": [tool("f")], "tool_choice": choice}), param);
        };
        let named = |name: &str| json!([{"type": "function", "function": {"name": name}}]);
        allow(json!(null), "tool_choice.allowed_tools");
        allow(json!([]), "tool_choice.allowed_tools");
        allow(json!({"tools": named("f")}), "tool_choice.allowed_tools.mode");
        allow(json!({"mode": "none", "tools": named("f")}), "tool_choice.allowed_tools.mode");
        allow(json!({"mode": "auto"}), "tool_choice.allowed_tools.tools");
        allow(json!({"mode": "auto", "tools": []}), "tool_choice.allowed_tools.tools");
        allow(json!({"mode": "auto", "tools": ["f"]}), "tool_choice.allowed_tools.tools[0]");
        let wrong = json!([{"type": "custom", "function": {"name": "f"}}]);
        allow(json!({"mode": "auto", "tools": wrong}), "tool_choice.allowed_tools.tools[0]");
        let unknown = "tool_choice.allowed_tools.tools[0].function.name";
        allow(json!({"mode": "required", "tools": named("g")}), unknown);
        let choice = json!({"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": named("f")}});
        check(json!({"tool_choice": choice}), "tool_choice");
    }

    #[test]
    fn calls_are_looked_for_where_they_are_wanted() {
        let plan = |body: Value| read(body).expect("sound").plan(Some(ToolFormat::Hermes), false);
        assert_eq!(plan(json!({"tool_choice": "none"})), None);
        assert_eq!(plan(json!({"tool_choice": "auto"})), None);
        assert_eq!(plan(json!({"tools": [tool("f")], "tool_choice": "none"})), None);
        let expected = ToolPlan {
            format: ToolFormat::Hermes,
            names: ["f".to_owned()].into(),
            parallel: true,
            named: None,
        };
        assert_eq!(plan(json!({"tools": [tool("f")], "tool_choice": null})), Some(expected.clone()));
        let one = json!({"tools": [tool("f")], "parallel_tool_calls": false});
        assert_eq!(plan(one), Some(ToolPlan { parallel: false, ..expected.clone() }));
        let required = json!({"tools": [tool("f")], "tool_choice": "required"});
        assert_eq!(plan(required), Some(ToolPlan { format: ToolFormat::Json, ..expected.clone() }));
        let named =
            json!({"tools": [tool("f")], "tool_choice": {"type": "function", "function": {"name": "f"}}});
        assert_eq!(plan(named), Some(ToolPlan { named: Some("f".to_owned()), ..expected }));
    }

    #[test]
    fn allowed_tools_are_the_only_ones() {
        let read = |mode: &str, allowed: &[&str]| {
            let allowed: Vec<_> =
                allowed.iter().map(|name| json!({"type": "function", "function": {"name": name}})).collect();
            let allowed = json!({"mode": mode, "tools": allowed});
            let choice = json!({"type": "allowed_tools", "allowed_tools": allowed});
            read(json!({"tools": [tool("f"), tool("g"), tool("h")], "tool_choice": choice})).expect("sound")
        };
        let plan = |tools: &Tools| tools.plan(Some(ToolFormat::Hermes), false).expect("calls are looked for");
        // In the order of `tools`, each once.
        let auto = read("auto", &["h", "f", "h"]);
        assert_eq!(auto.definitions, json!([tool("f"), tool("h")]));
        assert_eq!(
            (plan(&auto).names.as_ref(), plan(&auto).format),
            (&["f", "h"].map(str::to_owned)[..], ToolFormat::Hermes)
        );
        assert_eq!(auto.forced_schema(), None);
        let required = read("required", &["g"]);
        assert_eq!(plan(&required).format, ToolFormat::Json);
        let schema = required.forced_schema().expect("forced");
        let calls = schema["items"]["anyOf"].as_array().expect("calls");
        assert_eq!((calls.len(), &calls[0]["properties"]["name"]["const"]), (1, &json!("g")));
    }

    #[test]
    fn forced_calls_keep_to_the_tools_schemas() {
        let schema = |choice: Value, parallel: bool| {
            let body = json!({"tools": [tool("f"), {"type": "function", "function": {"name": "g"}}],
                              "tool_choice": choice, "parallel_tool_calls": parallel});
            read(body).expect("sound").forced_schema()
        };
        assert_eq!(schema(json!("auto"), true), None);
        let named = schema(json!({"type": "function", "function": {"name": "f"}}), true).expect("forced");
        assert_eq!(named, tool("f")["function"]["parameters"]);
        let empty = json!({"properties": {}, "additionalProperties": false, "type": "object"});
        assert_eq!(schema(json!({"type": "function", "function": {"name": "g"}}), true), Some(empty));
        let required = schema(json!("required"), false).expect("forced");
        assert_eq!(required["maxItems"], 1);
        let first = &required["items"]["anyOf"][0]["properties"];
        assert_eq!(first["name"]["const"], "f");
        let reference = first["parameters"]["properties"]["x"]["$ref"].as_str().expect("a reference");
        let target = required.pointer(reference.trim_start_matches('#'));
        assert_eq!(target, Some(&json!({"type": "string"})));
    }

    #[test]
    fn references_within_data_stay() {
        let to = |root: &str| json!({"$ref": format!("{root}/x")});
        let schema = |root: &str| {
            json!({"const": to("#"), "enum": [to("#")], "default": to("#"), "examples": [to("#")],
                   "properties": {"const": to(root), "$ref": to(root)}, "anyOf": [to(root)]})
        };
        let mut moved = schema("#");
        move_references(&mut moved, "#/items");
        assert_eq!(moved, schema("#/items"));
    }
}
