//! What can go wrong with Redis, and what to do about it. No error shows a secret.

use std::path::PathBuf;

use redis::{ErrorKind, RedisError};

/// An error of the Redis index.
#[derive(Debug, thiserror::Error)]
pub enum RedisIndexError {
    /// The URL of the index makes no sense.
    #[error(
        "{reason}; expected redis://host:port[/db], with user:password@ before the host where it asks for them, rediss:// for TLS, \
         redis+sentinel://host:port,host:port/master-name or redis+cluster://host:port,host:port"
    )]
    Url {
        /// Why.
        reason: &'static str,
    },
    /// A file that was named cannot be used.
    #[error("cannot read {}: {reason}", path.display())]
    File {
        /// Which.
        path: PathBuf,
        /// Why.
        reason: String,
    },
    /// User or password are wrong or missing.
    #[error(
        "Redis at {server} refuses {user} with this password ({detail}); set --index-password-file or \
         THALWEG_INDEX_PASSWORD, and the user in the URL"
    )]
    Auth {
        /// Where.
        server: String,
        /// Who.
        user: String,
        /// What it said.
        detail: String,
    },
    /// The user may not do what the index needs.
    #[error(
        "Redis at {server} does not permit {user} what the index needs ({detail}); grant it: ACL SETUSER USER \
         ~{{tw1:* +xadd +xread +xrange +xrevrange +set +get +getrange +strlen +expire +zadd +zrange +zremrangebyscore +ping \
         +role +cluster|slots +multi +exec +del"
    )]
    Permission {
        /// Where.
        server: String,
        /// Who.
        user: String,
        /// What it said.
        detail: String,
    },
    /// No connection, or it broke.
    #[error("Redis at {server} is out of reach: {detail}")]
    Unreachable {
        /// Where.
        server: String,
        /// Why.
        detail: String,
    },
    /// It did not answer in time.
    #[error("Redis at {server} did not answer within {ms} ms")]
    Timeout {
        /// Where.
        server: String,
        /// How long was waited.
        ms: u128,
    },
    /// No sentinel knows a master of this name.
    #[error("no sentinel of {server} names a master {master:?}; last: {detail}")]
    NoMaster {
        /// Which sentinels.
        server: String,
        /// The name asked for.
        master: String,
        /// What the last one said.
        detail: String,
    },
    /// It answered with an error, such as READONLY, OOM or LOADING.
    #[error("Redis at {server} refuses: {detail}")]
    Refused {
        /// Where.
        server: String,
        /// What it said.
        detail: String,
    },
    /// The key is not of the type that the index writes.
    #[error("Redis at {server} holds something else there: {detail}")]
    WrongType {
        /// Where.
        server: String,
        /// What it said.
        detail: String,
    },
    /// Something in Redis was not written by this version of the index.
    #[error("{0} in Redis cannot be read by this version")]
    Undecodable(&'static str),
    /// One key cannot be read.
    #[error("key {key}: {source}")]
    Key {
        /// Which.
        key: String,
        /// Why.
        source: Box<Self>,
    },
    /// The thread of the index could not be started.
    #[error("cannot start the thread of the cache index: {0}")]
    Thread(#[source] std::io::Error),
}

impl RedisIndexError {
    /// Whether it is about what one key holds, and the others may be well.
    pub(super) fn is_of_one_key(&self) -> bool {
        matches!(self, Self::WrongType { .. } | Self::Undecodable(_))
    }

    /// The same, naming the key if it is about one.
    pub(super) fn of_key(self, key: String) -> Self {
        if self.is_of_one_key() { Self::Key { key, source: Box::new(self) } } else { self }
    }

    pub(super) fn of(error: &RedisError, server: &str, user: Option<&str>) -> Self {
        let (server, mut detail) = (server.to_owned(), error.to_string());
        // A password may have been written in the user's place.
        let user = match user {
            Some(user) => {
                detail = without(&detail, user);
                "the URL's user"
            }
            None => "user default",
        };
        let user = user.to_owned();
        match (error.kind(), code_of(error)) {
            (ErrorKind::AuthenticationFailed, _) => Self::Auth { server, user, detail },
            (_, "WRONGPASS" | "NOAUTH") => Self::Auth { server, user, detail },
            (_, "NOPERM") => Self::Permission { server, user, detail },
            (_, "WRONGTYPE") => Self::WrongType { server, detail },
            (ErrorKind::UnexpectedReturnType | ErrorKind::Parse, _) => Self::Undecodable("an answer"),
            (ErrorKind::Io | ErrorKind::ClusterConnectionNotFound, _) => Self::Unreachable { server, detail },
            _ => Self::Refused { server, detail },
        }
    }
}

/// The text with USER for every word that is the user's name: parts of other words tell nothing.
fn without(text: &str, user: &str) -> String {
    let is_inner = |c: Option<char>| c.is_some_and(char::is_alphanumeric);
    let (mut shown, mut copied) = (String::with_capacity(text.len()), 0);
    for (at, name) in text.match_indices(user) {
        let (before, after) = (text[..at].chars().next_back(), text[at + name.len()..].chars().next());
        if !name.is_empty() && !is_inner(before) && !is_inner(after) {
            shown.push_str(&text[copied..at]);
            shown.push_str("USER");
            copied = at + name.len();
        }
    }
    shown.push_str(&text[copied..]);
    shown
}

/// The code of the reply, or of the first that failed in a pipeline.
fn code_of(error: &RedisError) -> &str {
    let text = || {
        ["WRONGPASS", "NOAUTH", "NOPERM", "WRONGTYPE"]
            .into_iter()
            .find(|code| error.to_string().contains(code))
    };
    error.code().or_else(text).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_users_name_is_left_out_where_it_stands_alone() {
        assert_eq!(without("Connection refused", "u"), "Connection refused");
        assert_eq!(
            without("User hunter2 has no access ('hunter2')", "hunter2"),
            "User USER has no access ('USER')"
        );
        assert_eq!(without("nothing", ""), "nothing");
    }
}
