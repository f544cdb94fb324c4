//! Every GGUF type against the values of an independent decoder (tests/reference/dequantize.py).

use thalweg_model::dequantize::dequantize_row;
use thalweg_model::dtype::DType;

const DTYPES: [DType; 11] = [
    DType::F32,
    DType::F16,
    DType::BF16,
    DType::Q4_0,
    DType::Q4_1,
    DType::Q5_0,
    DType::Q5_1,
    DType::Q8_0,
    DType::Q4_K,
    DType::Q5_K,
    DType::Q6_K,
];

#[derive(serde::Deserialize)]
struct Case {
    dtype: String,
    bytes: String,
    /// Little-endian f32.
    bits: String,
}

#[test]
fn rows_decode_to_the_reference_values() {
    let cases: Vec<Case> = serde_json::from_str(include_str!("data/dequantize.json")).unwrap();
    assert_eq!(cases.len(), DTYPES.len());
    for case in cases {
        let dtype = DTYPES.into_iter().find(|dtype| format!("{dtype:?}") == case.dtype).unwrap();
        let bits = unhex(&case.bits);
        let expected: Vec<f32> =
            bits.chunks(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect();
        let mut got = vec![0.0; expected.len()];
        dequantize_row(dtype, &unhex(&case.bytes), &mut got);
        for (index, (got, expected)) in got.iter().zip(&expected).enumerate() {
            let tolerance = 1e-6 * expected.abs();
            assert!((got - expected).abs() <= tolerance, "{dtype:?}[{index}] is {got}, expected {expected}");
        }
    }
}

#[test]
#[should_panic(expected = "bytes of 32 elements of Q4_0")]
fn a_row_of_the_wrong_length_is_a_bug() {
    dequantize_row(DType::Q4_0, &[0; 17], &mut [0.0; 32]);
}

fn unhex(text: &str) -> Vec<u8> {
    (0..text.len()).step_by(2).map(|at| u8::from_str_radix(&text[at..at + 2], 16).unwrap()).collect()
}
