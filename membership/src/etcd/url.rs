//! Where etcd is: `etcd://[user@]host[:port][,host[:port]...][/prefix]`, etcds:// with TLS.

use std::fmt;
use std::str::FromStr;

const PORT_DEFAULT: u16 = 2379;
const PREFIX_DEFAULT: &str = "/thalweg";

/// Endpoints, prefix and user of an etcd cluster; never a password. Neither `Display` nor `Debug` show the user, in whose place
/// a password may have been written.
#[derive(Clone, PartialEq, Eq)]
pub struct EtcdUrl {
    tls: bool,
    user: Option<String>,
    /// host:port, at least one.
    endpoints: Vec<String>,
    /// Begins with a slash and does not end with one.
    prefix: String,
}

/// The text is no URL of etcd. The text itself is not repeated, since it may hold a password.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}; write etcd://host:2379,host2:2379/prefix, etcds:// for TLS")]
pub struct ParseUrlError(&'static str);

impl EtcdUrl {
    /// Whether connections are encrypted.
    pub fn tls(&self) -> bool {
        self.tls
    }

    /// Who we are to etcd.
    pub fn user(&self) -> Option<&str> {
        self.user.as_deref()
    }

    /// Each `host:port`, an IPv6 host in brackets.
    pub fn endpoints(&self) -> &[String] {
        &self.endpoints
    }

    /// What every key begins with, without a slash at its end.
    pub fn prefix(&self) -> &str {
        &self.prefix
    }
}

impl fmt::Display for EtcdUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let scheme = if self.tls { "etcds" } else { "etcd" };
        write!(f, "{scheme}://{}{}", self.endpoints.join(","), self.prefix)
    }
}

impl fmt::Debug for EtcdUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "EtcdUrl({self})")
    }
}

impl FromStr for EtcdUrl {
    type Err = ParseUrlError;

    fn from_str(text: &str) -> Result<Self, ParseUrlError> {
        let (tls, rest) = match text.split_once("://") {
            Some(("etcd", rest)) => (false, rest),
            Some(("etcds", rest)) => (true, rest),
            _ => return Err(ParseUrlError("it does not begin with etcd:// or etcds://")),
        };
        let (authority, path) = rest.split_at(rest.find('/').unwrap_or(rest.len()));
        let (user, hosts) = match authority.rsplit_once('@') {
            Some((user, hosts)) => (Some(user), hosts),
            None => (None, authority),
        };
        match user {
            Some("") => return Err(ParseUrlError("the user before the @ is empty")),
            Some(user) if user.contains(':') => {
                return Err(ParseUrlError(
                    "a password does not belong into the URL, where others see it: use \
                     --membership-password-file or THALWEG_MEMBERSHIP_PASSWORD",
                ));
            }
            _ => {}
        }
        let endpoints = hosts.split(',').map(endpoint).collect::<Result<_, _>>()?;
        Ok(Self { tls, user: user.map(str::to_owned), endpoints, prefix: prefix(path)? })
    }
}

fn prefix(path: &str) -> Result<String, ParseUrlError> {
    if path.contains(['?', '#']) {
        return Err(ParseUrlError("the prefix has no ? and no #"));
    }
    match path.trim_end_matches('/') {
        "" => Ok(PREFIX_DEFAULT.to_owned()),
        prefix => Ok(prefix.to_owned()),
    }
}

fn endpoint(text: &str) -> Result<String, ParseUrlError> {
    let bracket = text.find(']').map_or(0, |end| end + 1);
    if text.starts_with('[') != (bracket > 0) {
        return Err(ParseUrlError("a bracket of a host is not closed"));
    }
    let (host, port) = match text[bracket..].split_once(':') {
        Some((before, _)) if bracket > 0 && !before.is_empty() => {
            return Err(ParseUrlError("behind the bracket of a host comes a colon and the port"));
        }
        Some((before, port)) => {
            let port = port.parse().ok().filter(|port| *port != 0);
            let port = port.ok_or(ParseUrlError("a port is not a number from 1 to 65535"))?;
            (&text[..bracket + before.len()], port)
        }
        None => (text, PORT_DEFAULT),
    };
    if host.is_empty() {
        return Err(ParseUrlError("a host is missing"));
    }
    if host.contains(|c: char| c.is_whitespace() || matches!(c, '@' | '?' | '#' | '\\')) {
        return Err(ParseUrlError("a host holds a character that no host has"));
    }
    Ok(format!("{host}:{port}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn urls_are_read_and_printed() {
        let check = |text: &str, expected: &str| {
            let url: EtcdUrl = text.parse().unwrap_or_else(|error| panic!("{text}: {error}"));
            assert_eq!(url.to_string(), expected, "{text}");
        };
        check("etcd://h", "etcd://h:2379/thalweg");
        check("etcd://h:1/", "etcd://h:1/thalweg");
        check("etcds://a:1,b,[::1]:3/x/y/", "etcds://a:1,b:2379,[::1]:3/x/y");
        check("etcd://me@10.0.0.1/t", "etcd://10.0.0.1:2379/t");
        check("etcd://[fe80::1]/t", "etcd://[fe80::1]:2379/t");
    }

    #[test]
    fn what_is_wrong_is_said_without_repeating_secrets() {
        let refused = |text: &str, part: &str| {
            let message = text.parse::<EtcdUrl>().unwrap_err().to_string();
            assert!(message.contains(part) && !message.contains("secret"), "{text}: {message}");
        };
        refused("http://h:1", "does not begin");
        refused("etcd", "does not begin");
        refused("etcd://", "host is missing");
        refused("etcd://a,,b", "host is missing");
        refused("etcd://:2379", "host is missing");
        refused("etcd://h:0", "port is not a number");
        refused("etcd://h:70000", "port is not a number");
        refused("etcd://::1", "port is not a number");
        refused("etcd://[::1/x", "bracket");
        refused("etcd://[::1]x:1", "behind the bracket");
        refused("etcd://a b", "no host has");
        refused("etcd://h/x?y", "no ?");
        refused("etcd://@h", "user before the @");
        refused("etcd://me:secret@h", "--membership-password-file");
    }
}
