//! Which membership a process uses.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, bail};
use clap::Args;
use thalweg_membership::{Etcd, EtcdConfig, Password};

/// Where the password of etcd's user may stand; a flag would show it to everybody.
const PASSWORD_VARIABLE: &str = "THALWEG_MEMBERSHIP_PASSWORD";

/// Where routers learn of workers.
#[derive(Args, Clone, Debug)]
pub(crate) struct MembershipOptions {
    /// Membership: static, which is the list of --worker flags, or etcd://USER@HOST:2379,HOST:2379/PREFIX, etcds:// with TLS
    #[arg(long, env = "THALWEG_MEMBERSHIP", default_value = "static", value_name = "MEMBERSHIP")]
    #[arg(hide_env_values = true)]
    membership: String,

    /// PEM file of the authority that signed etcd's certificate; needed with etcds://
    #[arg(long, env = "THALWEG_MEMBERSHIP_CA_FILE", value_name = "FILE")]
    membership_ca_file: Option<PathBuf>,

    /// PEM file of this process's certificate for etcd
    #[arg(long, env = "THALWEG_MEMBERSHIP_CERT_FILE", value_name = "FILE", requires = "membership_key_file")]
    membership_cert_file: Option<PathBuf>,

    /// PEM file of that certificate's key
    #[arg(long, env = "THALWEG_MEMBERSHIP_KEY_FILE", value_name = "FILE", requires = "membership_cert_file")]
    membership_key_file: Option<PathBuf>,

    /// File with the password of etcd's user; else the variable THALWEG_MEMBERSHIP_PASSWORD
    #[arg(long, env = "THALWEG_MEMBERSHIP_PASSWORD_FILE", value_name = "FILE")]
    membership_password_file: Option<PathBuf>,

    /// Seconds after which a process that died without a word is struck from etcd
    #[arg(long, env = "THALWEG_MEMBERSHIP_LEASE_TTL", value_name = "SECONDS", default_value_t = 10)]
    #[arg(value_parser = clap::value_parser!(u64).range(2..=3600))]
    membership_lease_ttl: u64,
}

impl MembershipOptions {
    /// The way to etcd; None where the membership is static.
    pub(crate) fn open(&self) -> anyhow::Result<Option<Etcd>> {
        self.open_with(std::env::var(PASSWORD_VARIABLE).ok())
    }

    fn open_with(&self, password: Option<String>) -> anyhow::Result<Option<Etcd>> {
        // The text is not repeated in messages: a password may stand in it.
        let url = match self.membership.as_str() {
            "static" => return Ok(None),
            text if text.starts_with("etcd") => text.parse().context("--membership")?,
            _ => bail!("--membership: expected `static` or etcd://host:2379"),
        };
        let password = match &self.membership_password_file {
            Some(file) => Some(read_password(file)?),
            None => password,
        };
        let config = EtcdConfig {
            url,
            password: password.map(Password::new),
            ca_file: self.membership_ca_file.clone(),
            identity: self.membership_cert_file.clone().zip(self.membership_key_file.clone()),
            lease_ttl: Duration::from_secs(self.membership_lease_ttl),
        };
        Ok(Some(Etcd::new(&config).context("--membership")?))
    }
}

/// Editors end a file with a line break, which is no part of the password.
fn read_password(file: &Path) -> anyhow::Result<String> {
    let text = std::fs::read_to_string(file);
    let text = text.with_context(|| format!("--membership-password-file {}", file.display()))?;
    Ok(text.trim_end_matches(['\r', '\n']).to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Flags {
        #[command(flatten)]
        membership: MembershipOptions,
    }

    fn open(args: &str, password: Option<&str>) -> Result<bool, String> {
        let args = std::iter::once("x").chain(args.split_whitespace());
        let flags = Flags::try_parse_from(args).map_err(|error| error.to_string())?;
        let opened = flags.membership.open_with(password.map(str::to_owned));
        opened.map(|etcd| etcd.is_some()).map_err(|error| format!("{error:#}"))
    }

    #[tokio::test]
    async fn memberships_are_opened_or_refused_without_telling_secrets() {
        assert_eq!(open("", None), Ok(false));
        assert_eq!(open("--membership static", Some("secret")), Ok(false));
        assert_eq!(open("--membership etcd://h:1,h2/p --membership-lease-ttl 2", None), Ok(true));
        assert_eq!(open("--membership etcd://me@h", Some("secret")), Ok(true));
        let refused = |args: &str, password, part: &str| {
            let message = open(args, password).unwrap_err();
            assert!(message.contains(part) && !message.contains("secret"), "{args}: {message}");
        };
        refused("--membership kubernetes", None, "`static`");
        refused("--membership etcd://me:secret@h", None, "--membership-password-file");
        refused("--membership etcd://me@h", None, "THALWEG_MEMBERSHIP_PASSWORD");
        refused("--membership etcd://h", Some("secret"), "etcd://USER@host");
        refused("--membership etcds://h", None, "--membership-ca-file");
        refused("--membership etcd://me@h --membership-password-file /none", None, "/none");
        refused("--membership etcd://h --membership-lease-ttl 1", None, "--membership-lease-ttl");
        refused("--membership etcds://h --membership-cert-file c", None, "--membership-key-file");
    }
}
