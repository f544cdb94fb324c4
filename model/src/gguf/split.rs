//! A model split over several GGUF files named `NAME-00001-of-00003.gguf`.

use std::path::{Path, PathBuf};

use super::header::Header;
use super::metadata::Metadata;
use crate::error::ModelError;
use crate::tensors::TensorTable;

/// More parts than any real model has.
const PARTS_MAX: u64 = 1024;

/// Reads the first part's siblings into the table; does nothing for a file that is whole.
pub(super) fn read_others(path: &Path, first: &Metadata, table: &mut TensorTable) -> Result<(), ModelError> {
    let count = first.u64("split.count")?.unwrap_or(1);
    if count <= 1 {
        return Ok(());
    }
    if count > PARTS_MAX {
        return Err(ModelError::malformed(
            path,
            format!("split.count is {count}, at most {PARTS_MAX} parts are read"),
        ));
    }
    let number = first.u64("split.no")?.unwrap_or(0);
    let name = PartName::parse(path);
    if number != 0 {
        let first_part = name.map_or("its first part".to_owned(), |name| name.part(1).display().to_string());
        let reason =
            format!("is part {} of {count} of a split model: give {first_part}", number.saturating_add(1));
        return Err(ModelError::malformed(path, reason));
    }
    let Some(name) = name.filter(|name| u64::from(name.count) == count) else {
        let reason = format!(
            "is the first of {count} parts, but not named like MODEL-00001-of-{count:05}.gguf: \
            the other parts cannot be found"
        );
        return Err(ModelError::malformed(path, reason));
    };
    for number in 1..count {
        read_part(&name, number, count, table)?;
    }
    let expected = first.u64("split.tensors.count")?;
    let found = table.len() as u64;
    match expected {
        Some(expected) if expected != found => {
            let reason = format!(
                "says that its {count} parts hold {expected} tensors, they hold {found}: \
                they are not parts of one model"
            );
            Err(ModelError::malformed(path, reason))
        }
        _ => Ok(()),
    }
}

fn read_part(
    name: &PartName<'_>,
    number: u64,
    count: u64,
    table: &mut TensorTable,
) -> Result<(), ModelError> {
    let path = name.part(number as u32 + 1);
    if !path.exists() {
        let reason = format!("part {} of {count} is missing: fetch it into the same folder", number + 1);
        return Err(ModelError::malformed(&path, reason));
    }
    let header = Header::read(&path)?;
    let part = &header.metadata;
    let says = (part.u64("split.no")?, part.u64("split.count")?);
    if says == (Some(number), Some(count)) {
        header.add_tensors(table)?;
        return Ok(());
    }
    let said = match says {
        (Some(no), Some(of)) => format!("says that it is part {} of {of}", no.saturating_add(1)),
        _ => "does not say that it is part of a split model".to_owned(),
    };
    Err(ModelError::malformed(&path, format!("{said}, expected part {} of {count}", number + 1)))
}

/// The served name of a GGUF file: its stem, without the part's number.
pub(crate) fn model_name(path: &Path) -> String {
    let stem = path.file_stem().unwrap_or_default().to_string_lossy();
    PartName::parse(path).map_or(stem.as_ref(), |name| name.stem).to_owned()
}

struct PartName<'a> {
    path: &'a Path,
    stem: &'a str,
    count: u32,
}

impl<'a> PartName<'a> {
    fn parse(path: &'a Path) -> Option<Self> {
        let name = path.file_name()?.to_str()?.strip_suffix(".gguf")?;
        let (rest, count) = name.rsplit_once("-of-")?;
        let (stem, number) = rest.rsplit_once('-')?;
        let digits = |text: &str| text.len() == 5 && text.bytes().all(|byte| byte.is_ascii_digit());
        (digits(count) && digits(number)).then_some(())?;
        Some(Self { path, stem, count: count.parse().ok()? })
    }

    /// The path of a part, counted from 1.
    fn part(&self, number: u32) -> PathBuf {
        self.path.with_file_name(format!("{}-{number:05}-of-{:05}.gguf", self.stem, self.count))
    }
}
