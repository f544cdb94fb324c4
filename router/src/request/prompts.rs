//! A field that takes a text, texts, token ids, or arrays of token ids.

use serde_json::Value;

use crate::error::RouterError;

use super::Prompt;
use super::fields::{invalid, token_ids};
use super::json::kind;

/// The field, and what holds for it.
pub(super) struct PromptField {
    pub(super) name: &'static str,
    /// Entries at most.
    pub(super) most: usize,
    pub(super) vocab_size: usize,
    /// Texts get a beginning of sequence where the model wants one.
    pub(super) bos: bool,
}

impl PromptField {
    /// At least one.
    pub(super) fn read(&self, value: Option<Value>) -> Result<Vec<Prompt>, RouterError> {
        let name = self.name;
        let list = match value.unwrap_or(Value::Null) {
            Value::Null => return Err(self.error(format!("`{name}` is missing"))),
            Value::String(text) => return Ok(vec![self.text(text, name.to_owned())?]),
            Value::Array(list) if list.is_empty() => return Err(self.error(format!("`{name}` is empty"))),
            Value::Array(list) => list,
            other => {
                let message = format!("`{name}` must be a string or an array, not {}", kind(&other));
                return Err(self.error(message));
            }
        };
        if list[0].is_number() {
            return Ok(vec![Prompt::Ids(token_ids(&list, self.vocab_size, name)?)]);
        }
        if list.len() > self.most {
            let message = format!("`{name}` takes at most {} {name}s, not {}", self.most, list.len());
            return Err(self.error(message));
        }
        list.into_iter().enumerate().map(|(at, item)| self.one_of_many(item, at)).collect()
    }

    fn one_of_many(&self, item: Value, at: usize) -> Result<Prompt, RouterError> {
        let path = format!("{}[{at}]", self.name);
        match item {
            Value::String(text) => self.text(text, path),
            Value::Array(ids) if ids.is_empty() => {
                let message = format!("`{path}` is empty");
                Err(invalid(path, message))
            }
            Value::Array(ids) => Ok(Prompt::Ids(token_ids(&ids, self.vocab_size, &path)?)),
            other => {
                let message =
                    format!("`{path}` must be a string or an array of token ids, not {}", kind(&other));
                Err(invalid(path, message))
            }
        }
    }

    fn text(&self, text: String, path: String) -> Result<Prompt, RouterError> {
        if text.is_empty() {
            let message = format!("`{path}` is empty; send at least one character");
            return Err(invalid(path, message));
        }
        Ok(Prompt::Text { text, bos: self.bos })
    }

    fn error(&self, message: String) -> RouterError {
        invalid(self.name.to_owned(), message)
    }
}
