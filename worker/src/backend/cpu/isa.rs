//! Which instructions the kernels use: chosen once, when a pool is built.

/// Instruction sets with kernels of their own, slowest first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Isa {
    /// Plain Rust.
    Scalar,
    /// AVX2 with FMA and F16C.
    Avx2,
    /// AVX-512 F, BW, DQ, VL and VNNI.
    Avx512,
}

/// Variable that lowers the choice: `scalar`, `avx2` or `avx512`.
pub const ISA_VARIABLE: &str = "THALWEG_CPU_ISA";

impl Isa {
    /// What `THALWEG_CPU_ISA` asks for, where this processor has it, else the best that it has.
    pub fn from_env() -> Self {
        let best = Self::best();
        let Ok(wanted) = std::env::var(ISA_VARIABLE) else { return best };
        match Self::parse(&wanted) {
            Some(isa) if isa.is_supported() => isa,
            Some(_) => {
                tracing::warn!(variable = ISA_VARIABLE, %wanted, using = ?best, "this processor lacks the instruction set");
                best
            }
            None => {
                tracing::warn!(variable = ISA_VARIABLE, %wanted, using = ?best, "not one of scalar, avx2, avx512");
                best
            }
        }
    }

    /// The fastest that this processor has.
    pub fn best() -> Self {
        [Self::Avx512, Self::Avx2].into_iter().find(|isa| isa.is_supported()).unwrap_or(Self::Scalar)
    }

    /// All that this processor has, slowest first.
    pub fn available() -> Vec<Self> {
        [Self::Scalar, Self::Avx2, Self::Avx512].into_iter().filter(|isa| isa.is_supported()).collect()
    }

    /// Whether this processor can run it.
    pub fn is_supported(self) -> bool {
        match self {
            Self::Scalar => true,
            Self::Avx2 => has_avx2(),
            Self::Avx512 => has_avx512(),
        }
    }

    fn parse(name: &str) -> Option<Self> {
        match name {
            "scalar" => Some(Self::Scalar),
            "avx2" => Some(Self::Avx2),
            "avx512" => Some(Self::Avx512),
            _ => None,
        }
    }
}

#[cfg(target_arch = "x86_64")]
fn has_avx2() -> bool {
    is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c")
}

#[cfg(target_arch = "x86_64")]
fn has_avx512() -> bool {
    has_avx2()
        && is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512dq")
        && is_x86_feature_detected!("avx512vl")
        && is_x86_feature_detected!("avx512vnni")
}

#[cfg(not(target_arch = "x86_64"))]
fn has_avx2() -> bool {
    false
}

#[cfg(not(target_arch = "x86_64"))]
fn has_avx512() -> bool {
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names() {
        let check = |name, expected| assert_eq!(Isa::parse(name), expected, "{name}");
        check("scalar", Some(Isa::Scalar));
        check("avx2", Some(Isa::Avx2));
        check("avx512", Some(Isa::Avx512));
        check("AVX2", None);
        check("", None);
    }

    #[test]
    fn the_best_is_available() {
        assert_eq!(Isa::available().last(), Some(&Isa::best()));
        assert_eq!(Isa::available().first(), Some(&Isa::Scalar));
    }
}
