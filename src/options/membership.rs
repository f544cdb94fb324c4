//! Which membership a process uses.

use std::str::FromStr;

use clap::Args;

/// Where routers learn of workers.
#[derive(Args, Clone, Debug)]
pub(crate) struct MembershipOptions {
    /// Membership: static, which is the list of --worker flags
    #[arg(long, env = "THALWEG_MEMBERSHIP", default_value = "static", value_name = "MEMBERSHIP")]
    membership: Membership,
}

/// Memberships of this build.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Membership {
    Static,
}

impl FromStr for Membership {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "static" => Ok(Self::Static),
            etcd if etcd.starts_with("etcd://") => {
                Err("etcd membership is not in this build yet; `static` with --worker grpc://host:port is"
                    .to_owned())
            }
            _ => Err("expected `static`".to_owned()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_membership_that_is_not_built_says_so() {
        assert_eq!("static".parse(), Ok(Membership::Static));
        for text in ["etcd://localhost", "kubernetes", ""] {
            assert!(text.parse::<Membership>().unwrap_err().contains("`static`"), "{text}");
        }
    }
}
