//! Reading a request body within its limits.

use std::time::Duration;

use axum::body::Body;
use axum::extract::Request;
use bytes::{Bytes, BytesMut};
use http::header;
use http_body_util::BodyExt;
use thalweg_proto::code::ErrorCode;
use tokio::time::{Instant, timeout_at};

use crate::config::RouterConfig;
use crate::error::RouterError;

/// A body that comes slower than this, in bytes a second, has the time that a client may stall for, and no more.
const BYTES_PER_SECOND_MIN: usize = 64 << 10;

/// The whole body; a 413 as soon as it is known to be over the limit. A client that sends nothing for as long as one
/// may read nothing is given up, and so is one that drips: altogether it has that time and what its bytes take at the
/// slowest rate.
pub(super) async fn read(request: Request, config: &RouterConfig) -> Result<Bytes, RouterError> {
    let bytes_max = config.limits.body_bytes_max;
    let announced = request.headers().get(header::CONTENT_LENGTH).and_then(|v| v.to_str().ok()?.parse().ok());
    if announced.is_some_and(|length: u64| length > bytes_max as u64) {
        return Err(too_large(bytes_max));
    }
    collect(request.into_body(), bytes_max, config.timeouts.client_stall_timeout).await
}

async fn collect(mut body: Body, bytes_max: usize, stall: Duration) -> Result<Bytes, RouterError> {
    let (mut bytes, start) = (BytesMut::new(), Instant::now());
    let broken = |why: String| RouterError::new(ErrorCode::InvalidRequest, format!("the request body {why}"));
    loop {
        let earned = Duration::from_secs_f64(bytes.len() as f64 / BYTES_PER_SECOND_MIN as f64);
        let (stalled, late) = (Instant::now() + stall, start + stall + earned);
        let Ok(frame) = timeout_at(stalled.min(late), body.frame()).await else {
            let seconds = stall.as_secs_f32();
            return Err(broken(match bytes.len() {
                got if late < stalled => format!("came too slowly: {got} bytes in {seconds} s and more"),
                _ => format!("stalled for {seconds} s"),
            }));
        };
        match frame {
            None => return Ok(bytes.freeze()),
            Some(Err(error)) => return Err(broken(format!("broke off: {error}"))),
            Some(Ok(frame)) => {
                let data = frame.into_data().unwrap_or_default();
                if bytes.len() + data.len() > bytes_max {
                    return Err(too_large(bytes_max));
                }
                bytes.extend_from_slice(&data);
            }
        }
    }
}

pub(super) fn too_large(bytes_max: usize) -> RouterError {
    let message = format!(
        "the request body is over {bytes_max} bytes; send less, or raise the router's --body-bytes-max"
    );
    RouterError::new(ErrorCode::RequestTooLarge, message)
}
