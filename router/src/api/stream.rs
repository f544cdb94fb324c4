//! Streamed replies.
//!
//! A stream is read at its client's pace: what the worker sends meanwhile waits in the dispatcher's buffer. Dropping
//! the body, as hyper does when the client goes away, drops the session and with it everything that was booked.

use std::convert::Infallible;
use std::time::Duration;

use axum::body::Body;
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use futures::FutureExt;
use futures::stream::{self, Stream, StreamExt};
use http::{HeaderName, HeaderValue, header};
use tokio::time::{Instant, Interval, MissedTickBehavior, interval, timeout};

use crate::error::RouterError;
use crate::output::choice::Piece;
use crate::sse::chunk::{DONE, KEEP_ALIVE, error_event};
use crate::usage::Usage;

use super::Api;
use super::error::ApiError;
use super::generate::name_worker;
use super::responses::ResponseScript;
use super::script::ChunkScript;
use super::session::Session;

const ACCEL_BUFFERING: HeaderName = HeaderName::from_static("x-accel-buffering");

/// Chunks that are ready at the same time go out together, up to about so many bytes.
const FRAME_BYTES: usize = 16 << 10;

/// Answers once the first output has come, so that what fails before gets its own status; if that takes long, headers
/// go first.
pub(super) async fn respond(api: &Api, session: Session, script: Script) -> Result<Response, ApiError> {
    let keep_alive = api.router.config.timeouts.sse_keep_alive;
    let mut events = Events::new(session, script, keep_alive);
    let first = match timeout(header_patience(keep_alive), events.first()).await {
        Ok(first) => Some(first?),
        Err(_) => None,
    };
    let worker = events.session.worker.clone();
    let body = stream::iter(first).chain(events.into_stream()).map(Ok::<Bytes, Infallible>);
    let headers = [
        (header::CONTENT_TYPE, HeaderValue::from_static("text/event-stream; charset=utf-8")),
        (header::CACHE_CONTROL, HeaderValue::from_static("no-cache")),
        // nginx would otherwise collect tokens until they fill a buffer.
        (ACCEL_BUFFERING, HeaderValue::from_static("no")),
    ];
    let mut response = (headers, Body::from_stream(body)).into_response();
    name_worker(api, response.headers_mut(), worker.as_ref());
    Ok(response)
}

/// How long the first token is awaited before headers are sent without knowing whether there will be one: errors
/// want a status, and idle timers of load balancers want bytes.
fn header_patience(keep_alive: Duration) -> Duration {
    const LONGEST: Duration = Duration::from_secs(4);
    if keep_alive.is_zero() { LONGEST } else { (keep_alive / 4).min(LONGEST) }
}

/// In whose words a stream speaks.
pub(super) enum Script {
    /// Chunks of OpenAI's chats and completions.
    Chunks(ChunkScript),
    /// Events of a response.
    Response(Box<ResponseScript>),
}

impl Script {
    fn piece(&mut self, session: &Session, piece: &Piece, out: &mut Vec<u8>) {
        match self {
            Self::Chunks(script) => script.piece(session, piece, out),
            Self::Response(script) => {
                script.piece(session, piece);
                script.take_into(out);
            }
        }
    }

    async fn end(&mut self, usage: Usage, out: &mut Vec<u8>) {
        match self {
            Self::Chunks(script) => {
                script.end(&usage, out);
                out.extend_from_slice(DONE);
            }
            Self::Response(script) => {
                script.finish(usage).await;
                script.take_into(out);
            }
        }
    }

    async fn fail(&mut self, error: &RouterError, usage: Usage, out: &mut Vec<u8>) {
        match self {
            Self::Chunks(_) => error_event(out, error),
            Self::Response(script) => {
                script.fail(error, usage).await;
                script.take_into(out);
            }
        }
    }
}

/// The events of one stream, as bytes.
pub(super) struct Events {
    session: Session,
    script: Script,
    pieces: Vec<Piece>,
    out: Vec<u8>,
    silence: Silence,
    /// Why it ends early, until that is told.
    failure: Option<RouterError>,
    ended: bool,
}

impl Events {
    /// Without `keep_alive` silence is not broken.
    pub(super) fn new(session: Session, script: Script, keep_alive: Duration) -> Self {
        let silence = Silence::new(keep_alive);
        let (pieces, out) = (Vec::new(), Vec::new());
        Self { session, script, pieces, out, silence, failure: None, ended: false }
    }

    /// The first output, or the error that came instead.
    async fn first(&mut self) -> Result<Bytes, RouterError> {
        while self.out.is_empty() {
            let more = self.session.next(&mut self.pieces).await?;
            self.write(more).await;
        }
        Ok(self.take())
    }

    fn into_stream(self) -> impl Stream<Item = Bytes> {
        stream::unfold(self, |mut events| async move {
            let bytes = match events.next().await? {
                Ok(bytes) => bytes,
                Err(error) => {
                    let usage = events.session.assembly.usage();
                    events.script.fail(&error, usage, &mut events.out).await;
                    events.take()
                }
            };
            Some((bytes, events))
        })
    }

    /// What has come to be sent, or why nothing more will; None behind the end.
    pub(super) async fn next(&mut self) -> Option<Result<Bytes, RouterError>> {
        while self.out.is_empty() {
            if self.ended {
                return self.failure.take().map(Err);
            }
            tokio::select! {
                biased;
                more = self.session.next(&mut self.pieces) => self.step(more).await,
                () = self.silence.broken() => self.out.extend_from_slice(KEEP_ALIVE),
            }
        }
        while !self.ended && self.out.len() < FRAME_BYTES {
            let Some(more) = self.session.next(&mut self.pieces).now_or_never() else { break };
            self.step(more).await;
        }
        Some(Ok(self.take()))
    }

    async fn step(&mut self, more: Result<bool, RouterError>) {
        match more {
            Ok(more) => self.write(more).await,
            Err(error) => {
                self.failure = Some(error);
                self.ended = true;
            }
        }
    }

    async fn write(&mut self, more: bool) {
        for piece in self.pieces.drain(..) {
            self.script.piece(&self.session, &piece, &mut self.out);
        }
        if !more {
            let usage = self.session.assembly.usage();
            self.script.end(usage, &mut self.out).await;
            self.ended = true;
        }
    }

    fn take(&mut self) -> Bytes {
        /// What a chunk with one token takes.
        const USUAL_BYTES: usize = 512;
        self.silence.last_output = Instant::now();
        Bytes::from(std::mem::replace(&mut self.out, Vec::with_capacity(USUAL_BYTES)))
    }
}

/// Watches for streams that say nothing for so long that a proxy might take them for idle.
struct Silence {
    keep_alive: Duration,
    last_output: Instant,
    /// Several times as often as a comment is due, so that output need not reset it. None: no comments.
    ticks: Option<Interval>,
}

impl Silence {
    fn new(keep_alive: Duration) -> Self {
        let ticks = (!keep_alive.is_zero()).then(|| {
            let mut ticks = interval((keep_alive / 4).max(Duration::from_millis(1)));
            ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
            ticks
        });
        Self { keep_alive, last_output: Instant::now(), ticks }
    }

    /// Returns when a comment is due.
    async fn broken(&mut self) {
        let Some(ticks) = &mut self.ticks else { return std::future::pending().await };
        loop {
            ticks.tick().await;
            if self.last_output.elapsed() >= self.keep_alive {
                return;
            }
        }
    }
}
