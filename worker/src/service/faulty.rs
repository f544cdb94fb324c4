//! Streams of a simulated worker that is told to misbehave: late, slow, or with things in them that no worker should send.

use std::sync::Arc;
use std::time::Duration;

use futures::{Stream, StreamExt};
use thalweg_proto::v1;
use tokio::time::{Instant, sleep_until};
use tonic::Status;

use super::generate::GenerateStream;
use crate::runner::sim::{FaultSwitch, Faults, Garbage};

/// Behind this many messages a truncated stream ends.
const TRUNCATED_BEHIND: usize = 2;

/// The stream as the faults of the moment make it.
pub(super) fn generate(
    stream: GenerateStream,
    faults: FaultSwitch,
    vocab_size: usize,
) -> impl Stream<Item = Result<v1::GenerateResponse, Status>> + Send {
    let faulty = FaultyStream { stream, faults, vocab_size, last: Instant::now(), sent: 0, held_back: None };
    futures::stream::unfold(faulty, |mut faulty| async move {
        let item = faulty.next().await?;
        Some((item, faulty))
    })
}

/// Load reports, while the faults let any through.
pub(super) fn reports(
    reports: impl Stream<Item = Result<v1::LoadReport, Status>> + Send,
    faults: FaultSwitch,
) -> impl Stream<Item = Result<v1::LoadReport, Status>> + Send {
    reports.filter(move |_| std::future::ready(!faults.now().silent))
}

struct FaultyStream {
    stream: GenerateStream,
    faults: FaultSwitch,
    vocab_size: usize,
    /// Of the last message, or of the request.
    last: Instant,
    sent: usize,
    held_back: Option<Result<v1::GenerateResponse, Status>>,
}

impl FaultyStream {
    async fn next(&mut self) -> Option<Result<v1::GenerateResponse, Status>> {
        let mut item = match self.held_back.take() {
            Some(item) => item,
            None => self.stream.next().await?,
        };
        self.wait().await;
        let garbage = self.faults.now().garbage;
        match garbage {
            Some(Garbage::Truncated) if self.sent >= TRUNCATED_BEHIND => return None,
            Some(Garbage::OutOfOrder) if self.sent.is_multiple_of(2) => {
                if let Some(next) = self.stream.next().await {
                    self.held_back = Some(std::mem::replace(&mut item, next));
                }
            }
            _ => {}
        }
        (self.last, self.sent) = (Instant::now(), self.sent + 1);
        Some(item.map(|response| spoil(response, garbage, self.vocab_size as u32)))
    }

    /// Holds a message back for as long as it takes, or until the faults say otherwise.
    async fn wait(&mut self) {
        let is_first = self.sent == 0;
        let pause = |faults: Arc<Faults>| match is_first {
            true => faults.delay_seconds.max(faults.slow_seconds),
            false => faults.slow_seconds,
        };
        loop {
            let until = self.last + Duration::from_secs_f64(pause(self.faults.now()));
            tokio::select! {
                () = sleep_until(until) => return,
                () = self.faults.changed() => {}
            }
        }
    }
}

fn spoil(
    mut response: v1::GenerateResponse,
    garbage: Option<Garbage>,
    vocab_size: u32,
) -> v1::GenerateResponse {
    for delta in &mut response.deltas {
        match garbage {
            Some(Garbage::InvalidIds) => delta.token_ids.iter_mut().for_each(|id| *id += vocab_size),
            Some(Garbage::UnknownChoice) => delta.index += 1000,
            _ => {}
        }
    }
    response
}
