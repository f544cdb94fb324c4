//! The file of API keys: YAML or JSON, with hashes in place of the keys themselves.

use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::Deserialize;

use super::grant::{CacheScope, Grant, is_reserved};
use super::keys::Hash;

/// A file of more bytes is none that people or tools write.
const BYTES_MAX: u64 = 16 << 20;
const NAME_CHARS_MAX: usize = 128;

/// The keys cannot be used.
#[derive(Debug, thiserror::Error)]
pub(crate) enum KeyFileError {
    /// It is not there, or not ours to read.
    #[error("cannot read {path}: {source}")]
    Read {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// It says something that keys are not.
    #[error("{path}: {reason}")]
    Malformed {
        /// The file.
        path: PathBuf,
        /// What is wrong and what would be right.
        reason: String,
    },
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct KeyFile {
    keys: Vec<Entry>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct Entry {
    name: String,
    sha256: String,
    tenant: Option<String>,
    requests_max: Option<usize>,
    tokens_max: Option<u64>,
    output_tokens_max: Option<u32>,
    duration_max: Option<f64>,
    #[serde(default)]
    cache_scope: CacheScope,
    priority_min: Option<i32>,
}

/// All keys of a file by their hashes.
pub(super) fn read(path: &Path) -> Result<Vec<(Hash, Grant)>, KeyFileError> {
    let unreadable = |source| KeyFileError::Read { path: path.to_owned(), source };
    let malformed = |reason: String| KeyFileError::Malformed { path: path.to_owned(), reason };
    if std::fs::metadata(path).map_err(unreadable)?.len() > BYTES_MAX {
        return Err(malformed(format!("it has more than {BYTES_MAX} bytes")));
    }
    let text = std::fs::read_to_string(path).map_err(unreadable)?;
    parse(&text).map_err(malformed)
}

fn parse(text: &str) -> Result<Vec<(Hash, Grant)>, String> {
    // Without the lines around the fault: somebody may have put a key there instead of its hash.
    let file: KeyFile = serde_saphyr::from_str(text).map_err(|error| error.without_snippet().to_string())?;
    let mut keys: Vec<(Hash, Grant)> = Vec::with_capacity(file.keys.len());
    for entry in file.keys {
        let name = entry.name.clone();
        let (hash, grant) = entry.grant().map_err(|reason| format!("key {name:?}: {reason}"))?;
        if keys.iter().any(|(known, grant)| grant.key == name || *known == hash) {
            return Err(format!("key {name:?}: another key has the same name or sha256"));
        }
        keys.push((hash, grant));
    }
    Ok(keys)
}

impl Entry {
    fn grant(self) -> Result<(Hash, Grant), String> {
        let hash = Hash::from_hex(&self.sha256)
            .ok_or("sha256 must be 64 hexadecimal digits; printf %s \"$KEY\" | sha256sum makes them")?;
        let tenant = self.tenant.unwrap_or_else(|| self.name.clone());
        for (field, text) in [("name", &self.name), ("tenant", &tenant)] {
            let is_sound =
                (1..=NAME_CHARS_MAX).contains(&text.len()) && text.bytes().all(|b| b.is_ascii_graphic());
            if !is_sound {
                return Err(format!("{field} must be 1 to {NAME_CHARS_MAX} visible ASCII characters"));
            }
        }
        if is_reserved(&tenant) {
            return Err(format!("tenant {tenant:?} is the scope of all; choose another name"));
        }
        let at_least_1 = [
            ("requests-max", self.requests_max == Some(0)),
            ("tokens-max", self.tokens_max == Some(0)),
            ("output-tokens-max", self.output_tokens_max == Some(0)),
        ];
        if let Some((field, _)) = at_least_1.iter().find(|(_, is_zero)| *is_zero) {
            return Err(format!("{field} must be at least 1; take the key out to close it"));
        }
        let duration_max = self.duration_max.map(Duration::try_from_secs_f64).transpose();
        let duration_max = duration_max.ok().filter(|d| d.is_none_or(|d| !d.is_zero()));
        let grant = Grant {
            requests_max: self.requests_max,
            tokens_max: self.tokens_max,
            output_tokens_max: self.output_tokens_max,
            duration_max: duration_max.ok_or("duration-max must be a number of seconds above 0")?,
            cache_scope: self.cache_scope,
            priority_min: self.priority_min,
            ..Grant::of(self.name, tenant)
        };
        Ok((hash, grant))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HASH: &str = "2cf24dba5fb0a30e26e83b2ac5b9e29e1b161e5c1fa7425e73043362938b9824";

    #[test]
    fn yaml_and_json_are_read() {
        let yaml = format!(
            "keys:\n- name: ci\n  sha256: {HASH}\n  tenant: team\n  requests-max: 2\n  tokens-max: 100\n  \
             output-tokens-max: 7\n  duration-max: 1.5\n  cache-scope: shared\n  priority-min: 5\n"
        );
        let (hash, grant) = parse(&yaml).expect("sound").remove(0);
        assert!(hash == Hash::of("hello"));
        let expected = Grant {
            requests_max: Some(2),
            tokens_max: Some(100),
            output_tokens_max: Some(7),
            duration_max: Some(Duration::from_millis(1500)),
            cache_scope: CacheScope::Shared,
            priority_min: Some(5),
            ..Grant::of("ci".to_owned(), "team".to_owned())
        };
        assert_eq!(grant, expected);
        let json = format!("{{\"keys\": [{{\"name\": \"ci\", \"sha256\": \"{HASH}\"}}]}}");
        assert_eq!(parse(&json).expect("sound")[0].1, Grant::of("ci".to_owned(), "ci".to_owned()));
        assert!(parse("keys: []").expect("sound").is_empty());
    }

    #[test]
    fn what_is_wrong_is_named_and_never_repeated() {
        let check = |fields: &str, says: &str| {
            let error = parse(&format!("keys:\n- {{name: ci, {fields}}}\n")).expect_err("must be refused");
            assert!(error.contains(says) && !error.contains("hush"), "{fields}: {error}");
        };
        check("sha256: hush", "sha256sum");
        check("key: hush", "key");
        let with = |fields: &str| format!("sha256: {HASH}, {fields}");
        check(&with("tenant: shared"), "scope of all");
        check(&with("tenant: ''"), "tenant must be");
        check(&with("requests-max: 0"), "requests-max");
        check(&with("duration-max: 0"), "duration-max");
        check(&with("duration-max: -1"), "duration-max");
        check(&with("cache-scope: all"), "tenant, shared");
        check(&with("limit: 5"), "limit");
        let twice = format!("keys:\n- {{name: a, sha256: {HASH}}}\n- {{name: b, sha256: {HASH}}}\n");
        assert!(parse(&twice).is_err_and(|error| error.contains("same name or sha256")));
        assert!(parse("hush").is_err_and(|error| !error.contains("hush")));
    }
}
