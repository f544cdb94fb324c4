//! One child process with JSON logs, which can be hurt in every way that a system knows; killed when dropped.

use std::collections::HashMap;
use std::ffi::OsStr;
use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::thread::JoinHandle;
use std::time::Duration;

use serde_json::Value;
use tokio::time::Instant;

/// A cold start on a busy machine takes seconds, not minutes.
const PATIENCE: Duration = Duration::from_secs(120);

/// A running `thalweg`.
pub struct Process {
    child: Child,
    events: Receiver<Value>,
    seen: Vec<Value>,
    /// How many events with each message `logged` has returned.
    returned: HashMap<String, usize>,
    stdout: Receiver<String>,
    readers: Vec<JoinHandle<()>>,
}

impl Process {
    /// Starts the binary with a clean environment of its own.
    pub fn start(binary: &str, args: &[impl AsRef<OsStr>]) -> Self {
        let mut child = Self::command(binary, args)
            .stderr(Stdio::piped())
            .spawn()
            .unwrap_or_else(|error| panic!("{}: {error}", Path::new(binary).display()));
        let (events, event_reader) = lines(child.stderr.take().expect("piped"), |line| {
            serde_json::from_str(&line).unwrap_or(Value::String(line))
        });
        Self::of(child, events, vec![event_reader])
    }

    /// The same of one that can write its log nowhere.
    pub fn start_without_log(binary: &str, args: &[impl AsRef<OsStr>]) -> Self {
        let full = std::fs::File::create("/dev/full").expect("a device that is full");
        let child = Self::command(binary, args).stderr(full).spawn();
        let child = child.unwrap_or_else(|error| panic!("{}: {error}", Path::new(binary).display()));
        Self::of(child, channel().1, Vec::new())
    }

    fn command(binary: &str, args: &[impl AsRef<OsStr>]) -> Command {
        let mut command = Command::new(binary);
        for (name, _) in std::env::vars().filter(|(n, _)| n.starts_with("THALWEG_") || n == "RUST_LOG") {
            command.env_remove(name);
        }
        command.args(args).args(["--log-format", "json"]).env("HF_HUB_OFFLINE", "1");
        command.stdin(Stdio::null()).stdout(Stdio::piped());
        command
    }

    fn of(mut child: Child, events: Receiver<Value>, mut readers: Vec<JoinHandle<()>>) -> Self {
        let (stdout, stdout_reader) = lines(child.stdout.take().expect("piped"), |line| line);
        readers.push(stdout_reader);
        Self { child, events, seen: Vec::new(), returned: HashMap::new(), stdout, readers }
    }

    /// The next line on stdout.
    pub fn stdout_line(&mut self) -> String {
        match self.stdout.recv_timeout(PATIENCE) {
            Ok(line) => line,
            Err(error) => panic!("no line on stdout: {error}; log: {:?}", self.log()),
        }
    }

    /// The next line on stderr that begins like this and is no log event.
    pub fn line_on_stderr(&mut self, begins: &str) -> String {
        loop {
            match self.events.recv_timeout(PATIENCE) {
                Ok(Value::String(line)) if line.starts_with(begins) => return line,
                Ok(event) => self.seen.push(event),
                Err(error) => panic!("{begins:?} is not on stderr: {error}; log: {:?}", self.seen),
            }
        }
    }

    /// The next log event with this message, in whatever order others came.
    pub fn logged(&mut self, message: &str) -> Value {
        let before = self.returned.get(message).copied().unwrap_or_default();
        let fits = |event: &&Value| event["message"] == message;
        loop {
            if let Some(event) = self.seen.iter().filter(fits).nth(before) {
                self.returned.insert(message.to_owned(), before + 1);
                return event.clone();
            }
            match self.events.recv_timeout(PATIENCE) {
                Ok(event) => self.seen.push(event),
                Err(error) => panic!("{message:?} was not logged: {error}; log: {:?}", self.seen),
            }
        }
    }

    /// Log events up to now.
    pub fn log(&mut self) -> &[Value] {
        self.seen.extend(self.events.try_iter());
        &self.seen
    }

    /// Ends it like a crash.
    pub fn kill(mut self) {
        self.end_at_once();
    }

    /// The same, of one whose log is still wanted.
    pub fn end_at_once(&mut self) {
        self.child.kill().expect("it can be killed");
        self.child.wait().expect("it ends");
    }

    /// Sends a signal, such as `STOP`.
    pub fn signal(&self, signal: &str) {
        let sent = Command::new("kill").args([&format!("-{signal}"), &self.child.id().to_string()]).status();
        assert!(sent.is_ok_and(|status| status.success()), "SIG{signal} could not be sent");
    }

    /// Whether it has not ended.
    pub fn runs(&mut self) -> bool {
        self.child.try_wait().expect("it can be asked").is_none()
    }

    /// How it ended, within `patience`; None of a signal.
    pub async fn ended(&mut self, patience: Duration) -> Option<i32> {
        let deadline = Instant::now() + patience;
        loop {
            if let Some(status) = self.child.try_wait().expect("it can be asked") {
                return status.code();
            }
            assert!(Instant::now() < deadline, "it did not end within {patience:?}");
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    }

    /// Lets it open so many files from now on, beside those that it has.
    pub fn limit_files(&self, files: usize) {
        let call = [format!("--pid={}", self.child.id()), format!("--nofile={files}:")];
        let limited = Command::new("prlimit").args(call).status();
        assert!(limited.is_ok_and(|status| status.success()), "its limit of files could not be set");
    }

    /// Most files that it may open.
    pub fn files_max(&self) -> usize {
        let limits = std::fs::read_to_string(format!("/proc/{}/limits", self.child.id())).expect("it runs");
        let line =
            limits.lines().find_map(|line| line.strip_prefix("Max open files")).expect("a line of files");
        line.split_whitespace().next().and_then(|soft| soft.parse().ok()).expect("a number of files")
    }

    /// Memory that it holds now, in bytes (RssAnon, since pages of files come and go).
    pub fn resident_bytes(&self) -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.child.id())).expect("it runs");
        let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:")).expect("a line of RssAnon");
        let kib: u64 = line.trim().trim_end_matches(" kB").parse().expect("a number of KiB");
        kib << 10
    }

    /// Asks it to end and checks that it does so in order: exit code 0 and nothing logged above info.
    pub fn stop(mut self) {
        self.signal("TERM");
        let status = self.child.wait().expect("it ends");
        for reader in self.readers.drain(..) {
            reader.join().expect("no panic while reading");
        }
        let log = self.log();
        assert_eq!(status.code(), Some(0), "{log:?}");
        let loud: Vec<_> =
            log.iter().filter(|e| !matches!(e["level"].as_str(), Some("INFO" | "DEBUG"))).collect();
        assert!(loud.is_empty(), "unexpected in the log: {loud:?}");
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // It may have ended already.
        drop(self.child.kill());
        drop(self.child.wait());
    }
}

fn lines<T: Send + 'static>(
    from: impl Read + Send + 'static,
    parse: impl Fn(String) -> T + Send + 'static,
) -> (Receiver<T>, JoinHandle<()>) {
    let (sender, receiver) = channel();
    let reader = std::thread::spawn(move || {
        for line in BufReader::new(from).lines().map_while(Result::ok) {
            if sender.send(parse(line)).is_err() {
                return;
            }
        }
    });
    (receiver, reader)
}
