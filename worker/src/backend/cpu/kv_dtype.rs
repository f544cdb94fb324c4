//! Element types of the KV cache.

use super::float8;
use super::lanes::Lanes;

/// How keys and values are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum KvDtype {
    /// Exact.
    F32,
    /// Rounded to nearest even.
    Bf16,
    /// Rounded to nearest even, saturated at 448, unscaled.
    Fp8E4m3,
    /// Rounded to nearest even, saturated at 57344, unscaled.
    Fp8E5m2,
}

impl KvDtype {
    /// All, widest first.
    pub const ALL: [Self; 4] = [Self::F32, Self::Bf16, Self::Fp8E4m3, Self::Fp8E5m2];

    /// Bytes of one element.
    pub fn bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::Bf16 => 2,
            Self::Fp8E4m3 | Self::Fp8E5m2 => 1,
        }
    }

    /// vLLM's name.
    pub fn name(self) -> &'static str {
        match self {
            Self::F32 => "float32",
            Self::Bf16 => "bfloat16",
            Self::Fp8E4m3 => "fp8_e4m3",
            Self::Fp8E5m2 => "fp8_e5m2",
        }
    }

    /// From a value of --kv-cache-dtype; `auto` is bf16 and `fp8` is e4m3.
    pub fn parse(name: &str) -> Option<Self> {
        match name {
            "auto" => Some(Self::Bf16),
            "fp8" => Some(Self::Fp8E4m3),
            _ => Self::ALL.into_iter().find(|dtype| dtype.name() == name),
        }
    }
}

/// One stored type at compile time.
pub(super) trait KvElement {
    const BYTES: usize;

    /// Stores numbers one behind the other.
    ///
    /// # Safety
    /// `to` has room for as many elements as `from`.
    unsafe fn store(from: &[f32], to: *mut u8);

    /// Loads sixteen.
    ///
    /// # Safety
    /// The CPU has the lanes' instruction set; sixteen elements stand at `from`.
    unsafe fn load<L: Lanes>(from: *const u8) -> L::V;
}

pub(super) struct F32;
pub(super) struct Bf16;
pub(super) struct Fp8<const MANTISSA: u32, const BIAS: u32>;
pub(super) type Fp8E4m3 = Fp8<{ float8::E4M3.0 }, { float8::E4M3.1 }>;
pub(super) type Fp8E5m2 = Fp8<{ float8::E5M2.0 }, { float8::E5M2.1 }>;

impl KvElement for F32 {
    const BYTES: usize = 4;

    unsafe fn store(from: &[f32], to: *mut u8) {
        // SAFETY: the caller gives the room, and the cache never overlaps activations.
        unsafe { std::ptr::copy_nonoverlapping(from.as_ptr().cast(), to, size_of_val(from)) }
    }

    #[inline(always)]
    unsafe fn load<L: Lanes>(from: *const u8) -> L::V {
        // SAFETY: the caller's promises are these.
        unsafe { L::load(from.cast()) }
    }
}

impl KvElement for Bf16 {
    const BYTES: usize = 2;

    unsafe fn store(from: &[f32], to: *mut u8) {
        for (i, x) in from.iter().enumerate() {
            // SAFETY: the caller gives the room.
            unsafe { to.cast::<u16>().add(i).write_unaligned(bf16(*x)) }
        }
    }

    #[inline(always)]
    unsafe fn load<L: Lanes>(from: *const u8) -> L::V {
        // SAFETY: the caller's promises are these.
        unsafe { L::load_bf16(from.cast()) }
    }
}

impl<const MANTISSA: u32, const BIAS: u32> KvElement for Fp8<MANTISSA, BIAS> {
    const BYTES: usize = 1;

    unsafe fn store(from: &[f32], to: *mut u8) {
        for (i, x) in from.iter().enumerate() {
            // SAFETY: the caller gives the room.
            unsafe { *to.add(i) = float8::from_f32::<MANTISSA, BIAS>(*x) }
        }
    }

    #[inline(always)]
    unsafe fn load<L: Lanes>(from: *const u8) -> L::V {
        // SAFETY: the caller's promises are these.
        unsafe { L::load_fp8::<MANTISSA, BIAS>(from) }
    }
}

/// Nearest bfloat16, ties to even; NaN stays NaN.
fn bf16(x: f32) -> u16 {
    let bits = x.to_bits();
    let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16;
    if x.is_nan() { (bits >> 16) as u16 | 0x40 } else { rounded as u16 }
}

/// Calls a generic function or runs an expression with `$element` bound to the stored type.
macro_rules! with_kv_element {
    ($dtype:expr, $element:ident => $body:expr) => {
        match $dtype {
            $crate::backend::cpu::kv_dtype::KvDtype::F32 => {
                type $element = $crate::backend::cpu::kv_dtype::F32;
                $body
            }
            $crate::backend::cpu::kv_dtype::KvDtype::Bf16 => {
                type $element = $crate::backend::cpu::kv_dtype::Bf16;
                $body
            }
            $crate::backend::cpu::kv_dtype::KvDtype::Fp8E4m3 => {
                type $element = $crate::backend::cpu::kv_dtype::Fp8E4m3;
                $body
            }
            $crate::backend::cpu::kv_dtype::KvDtype::Fp8E5m2 => {
                type $element = $crate::backend::cpu::kv_dtype::Fp8E5m2;
                $body
            }
        }
    };
}
pub(super) use with_kv_element;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names() {
        for dtype in KvDtype::ALL {
            assert_eq!(KvDtype::parse(dtype.name()), Some(dtype));
        }
        assert_eq!(KvDtype::parse("auto"), Some(KvDtype::Bf16));
        assert_eq!(KvDtype::parse("fp8"), Some(KvDtype::Fp8E4m3));
        assert_eq!(KvDtype::parse("int4"), None);
    }

    #[test]
    fn bf16_is_what_the_half_crate_rounds_to() {
        for bits in (0..=u32::MAX).step_by(65_521) {
            let x = f32::from_bits(bits);
            let expected = half::bf16::from_f32(x);
            assert!(bf16(x) == expected.to_bits() || x.is_nan() && expected.is_nan(), "{bits:#x}");
        }
    }
}
