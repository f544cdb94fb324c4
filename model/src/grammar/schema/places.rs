//! The schemas within a schema, as JSON pointers: what is data, and what nothing refers to, is none.

use std::collections::HashSet;

use serde_json::Value;

use super::references::pointer;
use super::{Object, refused};
use crate::grammar::compile::GrammarError;

/// Keywords that hold a schema, an array of them, or named ones.
const ONE: [&str; 3] = ["additionalItems", "additionalProperties", "items"];
const SEVERAL: [&str; 5] = ["allOf", "anyOf", "oneOf", "prefixItems", "items"];
const NAMED: [&str; 2] = ["properties", "patternProperties"];
const DEFINITIONS: [&str; 2] = ["$defs", "definitions"];
/// Keywords by which references find schemas without a pointer from the root.
const IDS: [&str; 3] = ["$id", "id", "$anchor"];

pub(super) struct Places {
    /// Each once.
    pub(super) schemas: Vec<String>,
    pub(super) references: Vec<Reference>,
}

/// A `$ref` that is a pointer from the root.
pub(super) struct Reference {
    /// The schema that it is in.
    pub(super) from: String,
    pub(super) to: String,
}

impl Places {
    pub(super) fn of(root: &Value) -> Result<Self, GrammarError> {
        let mut walk = Walk {
            root,
            has_ids: has_ids(root),
            known: HashSet::new(),
            found: Self { schemas: Vec::new(), references: Vec::new() },
            waiting: vec![String::new()],
        };
        while let Some(place) = walk.waiting.pop() {
            if let Some(Value::Object(schema)) = root.pointer(&place) {
                walk.visit(schema, place)?;
            }
        }
        Ok(walk.found)
    }
}

struct Walk<'a> {
    root: &'a Value,
    has_ids: bool,
    known: HashSet<String>,
    found: Places,
    waiting: Vec<String>,
}

impl Walk<'_> {
    fn visit(&mut self, schema: &Object, place: String) -> Result<(), GrammarError> {
        if !self.known.insert(place.clone()) {
            return Ok(());
        }
        for (keyword, value) in schema {
            let is_in = |keywords: &[&str]| keywords.contains(&keyword.as_str());
            let at = || format!("{place}/{keyword}");
            match value {
                Value::Object(_) if is_in(&ONE) => self.waiting.push(at()),
                Value::Array(schemas) if is_in(&SEVERAL) => {
                    self.waiting.extend((0..schemas.len()).map(|index| format!("{}/{index}", at())));
                }
                // Those with a name of their own may be meant by any reference.
                Value::Object(schemas) if is_in(&NAMED) || self.has_ids && is_in(&DEFINITIONS) => {
                    self.waiting.extend(schemas.keys().map(|name| format!("{}/{}", at(), escaped(name))));
                }
                Value::String(to) if keyword == "$ref" => self.reference(&place, to)?,
                _ => {}
            }
        }
        self.found.schemas.push(place);
        Ok(())
    }

    fn reference(&mut self, from: &str, to: &str) -> Result<(), GrammarError> {
        match pointer(to).filter(|to| self.root.pointer(to).is_some()) {
            Some(to) => {
                self.waiting.push(to.clone());
                self.found.references.push(Reference { from: from.to_owned(), to });
                Ok(())
            }
            None if self.has_ids => Ok(()),
            None if to.starts_with('#') => {
                let reason = format!("leads to `{to}`, which is not there; define it in `$defs`");
                Err(refused(from, ("$ref", reason)))
            }
            None => {
                let reason = format!("leads out of the schema, to `{to}`; copy what is meant into `$defs`");
                Err(refused(from, ("$ref", reason)))
            }
        }
    }
}

fn has_ids(value: &Value) -> bool {
    match value {
        Value::Array(items) => items.iter().any(has_ids),
        Value::Object(fields) => fields
            .iter()
            .any(|(key, value)| value.is_string() && IDS.contains(&key.as_str()) || has_ids(value)),
        _ => false,
    }
}

fn escaped(name: &str) -> String {
    name.replace('~', "~0").replace('/', "~1")
}
