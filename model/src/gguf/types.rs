//! The format's tensor type ids.

use super::cursor::Cursor;
use crate::dtype::DType;
use crate::error::ModelError;

/// The element type of an id, or an error that names the type.
pub(super) fn dtype_of(cursor: &Cursor<'_>, id: u32, what: &str) -> Result<DType, ModelError> {
    let dtype = match id {
        0 => DType::F32,
        1 => DType::F16,
        2 => DType::Q4_0,
        3 => DType::Q4_1,
        6 => DType::Q5_0,
        7 => DType::Q5_1,
        8 => DType::Q8_0,
        12 => DType::Q4_K,
        13 => DType::Q5_K,
        14 => DType::Q6_K,
        30 => DType::BF16,
        _ => return Err(unserved(cursor, id, what)),
    };
    Ok(dtype)
}

fn unserved(cursor: &Cursor<'_>, id: u32, what: &str) -> ModelError {
    let name = match id {
        9 => "Q8_1",
        10 => "Q2_K",
        11 => "Q3_K",
        15 => "Q8_K",
        16..=23 | 29 => "IQ (importance-matrix codebook)",
        24..=27 => "integer",
        28 => "F64",
        34 | 35 => "TQ (ternary)",
        39 => "MXFP4",
        _ => return cursor.malformed(format!("{what} has unknown type {id}")),
    };
    ModelError::unsupported(
        cursor.path(),
        format!("{what} of type {name} ({id})"),
        "use a file of Q4_0 to Q8_0, Q4_K, Q5_K, Q6_K, F16, BF16 or F32",
    )
}
