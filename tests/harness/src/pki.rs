//! Certificates for tests: an authority of their own and what it vouches for, as PEM files.

use std::path::{Path, PathBuf};

use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DnType, ExtendedKeyUsagePurpose, IsCa, KeyPair,
    KeyUsagePurpose, date_time_ymd,
};

/// An authority whose files lie in one folder.
pub struct Authority {
    folder: PathBuf,
    name: String,
    issuer: CertifiedIssuer<'static, KeyPair>,
}

/// The files of one certificate.
#[derive(Clone, Debug)]
pub struct Identity {
    /// The certificate.
    pub certificate: PathBuf,
    /// Its private key.
    pub key: PathBuf,
}

impl Authority {
    /// A new one, whose certificate is `<folder>/<name>.pem`.
    pub fn new(folder: &Path, name: &str) -> Self {
        let mut params = CertificateParams::default();
        params.distinguished_name.push(DnType::CommonName, name);
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        let issuer = CertifiedIssuer::self_signed(params, KeyPair::generate().expect("a key"));
        let issuer = issuer.expect("a certificate");
        let authority = Self { folder: folder.to_owned(), name: name.to_owned(), issuer };
        std::fs::write(authority.file(), authority.issuer.pem()).expect("a writable folder");
        authority
    }

    /// Its own certificate.
    pub fn file(&self) -> PathBuf {
        self.folder.join(format!("{}.pem", self.name))
    }

    /// A certificate for 127.0.0.1, ::1 and localhost, good for servers and clients, in `<folder>/<name>.pem` and
    /// `<folder>/<name>.key`; files that are there are replaced.
    pub fn issue(&self, name: &str) -> Identity {
        self.issue_until(name, 2999)
    }

    /// The same, whose time was over long ago.
    pub fn issue_expired(&self, name: &str) -> Identity {
        self.issue_until(name, 2001)
    }

    fn issue_until(&self, name: &str, year: i32) -> Identity {
        let names = ["localhost", "127.0.0.1", "::1"].map(str::to_owned);
        let mut params = CertificateParams::new(names).expect("sound names");
        params.distinguished_name.push(DnType::CommonName, name);
        params.extended_key_usages =
            vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
        params.not_before = date_time_ymd(2000, 1, 1);
        params.not_after = date_time_ymd(year, 1, 1);
        let key = KeyPair::generate().expect("a key");
        let certificate = params.signed_by(&key, &self.issuer).expect("a certificate");
        let identity = Identity {
            certificate: self.folder.join(format!("{name}.pem")),
            key: self.folder.join(format!("{name}.key")),
        };
        replace(&identity.key, &key.serialize_pem());
        replace(&identity.certificate, &certificate.pem());
        identity
    }
}

/// As whoever rotates certificates does: readers see the old file or the new one.
fn replace(path: &Path, text: &str) {
    let new = path.with_extension("new");
    std::fs::write(&new, text).expect("a writable folder");
    std::fs::rename(new, path).expect("a writable folder");
}
