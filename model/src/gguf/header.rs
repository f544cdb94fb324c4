//! One GGUF file: magic, counts, metadata, tensor infos.

use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use super::cursor::Cursor;
use super::metadata::Metadata;
use super::types::dtype_of;
use crate::dtype::DType;
use crate::error::ModelError;
use crate::mmap::FileMap;
use crate::tensors::{Shape, TENSORS_MAX, Tensor, TensorTable};

/// Longest tensor name, in bytes; the format says 64, some converters write more.
const TENSOR_NAME_BYTES_MAX: usize = 512;
/// Where tensors begin is a multiple of this, unless the file says otherwise.
const ALIGNMENT_DEFAULT: usize = 32;
const ALIGNMENT_MAX: usize = 1 << 20;

/// The header of a file whose tensors are not looked up yet.
pub(super) struct Header {
    pub(super) metadata: Metadata,
    file: Arc<FileMap>,
    tensor_count: u64,
    /// Tensor infos are parsed twice, as where data begins is known only behind them.
    infos_start: usize,
    data_start: usize,
    alignment: usize,
}

impl Header {
    /// Reads and checks all but where the tensors lie.
    pub(super) fn read(path: &Path) -> Result<Self, ModelError> {
        let file = Arc::new(FileMap::open(path)?);
        let mut cursor = Cursor::new(path, file.bytes());
        check_version(path, &mut cursor)?;
        let tensor_count = cursor.u64("tensor count")?;
        let key_count = cursor.u64("metadata key count")?;
        if tensor_count > TENSORS_MAX as u64 {
            let reason = format!("claims {tensor_count} tensors, at most {TENSORS_MAX} are read");
            return Err(cursor.malformed(reason));
        }
        let metadata = Metadata::parse(&file, &mut cursor, key_count)?;
        let alignment = alignment(&metadata)?;
        let infos_start = cursor.position();
        for index in 0..tensor_count {
            Info::parse(&mut cursor, index)?;
        }
        let data_start = cursor
            .position()
            .checked_next_multiple_of(alignment)
            .ok_or_else(|| cursor.malformed("tensor data begins past the end of the file".to_owned()))?;
        Ok(Self { metadata, file: Arc::clone(&file), tensor_count, infos_start, data_start, alignment })
    }

    /// Adds the file's tensors to the table.
    pub(super) fn add_tensors(self, table: &mut TensorTable) -> Result<Metadata, ModelError> {
        let file_index = table.add_file(Arc::clone(&self.file));
        let mut cursor = Cursor::new(self.file.path(), self.file.bytes());
        cursor.skip(self.infos_start as u64, "header")?;
        for index in 0..self.tensor_count {
            let info = Info::parse(&mut cursor, index)?;
            let range = info.range(&self.file, self.data_start, self.alignment)?;
            let tensor = Tensor { dtype: info.dtype, shape: info.shape, file: file_index, range };
            table.insert(info.name, tensor)?;
        }
        check_overlap(self.file.path(), file_index, table)?;
        Ok(self.metadata)
    }
}

fn check_version(path: &Path, cursor: &mut Cursor<'_>) -> Result<(), ModelError> {
    if cursor.array::<4>("magic")? != *b"GGUF" {
        return Err(ModelError::malformed(path, "is not a GGUF file: it does not begin with `GGUF`"));
    }
    match cursor.u32("version")? {
        2 | 3 => Ok(()),
        swapped if (1..=3).contains(&swapped.swap_bytes()) => Err(ModelError::unsupported(
            path,
            "a big-endian GGUF file",
            "fetch or convert the little-endian one",
        )),
        version => Err(ModelError::unsupported(
            path,
            format!("GGUF version {version}"),
            "convert the model anew: versions 2 and 3 are read",
        )),
    }
}

fn alignment(metadata: &Metadata) -> Result<usize, ModelError> {
    let alignment = match metadata.u32("general.alignment")? {
        None => return Ok(ALIGNMENT_DEFAULT),
        Some(alignment) => alignment as usize,
    };
    if alignment.is_power_of_two() && alignment <= ALIGNMENT_MAX {
        return Ok(alignment);
    }
    let reason = format!("general.alignment is {alignment}, expected a power of two up to {ALIGNMENT_MAX}");
    Err(ModelError::malformed(metadata.path(), reason))
}

struct Info<'a> {
    name: &'a str,
    shape: Shape,
    dtype: DType,
    bytes: usize,
    offset: u64,
}

impl<'a> Info<'a> {
    fn parse(cursor: &mut Cursor<'a>, index: u64) -> Result<Self, ModelError> {
        let name = cursor.name(TENSOR_NAME_BYTES_MAX, &format!("name of tensor {index}"))?;
        let what = format!("tensor `{name}`");
        let rank = cursor.u32(&what)? as usize;
        if !(1..=4).contains(&rank) {
            return Err(cursor.malformed(format!("{what} has {rank} dimensions, expected 1 to 4")));
        }
        let mut dims = [0u64; 4];
        for dim in dims[..rank].iter_mut().rev() {
            *dim = cursor.u64(&what)?;
        }
        let dims = &dims[..rank];
        let type_id = cursor.u32(&what)?;
        let dtype = dtype_of(cursor, type_id, &what)?;
        let offset = cursor.u64(&what)?;
        let sizes: Option<Vec<usize>> = dims.iter().map(|dim| usize::try_from(*dim).ok()).collect();
        let shape = sizes.and_then(|sizes| Shape::new(&sizes));
        let sized = shape.and_then(|shape| Some((shape, shape.bytes(dtype)?)));
        let Some((shape, bytes)) = sized else {
            let reason = format!("{what} of type {dtype:?} has impossible dimensions {dims:?}");
            return Err(cursor.malformed(reason));
        };
        Ok(Self { name, shape, dtype, bytes, offset })
    }

    /// Where its bytes lie in the file.
    fn range(&self, file: &FileMap, data_start: usize, alignment: usize) -> Result<Range<usize>, ModelError> {
        let Self { name, offset, bytes, .. } = self;
        if !offset.is_multiple_of(alignment as u64) {
            let reason =
                format!("tensor `{name}` has offset {offset}, no multiple of the alignment {alignment}");
            return Err(ModelError::malformed(file.path(), reason));
        }
        let start = usize::try_from(*offset).ok().and_then(|offset| data_start.checked_add(offset));
        let range = start.and_then(|start| Some(start..start.checked_add(*bytes)?));
        let length = file.bytes().len();
        range.filter(|range| range.end <= length).ok_or_else(|| {
            let reason = format!(
                "tensor `{name}` has {bytes} bytes at offset {offset} of the data, past the end of the file of \
                 {length} bytes: it is cut short or corrupt"
            );
            ModelError::malformed(file.path(), reason)
        })
    }
}

fn check_overlap(path: &Path, file_index: usize, table: &TensorTable) -> Result<(), ModelError> {
    let mut spans: Vec<(&str, &Range<usize>)> = table
        .iter()
        .filter(|(_, tensor)| tensor.file == file_index)
        .map(|(name, tensor)| (name, &tensor.range))
        .collect();
    spans.sort_unstable_by_key(|(_, range)| range.start);
    match spans.windows(2).find(|pair| pair[0].1.end > pair[1].1.start) {
        None => Ok(()),
        Some(pair) => {
            let reason = format!("tensors `{}` and `{}` overlap", pair[0].0, pair[1].0);
            Err(ModelError::malformed(path, reason))
        }
    }
}
