//! Membership kept in etcd: each process writes one key under a lease of its own, routers follow all keys.
//!
//! An etcd that is down, frozen or wiped ends no process and empties no list: the last known members stay in place
//! until etcd itself says otherwise, and whoever lost a lease writes its key anew.

mod client;
mod error;
mod keeper;
mod keys;
mod lease;
mod record;
mod registration;
mod roster;
mod router;
mod stats;
mod url;
mod watcher;

/// etcd's messages and clients, generated.
#[allow(missing_docs, unreachable_pub, clippy::all, reason = "generated code")]
mod rpc {
    tonic::include_proto!("etcdserverpb");
}

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

pub use error::EtcdError;
pub use record::Record;
pub use registration::Registration;
pub use router::EtcdMembership;
pub use stats::MembershipStats;
pub use url::{EtcdUrl, ParseUrlError};

use client::{Client, Credentials};
use stats::Counters;

/// A lease that is not renewed for so long lapses, and its member vanishes: `--membership-lease-ttl`'s default.
pub const LEASE_TTL_DEFAULT: Duration = Duration::from_secs(10);
/// Below this, one slow disk write of etcd would cost every lease.
pub const LEASE_TTL_MIN: Duration = Duration::from_secs(2);

/// How to reach etcd, and as whom.
#[derive(Clone, Debug)]
pub struct EtcdConfig {
    /// Endpoints, prefix and user.
    pub url: EtcdUrl,
    /// Of the URL's user.
    pub password: Option<Password>,
    /// PEM file of the authorities that may vouch for etcd; needed with etcds://.
    pub ca_file: Option<PathBuf>,
    /// PEM files of our certificate and its key, where etcd asks for one.
    pub identity: Option<(PathBuf, PathBuf)>,
    /// Of the leases that are asked for, in whole seconds; etcd may grant more.
    pub lease_ttl: Duration,
}

/// A password that no log line shows.
#[derive(Clone, PartialEq, Eq)]
pub struct Password(String);

impl Password {
    /// Keeps it.
    pub fn new(password: impl Into<String>) -> Self {
        Self(password.into())
    }
}

impl std::fmt::Debug for Password {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Password(..)")
    }
}

/// A way to etcd that registrations and watchers share. Cheap to clone.
#[derive(Clone)]
pub struct Etcd {
    client: Client,
    prefix: Arc<str>,
    lease_ttl: Duration,
    counters: Arc<Counters>,
}

impl Etcd {
    /// Reads the certificates; connects when first used, so that an etcd that is down does not keep a process from
    /// starting.
    pub fn new(config: &EtcdConfig) -> Result<Self, EtcdError> {
        let credentials = match (config.url.user(), &config.password) {
            (Some(user), Some(Password(password))) => {
                Some(Credentials { user: user.to_owned(), password: password.clone() })
            }
            (None, None) => None,
            (Some(_), None) => return Err(EtcdError::PasswordMissing),
            (None, Some(_)) => return Err(EtcdError::UserMissing),
        };
        Ok(Self {
            client: Client::new(config, credentials)?,
            prefix: config.url.prefix().into(),
            lease_ttl: config.lease_ttl.max(LEASE_TTL_MIN),
            counters: Arc::default(),
        })
    }

    /// How things stand between this process and etcd.
    pub fn stats(&self) -> MembershipStats {
        self.counters.stats()
    }
}
