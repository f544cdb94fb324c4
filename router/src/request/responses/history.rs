//! What is kept of an answered request: all that is needed to go on from it, or to show it again.

use serde::{Deserialize, Serialize};
use serde_json::Value;

/// One kept response. The conversation before it is part of it, so that it needs nobody else's life.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Kept {
    /// Items of earlier responses and what they answered.
    pub(crate) history: Vec<Value>,
    /// Items of its own request.
    pub(crate) input: Vec<Value>,
    /// The response object.
    pub(crate) response: Value,
}

impl Kept {
    /// Every item up to and with its output: what the next request continues.
    pub(crate) fn into_items(mut self) -> Vec<Value> {
        let mut items = self.history;
        items.append(&mut self.input);
        if let Some(Value::Array(output)) = self.response.get_mut("output").map(Value::take) {
            items.extend(output);
        }
        items
    }
}
