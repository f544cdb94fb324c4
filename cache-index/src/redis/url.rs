//! What stands behind `--index redis://..`.

use std::fmt;
use std::str::FromStr;

use super::RedisIndexError;

const PORT: u16 = 6379;
const SENTINEL_PORT: u16 = 26379;

/// Where Redis is, and who asks. Neither `Display` nor `Debug` show user and password.
#[derive(Clone, PartialEq, Eq)]
pub struct RedisUrl {
    pub(super) kind: Kind,
    pub(super) tls: bool,
    /// Hosts and ports: the server, the sentinels, or nodes of the cluster.
    pub(super) nodes: Vec<(String, u16)>,
    pub(super) user: Option<String>,
    pub(super) password: Option<String>,
    pub(super) db: i64,
    /// Sentinels ask for the same user and password.
    pub(super) sentinel_auth: bool,
}

/// What the nodes are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// One server.
    Single,
    /// Sentinels that know which server is the master of this name.
    Sentinel { master: String },
    /// Nodes that know the others.
    Cluster,
}

impl RedisUrl {
    /// Whether connections are encrypted.
    pub fn tls(&self) -> bool {
        self.tls
    }
}

impl FromStr for RedisUrl {
    type Err = RedisIndexError;

    fn from_str(text: &str) -> Result<Self, RedisIndexError> {
        parse(text).map_err(|reason| RedisIndexError::Url { reason })
    }
}

impl fmt::Display for RedisUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let scheme = if self.tls { "rediss" } else { "redis" };
        let nodes: Vec<String> = self.nodes.iter().map(|(host, port)| address(host, *port)).collect();
        let nodes = nodes.join(",");
        match &self.kind {
            Kind::Single if self.db == 0 => write!(f, "{scheme}://{nodes}"),
            Kind::Single => write!(f, "{scheme}://{nodes}/{}", self.db),
            Kind::Sentinel { master } => write!(f, "{scheme}+sentinel://{nodes}/{master}"),
            Kind::Cluster => write!(f, "{scheme}+cluster://{nodes}"),
        }
    }
}

impl fmt::Debug for RedisUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "RedisUrl({self})")
    }
}

/// Host and port as one writes them.
pub(super) fn address(host: &str, port: u16) -> String {
    if host.contains(':') { format!("[{host}]:{port}") } else { format!("{host}:{port}") }
}

fn parse(text: &str) -> Result<RedisUrl, &'static str> {
    let (scheme, rest) = text.split_once("://").ok_or("there is no ://")?;
    let (base, variant) = scheme.split_once('+').map_or((scheme, None), |(base, v)| (base, Some(v)));
    let tls = match base {
        "redis" | "valkey" => false,
        "rediss" | "valkeys" => true,
        _ => return Err("the scheme is neither redis nor rediss"),
    };
    let (rest, query) = rest.split_once('?').map_or((rest, None), |(rest, query)| (rest, Some(query)));
    let (authority, path) = rest.split_once('/').unwrap_or((rest, ""));
    let (user_info, hosts) = authority.rsplit_once('@').map_or((None, authority), |(u, h)| (Some(u), h));
    let (user, password) = user_info.map(user_and_password).transpose()?.unwrap_or_default();
    let sentinel = variant == Some("sentinel");
    let port = if sentinel { SENTINEL_PORT } else { PORT };
    let nodes = hosts.split(',').map(|node| host_and_port(node, port)).collect::<Result<Vec<_>, _>>()?;
    let (kind, db) = match variant {
        None if nodes.len() > 1 => return Err("several hosts need redis+sentinel:// or redis+cluster://"),
        None => (Kind::Single, database(path)?),
        Some("sentinel") if path.is_empty() => {
            return Err("the name of the master is missing: ../master-name");
        }
        Some("sentinel") => (Kind::Sentinel { master: percent_decoded(path)? }, 0),
        Some("cluster") if path.is_empty() || path == "0" => (Kind::Cluster, 0),
        Some("cluster") => return Err("a cluster has one database only: leave the path out"),
        Some(_) => return Err("after + comes sentinel or cluster"),
    };
    let sentinel_auth = match query {
        None => false,
        Some("sentinel_auth=yes") if sentinel => true,
        Some(_) => return Err("the only parameter is sentinel_auth=yes, of redis+sentinel://"),
    };
    Ok(RedisUrl { kind, tls, nodes, user, password, db, sentinel_auth })
}

fn user_and_password(text: &str) -> Result<(Option<String>, Option<String>), &'static str> {
    let (user, password) = text.split_once(':').map_or((text, None), |(user, p)| (user, Some(p)));
    let user = (!user.is_empty()).then(|| percent_decoded(user)).transpose()?;
    let password = password.filter(|p| !p.is_empty()).map(percent_decoded).transpose()?;
    Ok((user, password))
}

fn host_and_port(text: &str, default: u16) -> Result<(String, u16), &'static str> {
    let (host, port) = match text.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
        Some((host, rest)) => (host, rest.strip_prefix(':')),
        None => text.split_once(':').map_or((text, None), |(host, port)| (host, Some(port))),
    };
    let port = port.map_or(Ok(default), str::parse).map_err(|_| "a port is not a number below 65536")?;
    if host.is_empty() {
        return Err("a host is missing");
    }
    Ok((host.to_owned(), port))
}

fn database(path: &str) -> Result<i64, &'static str> {
    let number = if path.is_empty() { Ok(0) } else { path.parse() };
    number.ok().filter(|db| *db >= 0).ok_or("the path is not the number of a database")
}

fn percent_decoded(text: &str) -> Result<String, &'static str> {
    const WRONG: &str = "a % is not followed by two hexadecimal digits of UTF-8";
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.bytes();
    while let Some(byte) = rest.next() {
        let digit = |byte: Option<u8>| byte.and_then(|b| char::from(b).to_digit(16)).ok_or(WRONG);
        bytes.push(match byte {
            b'%' => (digit(rest.next())? * 16 + digit(rest.next())?) as u8,
            byte => byte,
        });
    }
    String::from_utf8(bytes).map_err(|_| WRONG)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn urls_are_read_and_shown_without_secrets() {
        let check = |text: &str, shown: &str, user: Option<&str>, password: Option<&str>| {
            let url: RedisUrl = text.parse().unwrap();
            assert_eq!(url.to_string(), shown, "{text}");
            assert_eq!((url.user.as_deref(), url.password.as_deref()), (user, password), "{text}");
            assert!(password.is_none_or(|secret| !format!("{url:?} {url}").contains(secret)), "{text}");
        };
        check("redis://localhost", "redis://localhost:6379", None, None);
        check("rediss://h:7/3", "rediss://h:7/3", None, None);
        check("valkey://[::1]:7", "redis://[::1]:7", None, None);
        check("redis://u:p%40ss%2f@h", "redis://h:6379", Some("u"), Some("p@ss/"));
        check("redis://:secret@h", "redis://h:6379", None, Some("secret"));
        check("redis://only-user@h", "redis://h:6379", Some("only-user"), None);
        check("redis+sentinel://a,b:1/m", "redis+sentinel://a:26379,b:1/m", None, None);
        check("rediss+cluster://u:pw@a:1,b:2", "rediss+cluster://a:1,b:2", Some("u"), Some("pw"));
        let with_auth: RedisUrl = "redis+sentinel://:x@a/m?sentinel_auth=yes".parse().unwrap();
        assert!(with_auth.sentinel_auth);
    }

    #[test]
    fn what_is_wrong_is_said_without_the_url() {
        for (text, says) in [
            ("localhost:6379", "no ://"),
            ("http://user:hunter2@h", "scheme"),
            ("redis://u:hunter2@a,b", "several hosts"),
            ("redis://u:hunter2@a/x", "database"),
            ("redis://u:hunter2@a:99999", "port"),
            ("redis://u:hunter2@", "host"),
            ("redis://u:%zz@a", "%"),
            ("redis+sentinel://a", "master"),
            ("redis+cluster://a/2", "one database"),
            ("redis+raft://a", "sentinel or cluster"),
            ("redis://a?db=2", "sentinel_auth"),
        ] {
            let error = text.parse::<RedisUrl>().unwrap_err().to_string();
            assert!(error.contains(says), "{text}: {error}");
            assert!(!error.contains("hunter2"), "{error}");
        }
    }
}
