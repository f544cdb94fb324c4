//! From the hidden states of a prompt to its embedding.

pub use thalweg_model::pooling::Pooling;

/// Scales a vector to the length 1. Squares are summed in f64, in order, so that one vector has one answer. A vector of
/// zeros stays what it is.
pub fn normalise(vector: &mut [f32]) {
    let length = vector.iter().map(|x| f64::from(*x) * f64::from(*x)).sum::<f64>().sqrt();
    if length > 0.0 {
        vector.iter_mut().for_each(|x| *x = (f64::from(*x) / length) as f32);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn vectors_are_scaled_to_the_length_1() {
        let check = |vector: &[f32], expected: &[f32]| {
            let mut vector = vector.to_vec();
            normalise(&mut vector);
            assert_eq!(vector, expected);
        };
        check(&[3.0, 4.0], &[0.6, 0.8]);
        check(&[0.0, -1e-30], &[0.0, -1.0]);
        check(&[1e30, 0.0], &[1.0, 0.0]);
        check(&[0.0, 0.0], &[0.0, 0.0]);
        check(&[], &[]);
    }
}
