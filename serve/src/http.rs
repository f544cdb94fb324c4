//! HTTP servers: connections are accepted, bounded in every direction, and closed in order.
//!
//! While a server drains it goes on accepting, since load balancers notice late; replies then ask the client to go:
//! `Connection: close`, or GOAWAY on HTTP/2. Requests that hyper cannot parse never come here: it answers them itself,
//! with 400 and no body.

use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use axum::body::Body;
use axum::response::Response;
use http::{HeaderValue, Request, Version, header};
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::conn::auto::Builder;
use tokio::net::TcpStream;
use tokio::sync::Notify;
use tokio::task::JoinSet;
use tokio::time::sleep;
use tokio_util::sync::CancellationToken;
use tower::ServiceExt;

use crate::unread::Whole;
use crate::{GuardedListener, Place, StallGuard};

/// A connection whose first request has not come by then is closed.
const FIRST_REQUEST_TIMEOUT: Duration = Duration::from_secs(10);
/// Between two requests of a connection, the head of the later one included. A load balancer must be the first to close
/// an idle connection, or it may send a request into one that closes: theirs last 60 s by default.
const IDLE_TIMEOUT: Duration = Duration::from_secs(75);
/// Requests at a time on one HTTP/2 connection; a client opens another connection for more.
const HTTP2_STREAMS_MAX: u32 = 256;
/// Bytes of request bodies in flight, per stream and per connection.
const HTTP2_STREAM_WINDOW: u32 = 1 << 20;
const HTTP2_CONNECTION_WINDOW: u32 = 4 << 20;
/// Bytes of replies that a stream whose client does not read may hold.
const HTTP2_SEND_BUFFER: usize = 256 << 10;
/// Bytes of a request's headers.
const HTTP2_HEADERS_MAX: u32 = 64 << 10;
/// A client that does not answer a ping in time is gone.
const HTTP2_PING_EVERY: Duration = Duration::from_secs(20);
const HTTP2_PING_TIMEOUT: Duration = Duration::from_secs(10);

/// How a server is told to end.
#[derive(Clone, Default)]
pub struct Closing {
    /// Ask clients to go, one reply at a time.
    pub drain: CancellationToken,
    /// Accept nobody, and end each connection with what runs on it.
    pub close: CancellationToken,
}

/// Serves until told to close, and then until the last connection has ended. Dropping the future cuts all.
pub async fn serve(listener: GuardedListener, routes: axum::Router, closing: Closing) {
    let builder = Arc::new(builder());
    let mut connections = JoinSet::new();
    loop {
        tokio::select! {
            biased;
            () = closing.close.cancelled() => break,
            Some(_ended) = connections.join_next(), if !connections.is_empty() => {}
            (stream, place) = listener.accept() => {
                let (builder, routes) = (Arc::clone(&builder), routes.clone());
                connections.spawn(connection(builder, stream, routes, closing.clone(), place));
            }
        }
    }
    drop(listener);
    while connections.join_next().await.is_some() {}
}

fn builder() -> Builder<TokioExecutor> {
    let mut builder = Builder::new(TokioExecutor::new());
    builder.http1().timer(TokioTimer::new()).header_read_timeout(IDLE_TIMEOUT);
    builder
        .http2()
        .timer(TokioTimer::new())
        .max_concurrent_streams(HTTP2_STREAMS_MAX)
        .initial_stream_window_size(HTTP2_STREAM_WINDOW)
        .initial_connection_window_size(HTTP2_CONNECTION_WINDOW)
        .max_send_buf_size(HTTP2_SEND_BUFFER)
        .max_header_list_size(HTTP2_HEADERS_MAX)
        .keep_alive_interval(HTTP2_PING_EVERY)
        .keep_alive_timeout(HTTP2_PING_TIMEOUT);
    builder
}

/// What the requests of a connection say of it.
#[derive(Default)]
struct Seen {
    any: AtomicBool,
    http2: AtomicBool,
    /// It should be told to go.
    go_away: Notify,
}

async fn connection(
    builder: Arc<Builder<TokioExecutor>>,
    stream: StallGuard<TcpStream>,
    routes: axum::Router,
    closing: Closing,
    _place: Place,
) {
    // Of its own: what all connections wait on together would be a lock that each token takes.
    let closing = Closing { drain: closing.drain.child_token(), close: closing.close.child_token() };
    let seen = Arc::new(Seen::default());
    let service =
        service_fn(|request| answer(routes.clone(), request, Arc::clone(&seen), closing.drain.clone()));
    let served = builder.serve_connection(TokioIo::new(stream), service);
    tokio::pin!(served);
    let first_request = sleep(FIRST_REQUEST_TIMEOUT);
    tokio::pin!(first_request);
    let (mut awaits_first, mut drains, mut closes) = (true, false, false);
    loop {
        tokio::select! {
            ended = served.as_mut() => {
                if let Err(error) = ended {
                    tracing::debug!(error, "a connection ended");
                }
                return;
            }
            () = first_request.as_mut(), if awaits_first => {
                awaits_first = false;
                if !seen.any.load(Ordering::Relaxed) {
                    return tracing::debug!("a connection was closed that sent no request in time");
                }
            }
            () = closing.drain.cancelled(), if !drains => {
                drains = true;
                // On HTTP/1 this would close a connection into which a request may be on its way.
                if seen.http2.load(Ordering::Relaxed) {
                    served.as_mut().graceful_shutdown();
                }
            }
            () = seen.go_away.notified() => served.as_mut().graceful_shutdown(),
            () = closing.close.cancelled(), if !closes => {
                closes = true;
                served.as_mut().graceful_shutdown();
            }
        }
    }
}

async fn answer(
    routes: axum::Router,
    request: Request<Incoming>,
    seen: Arc<Seen>,
    drain: CancellationToken,
) -> Result<Response, Infallible> {
    let is_http2 = request.version() == Version::HTTP_2;
    seen.any.store(true, Ordering::Relaxed);
    seen.http2.store(is_http2, Ordering::Relaxed);
    if is_http2 && drain.is_cancelled() {
        seen.go_away.notify_one();
    }
    let (request, closes) = Whole::of(request);
    let mut response = routes.oneshot(request.map(Body::new)).await?;
    if closes.is_set() || !is_http2 && drain.is_cancelled() {
        response.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
    }
    Ok(response)
}
