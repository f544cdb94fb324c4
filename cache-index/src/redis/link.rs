//! One connection to Redis, however it is set up, with a limit on every wait.

use std::path::PathBuf;
use std::time::Duration;

use redis::aio::{ConnectionLike, MultiplexedConnection};
use redis::cluster::ClusterClient;
use redis::cluster_async::ClusterConnection;
use redis::{
    AsyncConnectionConfig, Client, Cmd, ConnectionAddr, ConnectionInfo, FromRedisValue, IntoConnectionInfo,
    Pipeline, RedisConnectionInfo, RedisFuture, RedisResult, TlsCertificates, TlsMode, Value,
};

use super::url::{Kind, RedisUrl, address};
use super::{Limits, RedisIndexError};

/// Longest wait for a connection, each sentinel asked included: half of the 5 s within which all recovers.
const CONNECT_WITHIN: Duration = Duration::from_millis(2_000);
/// Longest wait for one sentinel, so that a frozen one leaves time for the next.
const SENTINEL_WITHIN: Duration = Duration::from_millis(400);
/// Longest wait for the answer to a small command. A healthy server answers in a millisecond; one that saves or rewrites
/// may take some hundred.
pub(super) const ANSWER_WITHIN: Duration = Duration::from_millis(1_500);
/// The same where the client of a cluster waits by itself, large snapshots included.
const CLUSTER_WITHIN: Duration = Duration::from_secs(10);
/// Slowest transfer that is waited for, bytes per ms: 8 MB/s.
const TRANSFER_BYTES_PER_MS: usize = 8_000;

/// How to reach Redis. `Debug` shows no secret.
#[derive(Clone, PartialEq)]
pub struct RedisConfig {
    /// Where it is.
    pub url: RedisUrl,
    /// Certificates to trust instead of the system's, PEM.
    pub ca_file: Option<PathBuf>,
    /// Password, before those of `password` and of the URL; read again for each connection.
    pub password_file: Option<PathBuf>,
    /// Password, before that of the URL.
    pub password: Option<String>,
    /// How much the index may take.
    pub limits: Limits,
}

impl RedisConfig {
    /// Only a URL; all else as usual.
    pub fn new(url: RedisUrl) -> Self {
        Self { url, ca_file: None, password_file: None, password: None, limits: Limits::default() }
    }
}

impl std::fmt::Debug for RedisConfig {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut shown = f.debug_struct("RedisConfig");
        shown.field("url", &self.url).field("ca_file", &self.ca_file);
        shown.field("password_file", &self.password_file).finish_non_exhaustive()
    }
}

/// An open connection; clones share it.
#[derive(Clone)]
pub(super) struct Link {
    inner: Inner,
    server: String,
    user: Option<String>,
}

#[derive(Clone)]
enum Inner {
    Node(MultiplexedConnection),
    Cluster(ClusterConnection),
}

/// Extra time for so many bytes.
pub(super) fn transfer_time(bytes: usize) -> Duration {
    Duration::from_millis((bytes / TRANSFER_BYTES_PER_MS) as u64)
}

impl Link {
    /// Connects, with the password and certificates as they are now.
    pub(super) async fn connect(config: &RedisConfig) -> Result<Self, RedisIndexError> {
        let server = config.url.to_string();
        let timeout = RedisIndexError::Timeout { server, ms: CONNECT_WITHIN.as_millis() };
        tokio::time::timeout(CONNECT_WITHIN, Setup::of(config)?.connect()).await.map_err(|_| timeout)?
    }

    /// Whether the server keeps keys of all shards, so that one command may read several streams.
    pub(super) fn is_one_node(&self) -> bool {
        matches!(self.inner, Inner::Node(_))
    }

    /// Runs a command.
    pub(super) async fn run<T: FromRedisValue>(
        &mut self,
        command: &Cmd,
        within: Duration,
    ) -> Result<T, RedisIndexError> {
        let answer = tokio::time::timeout(within, command.query_async(&mut self.inner)).await;
        self.checked(answer, within)
    }

    /// Runs commands on keys of one shard.
    pub(super) async fn run_all<T: FromRedisValue>(
        &mut self,
        commands: &Pipeline,
        within: Duration,
    ) -> Result<T, RedisIndexError> {
        let answer = tokio::time::timeout(within, commands.query_async(&mut self.inner)).await;
        self.checked(answer, within)
    }

    fn checked<T>(
        &self,
        answer: Result<RedisResult<T>, tokio::time::error::Elapsed>,
        within: Duration,
    ) -> Result<T, RedisIndexError> {
        match answer {
            Ok(Ok(value)) => Ok(value),
            Ok(Err(error)) => Err(RedisIndexError::of(&error, &self.server, self.user.as_deref())),
            Err(_) => Err(RedisIndexError::Timeout { server: self.server.clone(), ms: within.as_millis() }),
        }
    }
}

impl ConnectionLike for Inner {
    fn req_packed_command<'a>(&'a mut self, cmd: &'a Cmd) -> RedisFuture<'a, Value> {
        match self {
            Self::Node(node) => node.req_packed_command(cmd),
            Self::Cluster(cluster) => cluster.req_packed_command(cmd),
        }
    }

    fn req_packed_commands<'a>(
        &'a mut self,
        pipeline: &'a Pipeline,
        offset: usize,
        count: usize,
    ) -> RedisFuture<'a, Vec<Value>> {
        match self {
            Self::Node(node) => node.req_packed_commands(pipeline, offset, count),
            Self::Cluster(cluster) => cluster.req_packed_commands(pipeline, offset, count),
        }
    }

    fn get_db(&self) -> i64 {
        match self {
            Self::Node(node) => node.get_db(),
            Self::Cluster(cluster) => cluster.get_db(),
        }
    }
}

/// One attempt to connect.
struct Setup<'a> {
    url: &'a RedisUrl,
    password: Option<String>,
    ca: Option<Vec<u8>>,
}

impl<'a> Setup<'a> {
    fn of(config: &'a RedisConfig) -> Result<Self, RedisIndexError> {
        let read = |path: &PathBuf| {
            std::fs::read(path)
                .map_err(|error| RedisIndexError::File { path: path.clone(), reason: error.to_string() })
        };
        let password = match &config.password_file {
            Some(path) => {
                let text = String::from_utf8(read(path)?).map_err(|_| RedisIndexError::File {
                    path: path.clone(),
                    reason: "it is not UTF-8".to_owned(),
                })?;
                Some(text.trim_end_matches(['\r', '\n']).to_owned())
            }
            None => config.password.clone().or_else(|| config.url.password.clone()),
        };
        Ok(Self { url: &config.url, password, ca: config.ca_file.as_ref().map(read).transpose()? })
    }

    async fn connect(&self) -> Result<Link, RedisIndexError> {
        let (server, inner) = match &self.url.kind {
            Kind::Single => {
                let (host, port) = &self.url.nodes[0];
                (address(host, *port), Inner::Node(self.node(host, *port, true).await?))
            }
            Kind::Sentinel { master } => {
                let (host, port) = self.master(master).await?;
                let node = self.node(&host, port, true).await?;
                (format!("{} (master {})", self.url, address(&host, port)), Inner::Node(node))
            }
            Kind::Cluster => {
                let server = self.url.to_string();
                let connection = self.cluster().await.map_err(|error| self.error(&error, &server))?;
                (server, Inner::Cluster(connection))
            }
        };
        Ok(Link { inner, server, user: self.url.user.clone() })
    }

    async fn node(
        &self,
        host: &str,
        port: u16,
        auth: bool,
    ) -> Result<MultiplexedConnection, RedisIndexError> {
        let connect = async {
            let client = self.client(host, port, auth)?;
            // Waits are limited where a command is run.
            let config = AsyncConnectionConfig::new().set_connection_timeout(None).set_response_timeout(None);
            client.get_multiplexed_async_connection_with_config(&config).await
        };
        connect.await.map_err(|error| self.error(&error, &address(host, port)))
    }

    /// Asks one sentinel after the other.
    async fn master(&self, master: &str) -> Result<(String, u16), RedisIndexError> {
        let mut last = String::new();
        for (host, port) in &self.url.nodes {
            match tokio::time::timeout(SENTINEL_WITHIN, self.ask_sentinel(host, *port, master)).await {
                Ok(Ok(Some(found))) => return Ok(found),
                Ok(Ok(None)) => last = format!("{} does not know it", address(host, *port)),
                Ok(Err(error)) => last = error.to_string(),
                Err(_) => last = format!("{} did not answer", address(host, *port)),
            }
        }
        let master = master.to_owned();
        Err(RedisIndexError::NoMaster { server: self.url.to_string(), master, detail: last })
    }

    async fn ask_sentinel(
        &self,
        host: &str,
        port: u16,
        master: &str,
    ) -> Result<Option<(String, u16)>, RedisIndexError> {
        let mut sentinel = self.node(host, port, self.url.sentinel_auth).await?;
        let mut question = redis::cmd("SENTINEL");
        question.arg("GET-MASTER-ADDR-BY-NAME").arg(master);
        question.query_async(&mut sentinel).await.map_err(|error| self.error(&error, &address(host, port)))
    }

    async fn cluster(&self) -> RedisResult<ClusterConnection> {
        let nodes = self.url.nodes.iter().map(|(host, port)| self.info(host, *port, true));
        let nodes = nodes.collect::<RedisResult<Vec<_>>>()?;
        let mut builder =
            ClusterClient::builder(nodes).connection_timeout(CONNECT_WITHIN).response_timeout(CLUSTER_WITHIN);
        if self.url.tls {
            builder = builder.tls(TlsMode::Secure).certs(self.certificates());
        }
        builder.retries(1).build()?.get_async_connection().await
    }

    fn client(&self, host: &str, port: u16, auth: bool) -> RedisResult<Client> {
        let info = self.info(host, port, auth)?;
        if self.url.tls { Client::build_with_tls(info, self.certificates()) } else { Client::open(info) }
    }

    fn info(&self, host: &str, port: u16, auth: bool) -> RedisResult<ConnectionInfo> {
        let host = host.to_owned();
        let addr = match self.url.tls {
            true => ConnectionAddr::TcpTls { host, port, insecure: false, tls_params: None },
            false => ConnectionAddr::Tcp(host, port),
        };
        let mut settings = RedisConnectionInfo::default().set_lib_name("thalweg", env!("CARGO_PKG_VERSION"));
        if auth {
            settings = settings.set_db(self.url.db);
            if let Some(user) = &self.url.user {
                settings = settings.set_username(user);
            }
            if let Some(password) = &self.password {
                settings = settings.set_password(password);
            }
        }
        Ok(addr.into_connection_info()?.set_redis_settings(settings))
    }

    fn certificates(&self) -> TlsCertificates {
        TlsCertificates { client_tls: None, root_cert: self.ca.clone() }
    }

    fn error(&self, error: &redis::RedisError, server: &str) -> RedisIndexError {
        RedisIndexError::of(error, server, self.url.user.as_deref())
    }
}
