//! What was received of each choice: enough to go on elsewhere, and to notice a worker that sends nonsense.

use thalweg_proto::code::ErrorCode;
use thalweg_proto::v1;

use crate::error::RouterError;

/// State of every choice of one request.
#[derive(Debug)]
pub(super) struct Progress {
    choices: Vec<v1::ChoiceState>,
    max_tokens: usize,
    vocab_size: usize,
}

impl Progress {
    pub(super) fn new(choices: u32, max_tokens: u32, vocab_size: usize) -> Self {
        let state = |index| v1::ChoiceState { index, output_ids: Vec::new(), finished: false };
        Self { choices: (0..choices).map(state).collect(), max_tokens: max_tokens as usize, vocab_size }
    }

    /// Every choice, finished or not.
    pub(super) fn choices(&self) -> &[v1::ChoiceState] {
        &self.choices
    }

    /// What `Generate` is told, so that a worker continues from here.
    pub(super) fn unfinished(&self) -> Vec<v1::ChoiceState> {
        self.choices.iter().filter(|c| !c.finished).cloned().collect()
    }

    /// A choice has all that its client wants: what still comes of it is dropped.
    pub(super) fn end_choice(&mut self, index: u32) {
        if let Some(choice) = self.choices.get_mut(index as usize) {
            choice.finished = true;
        }
    }

    pub(super) fn finished(&self) -> bool {
        self.choices.iter().all(|c| c.finished)
    }

    /// Choices that have not finished.
    pub(super) fn open_choices(&self) -> u32 {
        self.choices.iter().filter(|c| !c.finished).count() as u32
    }

    /// Output tokens received of choices that have not finished.
    pub(super) fn open_tokens(&self) -> usize {
        self.choices.iter().filter(|c| !c.finished).map(|c| c.output_ids.len()).sum()
    }

    /// Output tokens received, over all choices.
    pub(super) fn tokens(&self) -> usize {
        self.choices.iter().map(|c| c.output_ids.len()).sum()
    }

    /// Takes in one message's deltas; those of finished choices are dropped.
    pub(super) fn take(
        &mut self,
        mut deltas: Vec<v1::ChoiceDelta>,
    ) -> Result<Vec<v1::ChoiceDelta>, RouterError> {
        let mut kept = Ok(());
        deltas.retain(|delta| {
            let taken = self.take_one(delta);
            let keep = matches!(taken, Ok(true));
            if let (Ok(()), Err(error)) = (&kept, taken) {
                kept = Err(error);
            }
            keep
        });
        kept.map(|()| deltas)
    }

    fn take_one(&mut self, delta: &v1::ChoiceDelta) -> Result<bool, RouterError> {
        let Some(choice) = self.choices.get_mut(delta.index as usize) else {
            return Err(nonsense("tokens of a choice that was not asked for"));
        };
        if choice.finished {
            return Ok(false);
        }
        if choice.output_ids.len() + delta.token_ids.len() > self.max_tokens {
            return Err(nonsense("more tokens than max_tokens"));
        }
        if delta.token_ids.iter().any(|id| *id as usize >= self.vocab_size) {
            return Err(nonsense("tokens outside of the model's vocabulary"));
        }
        choice.output_ids.extend_from_slice(&delta.token_ids);
        match delta.finish_reason() {
            v1::FinishReason::Unspecified => {}
            v1::FinishReason::Abort => {
                return Err(RouterError::new(
                    ErrorCode::Unavailable,
                    "the worker aborted the request; try again",
                ));
            }
            v1::FinishReason::Stop | v1::FinishReason::Length | v1::FinishReason::Complete => {
                choice.finished = true;
            }
        }
        Ok(true)
    }
}

fn nonsense(what: &str) -> RouterError {
    RouterError::new(ErrorCode::Internal, format!("the worker sent {what}"))
}

#[cfg(test)]
mod tests {
    use v1::FinishReason::{Abort, Length, Stop, Unspecified};

    use super::*;

    fn delta(index: u32, token_ids: &[u32], finish: v1::FinishReason) -> v1::ChoiceDelta {
        v1::ChoiceDelta {
            index,
            token_ids: token_ids.to_vec(),
            finish_reason: finish.into(),
            ..Default::default()
        }
    }

    #[test]
    fn choices_are_followed_to_their_end() {
        let mut progress = Progress::new(2, 4, 10);
        let kept = progress.take(vec![delta(0, &[1, 2], Unspecified), delta(1, &[7], Stop)]).unwrap();
        assert_eq!((kept.len(), progress.finished(), progress.tokens()), (2, false, 3));
        let kept = progress.take(vec![delta(1, &[9], Unspecified), delta(0, &[3, 4], Length)]).unwrap();
        assert_eq!(kept, [delta(0, &[3, 4], Length)], "late tokens of a finished choice are dropped");
        assert!(progress.finished());
        assert_eq!(progress.choices()[0].output_ids, [1, 2, 3, 4]);
        assert_eq!(progress.choices()[1].output_ids, [7]);
    }

    #[test]
    fn nonsense_is_an_error() {
        let check = |deltas: Vec<v1::ChoiceDelta>, part: &str| {
            let error = Progress::new(1, 2, 10).take(deltas).unwrap_err();
            assert!(error.message.contains(part), "{error}");
        };
        check(vec![delta(1, &[1], Unspecified)], "not asked for");
        check(vec![delta(0, &[1, 2, 3], Unspecified)], "more tokens");
        check(vec![delta(0, &[9, 10], Unspecified)], "vocabulary");
        check(vec![delta(0, &[1], Unspecified), delta(0, &[1, 2], Stop)], "more tokens");
        check(vec![delta(0, &[], Abort)], "aborted");
    }
}
