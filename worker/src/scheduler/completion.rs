//! What comes back from a step: tokens accepted, ends found, blocks told and freed.

use smallvec::SmallVec;

use super::rows::RowRecord;
use super::sequence::{Leaving, Running, Sequence};
use super::{Scheduler, SequenceKey, remember};
use crate::plan::{Logprobs, RowOutput, StepOutput};

/// Why a choice ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FinishReason {
    /// Its last token is one of `SamplingParams::end_ids`.
    Stop,
    /// Its grammar is complete: nothing may follow its last token, which is part of the text.
    Complete,
    /// max_tokens, or the context's end; or the prompt's, where nothing behind it was asked for.
    Length,
    /// Aborted.
    Abort,
}

/// What one step brought.
#[derive(Clone, Debug, PartialEq)]
pub struct Completed {
    /// Per sequence with something new.
    pub updates: Vec<Update>,
    /// Prompt tokens, or tokens computed again, in the step.
    pub prefill_tokens: usize,
    /// Sequences that decoded.
    pub decode_rows: usize,
    /// Time that the step took.
    pub seconds: f64,
}

/// Something new about a sequence.
#[derive(Clone, Debug, PartialEq)]
pub struct Update {
    /// Which.
    pub key: SequenceKey,
    /// New tokens.
    pub tokens: SmallVec<[Logprobs; 1]>,
    /// It has ended.
    pub finish: Option<FinishReason>,
    /// It cannot go on, and says why; its request fails.
    pub failure: Option<String>,
    /// All of the prompt's, when the last of them came with this step.
    pub prompt_logprobs: Option<Vec<Logprobs>>,
    /// The prompt's, with the end of its sequence.
    pub embedding: Option<Vec<f32>>,
}

/// The runner did not answer what it was asked: its state cannot be trusted any more.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("step {step} does not answer its plan: {reason}")]
pub struct StepMismatch {
    /// Number of the step.
    pub step: u64,
    /// What differs.
    pub reason: String,
}

impl Scheduler {
    /// Takes in the oldest planned step's output.
    pub fn complete(&mut self, output: StepOutput) -> Result<Completed, StepMismatch> {
        let mismatch = |step, reason: String| StepMismatch { step, reason };
        let step = self.in_flight.pop_front().ok_or_else(|| mismatch(0, "none is in flight".into()))?;
        if step.rows.len() != output.rows.len() {
            let reason = format!("{} rows were planned, {} came back", step.rows.len(), output.rows.len());
            return Err(mismatch(step.number, reason));
        }
        self.call_up();
        let (mut updates, mut leaving) = (Vec::with_capacity(step.rows.len()), Vec::new());
        let mut in_order = self.running.range_mut(..);
        for (record, row) in step.rows.iter().zip(output.rows) {
            record.check(&row).map_err(|reason| mismatch(step.number, reason))?;
            // Nearly all rows stand in a step as their sequences do here: then there is nothing to look for.
            let running = match in_order.next() {
                Some((key, running)) if *key == record.key => Some(running),
                _ => {
                    in_order = self.running.range_mut(record.key..);
                    in_order.next().and_then(|(key, running)| (*key == record.key).then_some(running))
                }
            };
            // Its sequence is over, and gone.
            let Some(running) = running else { continue };
            updates.extend(running.take_in(record, row));
            // A row in flight may be writing the block's last token.
            let written_by = if running.rows_in_flight > 0 { self.last_step } else { step.number };
            remember(running, &mut self.kv, written_by);
            if running.leaving.is_some() {
                leaving.push(record.key);
            }
        }
        for key in leaving {
            self.retire_if_done(key);
        }
        self.kv.step_completed(step.number);
        self.check_invariants();
        let (prefill_tokens, decode_rows) = (step.prefill_tokens, step.decode_rows);
        Ok(Completed { updates, prefill_tokens, decode_rows, seconds: output.seconds })
    }

    /// Asks memory for what this and the next plan read of each sequence, all at once: while the device was at work, other things went
    /// through the caches, and one by one each would be waited for.
    fn call_up(&self) {
        std::hint::black_box(self.running.values().map(Running::call_up).fold(0, usize::wrapping_add));
    }
}

impl RowRecord {
    fn check(&self, row: &RowOutput) -> Result<(), String> {
        if row.sampled.len() != usize::from(self.samples) {
            return Err(format!(
                "{} tokens were sampled in a row that asks for {}",
                row.sampled.len(),
                self.samples as u8
            ));
        }
        if row.prompt.len() != self.targets {
            return Err(format!("{} prompt logprobs came for {} targets", row.prompt.len(), self.targets));
        }
        if row.embedding.is_some() != self.embeds {
            return Err(match self.embeds {
                true => "no embedding came in a row that ends a prompt".to_owned(),
                false => "an embedding came in a row that asks for none".to_owned(),
            });
        }
        Ok(())
    }
}

impl Running {
    /// What a row in flight has yielded.
    fn take_in(&mut self, record: &RowRecord, row: RowOutput) -> Option<Update> {
        self.rows_in_flight -= 1;
        self.samples_in_flight -= usize::from(record.samples);
        if self.leaving == Some(Leaving::Over) {
            return None;
        }
        let update = self.accept(row)?;
        if update.finish.is_some() || update.failure.is_some() {
            self.leaving = Some(Leaving::Over);
        }
        Some(update)
    }

    fn accept(&mut self, mut row: RowOutput) -> Option<Update> {
        if self.sequence.constraint.as_ref().is_some_and(|constraint| !constraint.is_open()) {
            // Drawn without a mask, for nobody.
            row.sampled.clear();
        }
        let stopped = row.sampled.iter().any(|sampled| self.takes_as_end(sampled.token));
        let sequence = &mut self.sequence;
        let (mut complete, mut failure) = (false, None);
        if let Some(constraint) = &mut sequence.constraint {
            if !stopped {
                row.sampled.iter().for_each(|sampled| constraint.consume(&[sampled.token]));
            }
            (complete, failure) = (constraint.is_complete(), constraint.failure().map(str::to_owned));
        }
        if failure.is_some() {
            row.sampled.clear();
        }
        if let Some(logprobs) = &mut sequence.prompt_logprobs {
            logprobs.got.append(&mut row.prompt);
        }
        let prompt_logprobs = sequence.take_prompt_logprobs();
        sequence.tokens.extend(row.sampled.iter().map(|sampled| sampled.token));
        let owes_embedding = sequence.pooling.is_some() && row.embedding.is_none();
        let is_full = sequence.output_len() >= sequence.output_max
            && !sequence.wants_prompt_logprobs()
            && !owes_embedding;
        let finish = match (stopped, complete) {
            (true, _) => Some(FinishReason::Stop),
            (false, true) => Some(FinishReason::Complete),
            (false, false) => is_full.then_some(FinishReason::Length),
        };
        let finish = finish.filter(|_| failure.is_none());
        let is_news =
            finish.is_some() || failure.is_some() || prompt_logprobs.is_some() || !row.sampled.is_empty();
        let (key, RowOutput { sampled: tokens, embedding, .. }) = (sequence.key, row);
        is_news.then_some(Update { key, tokens, finish, failure, prompt_logprobs, embedding })
    }

    /// The next output token ends the sequence. Before min_tokens the sampler masks these ids.
    fn takes_as_end(&self, token: u32) -> bool {
        let Sequence { end_ids, min_tokens, .. } = &self.sequence;
        self.sequence.output_len() >= *min_tokens && end_ids.binary_search(&token).is_ok()
    }
}
