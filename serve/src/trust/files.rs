//! Certificate files, and the TLS configuration made from them, which follows them as they change.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use rustls::RootCertStore;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio_rustls::rustls;

use super::TrustError;

/// PEM files for mutual TLS.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TlsFiles {
    /// Our certificate, with those between it and the authority.
    pub certificate: PathBuf,
    /// Its private key.
    pub key: PathBuf,
    /// The authorities that must have signed the peer's certificate.
    pub authority: PathBuf,
}

/// What the files hold.
pub(super) struct Material {
    pub(super) chain: Vec<CertificateDer<'static>>,
    pub(super) key: PrivateKeyDer<'static>,
    pub(super) roots: RootCertStore,
}

impl TlsFiles {
    pub(super) fn read(&self) -> Result<Material, TrustError> {
        let chain = certificates(&self.certificate)?;
        let key = PrivateKeyDer::from_pem_slice(&read(&self.key)?).map_err(|error| TrustError::Pem {
            path: self.key.clone(),
            what: "private key",
            reason: error.to_string(),
        })?;
        let mut roots = RootCertStore::empty();
        for certificate in certificates(&self.authority)? {
            roots.add(certificate).map_err(|error| self.unusable(error))?;
        }
        Ok(Material { chain, key, roots })
    }

    pub(super) fn unusable(&self, error: impl ToString) -> TrustError {
        TrustError::Tls { certificate: self.certificate.clone(), reason: error.to_string() }
    }

    /// What changes whenever a file is replaced or written, also behind a symbolic link.
    fn stamp(&self) -> Stamp {
        [&self.certificate, &self.key, &self.authority].map(|path| {
            let metadata = std::fs::metadata(path).ok()?;
            Some((metadata.ino(), metadata.mtime(), metadata.mtime_nsec(), metadata.len()))
        })
    }
}

type Stamp = [Option<(u64, i64, i64, u64)>; 3];

/// A TLS configuration that is made anew when its files have changed.
pub(super) struct Reloading<C> {
    files: TlsFiles,
    build: fn(&TlsFiles) -> Result<C, TrustError>,
    current: Mutex<Current<C>>,
}

struct Current<C> {
    stamp: Stamp,
    config: Arc<C>,
}

impl<C> Reloading<C> {
    /// Reads the files once; at the start whatever is wrong with them is an error.
    pub(super) fn new(
        files: TlsFiles,
        build: fn(&TlsFiles) -> Result<C, TrustError>,
    ) -> Result<Self, TrustError> {
        let stamp = files.stamp();
        let config = Arc::new(build(&files)?);
        Ok(Self { files, build, current: Mutex::new(Current { stamp, config }) })
    }

    /// The configuration for a new connection. Files that cannot be used, such as a certificate whose key is still to be
    /// written, leave the former one in place until they change again.
    pub(super) fn get(&self) -> Arc<C> {
        let mut current = self.current.lock().unwrap_or_else(PoisonError::into_inner);
        // Before the files are read, so that what is written meanwhile is read the next time.
        let stamp = self.files.stamp();
        if stamp != current.stamp {
            current.stamp = stamp;
            match (self.build)(&self.files) {
                Ok(config) => {
                    current.config = Arc::new(config);
                    tracing::info!(certificate = %self.files.certificate.display(), "certificates were read again");
                }
                Err(error) => {
                    tracing::warn!(%error, "changed certificates cannot be used, going on with the former ones");
                }
            }
        }
        Arc::clone(&current.config)
    }
}

fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, TrustError> {
    let unreadable = |reason: String| TrustError::Pem { path: path.to_owned(), what: "certificate", reason };
    let certificates: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&read(path)?).collect();
    match certificates {
        Ok(certificates) if certificates.is_empty() => Err(unreadable("there is none".to_owned())),
        Ok(certificates) => Ok(certificates),
        Err(error) => Err(unreadable(error.to_string())),
    }
}

pub(super) fn read(path: &Path) -> Result<Vec<u8>, TrustError> {
    std::fs::read(path).map_err(|source| TrustError::Read { path: path.to_owned(), source })
}
