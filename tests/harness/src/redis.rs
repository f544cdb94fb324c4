//! Real Redis servers on free loopback ports, with their data in a temporary folder; all end when dropped.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use tempfile::TempDir;

use crate::pki::Authority;

const PATIENCE: Duration = Duration::from_secs(30);

/// A server, a replica or a sentinel.
pub struct Redis {
    binary: String,
    args: Vec<String>,
    /// Its plain port.
    pub port: u16,
    /// Its TLS port, if it has one.
    pub tls_port: u16,
    process: Running,
    dir: TempDir,
}

struct Running {
    child: Child,
    log: Receiver<String>,
}

/// A cluster whose nodes share the slots evenly.
pub struct RedisCluster {
    /// The nodes.
    pub nodes: Vec<Redis>,
}

impl Redis {
    /// An empty server.
    pub fn start() -> Self {
        Self::with(&[])
    }

    /// An empty server with options such as `--maxmemory 1mb`.
    pub fn with(args: &[&str]) -> Self {
        Self::of("redis-server", args)
    }

    /// An empty server from another binary, such as Valkey's.
    pub fn of(binary: &str, args: &[&str]) -> Self {
        let dir = tempfile::tempdir().expect("a temporary folder");
        Self::spawn(binary, args, dir, "Ready to accept connections")
    }

    /// Binaries that the main tests run on: Redis, and Valkey where `THALWEG_TEST_VALKEY` names one.
    pub fn binaries() -> Vec<String> {
        let valkey = std::env::var("THALWEG_TEST_VALKEY").ok();
        std::iter::once("redis-server".to_owned()).chain(valkey).collect()
    }

    /// A server that also speaks TLS with a certificate for 127.0.0.1 of a new authority, which is in `ca_file`.
    pub fn with_tls() -> Self {
        let dir = tempfile::tempdir().expect("a temporary folder");
        let authority = Authority::new(dir.path(), "ca");
        let identity = authority.issue("server");
        let tls_port = free_port();
        let port = tls_port.to_string();
        let text = |path: PathBuf| path.display().to_string();
        let (ca, cert, key) = (text(authority.file()), text(identity.certificate), text(identity.key));
        let args = [
            ["--tls-port", &port],
            ["--tls-ca-cert-file", &ca],
            ["--tls-cert-file", &cert],
            ["--tls-key-file", &key],
            ["--tls-auth-clients", "no"],
        ];
        let mut server = Self::spawn("redis-server", args.as_flattened(), dir, "Ready to accept connections");
        server.tls_port = tls_port;
        server
    }

    /// A replica that has caught up with its master.
    pub fn replica_of(master: &Self) -> Self {
        let port = master.port.to_string();
        let dir = tempfile::tempdir().expect("a temporary folder");
        let args = ["--replicaof", "127.0.0.1", &port, "--repl-diskless-sync-delay", "0"];
        let replica = Self::spawn("redis-server", &args, dir, "sync: Finished with success");
        // A link that came up late would count as broken and keep the replica from taking over.
        replica.eventually(&["INFO", "replication"], |text| text.contains("master_link_status:up"));
        replica
    }

    /// A sentinel that alone decides, within a second, whether the master named `name` is down.
    pub fn sentinel_of(master: &Self, name: &str) -> Self {
        let dir = tempfile::tempdir().expect("a temporary folder");
        let file = dir.path().join("sentinel.conf");
        let settings = format!(
            "sentinel monitor {name} 127.0.0.1 {} 1\nsentinel down-after-milliseconds {name} 1000\n\
             sentinel failover-timeout {name} 5000\n",
            master.port
        );
        std::fs::write(&file, settings).expect("the folder can be written to");
        let file = file.display().to_string();
        let sentinel = Self::spawn("redis-sentinel", &[&file], dir, "+monitor master");
        sentinel.eventually(&["SENTINEL", "REPLICAS", name], |text| text.contains("127.0.0.1"));
        sentinel
    }

    /// The authority that its TLS certificate is from.
    pub fn ca_file(&self) -> PathBuf {
        self.dir.path().join("ca.pem")
    }

    /// `redis://127.0.0.1:port`.
    pub fn url(&self) -> String {
        format!("redis://127.0.0.1:{}", self.port)
    }

    /// Runs one command; the reply as it stands on the wire.
    pub fn command(&self, args: &[&str]) -> String {
        self.try_command(args).unwrap_or_else(|error| panic!("{args:?}: {error}"))
    }

    /// Asks again and again until the reply is right. A server that changes its role closes its connections meanwhile.
    pub fn eventually(&self, args: &[&str], right: impl Fn(&str) -> bool) {
        let deadline = tokio::time::Instant::now() + PATIENCE;
        loop {
            let reply = self.try_command(args);
            if reply.as_ref().is_ok_and(|reply| right(reply)) {
                return;
            }
            assert!(tokio::time::Instant::now() < deadline, "{args:?}: {reply:?}");
        }
    }

    fn try_command(&self, args: &[&str]) -> std::io::Result<String> {
        let mut stream = TcpStream::connect((Ipv4Addr::LOCALHOST, self.port))?;
        stream.set_read_timeout(Some(PATIENCE))?;
        // The second command's reply marks the end of the first one's.
        let mut request = format!("*{}\r\n", args.len());
        args.iter().for_each(|arg| request += &format!("${}\r\n{arg}\r\n", arg.len()));
        request += "*2\r\n$4\r\nPING\r\n$9\r\nthe-end-.\r\n";
        stream.write_all(request.as_bytes())?;
        let end = b"$9\r\nthe-end-.\r\n";
        let (mut reply, mut buffer) = (Vec::new(), [0; 4096]);
        while !reply.ends_with(end) {
            match stream.read(&mut buffer)? {
                0 => return Err(std::io::ErrorKind::UnexpectedEof.into()),
                n => reply.extend_from_slice(&buffer[..n]),
            }
        }
        reply.truncate(reply.len() - end.len());
        Ok(String::from_utf8_lossy(&reply).into_owned())
    }

    /// Stops it from doing anything; its connections stay open.
    pub fn freeze(&self) {
        self.signal("-STOP");
    }

    /// Lets it go on.
    pub fn thaw(&self) {
        self.signal("-CONT");
    }

    /// Ends it like a crash.
    pub fn kill(&mut self) {
        // It may have ended already.
        drop(self.process.child.kill());
        drop(self.process.child.wait());
    }

    /// Starts it again on the same port, after `kill`; nothing is left of its data.
    pub fn restart_empty(&mut self) {
        self.process = run(&self.binary, &self.args);
        self.process.wait_for("Ready to accept connections");
    }

    fn spawn(binary: &str, args: &[&str], dir: TempDir, ready: &str) -> Self {
        let port = free_port();
        let path = dir.path().display().to_string();
        let port_text = port.to_string();
        let usual = ["--port", &port_text, "--bind", "127.0.0.1", "--dir", &path];
        let in_memory = ["--save", "", "--appendonly", "no"];
        // A file of settings comes first.
        let (file, rest) = args.split_at(usize::from(args.first().is_some_and(|arg| !arg.starts_with("--"))));
        let mut all = file.to_vec();
        all.extend(usual);
        if file.is_empty() {
            all.extend(in_memory);
        }
        all.extend(rest);
        let args: Vec<String> = all.into_iter().map(str::to_owned).collect();
        let process = run(binary, &args);
        process.wait_for(ready);
        Self { binary: binary.to_owned(), args, port, tls_port: 0, process, dir }
    }

    fn signal(&self, signal: &str) {
        let status = Command::new("kill").args([signal, &self.process.child.id().to_string()]).status();
        assert!(status.is_ok_and(|status| status.success()), "{signal} could not be sent");
    }
}

impl Drop for Redis {
    fn drop(&mut self) {
        self.kill();
    }
}

impl RedisCluster {
    /// Three nodes.
    pub fn start() -> Self {
        let nodes: Vec<(Redis, u16)> = (0..3)
            .map(|_| {
                let bus = free_port();
                (Redis::with(&["--cluster-enabled", "yes", "--cluster-port", &bus.to_string()]), bus)
            })
            .collect();
        for (i, (node, _)) in nodes.iter().enumerate() {
            let (from, to) = (i * 16_384 / 3, (i + 1) * 16_384 / 3 - 1);
            let reply = node.command(&["CLUSTER", "ADDSLOTSRANGE", &from.to_string(), &to.to_string()]);
            assert_eq!(reply, "+OK\r\n");
            for (other, bus) in &nodes[..i] {
                let (port, bus) = (other.port.to_string(), bus.to_string());
                assert_eq!(node.command(&["CLUSTER", "MEET", "127.0.0.1", &port, &bus]), "+OK\r\n");
            }
        }
        let nodes: Vec<Redis> = nodes.into_iter().map(|(node, _)| node).collect();
        for node in &nodes {
            node.eventually(&["CLUSTER", "INFO"], |text| {
                text.contains("cluster_state:ok") && text.contains("cluster_known_nodes:3")
            });
        }
        Self { nodes }
    }

    /// `redis+cluster://..` of all nodes.
    pub fn url(&self) -> String {
        let nodes: Vec<String> = self.nodes.iter().map(|node| format!("127.0.0.1:{}", node.port)).collect();
        format!("redis+cluster://{}", nodes.join(","))
    }
}

impl Running {
    fn wait_for(&self, text: &str) {
        let mut seen = Vec::new();
        loop {
            match self.log.recv_timeout(PATIENCE) {
                Ok(line) if line.contains(text) => return,
                Ok(line) => seen.push(line),
                Err(error) => panic!("{text:?} was not logged: {error}; log: {seen:#?}"),
            }
        }
    }
}

fn run(binary: &str, args: &[String]) -> Running {
    let mut command = Command::new(binary);
    command.args(args).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
    let mut child = command.spawn().unwrap_or_else(|error| panic!("{binary} cannot be started: {error}"));
    let stdout = BufReader::new(child.stdout.take().expect("piped"));
    let (sender, log) = channel();
    // Reads to the end, lest the server waits for a full pipe.
    std::thread::spawn(move || stdout.lines().map_while(Result::ok).for_each(|line| drop(sender.send(line))));
    Running { child, log }
}

/// A port that nobody listens on. Another process may take it before its user does, which then fails loudly.
fn free_port() -> u16 {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a free port");
    listener.local_addr().expect("bound").port()
}
