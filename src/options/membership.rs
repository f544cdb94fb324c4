//! Which membership a process uses.

use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::Duration;

use clap::Args;
use thalweg_membership::{Etcd, EtcdConfig, EtcdUrl, ParseUrlError, Password};
use thalweg_proto::value;

use super::BadOption;

/// Where the password of etcd's user may stand; a flag would show it to everybody.
const PASSWORD_VARIABLE: &str = "THALWEG_MEMBERSHIP_PASSWORD";

/// Where routers learn of workers.
#[derive(Args, Clone, Debug)]
pub(crate) struct MembershipOptions {
    /// Membership: static, which is the list of --worker flags, or etcd://USER@HOST:2379,HOST:2379/PREFIX, etcds:// with TLS
    #[arg(long, env = "THALWEG_MEMBERSHIP", default_value = "static", value_name = "MEMBERSHIP")]
    membership: Membership,

    /// PEM file of the authority that signed etcd's certificate; needed with etcds://
    #[arg(long, env = "THALWEG_MEMBERSHIP_CA_FILE", value_name = "FILE", value_parser = value::file)]
    membership_ca_file: Option<PathBuf>,

    /// PEM file of this process's certificate for etcd
    #[arg(long, env = "THALWEG_MEMBERSHIP_CERT_FILE", value_name = "FILE", value_parser = value::file)]
    membership_cert_file: Option<PathBuf>,

    /// PEM file of that certificate's key
    #[arg(long, env = "THALWEG_MEMBERSHIP_KEY_FILE", value_name = "FILE", value_parser = value::file)]
    membership_key_file: Option<PathBuf>,

    /// File with the password of etcd's user; else the variable THALWEG_MEMBERSHIP_PASSWORD
    #[arg(long, env = "THALWEG_MEMBERSHIP_PASSWORD_FILE", value_name = "FILE", value_parser = value::file)]
    membership_password_file: Option<PathBuf>,

    /// Seconds after which a process that died without a word is struck from etcd
    #[arg(long, env = "THALWEG_MEMBERSHIP_LEASE_TTL", value_name = "SECONDS", default_value_t = 10)]
    #[arg(value_parser = value::whole(2..=3600u64))]
    membership_lease_ttl: u64,
}

impl MembershipOptions {
    /// The way to etcd; None where the membership is static.
    pub(crate) fn open(&self) -> anyhow::Result<Option<Etcd>> {
        self.open_with(std::env::var(PASSWORD_VARIABLE).ok())
    }

    fn open_with(&self, password: Option<String>) -> anyhow::Result<Option<Etcd>> {
        let url = match &self.membership {
            Membership::Static => return self.refuse_files().map(|()| None),
            Membership::Etcd(url) => url.clone(),
        };
        if self.membership_cert_file.is_some() != self.membership_key_file.is_some() {
            let text = "--membership-cert-file and --membership-key-file belong together: one is missing";
            return Err(BadOption::because(text));
        }
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
        Etcd::new(&config).map(Some).map_err(|error| BadOption::because(format!("--membership: {error}")))
    }

    fn refuse_files(&self) -> anyhow::Result<()> {
        let files = [
            ("--membership-ca-file", &self.membership_ca_file),
            ("--membership-cert-file", &self.membership_cert_file),
            ("--membership-key-file", &self.membership_key_file),
            ("--membership-password-file", &self.membership_password_file),
        ];
        files.iter().find(|(_, file)| file.is_some()).map_or(Ok(()), |(flag, _)| {
            Err(BadOption::because(format!(
                "{flag} is read for etcd:// alone; set --membership, or leave it out"
            )))
        })
    }
}

/// What `--membership` says.
#[derive(Clone, Debug)]
enum Membership {
    Static,
    Etcd(EtcdUrl),
}

impl FromStr for Membership {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "static" => Ok(Self::Static),
            _ if text.starts_with("etcd") => {
                text.parse().map(Self::Etcd).map_err(|error: ParseUrlError| error.to_string())
            }
            _ => Err("expected `static` or etcd://host:2379".to_owned()),
        }
    }
}

/// Editors end a file with a line break, which is no part of the password.
fn read_password(file: &Path) -> anyhow::Result<String> {
    let text = std::fs::read_to_string(file).map_err(|error| {
        BadOption::because(format!("--membership-password-file {}: {error}", file.display()))
    })?;
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
        let flags = Flags::try_parse_from(args).map_err(|error| {
            // What is said of the value; the binary leaves out the value itself.
            let source = std::error::Error::source(&error).map(ToString::to_string);
            source.unwrap_or_else(|| error.to_string())
        })?;
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
        refused("--membership etcd://h --membership-lease-ttl 1", None, "from 2 to 3600");
        refused("--membership etcds://h --membership-cert-file /dev/null", None, "--membership-key-file");
        refused("--membership-cert-file /dev/null", None, "etcd:// alone");
    }
}
