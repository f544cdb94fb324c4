//! Typed access to a JSON object, with errors that name the file and the key.

use std::path::Path;

use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

use crate::error::ModelError;

/// Largest JSON file that is read, in bytes; an index of a very large model has a few MB.
const JSON_BYTES_MAX: u64 = 64 << 20;

/// Reads a JSON file whose top is an object.
pub(crate) fn read_object(path: &Path) -> Result<Map<String, Value>, ModelError> {
    let io = |source| ModelError::io(path, source);
    let length = std::fs::metadata(path).map_err(io)?.len();
    if length > JSON_BYTES_MAX {
        return Err(ModelError::malformed(
            path,
            format!("has {length} bytes, at most {JSON_BYTES_MAX} are read"),
        ));
    }
    let text = std::fs::read(path).map_err(io)?;
    match serde_json::from_slice(&text) {
        Ok(Value::Object(object)) => Ok(object),
        Ok(_) => Err(ModelError::malformed(path, "is not a JSON object")),
        Err(error) => Err(ModelError::malformed(path, format!("is not valid JSON: {error}"))),
    }
}

/// A JSON object within a file. A key that is null counts as absent.
#[derive(Clone, Copy)]
pub(crate) struct Keys<'a> {
    pub(crate) path: &'a Path,
    pub(crate) object: &'a Map<String, Value>,
}

impl<'a> Keys<'a> {
    pub(crate) fn get<T: DeserializeOwned>(&self, key: &str) -> Result<Option<T>, ModelError> {
        match self.object.get(key) {
            None | Some(Value::Null) => Ok(None),
            Some(value) => {
                T::deserialize(value).map(Some).map_err(|error| self.wrong(key, &error.to_string()))
            }
        }
    }

    pub(crate) fn required<T: DeserializeOwned>(&self, key: &str) -> Result<T, ModelError> {
        self.get(key)?.ok_or_else(|| self.wrong(key, "is missing"))
    }

    pub(crate) fn get_or<T: DeserializeOwned>(&self, key: &str, default: T) -> Result<T, ModelError> {
        Ok(self.get(key)?.unwrap_or(default))
    }

    /// An object below this one.
    pub(crate) fn below(&self, key: &str) -> Result<Option<Keys<'a>>, ModelError> {
        match self.object.get(key) {
            None | Some(Value::Null) => Ok(None),
            Some(Value::Object(object)) => Ok(Some(Keys { path: self.path, object })),
            Some(_) => Err(self.wrong(key, "is not an object")),
        }
    }

    pub(crate) fn wrong(&self, key: &str, reason: &str) -> ModelError {
        ModelError::malformed(self.path, format!("`{key}`: {reason}"))
    }

    pub(crate) fn unsupported(&self, what: String, instead: &str) -> ModelError {
        ModelError::unsupported(self.path, what, instead)
    }
}
