//! The key-value part of a GGUF file, with typed access. Values stay in the mapped file; only keys are copied.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use super::cursor::Cursor;
use super::value::{Value, ValueType};
use crate::error::ModelError;
use crate::mmap::FileMap;

/// More keys than any real file has by two orders of magnitude.
const KEYS_MAX: u64 = 4096;
/// The longest key that the format allows, in bytes.
const KEY_BYTES_MAX: usize = 65_535;

/// What a GGUF file says about its model, by key.
#[derive(Clone, Debug)]
pub struct Metadata {
    file: Arc<FileMap>,
    values: BTreeMap<String, Value>,
}

impl Metadata {
    pub(super) fn parse(
        file: &Arc<FileMap>,
        cursor: &mut Cursor<'_>,
        count: u64,
    ) -> Result<Self, ModelError> {
        if count > KEYS_MAX {
            return Err(
                cursor.malformed(format!("claims {count} metadata keys, at most {KEYS_MAX} are read"))
            );
        }
        let mut values = BTreeMap::new();
        for index in 0..count {
            let key = cursor.name(KEY_BYTES_MAX, &format!("metadata key {index}"))?;
            let value = Value::parse(cursor, key)?;
            match values.entry(key.to_owned()) {
                Entry::Vacant(entry) => entry.insert(value),
                Entry::Occupied(_) => {
                    return Err(cursor.malformed(format!("metadata key `{key}` appears twice")));
                }
            };
        }
        Ok(Self { file: Arc::clone(file), values })
    }

    /// The file, for messages.
    pub fn path(&self) -> &Path {
        self.file.path()
    }

    /// All keys, in alphabetical order.
    pub fn keys(&self) -> impl Iterator<Item = &str> {
        self.values.keys().map(String::as_str)
    }

    /// The key is present, with a value of any type.
    pub fn contains(&self, key: &str) -> bool {
        self.values.contains_key(key)
    }

    /// A text, or None where the key is absent; any other type is an error, here and below.
    pub fn string(&self, key: &str) -> Result<Option<&str>, ModelError> {
        match self.values.get(key) {
            None => Ok(None),
            Some(Value::String(range)) => Ok(Some(self.text(range.clone()))),
            Some(other) => Err(self.mistyped(key, other, "a string")),
        }
    }

    /// A number of any integer type that fits.
    pub fn u64(&self, key: &str) -> Result<Option<u64>, ModelError> {
        match self.values.get(key) {
            None => Ok(None),
            Some(Value::Integer(value)) => match u64::try_from(*value) {
                Ok(value) => Ok(Some(value)),
                Err(_) => Err(self.error(format!("metadata key `{key}` is {value}, expected 0 or more"))),
            },
            Some(other) => Err(self.mistyped(key, other, "an integer")),
        }
    }

    /// A number of any integer type that fits.
    pub fn u32(&self, key: &str) -> Result<Option<u32>, ModelError> {
        match self.u64(key)?.map(u32::try_from) {
            None => Ok(None),
            Some(Ok(value)) => Ok(Some(value)),
            Some(Err(_)) => Err(self.error(format!("metadata key `{key}` is too large"))),
        }
    }

    /// A number of either floating type.
    pub fn f32(&self, key: &str) -> Result<Option<f32>, ModelError> {
        match self.values.get(key) {
            None => Ok(None),
            Some(Value::Float(value)) => Ok(Some(*value as f32)),
            Some(other) => Err(self.mistyped(key, other, "a float")),
        }
    }

    /// A truth value.
    pub fn bool(&self, key: &str) -> Result<Option<bool>, ModelError> {
        match self.values.get(key) {
            None => Ok(None),
            Some(Value::Bool(value)) => Ok(Some(*value)),
            Some(other) => Err(self.mistyped(key, other, "a boolean")),
        }
    }

    /// The texts of an array, straight from the mapped file.
    pub fn strings(&self, key: &str) -> Result<Option<Strings<'_>>, ModelError> {
        match self.values.get(key) {
            None => Ok(None),
            Some(Value::Array { element: ValueType::String, count, bytes }) => {
                Ok(Some(Strings { rest: &self.file.bytes()[bytes.clone()], left: *count }))
            }
            Some(other) => Err(self.mistyped(key, other, "an array of strings")),
        }
    }

    /// The numbers of an array of any integer type up to 64 bits signed (booleans count as 0 and 1).
    pub fn ints(&self, key: &str) -> Result<Option<impl ExactSizeIterator<Item = i64>>, ModelError> {
        match self.values.get(key) {
            None => Ok(None),
            Some(Value::Array { element, bytes, .. }) if element.is_integer() => {
                let element = *element;
                let chunks = self.file.bytes()[bytes.clone()].chunks_exact(element.bytes().unwrap_or(1));
                Ok(Some(chunks.map(move |chunk| element.integer(chunk) as i64)))
            }
            Some(other) => Err(self.mistyped(key, other, "an array of integers")),
        }
    }

    /// The numbers of an array of either floating type.
    pub fn floats(&self, key: &str) -> Result<Option<impl ExactSizeIterator<Item = f32>>, ModelError> {
        match self.values.get(key) {
            None => Ok(None),
            Some(Value::Array { element: element @ (ValueType::F32 | ValueType::F64), bytes, .. }) => {
                let element = *element;
                let chunks = self.file.bytes()[bytes.clone()].chunks_exact(element.bytes().unwrap_or(1));
                Ok(Some(chunks.map(move |chunk| element.float(chunk) as f32)))
            }
            Some(other) => Err(self.mistyped(key, other, "an array of floats")),
        }
    }

    /// Feeds the values of all keys with this prefix to a hash, each with its key, type and length.
    pub(crate) fn hash(&self, prefix: &str, hasher: &mut blake3::Hasher) {
        for (key, value) in self.values.iter().filter(|(key, _)| key.starts_with(prefix)) {
            let scalar;
            let bytes = match value {
                Value::String(range) | Value::Array { bytes: range, .. } => &self.file.bytes()[range.clone()],
                Value::Integer(_) | Value::Float(_) | Value::Bool(_) => {
                    scalar = format!("{value:?}");
                    scalar.as_bytes()
                }
            };
            for part in [key.as_bytes(), value.kind().as_bytes(), bytes] {
                hasher.update(&(part.len() as u64).to_le_bytes());
                hasher.update(part);
            }
        }
    }

    fn text(&self, range: Range<usize>) -> &str {
        std::str::from_utf8(&self.file.bytes()[range]).unwrap_or_default()
    }

    fn mistyped(&self, key: &str, found: &Value, expected: &str) -> ModelError {
        self.error(format!("metadata key `{key}` is {}, expected {expected}", found.kind()))
    }

    fn error(&self, reason: String) -> ModelError {
        ModelError::malformed(self.path(), reason)
    }
}

/// Iterator over the strings of an array.
#[derive(Clone, Debug)]
pub struct Strings<'a> {
    rest: &'a [u8],
    left: usize,
}

impl<'a> Iterator for Strings<'a> {
    type Item = &'a str;

    fn next(&mut self) -> Option<&'a str> {
        self.left = self.left.checked_sub(1)?;
        let (length, rest) = self.rest.split_first_chunk::<8>()?;
        let (text, rest) = rest.split_at_checked(u64::from_le_bytes(*length) as usize)?;
        self.rest = rest;
        std::str::from_utf8(text).ok()
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        (self.left, Some(self.left))
    }
}

impl ExactSizeIterator for Strings<'_> {}
