//! A real etcd of one member on free ports, which can be frozen, killed, restarted and wiped.

use std::fs::File;
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::path::PathBuf;
use std::process::{Child, Command, Output, Stdio};
use std::time::Duration;

use tempfile::TempDir;
use tokio::time::Instant;

use crate::pki::{Authority, Identity};

/// A cold start with elections on a busy machine.
const PATIENCE: Duration = Duration::from_secs(30);

/// A running etcd. Dropping it kills it and removes its data.
pub struct Etcd {
    child: Option<Child>,
    client: SocketAddr,
    peer: SocketAddr,
    folder: TempDir,
    tls: Option<Tls>,
    /// user:password, once authentication is on.
    user: Option<String>,
}

/// What a client of an etcd with TLS needs.
pub struct Tls {
    /// Whom to trust.
    pub authority: PathBuf,
    /// Whom etcd trusts.
    pub client: Identity,
    server: Identity,
}

impl Etcd {
    /// Starts one and waits until it serves.
    pub fn start() -> Self {
        Self::start_with(false)
    }

    /// Starts one that speaks TLS alone and asks clients for a certificate.
    pub fn start_with_tls() -> Self {
        Self::start_with(true)
    }

    fn start_with(tls: bool) -> Self {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let tls = tls.then(|| {
            let authority = Authority::new(folder.path(), "authority");
            let (server, client) = (authority.issue("server"), authority.issue("client"));
            Tls { authority: authority.file(), client, server }
        });
        let [client, peer] = free_addresses();
        let mut etcd = Self { child: None, client, peer, folder, tls, user: None };
        etcd.restart();
        etcd
    }

    /// Where clients connect to.
    pub fn address(&self) -> SocketAddr {
        self.client
    }

    /// The URL of a membership with this prefix.
    pub fn url(&self, prefix: &str) -> String {
        let scheme = if self.tls.is_some() { "etcds" } else { "etcd" };
        format!("{scheme}://{}{prefix}", self.client)
    }

    /// The files of an etcd with TLS.
    pub fn tls(&self) -> &Tls {
        self.tls.as_ref().expect("started with TLS")
    }

    /// Stops it in the middle of whatever it does (SIGSTOP).
    pub fn freeze(&self) {
        self.signal("-STOP");
    }

    /// It goes on as if no time had passed.
    pub fn thaw(&self) {
        self.signal("-CONT");
    }

    /// Ends it like a crash (SIGKILL).
    pub fn kill(&mut self) {
        if let Some(mut child) = self.child.take() {
            child.kill().expect("it can be killed");
            child.wait().expect("it ends");
        }
    }

    /// Starts it again on the same ports with the data that it has, and waits until it serves.
    pub fn restart(&mut self) {
        self.kill();
        let log = File::create(self.folder.path().join("log")).expect("a log file");
        let mut command = Command::new("etcd");
        command.args(self.arguments()).stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);
        self.child = Some(command.spawn().expect("etcd is installed"));
        self.wait_until_healthy();
    }

    /// Starts it again on the same ports without any data.
    pub fn restart_wiped(&mut self) {
        self.kill();
        std::fs::remove_dir_all(self.data()).expect("there was data");
        self.user = None;
        self.restart();
    }

    /// Forgets the past of every key: whoever watches from an older revision is sent away.
    pub fn compact(&self) {
        let status = self.ctl(&["endpoint", "status", "--write-out", "json"]);
        let status: serde_json::Value = serde_json::from_str(&status).expect("JSON");
        let revision = status[0]["Status"]["header"]["revision"].to_string();
        self.ctl(&["compact", &revision, "--physical"]);
    }

    /// Turns authentication on: `user` may read and write everything, nobody else anything.
    pub fn enable_auth(&mut self, user: &str, password: &str) {
        let root = format!("root:{password}");
        let user = format!("{user}:{password}");
        let (name, _) = user.split_once(':').expect("a colon");
        self.ctl(&["user", "add", &root]);
        self.ctl(&["user", "grant-role", "root", "root"]);
        self.ctl(&["user", "add", &user]);
        self.ctl(&["role", "add", "all"]);
        self.ctl(&["role", "grant-permission", "all", "--from-key", "readwrite", ""]);
        self.ctl(&["user", "grant-role", name, "all"]);
        self.ctl(&["auth", "enable"]);
        self.user = Some(root);
    }

    /// What etcdctl prints; it must succeed.
    pub fn ctl(&self, args: &[&str]) -> String {
        let Output { status, stdout, stderr } = self.etcdctl(args);
        let (stdout, stderr) = (String::from_utf8_lossy(&stdout), String::from_utf8_lossy(&stderr));
        assert!(status.success(), "etcdctl {args:?}: {stdout}{stderr}");
        stdout.into_owned()
    }

    /// The value under a key, if it is there.
    pub fn get(&self, key: &str) -> Option<String> {
        let value = self.ctl(&["get", "--print-value-only", key]);
        (!value.is_empty()).then(|| value.trim_end().to_owned())
    }

    /// Every lease that lives, as etcdctl names them, in order.
    pub fn leases(&self) -> Vec<String> {
        let mut leases: Vec<_> = self.ctl(&["lease", "list"]).lines().skip(1).map(str::to_owned).collect();
        leases.sort();
        leases
    }

    fn etcdctl(&self, args: &[&str]) -> Output {
        let mut command = Command::new("etcdctl");
        command.env("ETCDCTL_API", "3").arg("--dial-timeout=1s").arg("--command-timeout=5s");
        command.arg(format!("--endpoints={}://{}", self.scheme(), self.client));
        if let Some(tls) = &self.tls {
            command.arg("--cacert").arg(&tls.authority).arg("--cert").arg(&tls.client.certificate);
            command.arg("--key").arg(&tls.client.key);
        }
        command.args(self.user.iter().map(|user| format!("--user={user}")));
        command.args(args).output().expect("etcdctl is installed")
    }

    fn scheme(&self) -> &'static str {
        if self.tls.is_some() { "https" } else { "http" }
    }

    fn data(&self) -> PathBuf {
        self.folder.path().join("data")
    }

    fn arguments(&self) -> Vec<String> {
        let (client, peer) =
            (format!("{}://{}", self.scheme(), self.client), format!("http://{}", self.peer));
        let mut arguments = vec!["--data-dir".to_owned(), self.data().display().to_string()];
        let mut set = |name: &str, value: &str| arguments.extend([format!("--{name}"), value.to_owned()]);
        set("name", "one");
        set("listen-client-urls", &client);
        set("advertise-client-urls", &client);
        set("listen-peer-urls", &peer);
        set("initial-advertise-peer-urls", &peer);
        set("initial-cluster", &format!("one={peer}"));
        // Elections quicker than the shortest lease.
        set("heartbeat-interval", "50");
        set("election-timeout", "500");
        if let Some(tls) = &self.tls {
            set("cert-file", &tls.server.certificate.display().to_string());
            set("key-file", &tls.server.key.display().to_string());
            set("trusted-ca-file", &tls.authority.display().to_string());
            arguments.push("--client-cert-auth".to_owned());
        }
        arguments
    }

    fn wait_until_healthy(&mut self) {
        let deadline = Instant::now() + PATIENCE;
        // Asking starts a process, so that this is no busy loop. Health asks as no user, which etcd answers all the same.
        while !self.etcdctl(&["endpoint", "health"]).status.success() {
            let ended = self.child.as_mut().and_then(|child| child.try_wait().ok().flatten());
            if ended.is_some() || Instant::now() > deadline {
                let log = std::fs::read_to_string(self.folder.path().join("log")).unwrap_or_default();
                panic!("etcd does not serve ({ended:?}): {log}");
            }
        }
    }

    fn signal(&self, signal: &str) {
        let process = self.child.as_ref().expect("it runs").id().to_string();
        let sent = Command::new("kill").args([signal, &process]).status();
        assert!(sent.is_ok_and(|status| status.success()), "kill {signal} {process}");
    }
}

impl Drop for Etcd {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Two addresses that nobody listens on; both are held while they are chosen, so that they differ.
fn free_addresses() -> [SocketAddr; 2] {
    let listeners = [(); 2].map(|()| TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a free port"));
    listeners.map(|listener| listener.local_addr().expect("an address"))
}
