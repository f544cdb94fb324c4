//! What a process writes under its key: a JSON object whose unknown fields are left alone, so that versions mix.

use serde::{Deserialize, Serialize};
use thalweg_proto::ids::WorkerId;

use crate::{GrpcAddress, Member};

/// One process, as it tells of itself.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
    /// Its name, which the key ends with.
    pub id: String,
    /// Where others reach it: `grpc://host:port` of a worker, `host:port` of a router's HTTP.
    pub address: String,
    /// It takes no new work.
    #[serde(default)]
    pub draining: bool,
    /// Names that a worker serves, for people; `Describe` is what routers go by.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub models: Vec<String>,
    /// Of its build, for people.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub version: String,
}

impl Record {
    /// The value under the key.
    pub(super) fn to_json(&self) -> Vec<u8> {
        // Plain text and flags always have a JSON form.
        serde_json::to_vec(self).unwrap_or_default()
    }

    /// The member that a value under `id`'s key tells of, or what is wrong with it.
    pub(super) fn member(id: &str, value: &[u8]) -> Result<Member, String> {
        let record: Self = serde_json::from_slice(value).map_err(|error| error.to_string())?;
        if record.id != id {
            return Err(format!("its id is {:?}, the key says {id:?}", record.id));
        }
        let address: GrpcAddress = record.address.parse().map_err(|error| format!("{error}"))?;
        Ok(Member { id: Some(WorkerId::new(record.id)), address, draining: record.draining })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_read_or_refused() {
        let ok = |value: &str, address: &str, draining| {
            let member = Record::member("w", value.as_bytes()).unwrap_or_else(|e| panic!("{value}: {e}"));
            assert_eq!(
                (member.address.to_string().as_str(), member.draining),
                (address, draining),
                "{value}"
            );
        };
        ok(r#"{"id":"w","address":"grpc://h:1"}"#, "grpc://h:1", false);
        ok(r#"{"id":"w","address":"grpc://h:1","draining":true,"weight":7}"#, "grpc://h:1", true);
        let record = Record {
            id: "w".to_owned(),
            address: "grpc://[::1]:9".to_owned(),
            draining: true,
            models: vec!["m".to_owned()],
            version: "1".to_owned(),
        };
        ok(std::str::from_utf8(&record.to_json()).unwrap(), "grpc://[::1]:9", true);

        let refused = |value: &str, part: &str| {
            let reason = Record::member("w", value.as_bytes()).unwrap_err();
            assert!(reason.contains(part), "{value}: {reason}");
        };
        refused("", "EOF");
        refused("grpc://h:1", "expected");
        refused(r#"{"id":"w"}"#, "address");
        refused(r#"{"id":"v","address":"grpc://h:1"}"#, "the key says");
        refused(r#"{"id":"w","address":"h:1"}"#, "grpc://");
        refused(r#"{"id":"w","address":"grpc://h:1","draining":"yes"}"#, "boolean");
        refused("\u{0}\u{1}", "expected");
    }
}
