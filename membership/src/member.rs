//! One member and the address at which it answers.

use std::fmt;
use std::str::FromStr;

use thalweg_proto::ids::WorkerId;

/// A worker that is said to exist.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Member {
    /// Its name where the source knows it; a static list does not, the worker's own `Describe` tells.
    pub id: Option<WorkerId>,
    /// Where its gRPC service listens.
    pub address: GrpcAddress,
    /// It takes no new work; what it runs goes on.
    pub draining: bool,
}

/// Host and port of a gRPC service, written `grpc://host:port`.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct GrpcAddress {
    host: String,
    port: u16,
}

/// The text is no `grpc://host:port`. The text itself is not repeated, since it may hold a password.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}; expected grpc://host:port, such as grpc://10.0.0.7:50061")]
pub struct ParseAddressError(&'static str);

impl GrpcAddress {
    /// Host name or IP address, an IPv6 one without brackets.
    pub fn host(&self) -> &str {
        &self.host
    }

    /// TCP port, never 0.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// The URI that an HTTP/2 client connects to, without TLS.
    pub fn http_uri(&self) -> String {
        format!("http://{}", self.authority())
    }

    fn authority(&self) -> String {
        if self.host.contains(':') {
            format!("[{}]:{}", self.host, self.port)
        } else {
            format!("{}:{}", self.host, self.port)
        }
    }
}

impl fmt::Display for GrpcAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "grpc://{}", self.authority())
    }
}

impl From<std::net::SocketAddr> for GrpcAddress {
    fn from(address: std::net::SocketAddr) -> Self {
        Self { host: address.ip().to_string(), port: address.port() }
    }
}

impl FromStr for GrpcAddress {
    type Err = ParseAddressError;

    fn from_str(text: &str) -> Result<Self, ParseAddressError> {
        let fail = ParseAddressError;
        let authority = text.strip_prefix("grpc://").ok_or_else(|| fail("it does not begin with grpc://"))?;
        let (host, port) = authority.rsplit_once(':').ok_or_else(|| fail("the port is missing"))?;
        let host = match host.strip_prefix('[') {
            Some(inner) => {
                inner.strip_suffix(']').ok_or_else(|| fail("the bracket of the host is not closed"))?
            }
            None if host.contains(':') => {
                return Err(fail("an IPv6 host needs brackets, or the port is missing"));
            }
            None => host,
        };
        if host.is_empty() {
            return Err(fail("the host is missing"));
        }
        if host.contains(|c: char| c.is_whitespace() || matches!(c, '/' | '@' | '?' | '#' | '[' | ']')) {
            return Err(fail("the host holds a character that no host has"));
        }
        match port.parse() {
            Ok(0) | Err(_) => Err(fail("the port is not a number from 1 to 65535")),
            Ok(port) => Ok(Self { host: host.to_owned(), port }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_parse_or_say_what_is_wrong() {
        let ok = |text: &str, host: &str, port| {
            let address: GrpcAddress = text.parse().unwrap();
            assert_eq!((address.host(), address.port()), (host, port), "{text}");
            assert_eq!(address.to_string(), text);
        };
        ok("grpc://localhost:50061", "localhost", 50061);
        ok("grpc://10.1.2.3:1", "10.1.2.3", 1);
        ok("grpc://[::1]:65535", "::1", 65535);

        let refused = |text: &str, reason: &str| {
            let message = text.parse::<GrpcAddress>().unwrap_err().to_string();
            assert!(message.contains(reason) && !message.contains(text), "{text}: {message}");
        };
        refused("localhost:50061", "does not begin");
        refused("http://localhost:50061", "does not begin");
        refused("grpc://localhost", "port is missing");
        refused("grpc://localhost:", "port is not a number");
        refused("grpc://localhost:0", "port is not a number");
        refused("grpc://localhost:70000", "port is not a number");
        refused("grpc://:50061", "host is missing");
        refused("grpc://::1:50061", "needs brackets");
        refused("grpc://[::1:50061", "not closed");
        refused("grpc://a/b:1", "no host has");
        refused("grpc://user:hunter2@a:1", "needs brackets");
        refused("grpc://hunter2@a:1", "no host has");
    }
}
