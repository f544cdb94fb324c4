//! The thread behind a simulated runner: says what rows want, and lets the time pass.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender};
use std::time::Duration;

use hashbrown::HashMap;
use thalweg_model::grammar::TokenMask;
use tokio::time::Instant;

use super::faults::Trigger;
use super::language::Speaker;
use super::{SimConfig, Stopping, Submitted, failure};
use crate::backend::BackendError;
use crate::plan::{Row, RowInput, RowOutput, SlotId, StepMasks, StepOutput, StepPlan, Want};

/// What stands for a device.
pub(super) struct Device {
    config: SimConfig,
    masks: Receiver<StepMasks>,
    speakers: HashMap<SlotId, Speaker>,
    /// When the step before ended: one that was there by then begins at that moment, so that waits do not add up.
    free_at: Option<Instant>,
    stopping: Arc<Stopping>,
}

/// Time between two looks whether a stall is over.
const STALL_INTERVAL: Duration = Duration::from_millis(5);

impl Device {
    pub(super) fn new(config: SimConfig, masks: Receiver<StepMasks>, stopping: Arc<Stopping>) -> Self {
        Self { config, masks, speakers: HashMap::new(), free_at: None, stopping }
    }

    /// Runs plans until there are no more, or one fails.
    pub(super) fn run(
        &mut self,
        plans: &Receiver<Submitted>,
        outputs: &SyncSender<Result<StepOutput, BackendError>>,
    ) {
        while let Ok(submitted) = plans.recv() {
            let output = catch_unwind(AssertUnwindSafe(|| self.step(submitted)))
                .unwrap_or_else(|payload| Err(failure(format!("panicked: {}", message(payload.as_ref())))));
            let failed = output.is_err();
            if outputs.send(output).is_err() || failed {
                return;
            }
        }
    }

    fn step(&mut self, Submitted { step, mut plan, at }: Submitted) -> Result<StepOutput, BackendError> {
        for init in plan.slots.drain(..) {
            self.look_for_poison(&init.prompt);
            self.speakers.insert(init.slot, Speaker::new(init));
        }
        let mut masks = self.masks_of(&plan)?;
        let rows = plan.rows.iter().enumerate().map(|(at, row)| self.row(row, masks.remove(&at)));
        let rows = rows.collect::<Result<_, _>>()?;
        let seconds = self.config.step.seconds(&plan, step);
        let end = self.free_at.map_or(at, |free| free.max(at)) + Duration::from_secs_f64(seconds);
        self.wait_until(end)?;
        while self.config.faults.now().stall {
            if self.stopping.wait(STALL_INTERVAL) {
                return Err(failure("stopped".into()));
            }
        }
        self.free_at = Some(end);
        Ok(StepOutput { rows, seconds })
    }

    /// By row.
    fn masks_of(&self, plan: &StepPlan) -> Result<HashMap<usize, TokenMask>, BackendError> {
        if plan.constrained.is_empty() {
            return Ok(HashMap::new());
        }
        let masks = self.masks.recv().map_err(|_| failure("stopped".into()))?;
        let rows = plan.constrained.iter().copied().zip(masks.0);
        Ok(rows.filter_map(|(row, mask)| Some((row, mask?))).collect())
    }

    fn wait_until(&self, end: Instant) -> Result<(), BackendError> {
        loop {
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(());
            }
            if self.stopping.wait(left) {
                return Err(failure("stopped".into()));
            }
        }
    }

    fn look_for_poison(&self, prompt: &[u32]) {
        let faults = self.config.faults.now();
        let holds = |trigger: &Option<Trigger>| trigger.as_ref().is_some_and(|trigger| trigger.is_in(prompt));
        if holds(&faults.abort_on) {
            tracing::error!("aborting, as the profile's faults.abort_on wants it for this prompt");
            std::process::abort();
        }
        assert!(!holds(&faults.panic_on), "the prompt contains what the profile's faults.panic_on says");
    }

    fn row(&mut self, row: &Row, mask: Option<TokenMask>) -> Result<RowOutput, BackendError> {
        let language = Arc::clone(&self.config.language);
        let speaker = self
            .speakers
            .get_mut(&row.slot)
            .ok_or_else(|| failure(format!("slot {} was never set", row.slot.0)))?;
        let mut output = RowOutput::default();
        let output_index = match row.want {
            Want::Nothing | Want::Embedding { ends: false, .. } => None,
            Want::Embedding { ends: true, .. } => {
                output.embedding = Some(language.embed(speaker));
                None
            }
            Want::Sample { output_index } => Some(output_index),
            Want::PromptLogprobs { top, next, output_index } => {
                output.prompt = targets(row, next)
                    .map(|(position, token)| language.predict(position, token, top))
                    .collect();
                output_index
            }
        };
        if let Some(index) = output_index {
            if index != speaker.output_len() {
                let has = speaker.output_len();
                return Err(failure(format!("output {index} is asked for behind {has} outputs")));
            }
            output.sampled.push(language.say(speaker, mask.as_ref()));
        }
        Ok(output)
    }
}

/// Positions and tokens that a row's own tokens predict.
fn targets(row: &Row, next: Option<u32>) -> impl Iterator<Item = (usize, u32)> {
    let ids: &[u32] = match &row.input {
        RowInput::Tokens(ids) => ids,
        RowInput::LastSampled => &[],
    };
    let first = row.context as usize + 1;
    (first..).zip(ids.iter().skip(1).copied().chain(next))
}

fn message(payload: &(dyn std::any::Any + Send)) -> &str {
    let text = payload.downcast_ref::<&str>().copied();
    text.or_else(|| payload.downcast_ref::<String>().map(String::as_str)).unwrap_or("without a message")
}
