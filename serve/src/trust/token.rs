//! The token that the processes of a cluster share, as bearer metadata of every call.

use std::path::Path;
use std::sync::Arc;

use tonic::metadata::{Ascii, MetadataValue};
use tonic::service::Interceptor;
use tonic::{Request, Status};

use super::TrustError;
use super::files::read;

const HEADER: &str = "authorization";
const SCHEME: &str = "Bearer ";

/// Shorter ones can be guessed.
const BYTES_MIN: usize = 16;

/// Shows the token with each call; without one, nothing.
#[derive(Clone, Default)]
pub struct Bearer {
    value: Option<MetadataValue<Ascii>>,
}

/// Refuses calls that do not show a token of the cluster; without one, none.
#[derive(Clone, Default)]
pub struct TokenGuard {
    /// Hashes, which blake3 compares in constant time whatever the lengths.
    accepted: Option<Arc<[blake3::Hash]>>,
}

impl Bearer {
    pub(super) fn from_file(path: &Path) -> Result<Self, TrustError> {
        let tokens = tokens(path)?;
        let value = format!("{SCHEME}{}", tokens[0]).parse::<MetadataValue<Ascii>>();
        let mut value = value.map_err(|_| unusable(path))?;
        value.set_sensitive(true);
        Ok(Self { value: Some(value) })
    }
}

impl TokenGuard {
    pub(super) fn from_file(path: &Path) -> Result<Self, TrustError> {
        let hashes = tokens(path)?.iter().map(|token| blake3::hash(token.as_bytes())).collect();
        Ok(Self { accepted: Some(hashes) })
    }

    /// Whether this is one of the tokens. Every one is compared, so that time tells nothing.
    fn accepts(&self, shown: &[u8]) -> bool {
        let shown = blake3::hash(shown);
        let accepted = self.accepted.as_deref().unwrap_or_default();
        accepted.iter().fold(false, |found, token| found | (*token == shown))
    }
}

impl Interceptor for Bearer {
    fn call(&mut self, mut request: Request<()>) -> Result<Request<()>, Status> {
        if let Some(value) = &self.value {
            request.metadata_mut().insert(HEADER, value.clone());
        }
        Ok(request)
    }
}

impl Interceptor for TokenGuard {
    fn call(&mut self, request: Request<()>) -> Result<Request<()>, Status> {
        if self.accepted.is_none() {
            return Ok(request);
        }
        let shown = request.metadata().get(HEADER).map(MetadataValue::as_bytes);
        match shown.and_then(|value| value.strip_prefix(SCHEME.as_bytes())) {
            Some(token) if self.accepts(token) => Ok(request),
            Some(_) => Err(Status::unauthenticated(
                "the cluster token is not one of this worker's; give both sides the same --cluster-token-file",
            )),
            None => Err(Status::unauthenticated(
                "this worker wants a cluster token and was shown none; pass --cluster-token-file to the caller too",
            )),
        }
    }
}

fn tokens(path: &Path) -> Result<Vec<String>, TrustError> {
    let text = String::from_utf8(read(path)?).map_err(|_| unusable(path))?;
    let lines = text.lines().map(str::trim).filter(|line| !line.is_empty());
    let tokens: Vec<String> = lines.map(str::to_owned).collect();
    let is_sound = |token: &String| token.len() >= BYTES_MIN && token.bytes().all(|b| b.is_ascii_graphic());
    if tokens.is_empty() || !tokens.iter().all(is_sound) {
        return Err(unusable(path));
    }
    Ok(tokens)
}

fn unusable(path: &Path) -> TrustError {
    TrustError::Token { path: path.to_owned(), bytes_min: BYTES_MIN }
}

impl std::fmt::Debug for Bearer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Bearer").field("shows_token", &self.value.is_some()).finish()
    }
}

impl std::fmt::Debug for TokenGuard {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("TokenGuard").field("wants_token", &self.accepted.is_some()).finish()
    }
}
