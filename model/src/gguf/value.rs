//! A metadata value: a scalar, or where its bytes lie in the file.

use std::ops::Range;

use super::cursor::Cursor;
use crate::error::ModelError;

#[derive(Clone, Debug)]
pub(super) enum Value {
    Integer(i128),
    Float(f64),
    Bool(bool),
    String(Range<usize>),
    Array { element: ValueType, count: usize, bytes: Range<usize> },
}

/// The format's type ids.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ValueType {
    U8,
    I8,
    U16,
    I16,
    U32,
    I32,
    F32,
    Bool,
    String,
    Array,
    U64,
    I64,
    F64,
}

impl Value {
    pub(super) fn parse(cursor: &mut Cursor<'_>, key: &str) -> Result<Self, ModelError> {
        let what = format!("metadata key `{key}`");
        let kind = ValueType::parse(cursor, &what)?;
        match kind {
            ValueType::String => Ok(Self::String(cursor.string(&what)?)),
            ValueType::Array => Self::parse_array(cursor, &what),
            ValueType::F32 => Ok(Self::Float(kind.float(&cursor.array::<4>(&what)?))),
            ValueType::F64 => Ok(Self::Float(kind.float(&cursor.array::<8>(&what)?))),
            ValueType::Bool => Ok(Self::Bool(cursor.array::<1>(&what)? != [0])),
            ValueType::U8 | ValueType::I8 => Ok(Self::Integer(kind.integer(&cursor.array::<1>(&what)?))),
            ValueType::U16 | ValueType::I16 => Ok(Self::Integer(kind.integer(&cursor.array::<2>(&what)?))),
            ValueType::U32 | ValueType::I32 => Ok(Self::Integer(kind.integer(&cursor.array::<4>(&what)?))),
            ValueType::U64 | ValueType::I64 => Ok(Self::Integer(kind.integer(&cursor.array::<8>(&what)?))),
        }
    }

    fn parse_array(cursor: &mut Cursor<'_>, what: &str) -> Result<Self, ModelError> {
        let element = ValueType::parse(cursor, what)?;
        let count = cursor.u64(what)?;
        let bytes = match (element, element.bytes()) {
            (ValueType::Array, _) => return Err(cursor.malformed(format!("{what} is an array of arrays"))),
            (_, Some(bytes)) => {
                let total = count.checked_mul(bytes as u64);
                cursor.skip(total.unwrap_or(u64::MAX), what)?
            }
            (_, None) => {
                let start = cursor.position();
                for _ in 0..count {
                    cursor.string(what)?;
                }
                start..cursor.position()
            }
        };
        Ok(Self::Array { element, count: count as usize, bytes })
    }

    pub(super) fn kind(&self) -> &'static str {
        match self {
            Self::Integer(_) => "an integer",
            Self::Float(_) => "a float",
            Self::Bool(_) => "a boolean",
            Self::String(_) => "a string",
            Self::Array { element: ValueType::String, .. } => "an array of strings",
            Self::Array { element: ValueType::F32 | ValueType::F64, .. } => "an array of floats",
            Self::Array { .. } => "an array of integers",
        }
    }
}

impl ValueType {
    fn parse(cursor: &mut Cursor<'_>, what: &str) -> Result<Self, ModelError> {
        const BY_ID: [ValueType; 13] = [
            ValueType::U8,
            ValueType::I8,
            ValueType::U16,
            ValueType::I16,
            ValueType::U32,
            ValueType::I32,
            ValueType::F32,
            ValueType::Bool,
            ValueType::String,
            ValueType::Array,
            ValueType::U64,
            ValueType::I64,
            ValueType::F64,
        ];
        let id = cursor.u32(what)?;
        BY_ID
            .get(id as usize)
            .copied()
            .ok_or_else(|| cursor.malformed(format!("{what} has unknown type {id}")))
    }

    /// Size of a value; None where it varies.
    pub(super) fn bytes(self) -> Option<usize> {
        match self {
            Self::U8 | Self::I8 | Self::Bool => Some(1),
            Self::U16 | Self::I16 => Some(2),
            Self::U32 | Self::I32 | Self::F32 => Some(4),
            Self::U64 | Self::I64 | Self::F64 => Some(8),
            Self::String | Self::Array => None,
        }
    }

    pub(super) fn is_integer(self) -> bool {
        !matches!(self, Self::F32 | Self::F64 | Self::String | Self::Array)
    }

    /// The integer in `bytes`, which are as many as the type has.
    pub(super) fn integer(self, bytes: &[u8]) -> i128 {
        let mut wide = [0; 8];
        wide[..bytes.len()].copy_from_slice(bytes);
        let unsigned = u64::from_le_bytes(wide);
        match self {
            Self::I8 => i128::from(unsigned as i8),
            Self::I16 => i128::from(unsigned as i16),
            Self::I32 => i128::from(unsigned as i32),
            Self::I64 => i128::from(unsigned as i64),
            _ => i128::from(unsigned),
        }
    }

    /// The float in `bytes`, which are as many as the type has.
    pub(super) fn float(self, bytes: &[u8]) -> f64 {
        let mut wide = [0; 8];
        wide[..bytes.len()].copy_from_slice(bytes);
        let bits = u64::from_le_bytes(wide);
        if self == Self::F32 { f64::from(f32::from_bits(bits as u32)) } else { f64::from_bits(bits) }
    }
}
