//! A request between its arrival and its last event.

use std::sync::Arc;
use std::time::Duration;

use smallvec::SmallVec;

use super::channel::EventSender;
use super::core::Delivery;
use super::inbox::Ticket;
use super::ledger::Ledger;
use super::request::{ChoiceDelta, ChoiceState, EngineEvent, EngineRequest, PromptInfo};
use crate::sampling::SamplingParams;
use crate::scheduler::{FinishReason, NewSequence, SequenceKey, Started, Update};

/// What the engine keeps of a request; tokens and blocks are the scheduler's.
#[derive(Debug)]
pub(super) struct LiveRequest {
    pub(super) events: Arc<EventSender>,
    arrived: Duration,
    prompt_len: usize,
    wants_logprobs: bool,
    /// Its first event has a token.
    draws: bool,
    /// Until the first event takes it along.
    prompt: Option<Box<PromptInfo>>,
    /// Choices that had nothing left to do on arrival; the first event tells.
    ended: Vec<ChoiceDelta>,
    has_started: bool,
    /// Choices that have not ended.
    open: SmallVec<[LiveChoice; 1]>,
}

#[derive(Debug)]
struct LiveChoice {
    key: SequenceKey,
    tokens: usize,
    first_token: Duration,
}

/// A request as it is taken in.
#[derive(Debug)]
pub(super) struct Opened {
    pub(super) live: LiveRequest,
    /// For the scheduler; none when no choice has anything left to do.
    pub(super) sequences: Vec<NewSequence>,
}

/// Splits a request into sequences. The first one computes the prompt, and its logprobs, for all.
pub(super) fn open(
    ticket: Ticket,
    request: EngineRequest,
    output_max: usize,
    events: EventSender,
    now: Duration,
) -> Opened {
    let EngineRequest {
        prompt, sampling, choices, prompt_logprobs, pooling, priority, root, adapter, ..
    } = request;
    // The first token of a prompt has nothing that it could be predicted from: one alone has its logprobs already, none.
    let known_logprobs = prompt_logprobs.filter(|_| prompt.len() == 1).map(|_| Vec::new());
    let prompt_logprobs = prompt_logprobs.filter(|_| prompt.len() > 1);
    let mut carrier =
        prompt_logprobs.is_some().then(|| carrier_of(&choices, &sampling, output_max)).flatten();
    let (mut sequences, mut ended): (Vec<NewSequence>, _) = (Vec::new(), Vec::new());
    for ChoiceState { index, output, .. } in choices.into_iter().filter(|c| !c.finished) {
        let carries = carrier.take_if(|carrier| *carrier == index).is_some();
        let end = end_of(&output, &sampling, output_max).filter(|_| pooling.is_none());
        if end.is_some() && !carries {
            ended.push(ChoiceDelta { index, finish: end, ..ChoiceDelta::default() });
            continue;
        }
        sequences.push(NewSequence {
            key: SequenceKey { priority, request: ticket.0, choice: index },
            prompt: prompt.clone(),
            output,
            sampling: sampling.clone(),
            output_max,
            root,
            adapter,
            prompt_logprobs: prompt_logprobs.filter(|_| carries),
            pooling,
            leader: None,
        });
    }
    elect_leader(&mut sequences);
    let open = sequences.iter().map(|s| LiveChoice { key: s.key, tokens: 0, first_token: now }).collect();
    let live = LiveRequest {
        events: Arc::new(events),
        arrived: now,
        prompt_len: prompt.len(),
        wants_logprobs: sampling.logprobs.is_some(),
        draws: output_max > 0,
        prompt: Some(Box::new(PromptInfo { prompt_logprobs: known_logprobs, ..PromptInfo::default() })),
        ended,
        has_started: false,
        open,
    };
    Opened { live, sequences }
}

/// The choice whose sequence yields the prompt's logprobs: one that has something left to do, else the first that has
/// only reached its length.
fn carrier_of(choices: &[ChoiceState], sampling: &SamplingParams, output_max: usize) -> Option<u32> {
    let open = || choices.iter().filter(|c| !c.finished);
    let ends = |choice: &ChoiceState| end_of(&choice.output, sampling, output_max);
    let busy = open().find(|c| ends(c).is_none());
    busy.or_else(|| open().find(|c| ends(c) == Some(FinishReason::Length))).map(|c| c.index)
}

/// Why nothing is left to do after this output, if so.
fn end_of(output: &[u32], sampling: &SamplingParams, output_max: usize) -> Option<FinishReason> {
    let past_min = output.len() > sampling.min_tokens as usize;
    let stopped = output.last().is_some_and(|token| sampling.end_ids.binary_search(token).is_ok());
    match (past_min && stopped, output.len() >= output_max) {
        (true, _) => Some(FinishReason::Stop),
        (false, true) => Some(FinishReason::Length),
        (false, false) => None,
    }
}

/// Whoever carries the prompt's logprobs, else the first, computes the prompt; the others wait for its blocks.
fn elect_leader(sequences: &mut [NewSequence]) {
    if let Some(carrier) = sequences.iter().position(|s| s.prompt_logprobs.is_some()) {
        sequences.swap(0, carrier);
    }
    if let Some((leader, followers)) = sequences.split_first_mut() {
        followers.iter_mut().for_each(|follower| follower.leader = Some(leader.key));
    }
}

impl LiveRequest {
    /// One of its sequences got a slot; the first of them tells of queue and cache.
    pub(super) fn start(
        &mut self,
        started: &Started,
        block_tokens: usize,
        now: Duration,
        ledger: &mut Ledger,
    ) {
        if std::mem::replace(&mut self.has_started, true) {
            return;
        }
        let queued = now.saturating_sub(self.arrived);
        let mut cached = 0;
        if let Some(prompt) = &mut self.prompt {
            // A resumed sequence may find more than the prompt.
            cached = started.cached_tokens.min((self.prompt_len - 1) / block_tokens * block_tokens);
            prompt.cached_tokens = cached as u32;
            prompt.queue_seconds = queued.as_secs_f64();
        }
        let looked_up = if started.looked_up_tokens == 0 { 0 } else { self.prompt_len };
        ledger.request_started(queued, looked_up, cached);
    }

    /// Takes in what the scheduler accepted; None when there is nothing of it to tell in a delta.
    pub(super) fn delta(
        &mut self,
        update: Update,
        now: Duration,
        ledger: &mut Ledger,
    ) -> Option<ChoiceDelta> {
        if let (Some(prompt), Some(logprobs)) = (&mut self.prompt, update.prompt_logprobs) {
            prompt.prompt_logprobs = Some(logprobs);
        }
        if let (Some(prompt), Some(embedding)) = (&mut self.prompt, update.embedding) {
            prompt.embedding = embedding;
        }
        ledger.tokens_put_out(update.tokens.len());
        let at = self.open.iter().position(|choice| choice.key == update.key)?;
        let choice = &mut self.open[at];
        if choice.tokens == 0 {
            choice.first_token = now;
        }
        choice.tokens += update.tokens.len();
        if let Some(reason) = update.finish {
            ledger.choice_finished(reason, choice.tokens, now.saturating_sub(choice.first_token));
            self.open.remove(at);
        }
        let is_news = update.finish.is_some() || !update.tokens.is_empty();
        is_news.then(|| ChoiceDelta {
            index: update.key.choice,
            tokens: update.tokens.iter().map(|t| t.token).collect(),
            logprobs: if self.wants_logprobs { update.tokens.into_vec() } else { Vec::new() },
            finish: update.finish,
        })
    }

    /// An event of these deltas. The first one takes along what became of the prompt.
    pub(super) fn event(
        &mut self,
        mut deltas: SmallVec<[ChoiceDelta; 1]>,
        now: Duration,
        ledger: &mut Ledger,
    ) -> EngineEvent {
        let since_arrival = now.saturating_sub(self.arrived);
        let prompt = self.prompt.take();
        if prompt.is_some() {
            deltas.extend(self.ended.drain(..));
            ledger.first_event(self.prompt_len, self.draws.then_some(since_arrival));
        }
        if self.is_over() {
            ledger.request_finished(since_arrival);
        }
        EngineEvent { prompt, deltas }
    }

    /// [`Self::event`] on its way out.
    pub(super) fn deliver(
        &mut self,
        ticket: Ticket,
        deltas: SmallVec<[ChoiceDelta; 1]>,
        now: Duration,
        ledger: &mut Ledger,
    ) -> Delivery {
        let event = self.event(deltas, now, ledger);
        Delivery { ticket, to: self.events.clone(), event: Ok(event), is_last: self.is_over() }
    }

    /// The last event of an aborted request, and the sequences to give up.
    pub(super) fn abort(&mut self, ledger: &mut Ledger) -> (EngineEvent, Vec<SequenceKey>) {
        let mut deltas = SmallVec::from_vec(std::mem::take(&mut self.ended));
        let keys: Vec<SequenceKey> = self.open.drain(..).map(|choice| choice.key).collect();
        for key in &keys {
            ledger.choice_finished(FinishReason::Abort, 0, Duration::ZERO);
            let finish = Some(FinishReason::Abort);
            deltas.push(ChoiceDelta { index: key.choice, finish, ..ChoiceDelta::default() });
        }
        ledger.request_aborted();
        (EngineEvent { prompt: self.prompt.take(), deltas }, keys)
    }

    /// None would be left without these choices.
    pub(super) fn are_all_open_in(&self, choices: &[u32]) -> bool {
        self.open.iter().all(|open| choices.contains(&open.key.choice))
    }

    /// Ends those of these choices that are open. Deltas to tell now, which are none while the first event is still to come:
    /// that one takes them along. And the sequences to give up.
    pub(super) fn abort_choices(
        &mut self,
        choices: &[u32],
        ledger: &mut Ledger,
    ) -> (SmallVec<[ChoiceDelta; 1]>, Vec<SequenceKey>) {
        let is_cut = |open: &LiveChoice| choices.contains(&open.key.choice);
        let keys: Vec<SequenceKey> = self.open.iter().filter(|o| is_cut(o)).map(|o| o.key).collect();
        self.open.retain(|open| !is_cut(open));
        let mut deltas = SmallVec::new();
        for key in &keys {
            ledger.choice_finished(FinishReason::Abort, 0, Duration::ZERO);
            let finish = Some(FinishReason::Abort);
            deltas.push(ChoiceDelta { index: key.choice, finish, ..ChoiceDelta::default() });
        }
        if self.prompt.is_some() {
            self.ended.extend(deltas.drain(..));
        }
        (deltas, keys)
    }

    /// Every choice has ended.
    pub(super) fn is_over(&self) -> bool {
        self.open.is_empty()
    }
}
