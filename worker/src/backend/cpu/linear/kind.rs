//! Formats as constants, so that each has vector kernels of its own.

/// `Scales::Offset`.
pub(super) const OFFSET: u8 = 0;
/// `Scales::Minimum`.
pub(super) const MINIMUM: u8 = 1;
/// `Scales::SuperMinimum`.
pub(super) const SUPER_MINIMUM: u8 = 2;
/// `Scales::SuperHalves`.
pub(super) const SUPER_HALVES: u8 = 3;

/// `Format::F32`.
pub(super) const F32: u8 = 0;
/// `Format::Bf16`.
pub(super) const BF16: u8 = 1;
/// `Format::F16`.
pub(super) const F16: u8 = 2;

/// Calls the instance of `$function<BITS, SCALES>` for a quantised format.
macro_rules! for_quants {
    ($format:expr, $function:ident($($argument:expr),*)) => {{
        use $crate::backend::cpu::linear::format::{Format, Scales};
        use $crate::backend::cpu::linear::kind;
        match $format {
            Format::Quants { bits: 4, scales: Scales::Offset } => $function::<4, { kind::OFFSET }>($($argument),*),
            Format::Quants { bits: 4, scales: Scales::Minimum } => $function::<4, { kind::MINIMUM }>($($argument),*),
            Format::Quants { bits: 4, scales: Scales::SuperMinimum } => {
                $function::<4, { kind::SUPER_MINIMUM }>($($argument),*)
            }
            Format::Quants { bits: 5, scales: Scales::Offset } => $function::<5, { kind::OFFSET }>($($argument),*),
            Format::Quants { bits: 5, scales: Scales::Minimum } => $function::<5, { kind::MINIMUM }>($($argument),*),
            Format::Quants { bits: 5, scales: Scales::SuperMinimum } => {
                $function::<5, { kind::SUPER_MINIMUM }>($($argument),*)
            }
            Format::Quants { bits: 6, scales: Scales::SuperHalves } => {
                $function::<6, { kind::SUPER_HALVES }>($($argument),*)
            }
            Format::Quants { bits: 8, scales: Scales::Offset } => $function::<8, { kind::OFFSET }>($($argument),*),
            other => unreachable!("{other:?} has no quantised kernel"),
        }
    }};
}

/// Calls the instance of `$function<TYPE>` for an unquantised format.
macro_rules! for_plain {
    ($format:expr, $function:ident($($argument:expr),*)) => {{
        use $crate::backend::cpu::linear::format::Format;
        use $crate::backend::cpu::linear::kind;
        match $format {
            Format::F32 => $function::<{ kind::F32 }>($($argument),*),
            Format::Bf16 => $function::<{ kind::BF16 }>($($argument),*),
            Format::F16 => $function::<{ kind::F16 }>($($argument),*),
            other => unreachable!("{other:?} has no plain kernel"),
        }
    }};
}

pub(super) use {for_plain, for_quants};
