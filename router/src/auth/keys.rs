//! The keys of this moment.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use arc_swap::ArcSwap;
use ring::digest::{SHA256, digest};

use super::file::{self, KeyFileError};
use super::grant::Grant;

/// SHA-256 of a key. Compared as a hash of blake3's type, which takes the same time whatever differs.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct Hash(blake3::Hash);

impl fmt::Debug for Hash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Hash(..)")
    }
}

impl Hash {
    pub(super) fn of(key: &str) -> Self {
        let mut bytes = [0; 32];
        bytes.copy_from_slice(digest(&SHA256, key.as_bytes()).as_ref());
        Self(blake3::Hash::from_bytes(bytes))
    }

    pub(super) fn from_hex(text: &str) -> Option<Self> {
        blake3::Hash::from_hex(text).ok().map(Self)
    }
}

/// What a router knows of keys. Reads never block.
pub(crate) struct Keys {
    path: Option<PathBuf>,
    /// From the environment; they stay as they are.
    given: Vec<(Hash, Arc<Grant>)>,
    all: ArcSwap<Vec<(Hash, Arc<Grant>)>>,
    /// What everybody may do where there are no keys.
    open: Option<Arc<Grant>>,
}

impl Keys {
    /// Keys of a file, if there is one, and those given in plain text; without either, everybody is let in.
    pub(crate) fn load(path: Option<PathBuf>, given: &[&str]) -> Result<Self, KeyFileError> {
        let is_open = path.is_none() && given.is_empty();
        let given: Vec<_> = given
            .iter()
            .enumerate()
            .map(|(at, key)| {
                let name = format!("api-key-{at}");
                (Hash::of(key), Arc::new(Grant { key: name, ..Grant::open() }))
            })
            .collect();
        let keys = Self {
            path,
            all: ArcSwap::from_pointee(given.clone()),
            given,
            open: is_open.then(|| Arc::new(Grant::open())),
        };
        keys.reload()?;
        Ok(keys)
    }

    pub(super) fn path(&self) -> Option<&Path> {
        self.path.as_deref()
    }

    /// Takes up what the file says now; keeps what was known if it cannot be used. Returns the number of keys.
    pub(super) fn reload(&self) -> Result<usize, KeyFileError> {
        let Some(path) = &self.path else { return Ok(self.given.len()) };
        let of_file = file::read(path)?.into_iter().map(|(hash, grant)| (hash, Arc::new(grant)));
        let all: Vec<_> = of_file.chain(self.given.iter().cloned()).collect();
        let count = all.len();
        self.all.store(Arc::new(all));
        Ok(count)
    }

    /// What everybody may do, if no key is needed.
    pub(crate) fn open(&self) -> Option<&Arc<Grant>> {
        self.open.as_ref()
    }

    /// Nobody is let in without a key.
    pub(crate) fn are_needed(&self) -> bool {
        self.open.is_none()
    }

    /// What this key allows. Every one is compared, so that time tells nothing.
    pub(super) fn find(&self, shown: &str) -> Option<Arc<Grant>> {
        let shown = Hash::of(shown);
        let keys = self.all.load();
        let mut found = None;
        for (hash, grant) in keys.iter() {
            if *hash == shown {
                found = Some(grant);
            }
        }
        found.cloned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_found_by_their_hashes() {
        let keys = Keys::load(None, &["one", "two"]).expect("keys");
        let found = |shown: &str| keys.find(shown).map(|grant| grant.key.clone());
        assert_eq!(found("two").as_deref(), Some("api-key-1"));
        assert_eq!((found(""), found("three"), found("one ")), (None, None, None));
        assert!(keys.open().is_none());
        assert!(Keys::load(None, &[]).is_ok_and(|keys| keys.open().is_some()));
    }

    #[test]
    fn a_broken_file_leaves_the_keys_as_they_are() {
        let file = tempfile::NamedTempFile::new().expect("a file");
        let write = |text: &str| std::fs::write(file.path(), text).expect("written");
        let hash = "2cf24dba5fb0a30e26e83b2ac5b9e29e1b161e5c1fa7425e73043362938b9824";
        write(&format!("keys: [{{name: ci, sha256: {hash}}}]"));
        let keys = Keys::load(Some(file.path().to_owned()), &["env"]).expect("keys");
        assert!(keys.find("hello").is_some() && keys.find("env").is_some());
        write("keys: [");
        assert!(keys.reload().is_err());
        assert!(keys.find("hello").is_some());
        write("keys: []");
        assert_eq!(keys.reload().expect("sound"), 1);
        assert!(keys.find("hello").is_none() && keys.find("env").is_some());
        assert!(Keys::load(Some("/nowhere/keys".into()), &[]).is_err());
    }
}
