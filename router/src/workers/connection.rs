//! Getting to know a worker: connect, describe, tokenizer.

use std::time::Duration;

use thalweg_membership::GrpcAddress;
use thalweg_proto::v1::worker_client::WorkerClient;
use thalweg_proto::{MESSAGE_BYTES_MAX, PROTOCOL, block_hash, v1};
use thalweg_serve::trust::{ClientTrust, TrustedChannel};
use tonic::transport::Endpoint;

use super::tokenizers::FetchError;

/// Bytes in flight of one stream, and of the whole connection: tokens are small, a tokenizer is not.
const STREAM_WINDOW: u32 = 1 << 20;
const CONNECTION_WINDOW: u32 = 16 << 20;
/// A ping each, also without streams; a connection that does not answer in time is broken off.
const KEEP_ALIVE_EVERY: Duration = Duration::from_secs(5);
const KEEP_ALIVE_TIMEOUT: Duration = Duration::from_secs(3);

/// A worker cannot be used.
#[derive(Debug, thiserror::Error)]
pub(super) enum ConnectError {
    /// The address is no URI; membership's own parser should have refused it.
    #[error("address cannot be used: {0}")]
    Address(#[from] tonic::transport::Error),
    /// It does not answer.
    #[error("worker does not answer: {}", story(.0))]
    Describe(tonic::Status),
    /// It does not know us.
    #[error("worker refuses this router: {0}")]
    Refused(String),
    /// Or not in time.
    #[error("worker does not answer within {0:?}")]
    Timeout(Duration),
    /// It is older or newer than we can talk to.
    #[error("worker speaks protocol {min} to {max}, this router {} to {}; upgrade the older one", PROTOCOL.start(), PROTOCOL.end())]
    Protocol {
        /// Oldest that the worker speaks.
        min: u32,
        /// Newest.
        max: u32,
    },
    /// What it says of itself cannot be.
    #[error("worker describes itself wrongly: {0}")]
    Description(&'static str),
    /// Its tokenizer is needed and cannot be had.
    #[error(transparent)]
    Tokenizer(#[from] FetchError),
}

/// A channel that connects when first used and again after every break.
pub(super) fn channel(
    address: &GrpcAddress,
    connect_timeout: Duration,
    trust: &ClientTrust,
) -> Result<TrustedChannel, ConnectError> {
    let endpoint = Endpoint::from_shared(address.http_uri())?
        .connect_timeout(connect_timeout)
        .initial_stream_window_size(STREAM_WINDOW)
        .initial_connection_window_size(CONNECTION_WINDOW)
        .http2_keep_alive_interval(KEEP_ALIVE_EVERY)
        .keep_alive_timeout(KEEP_ALIVE_TIMEOUT)
        .keep_alive_while_idle(true)
        .tcp_nodelay(true);
    Ok(trust.channel(&endpoint))
}

/// The service with the limits that both sides agree on.
pub(super) fn client(channel: TrustedChannel) -> WorkerClient<TrustedChannel> {
    WorkerClient::new(channel)
        .max_decoding_message_size(MESSAGE_BYTES_MAX)
        .max_encoding_message_size(MESSAGE_BYTES_MAX)
}

/// Asks the worker who it is, and checks that we can work with it.
pub(super) async fn describe(
    client: &mut WorkerClient<TrustedChannel>,
    timeout: Duration,
) -> Result<v1::DescribeResponse, ConnectError> {
    let answer = tokio::time::timeout(timeout, client.describe(v1::DescribeRequest {})).await;
    let about = answer.map_err(|_| ConnectError::Timeout(timeout))?.map_err(refusal)?.into_inner();
    check(&about)?;
    Ok(about)
}

fn refusal(status: tonic::Status) -> ConnectError {
    match status.code() {
        tonic::Code::Unauthenticated => ConnectError::Refused(status.message().to_owned()),
        _ => ConnectError::Describe(status),
    }
}

/// The status with what lies beneath it: a certificate that is refused stands at the bottom.
fn story(status: &tonic::Status) -> String {
    let mut text = status.message().to_owned();
    let mut source = std::error::Error::source(status);
    while let Some(error) = source {
        let cause = error.to_string();
        if !text.contains(&cause) {
            text = format!("{text}: {cause}");
        }
        source = error.source();
    }
    text
}

fn check(about: &v1::DescribeResponse) -> Result<(), ConnectError> {
    let (min, max) = (about.protocol_min, about.protocol_max);
    if max < *PROTOCOL.start() || min > *PROTOCOL.end() {
        return Err(ConnectError::Protocol { min, max });
    }
    let fault = if about.worker_id.is_empty() {
        "it has no name"
    } else if about.models.is_empty() {
        "it serves no model"
    } else if about.fingerprint.is_empty() {
        "its model has no fingerprint"
    } else if about.block_size == 0 {
        "its blocks hold no tokens"
    } else if about.max_num_seqs == 0 {
        "it runs no sequences"
    } else if about.hash_version != block_hash::HASH_VERSION {
        "it hashes blocks in another way; upgrade the older one of router and worker"
    } else {
        return Ok(());
    };
    Err(ConnectError::Description(fault))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn descriptions_are_checked() {
        let sound = v1::DescribeResponse {
            worker_id: "w".into(),
            models: vec!["m".into()],
            fingerprint: vec![1].into(),
            block_size: 16,
            max_num_seqs: 8,
            hash_version: block_hash::HASH_VERSION,
            protocol_min: 1,
            protocol_max: 1,
            ..Default::default()
        };
        assert!(check(&sound).is_ok());
        let refused = |change: fn(&mut v1::DescribeResponse), part: &str| {
            let mut about = sound.clone();
            change(&mut about);
            let message = check(&about).unwrap_err().to_string();
            assert!(message.contains(part), "{message}");
        };
        refused(|a| (a.protocol_min, a.protocol_max) = (2, 3), "protocol 2 to 3");
        refused(|a| (a.protocol_min, a.protocol_max) = (0, 0), "protocol 0 to 0");
        refused(|a| a.worker_id.clear(), "no name");
        refused(|a| a.models.clear(), "no model");
        refused(|a| a.fingerprint.clear(), "fingerprint");
        refused(|a| a.block_size = 0, "blocks");
        refused(|a| a.max_num_seqs = 0, "sequences");
        refused(|a| a.hash_version += 1, "hashes blocks");
    }
}
