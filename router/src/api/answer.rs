//! The events of a request's generations, one per prompt, as they come.

use std::sync::Arc;

use futures::stream::{self, AbortHandle, BoxStream, StreamExt};
use thalweg_proto::ids::WorkerId;

use crate::dispatch::{ChoiceEnder, Dispatcher, Generation, GenerationEvent, Tokenized};
use crate::error::RouterError;

/// What happens to one prompt.
pub(super) enum Event {
    /// A worker has taken it; single choices can be ended from now on.
    Placed(WorkerId, ChoiceEnder),
    /// The worker sent something.
    Output(GenerationEvent),
}

type Item = Result<(usize, Event), RouterError>;

/// All generations of a request. Dropping it cancels them.
pub(super) struct Answer {
    events: Events,
    handles: Vec<AbortHandle>,
}

enum Events {
    /// The usual case, without the cost of merging.
    One(BoxStream<'static, Item>),
    Many(BoxStream<'static, Item>),
}

impl Answer {
    /// Nothing happens before the first call of `next`, and then to so many prompts at once; None: to all.
    pub(super) fn new(
        dispatcher: &Arc<Dispatcher>,
        requests: Vec<Tokenized>,
        at_once: Option<usize>,
    ) -> Self {
        let mut handles = Vec::with_capacity(requests.len());
        let mut streams: Vec<_> = requests
            .into_iter()
            .enumerate()
            .map(|(prompt, request)| {
                let (stream, handle) = stream::abortable(generation(Arc::clone(dispatcher), prompt, request));
                handles.push(handle);
                stream.boxed()
            })
            .collect();
        let events = match streams.pop() {
            Some(only) if streams.is_empty() => Events::One(only),
            last => {
                streams.extend(last);
                Events::Many(stream::iter(streams).flatten_unordered(at_once).boxed())
            }
        };
        Self { events, handles }
    }

    /// The next event with the prompt that it is about; None once all generations have ended.
    pub(super) async fn next(&mut self) -> Option<Item> {
        match &mut self.events {
            Events::One(stream) => stream.next().await,
            Events::Many(streams) => streams.next().await,
        }
    }

    /// Cancels one prompt's generation: all its choices have what they need.
    pub(super) fn finish(&mut self, prompt: usize) {
        match &self.events {
            Events::One(_) => self.events = Events::Many(stream::empty().boxed()),
            Events::Many(_) => self.handles[prompt].abort(),
        }
    }
}

enum State {
    Waiting(Box<Tokenized>),
    Running(Generation),
    Ended,
}

fn generation(
    dispatcher: Arc<Dispatcher>,
    prompt: usize,
    request: Tokenized,
) -> impl futures::Stream<Item = Item> + Send + 'static {
    let start = (dispatcher, State::Waiting(Box::new(request)));
    stream::unfold(start, move |(dispatcher, state)| async move {
        let (item, state) = match state {
            State::Waiting(request) => match dispatcher.dispatch(*request).await {
                Ok(generation) => {
                    let placed = Event::Placed(generation.worker().clone(), generation.ender());
                    (Ok(placed), State::Running(generation))
                }
                Err(error) => (Err(error), State::Ended),
            },
            State::Running(mut generation) => match generation.next().await? {
                Ok(event) => (Ok(Event::Output(event)), State::Running(generation)),
                Err(error) => (Err(error), State::Ended),
            },
            State::Ended => return None,
        };
        Some((item.map(|event| (prompt, event)), (dispatcher, state)))
    })
}
