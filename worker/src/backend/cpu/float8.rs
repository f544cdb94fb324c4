//! 8-bit floats of the OCP specification: a sign, 7 - `MANTISSA` exponent bits, `MANTISSA` fraction bits. Conversion rounds to
//! the nearest, ties to even, and saturates; all bits but the sign set is NaN. E5M2's infinities are never written.

/// E4M3: largest 448.
pub(super) const E4M3: (u32, u32) = (3, 7);
/// E5M2: largest 57344.
pub(super) const E5M2: (u32, u32) = (2, 15);

const NAN: u8 = 0x7f;

/// The number that a byte stands for.
pub(super) fn to_f32<const MANTISSA: u32, const BIAS: u32>(byte: u8) -> f32 {
    let magnitude = u32::from(byte & 0x7f);
    let sign = u32::from(byte & 0x80) << 24;
    if magnitude == u32::from(NAN) {
        return f32::from_bits(f32::NAN.to_bits() | sign);
    }
    let exponent = magnitude >> MANTISSA;
    let hidden = if exponent > 0 { 1 << MANTISSA } else { 0 };
    let integer = (magnitude & ((1 << MANTISSA) - 1)) | hidden;
    let scale = f32::from_bits((exponent.max(1) + 127 - BIAS - MANTISSA) << 23);
    f32::from_bits((integer as f32 * scale).to_bits() | sign)
}

/// The byte nearest to a number.
pub(super) fn from_f32<const MANTISSA: u32, const BIAS: u32>(x: f32) -> u8 {
    let sign = (x.to_bits() >> 24) as u8 & 0x80;
    let magnitude = x.abs();
    if magnitude.is_nan() {
        return sign | NAN;
    }
    let smallest_normal = f32::from_bits((128 - BIAS) << 23);
    let code = if magnitude < smallest_normal {
        // In units of the smallest subnormal, rounded by the addition; eight of them are the first normal number's code.
        let units = magnitude * f32::from_bits((126 + BIAS + MANTISSA) << 23);
        (units + ROUNDER).to_bits() - ROUNDER.to_bits()
    } else {
        let dropped = 23 - MANTISSA;
        let bits = magnitude.to_bits();
        let rounded = bits + (1 << (dropped - 1)) - 1 + ((bits >> dropped) & 1);
        (rounded >> dropped) - ((127 - BIAS) << MANTISSA)
    };
    sign | code.min(u32::from(largest::<MANTISSA>())) as u8
}

const ROUNDER: f32 = 8_388_608.0;

/// E4M3 has one NaN behind its largest number; E5M2 has three and infinity.
const fn largest<const MANTISSA: u32>() -> u8 {
    if MANTISSA == E4M3.0 { 0x7e } else { 0x7b }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Values from the specification's tables (OCP 8-bit floating point, revision 1.0, table 2).
    #[test]
    fn values_of_the_specification() {
        let e4m3 = |byte, value: f32| assert_eq!(to_f32::<3, 7>(byte), value, "e4m3 {byte:#x}");
        e4m3(0x7e, 448.0);
        e4m3(0x08, 2f32.powi(-6));
        e4m3(0x07, 0.875 * 2f32.powi(-6));
        e4m3(0x01, 2f32.powi(-9));
        e4m3(0xfe, -448.0);
        let e5m2 = |byte, value: f32| assert_eq!(to_f32::<2, 15>(byte), value, "e5m2 {byte:#x}");
        e5m2(0x7b, 57344.0);
        e5m2(0x04, 2f32.powi(-14));
        e5m2(0x03, 0.75 * 2f32.powi(-14));
        e5m2(0x01, 2f32.powi(-16));
        assert!(to_f32::<3, 7>(0x7f).is_nan() && to_f32::<2, 15>(0xff).is_nan());
    }

    #[test]
    fn conversion_takes_the_nearest_with_ties_to_even() {
        nearest::<3, 7>();
        nearest::<2, 15>();
    }

    fn nearest<const MANTISSA: u32, const BIAS: u32>() {
        let largest = largest::<MANTISSA>();
        for code in 0..largest {
            let (low, high) = (to_f32::<MANTISSA, BIAS>(code), to_f32::<MANTISSA, BIAS>(code + 1));
            let middle = (low + high) / 2.0;
            let even = if code % 2 == 0 { code } else { code + 1 };
            let check = |x: f32, expected: u8| {
                assert_eq!(from_f32::<MANTISSA, BIAS>(x), expected, "{x}");
                assert_eq!(from_f32::<MANTISSA, BIAS>(-x), expected | 0x80, "-{x}");
            };
            check(low, code);
            check(middle, even);
            check(f32::from_bits(middle.to_bits() - 1), code);
            check(f32::from_bits(middle.to_bits() + 1), code + 1);
        }
        for huge in [1e6, f32::MAX, f32::INFINITY] {
            assert_eq!(from_f32::<MANTISSA, BIAS>(huge), largest);
        }
        assert_eq!(from_f32::<MANTISSA, BIAS>(f32::NAN) & 0x7f, NAN);
    }
}
