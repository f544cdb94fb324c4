//! Reading a request body within its limits.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use axum::body::Body;
use axum::extract::Request;
use bytes::{Bytes, BytesMut};
use http::{HeaderMap, header};
use http_body_util::BodyExt;
use thalweg_proto::code::ErrorCode;
use tokio::time::{Instant, timeout_at};

use crate::error::{RouterError, echo};

use super::Api;

/// A body that comes slower than this, in bytes a second, has the time that a client may stall for, and no more.
const BYTES_PER_SECOND_MIN: usize = 64 << 10;

/// After so long bodies that came before have mostly been read.
const RETRY_AFTER: Duration = Duration::from_secs(1);

/// Room for the bodies that come in, all of them together: each may be as large as one may be, and stay away for as long as a
/// client may stall.
pub(super) struct BodyRoom {
    bytes_max: usize,
    taken: AtomicUsize,
}

/// What one body takes of it.
struct Share<'a> {
    room: &'a BodyRoom,
    bytes: usize,
}

impl BodyRoom {
    pub(super) fn new(bytes_max: usize) -> Self {
        Self { bytes_max, taken: AtomicUsize::new(0) }
    }
}

impl Share<'_> {
    fn grow(&mut self, bytes: usize) -> Result<(), RouterError> {
        let BodyRoom { bytes_max, taken } = self.room;
        let fits = |taken: usize| taken.checked_add(bytes).filter(|all| all <= bytes_max);
        if taken.fetch_update(Ordering::Relaxed, Ordering::Relaxed, fits).is_ok() {
            self.bytes += bytes;
            return Ok(());
        }
        let message = format!(
            "request bodies that have come in part take {bytes_max} bytes, the most that they may; try again"
        );
        Err(RouterError::new(ErrorCode::Overloaded, message).retry_after(RETRY_AFTER))
    }
}

impl Drop for Share<'_> {
    fn drop(&mut self) {
        self.room.taken.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

/// The whole body; a 413 as soon as it is known to be over the limit. A client that sends nothing for as long as one
/// may read nothing is given up, and so is one that drips: altogether it has that time and what its bytes take at the
/// slowest rate.
pub(super) async fn read(request: Request, api: &Api) -> Result<Bytes, RouterError> {
    check_headers(request.headers())?;
    let config = &api.router.config;
    let bytes_max = config.limits.body_bytes_max;
    let announced = request.headers().get(header::CONTENT_LENGTH).and_then(|v| v.to_str().ok()?.parse().ok());
    if announced.is_some_and(|length: u64| length > bytes_max as u64) {
        return Err(too_large(bytes_max));
    }
    let share = Share { room: &api.bodies, bytes: 0 };
    collect(request.into_body(), bytes_max, share, config.timeouts.client_stall_timeout).await
}

/// A packed body is refused, and what a page makes a browser send without asking first, as texts and forms are: whether the page may
/// send JSON is told by CORS. Who is no browser may call JSON what he likes.
fn check_headers(headers: &HeaderMap) -> Result<(), RouterError> {
    let text = |name| headers.get(name).map(|value| String::from_utf8_lossy(value.as_bytes()));
    let kind = text(header::CONTENT_TYPE).unwrap_or_default();
    let message = if headers.contains_key(header::ORIGIN) && !is_json(&kind) {
        format!("a page must send `Content-Type: application/json`, not {:?}", echo(&kind))
    } else if let Some(how) =
        text(header::CONTENT_ENCODING).filter(|how| !how.eq_ignore_ascii_case("identity"))
    {
        format!("the request body has the `Content-Encoding` {:?}; send it unpacked", echo(&how))
    } else {
        return Ok(());
    };
    Err(RouterError::new(ErrorCode::UnsupportedMediaType, message))
}

fn is_json(content_type: &str) -> bool {
    let kind = content_type.split(';').next().unwrap_or_default().trim();
    kind.eq_ignore_ascii_case("application/json")
}

async fn collect(
    mut body: Body,
    bytes_max: usize,
    mut share: Share<'_>,
    stall: Duration,
) -> Result<Bytes, RouterError> {
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
                share.grow(data.len())?;
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packed_bodies_and_pages_without_json_are_refused() {
        let check = |headers: &[(header::HeaderName, &str)], is_taken: bool| {
            let all = headers.iter().map(|(name, value)| (name.clone(), value.parse().expect("a value")));
            assert_eq!(check_headers(&HeaderMap::from_iter(all)).is_ok(), is_taken, "{headers:?}");
        };
        let page = (header::ORIGIN, "https://example.org");
        check(&[], true);
        check(&[(header::CONTENT_TYPE, "text/plain")], true);
        check(std::slice::from_ref(&page), false);
        check(&[page.clone(), (header::CONTENT_TYPE, "text/plain;charset=UTF-8")], false);
        check(&[page, (header::CONTENT_TYPE, "Application/JSON; charset=utf-8")], true);
        check(&[(header::CONTENT_ENCODING, "identity")], true);
        check(&[(header::CONTENT_ENCODING, "gzip")], false);
    }
}
