//! Tokenizers and templates by fingerprint, each fetched from a worker once and kept by the workers that have it.

use std::sync::{Arc, Weak};
use std::time::Duration;

use bytes::Bytes;
use hashbrown::HashMap;
use parking_lot::Mutex;
use thalweg_model::chat_template::ChatTemplate;
use thalweg_model::tokenizer::{Tokenizer, TokenizerBundle};
use thalweg_proto::v1;
use thalweg_proto::v1::worker_client::WorkerClient;
use thalweg_serve::trust::TrustedChannel;

/// Largest bundle taken from a worker, in bytes; real ones have up to 40 MB.
const BUNDLE_BYTES_MAX: usize = 256 << 20;
/// Longest transfer.
const FETCH_TIMEOUT: Duration = Duration::from_secs(15);

/// Text side of one fingerprint.
pub(super) struct TextSide {
    pub(super) tokenizer: Arc<Tokenizer>,
    pub(super) template: Option<Arc<ChatTemplate>>,
}

/// The tokenizer could not be had.
#[derive(Debug, thiserror::Error)]
pub(super) enum FetchError {
    /// The worker did not send it.
    #[error("tokenizer was not sent: {0}")]
    Transfer(#[from] tonic::Status),
    /// It did not end in time.
    #[error("tokenizer was not sent within {} s", FETCH_TIMEOUT.as_secs())]
    Timeout,
    /// It does not end at all.
    #[error("tokenizer is larger than {BUNDLE_BYTES_MAX} bytes")]
    TooLarge,
    /// It is no bundle.
    #[error("tokenizer cannot be read: {0}")]
    Malformed(#[from] serde_json::Error),
    /// Its parts contradict each other.
    #[error("tokenizer cannot be used: {0}")]
    Model(#[from] thalweg_model::error::ModelError),
    /// The thread that read it ended early.
    #[error("tokenizer could not be read: {0}")]
    Interrupted(#[from] tokio::task::JoinError),
}

#[derive(Default)]
pub(super) struct Tokenizers {
    known: Mutex<HashMap<Bytes, Weak<TextSide>>>,
    /// One transfer at a time, so that workers of one fingerprint that appear together cause one.
    fetching: tokio::sync::Mutex<()>,
}

impl Tokenizers {
    /// The text side of a worker's fingerprint.
    pub(super) async fn ensure(
        &self,
        about: &v1::DescribeResponse,
        client: &mut WorkerClient<TrustedChannel>,
    ) -> Result<Arc<TextSide>, FetchError> {
        let _one_at_a_time = self.fetching.lock().await;
        if let Some(text) = self.get(&about.fingerprint) {
            return Ok(text);
        }
        let model = about.models.first().cloned().unwrap_or_default();
        let bytes = tokio::time::timeout(FETCH_TIMEOUT, transfer(model, client))
            .await
            .map_err(|_| FetchError::Timeout)??;
        // Building a vocabulary takes a good part of a second: not on the reactor.
        let text = tokio::task::spawn_blocking(move || build(&bytes)).await??;
        Ok(self.put(about.fingerprint.clone(), text))
    }

    fn get(&self, fingerprint: &[u8]) -> Option<Arc<TextSide>> {
        self.known.lock().get(fingerprint).and_then(Weak::upgrade)
    }

    fn put(&self, fingerprint: Bytes, text: TextSide) -> Arc<TextSide> {
        let text = Arc::new(text);
        let mut known = self.known.lock();
        known.retain(|_, text| text.strong_count() > 0);
        known.insert(fingerprint, Arc::downgrade(&text));
        text
    }
}

async fn transfer(model: String, client: &mut WorkerClient<TrustedChannel>) -> Result<Vec<u8>, FetchError> {
    let mut chunks = client.fetch_tokenizer(v1::FetchTokenizerRequest { model }).await?.into_inner();
    let mut bytes = Vec::new();
    while let Some(message) = chunks.message().await? {
        if bytes.len() + message.chunk.len() > BUNDLE_BYTES_MAX {
            return Err(FetchError::TooLarge);
        }
        bytes.extend_from_slice(&message.chunk);
    }
    Ok(bytes)
}

fn build(bytes: &[u8]) -> Result<TextSide, FetchError> {
    let bundle: TokenizerBundle = serde_json::from_slice(bytes)?;
    let template = bundle.chat_template.as_deref().map(|source| ChatTemplate::new(source, &bundle));
    Ok(TextSide {
        tokenizer: Arc::new(Tokenizer::new(&bundle)?),
        template: template.transpose()?.map(Arc::new),
    })
}

#[cfg(test)]
impl TextSide {
    /// Of one token per byte.
    pub(super) fn of_bytes() -> Self {
        let bundle = crate::test_support::tokenizer::bundle(false, 512);
        Self { tokenizer: Arc::new(Tokenizer::new(&bundle).expect("the tokenizer loads")), template: None }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_side_is_kept_while_a_worker_has_it() {
        let tokenizers = Tokenizers::default();
        let put = |name: &'static str| tokenizers.put(Bytes::from(name), TextSide::of_bytes());
        let (a, b) = (put("a"), put("b"));
        assert!(tokenizers.get(b"a").is_some_and(|found| Arc::ptr_eq(&found, &a)));
        drop(a);
        let _c = put("c");
        assert!(tokenizers.get(b"a").is_none() && tokenizers.get(b"b").is_some());
        assert_eq!(tokenizers.known.lock().len(), 2);
        drop(b);
    }
}
