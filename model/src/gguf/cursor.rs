//! A bounded reader over a file's bytes: every length that the file claims is checked before it is used.

use std::ops::Range;
use std::path::Path;

use crate::error::ModelError;

/// Reads little-endian values in order; errors name the file, the part that was read and the offset.
pub(super) struct Cursor<'a> {
    path: &'a Path,
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Cursor<'a> {
    pub(super) fn new(path: &'a Path, bytes: &'a [u8]) -> Self {
        Self { path, bytes, at: 0 }
    }

    pub(super) fn path(&self) -> &'a Path {
        self.path
    }

    pub(super) fn position(&self) -> usize {
        self.at
    }

    /// The range of the next `count` bytes, which are skipped.
    pub(super) fn skip(&mut self, count: u64, what: &str) -> Result<Range<usize>, ModelError> {
        let left = self.bytes.len() - self.at;
        let count = usize::try_from(count).ok().filter(|count| *count <= left).ok_or_else(|| {
            self.malformed(format!(
                "{what} needs {count} bytes where the file has {left} left: it is cut short or corrupt"
            ))
        })?;
        let start = self.at;
        self.at += count;
        Ok(start..self.at)
    }

    pub(super) fn array<const N: usize>(&mut self, what: &str) -> Result<[u8; N], ModelError> {
        let range = self.skip(N as u64, what)?;
        let mut value = [0; N];
        value.copy_from_slice(&self.bytes[range]);
        Ok(value)
    }

    pub(super) fn u32(&mut self, what: &str) -> Result<u32, ModelError> {
        self.array(what).map(u32::from_le_bytes)
    }

    pub(super) fn u64(&mut self, what: &str) -> Result<u64, ModelError> {
        self.array(what).map(u64::from_le_bytes)
    }

    /// A length-prefixed string, as a range of the file that holds valid UTF-8.
    pub(super) fn string(&mut self, what: &str) -> Result<Range<usize>, ModelError> {
        let length = self.u64(what)?;
        let range = self.skip(length, what)?;
        match std::str::from_utf8(&self.bytes[range.clone()]) {
            Ok(_) => Ok(range),
            Err(_) => Err(self.malformed(format!("{what} is not UTF-8"))),
        }
    }

    /// A non-empty string of at most `limit` bytes.
    pub(super) fn name(&mut self, limit: usize, what: &str) -> Result<&'a str, ModelError> {
        let range = self.string(what)?;
        if range.is_empty() || range.len() > limit {
            let length = range.len();
            return Err(self.malformed(format!("{what} has {length} bytes, expected 1 to {limit}")));
        }
        std::str::from_utf8(&self.bytes[range]).map_err(|_| self.malformed(format!("{what} is not UTF-8")))
    }

    pub(super) fn malformed(&self, reason: String) -> ModelError {
        ModelError::malformed(self.path, format!("{reason} (offset {})", self.at))
    }
}
