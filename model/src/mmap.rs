//! A file mapped for reading: the only place of this crate that needs `unsafe`.

#![allow(unsafe_code)]

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use memmap2::{Advice, Mmap, UncheckedAdvice};

use crate::error::ModelError;

/// A read-only file and its mapping. The file must not be rewritten in place while it is open.
#[derive(Debug)]
pub(crate) struct FileMap {
    path: PathBuf,
    file: File,
    map: Mmap,
}

impl FileMap {
    /// Maps the whole file.
    pub(crate) fn open(path: &Path) -> Result<Self, ModelError> {
        let io = |source| ModelError::io(path, source);
        // Before it is opened: to open a pipe would wait for its writer.
        if !std::fs::metadata(path).map_err(io)?.is_file() {
            return Err(ModelError::malformed(path, "is not a regular file"));
        }
        let file = File::open(path).map_err(io)?;
        if file.metadata().map_err(io)?.len() == 0 {
            return Err(ModelError::malformed(path, "is empty: fetch it again"));
        }
        // SAFETY: the mapping is read-only, and it lives as long as the slices borrowed from it. Another
        // process that truncates the file could still fault us; model files are replaced by renaming, never rewritten
        // in place, which the type's documentation demands.
        let map = unsafe { Mmap::map(&file) }.map_err(io)?;
        if let Err(error) = map.advise(Advice::Sequential) {
            tracing::debug!(%error, path = %path.display(), "no sequential read-ahead");
        }
        Ok(Self { path: path.to_owned(), file, map })
    }

    /// Where it lies.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// The whole content.
    pub(crate) fn bytes(&self) -> &[u8] {
        &self.map
    }

    /// Reads a few bytes without mapping their pages into memory.
    pub(crate) fn read_at(&self, buffer: &mut [u8], offset: usize) -> Result<(), ModelError> {
        self.file.read_exact_at(buffer, offset as u64).map_err(|source| ModelError::io(&self.path, source))
    }

    /// Drops the resident pages of `slice`, which must be a part of [`FileMap::bytes`]; they are read from disk again if
    /// touched, those at its ends that hold neighbours' bytes too.
    pub(crate) fn release(&self, slice: &[u8]) {
        let Some(start) = (slice.as_ptr() as usize).checked_sub(self.map.as_ptr() as usize) else { return };
        if slice.is_empty() || start.checked_add(slice.len()).is_none_or(|end| end > self.map.len()) {
            return;
        }
        // SAFETY: the range lies within this read-only, file-backed mapping, so that dropped pages come back
        // with the same content.
        let advised =
            unsafe { self.map.unchecked_advise_range(UncheckedAdvice::DontNeed, start, slice.len()) };
        if let Err(error) = advised {
            tracing::debug!(%error, path = %self.path.display(), "mapped pages were not released");
        }
    }
}
