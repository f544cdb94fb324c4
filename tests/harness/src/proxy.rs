//! A loopback TCP proxy that misbehaves on command: it delays, throttles, freezes, swallows, refuses and cuts.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::Duration;

use tokio::time::Instant;

const BUFFER_BYTES: usize = 64 << 10;
const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);

/// Forwards connections to one address. Dropping it cuts them.
pub struct Proxy {
    address: SocketAddr,
    shared: Arc<Shared>,
}

struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

struct State {
    target: SocketAddr,
    conduct: Conduct,
    /// Both sockets of every open connection, by number.
    open: Vec<(u64, [TcpStream; 2])>,
    accepted: u64,
    ended: bool,
}

/// How bytes are treated, in both directions and on connections new and old.
#[derive(Clone, Copy, Debug, Default)]
struct Conduct {
    delay: Duration,
    bytes_per_second: Option<u64>,
    frozen: bool,
    blackhole: bool,
    refusing: bool,
}

impl Proxy {
    /// Forwards from a free port of the loopback address.
    pub fn start(target: SocketAddr) -> Self {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a free port");
        let address = listener.local_addr().expect("an address");
        let state =
            State { target, conduct: Conduct::default(), open: Vec::new(), accepted: 0, ended: false };
        let shared = Arc::new(Shared { state: Mutex::new(state), changed: Condvar::new() });
        let accepting = Arc::clone(&shared);
        std::thread::spawn(move || accept(&listener, &accepting));
        Self { address, shared }
    }

    /// Where clients connect to.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Connections that were accepted since the start.
    pub fn accepted(&self) -> u64 {
        self.shared.state().accepted
    }

    /// Connections that are open.
    pub fn connections(&self) -> usize {
        self.shared.state().open.len()
    }

    /// New connections lead elsewhere.
    pub fn retarget(&self, target: SocketAddr) {
        self.shared.state().target = target;
    }

    /// Back to plain forwarding.
    pub fn forward(&self) {
        self.change(|conduct| *conduct = Conduct::default());
    }

    /// Whatever is read is passed on so much later; what comes meanwhile waits its turn and may take twice as long.
    pub fn delay(&self, delay: Duration) {
        self.change(|conduct| conduct.delay = delay);
    }

    /// Each direction of each connection passes on so many bytes a second at most.
    pub fn throttle(&self, bytes_per_second: u64) {
        assert!(bytes_per_second > 0, "freeze() stops everything");
        self.change(|conduct| conduct.bytes_per_second = Some(bytes_per_second));
    }

    /// Nothing moves, nothing is lost, connections are accepted: a process under SIGSTOP looks so.
    pub fn freeze(&self) {
        self.change(|conduct| conduct.frozen = true);
    }

    /// What was held up moves on.
    pub fn thaw(&self) {
        self.change(|conduct| conduct.frozen = false);
    }

    /// Bytes are read and thrown away until `forward`; connections that lost some should be cut afterwards.
    pub fn blackhole(&self) {
        self.change(|conduct| conduct.blackhole = true);
    }

    /// New connections are closed at once until `forward`; open ones go on.
    pub fn refuse(&self) {
        self.change(|conduct| conduct.refusing = true);
    }

    /// Closes every open connection; new ones are welcome.
    pub fn cut(&self) {
        self.shared.state().cut();
    }

    fn change(&self, change: impl FnOnce(&mut Conduct)) {
        change(&mut self.shared.state().conduct);
        self.shared.changed.notify_all();
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        let mut state = self.shared.state();
        state.ended = true;
        state.cut();
        drop(state);
        self.shared.changed.notify_all();
        // Wakes the accepting thread, which sees that it is over.
        drop(TcpStream::connect(self.address));
    }
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no panic while the state is held")
    }

    /// Waits until `due`, or as long as nothing may move; returns how the bytes are to be treated then, None at the end.
    fn conduct(&self, due: impl Fn(&Conduct) -> Option<Instant>) -> Option<Conduct> {
        let mut state = self.state();
        loop {
            if state.ended {
                return None;
            }
            let conduct = state.conduct;
            let wait = due(&conduct).map(|due| due.saturating_duration_since(Instant::now()));
            state = match wait {
                Some(left) if left.is_zero() && !conduct.frozen => return Some(conduct),
                Some(left) if !conduct.frozen => {
                    self.changed.wait_timeout(state, left).expect("no panic while the state is held").0
                }
                _ => self.changed.wait(state).expect("no panic while the state is held"),
            };
        }
    }
}

impl State {
    fn cut(&mut self) {
        for socket in self.open.drain(..).flat_map(|(_, sockets)| sockets) {
            // The other side may have closed it already.
            drop(socket.shutdown(Shutdown::Both));
        }
    }
}

fn accept(listener: &TcpListener, shared: &Arc<Shared>) {
    for client in listener.incoming().map_while(Result::ok) {
        let mut state = shared.state();
        if state.ended {
            return;
        }
        state.accepted += 1;
        if state.conduct.refusing {
            continue;
        }
        let (number, target) = (state.accepted, state.target);
        drop(state);
        let shared = Arc::clone(shared);
        std::thread::spawn(move || {
            if let Ok(server) = TcpStream::connect_timeout(&target, CONNECT_TIMEOUT) {
                drop(join(&shared, number, &client, &server));
            }
        });
    }
}

/// Forwards both ways until one side closes.
fn join(shared: &Arc<Shared>, number: u64, client: &TcpStream, server: &TcpStream) -> std::io::Result<()> {
    client.set_nodelay(true)?;
    server.set_nodelay(true)?;
    let mut state = shared.state();
    if state.ended {
        return Ok(());
    }
    state.open.push((number, [client.try_clone()?, server.try_clone()?]));
    drop(state);
    let back = {
        let (shared, from, to) = (Arc::clone(shared), server.try_clone()?, client.try_clone()?);
        std::thread::spawn(move || pump(&shared, &from, &to))
    };
    pump(shared, client, server);
    drop(back.join());
    shared.state().open.retain(|(open, _)| *open != number);
    Ok(())
}

/// One direction; its end closes the receiver's side of it.
fn pump(shared: &Shared, mut from: &TcpStream, mut to: &TcpStream) {
    let mut buffer = vec![0; BUFFER_BYTES];
    while let Ok(count @ 1..) = from.read(&mut buffer) {
        let read = Instant::now();
        let mut rest = &buffer[..count];
        // Part by part, as slowly as is wanted at that moment.
        let mut last = read;
        while !rest.is_empty() {
            let due = |conduct: &Conduct| {
                let pace = conduct.bytes_per_second.map(|rate| last + part(rate).1);
                Some((read + conduct.delay).max(pace.unwrap_or(read)))
            };
            let Some(conduct) = shared.conduct(due) else { return };
            let size = conduct.bytes_per_second.map_or(rest.len(), |rate| part(rate).0.min(rest.len()));
            let (now, later) = rest.split_at(size);
            if !conduct.blackhole && to.write_all(now).is_err() {
                break;
            }
            (rest, last) = (later, Instant::now());
        }
    }
    drop(to.shutdown(Shutdown::Write));
    drop(from.shutdown(Shutdown::Read));
}

/// Bytes to pass on at once, and the time that they take, at a rate: fifty parts a second, or byte by byte.
fn part(bytes_per_second: u64) -> (usize, Duration) {
    let size = (bytes_per_second / 50).max(1);
    (size as usize, Duration::from_secs_f64(size as f64 / bytes_per_second as f64))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A server that sends back what it gets, behind a proxy, and a client of it.
    fn echo() -> (Proxy, TcpStream) {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let proxy = Proxy::start(listener.local_addr().unwrap());
        std::thread::spawn(move || {
            for stream in listener.incoming().map_while(Result::ok) {
                std::thread::spawn(move || std::io::copy(&mut &stream, &mut &stream));
            }
        });
        let client = connect(&proxy);
        (proxy, client)
    }

    fn connect(proxy: &Proxy) -> TcpStream {
        let client = TcpStream::connect(proxy.address()).unwrap();
        client.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
        client
    }

    fn round(mut client: &TcpStream, bytes: usize) -> std::io::Result<Duration> {
        let start = Instant::now();
        client.write_all(&vec![7; bytes])?;
        client.read_exact(&mut vec![0; bytes])?;
        Ok(start.elapsed())
    }

    #[test]
    fn bytes_are_passed_on_and_slowed_down() {
        let (proxy, client) = echo();
        round(&client, 100_000).unwrap();
        proxy.delay(Duration::from_millis(100));
        let took = round(&client, 10).unwrap();
        assert!(took >= Duration::from_millis(200), "{took:?}");
        proxy.forward();
        proxy.throttle(1000);
        let took = round(&client, 500).unwrap();
        assert!(took >= Duration::from_millis(450), "{took:?}");
        proxy.forward();
        round(&client, 100_000).unwrap();
    }

    #[test]
    fn connections_freeze_break_and_return() {
        let (proxy, client) = echo();
        round(&client, 1).unwrap();
        proxy.freeze();
        client.set_read_timeout(Some(Duration::from_millis(100))).unwrap();
        assert!(round(&client, 1).is_err(), "nothing moves");
        client.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
        proxy.thaw();
        (&client).read_exact(&mut [0]).unwrap();
        proxy.cut();
        assert!(round(&client, 1).is_err(), "it is closed");
        let client = connect(&proxy);
        round(&client, 1).unwrap();
        proxy.refuse();
        assert!(round(&connect(&proxy), 1).is_err());
        round(&client, 1).unwrap();
        assert_eq!(proxy.accepted(), 3);
    }
}
