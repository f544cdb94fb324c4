//! GGUF version 2 and 3: one file, or the parts of a split one.

mod config;
mod cursor;
mod header;
mod metadata;
mod split;
mod types;
mod value;

use std::path::Path;

use self::header::Header;
pub use self::metadata::{Metadata, Strings};
pub(crate) use self::split::model_name;
use crate::config::ModelConfig;
use crate::error::ModelError;
use crate::tensors::TensorTable;

/// Reads the headers of a file and, where it is the first part of a split model, of all parts.
pub(crate) fn read(path: &Path) -> Result<(Metadata, ModelConfig, TensorTable), ModelError> {
    let mut table = TensorTable::default();
    let metadata = Header::read(path)?.add_tensors(&mut table)?;
    split::read_others(path, &metadata, &mut table)?;
    let config = config::read(&metadata, &table)?;
    Ok((metadata, config, table))
}
