//! What stays on the device per running sequence: its last token, how it draws, and what it has said.

use std::sync::Arc;

use hashbrown::HashMap;

use crate::plan::{SlotId, SlotInit};
use crate::sampling::SamplingParams;

/// All slots.
pub(super) struct Slots(Vec<Slot>);

/// One running sequence.
#[derive(Default)]
pub(super) struct Slot {
    last: Option<u32>,
    draw: Option<Draw>,
}

/// How a slot's tokens are drawn.
pub(super) struct Draw {
    pub(super) sampling: Arc<SamplingParams>,
    pub(super) choice: u32,
    /// Kept only where a penalty asks for it.
    pub(super) seen: Option<Seen>,
}

/// Tokens in prompt and output.
#[derive(Default)]
pub(super) struct Seen {
    /// How often each was put out; 0 for those of the prompt alone.
    pub(super) counts: HashMap<u32, u32>,
}

impl Slots {
    pub(super) fn new(count: usize) -> Self {
        Self((0..count).map(|_| Slot::default()).collect())
    }

    /// Hands a slot to a new sequence; nothing of the old one stays.
    pub(super) fn init(&mut self, init: &SlotInit) -> Result<(), String> {
        let index = self.index(init.slot)?;
        let seen = has_penalty(&init.sampling).then(|| Seen::of(&init.prompt, &init.output));
        let draw = Draw { sampling: init.sampling.clone(), choice: init.choice, seen };
        self.0[index] = Slot { last: init.output.last().copied(), draw: Some(draw) };
        Ok(())
    }

    /// Position of a slot, if there is such a one.
    pub(super) fn index(&self, slot: SlotId) -> Result<usize, String> {
        let index = slot.0 as usize;
        if index < self.0.len() { Ok(index) } else { Err(format!("slot {index} of {}", self.0.len())) }
    }

    pub(super) fn last_sampled(&self, slot: SlotId) -> Result<u32, String> {
        self.0[self.index(slot)?].last.ok_or_else(|| format!("slot {} has sampled nothing yet", slot.0))
    }

    /// How a slot draws, once it was set.
    pub(super) fn draw(&self, index: usize) -> Option<&Draw> {
        self.0[index].draw.as_ref()
    }

    /// Notes a sampled token.
    pub(super) fn push(&mut self, index: usize, token: u32) {
        let slot = &mut self.0[index];
        slot.last = Some(token);
        if let Some(seen) = slot.draw.as_mut().and_then(|draw| draw.seen.as_mut()) {
            *seen.counts.entry(token).or_default() += 1;
        }
    }
}

impl Seen {
    fn of(prompt: &[u32], output: &[u32]) -> Self {
        let mut seen = Self { counts: prompt.iter().map(|token| (*token, 0)).collect() };
        for token in output {
            *seen.counts.entry(*token).or_default() += 1;
        }
        seen
    }
}

fn has_penalty(sampling: &SamplingParams) -> bool {
    sampling.presence_penalty != 0.0
        || sampling.frequency_penalty != 0.0
        || sampling.repetition_penalty != 1.0
}
