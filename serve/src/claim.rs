//! An address that is ours before anybody can connect to it: one in use is told before a server spends minutes on its start.

use std::io;
use std::net::SocketAddr;

use tokio::net::{TcpListener, TcpSocket};

/// Connections that wait to be accepted; the system's own limit may be lower.
const BACKLOG: u32 = 1024;

/// An address at which connections are refused until [`Claim::listen`]: whoever looks whether somebody listens is not misled.
pub struct Claim {
    socket: TcpSocket,
    address: SocketAddr,
}

impl Claim {
    /// Takes the address; port 0 takes a free one. Of two that claim it at a time, the second to listen is told.
    pub fn take(address: SocketAddr) -> io::Result<Self> {
        let socket = if address.is_ipv4() { TcpSocket::new_v4()? } else { TcpSocket::new_v6()? };
        // Connections that an earlier process closed a moment ago do not count.
        socket.set_reuseaddr(true)?;
        socket.bind(address)?;
        let address = socket.local_addr()?;
        Ok(Self { socket, address })
    }

    /// Which it is, with the port that was free.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// From now on connections wait to be accepted.
    pub fn listen(self) -> io::Result<TcpListener> {
        self.socket.listen(BACKLOG)
    }
}

#[cfg(test)]
mod tests {
    use std::io::ErrorKind;
    use std::net::TcpStream;

    use super::*;

    #[tokio::test]
    async fn nobody_connects_to_a_claim_and_nobody_claims_where_somebody_listens() {
        let claim = Claim::take(SocketAddr::from(([127, 0, 0, 1], 0))).expect("a free port");
        let address = claim.address();
        let early = TcpStream::connect(address).expect_err("nobody listens");
        assert_eq!(early.kind(), ErrorKind::ConnectionRefused);
        let rival = Claim::take(address).expect("nobody listens");
        let listener = claim.listen().expect("it is ours");
        assert_eq!(listener.local_addr().expect("an address"), address);
        TcpStream::connect(address).expect("somebody listens");
        assert_eq!(rival.listen().expect_err("too late").kind(), ErrorKind::AddrInUse);
        let late = Claim::take(address).err().expect("somebody listens");
        assert_eq!(late.kind(), ErrorKind::AddrInUse);
    }
}
