//! Prompts that took three workers down: refused for a while, so that a client that tries again takes no more.

use std::collections::VecDeque;
use std::time::Duration;

use thalweg_proto::code::ErrorCode;
use tokio::time::Instant;

use crate::error::RouterError;
use crate::workers::in_flight::PromptId;

/// How long a prompt is refused.
const REFUSED_FOR: Duration = Duration::from_secs(600);
/// Prompts remembered; above it the oldest is forgotten. Each has cost three workers, so there are never many.
const PROMPTS_MAX: usize = 1024;

/// The prompts, oldest first.
#[derive(Debug, Default)]
pub(super) struct Poison {
    prompts: VecDeque<(PromptId, Instant)>,
}

impl Poison {
    /// Prompts that are refused now.
    pub(super) fn len(&mut self, now: Instant) -> usize {
        while self.prompts.front().is_some_and(|(_, since)| now.duration_since(*since) >= REFUSED_FOR) {
            self.prompts.pop_front();
        }
        self.prompts.len()
    }

    /// Refuses this prompt from now on.
    pub(super) fn add(&mut self, prompt: PromptId, now: Instant) {
        self.prompts.retain(|(known, _)| *known != prompt);
        if self.prompts.len() == PROMPTS_MAX {
            self.prompts.pop_front();
        }
        self.prompts.push_back((prompt, now));
    }

    /// An error if the prompt is refused.
    pub(super) fn check(&mut self, prompt: &PromptId, now: Instant) -> Result<(), RouterError> {
        if self.len(now) == 0 {
            return Ok(());
        }
        match self.prompts.iter().find(|(known, _)| known == prompt) {
            None => Ok(()),
            Some((_, since)) => {
                let left = REFUSED_FOR.saturating_sub(now.duration_since(*since));
                let message = format!(
                    "workers ended abnormally on this prompt; it is refused for another {} s",
                    left.as_secs().max(1)
                );
                Err(RouterError::new(ErrorCode::WorkerCrashed, message))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn prompt(ids: &[u32]) -> PromptId {
        blake3::hash(&ids.iter().flat_map(|id| id.to_le_bytes()).collect::<Vec<_>>())
    }

    #[tokio::test(start_paused = true)]
    async fn a_prompt_is_refused_for_ten_minutes_and_others_are_not() {
        let mut poison = Poison::default();
        poison.check(&prompt(&[1, 2]), Instant::now()).unwrap();
        poison.add(prompt(&[1, 2]), Instant::now());
        let error = poison.check(&prompt(&[1, 2]), Instant::now()).unwrap_err();
        assert_eq!((error.code, error.message.contains("600 s")), (ErrorCode::WorkerCrashed, true));
        poison.check(&prompt(&[1, 2, 3]), Instant::now()).unwrap();
        tokio::time::advance(REFUSED_FOR).await;
        poison.check(&prompt(&[1, 2]), Instant::now()).unwrap();
        assert_eq!(poison.len(Instant::now()), 0);
    }

    #[tokio::test(start_paused = true)]
    async fn the_oldest_of_too_many_is_forgotten() {
        let mut poison = Poison::default();
        for id in 0..=PROMPTS_MAX as u32 {
            poison.add(prompt(&[id]), Instant::now());
        }
        poison.add(prompt(&[2]), Instant::now());
        assert_eq!(poison.len(Instant::now()), PROMPTS_MAX);
        poison.check(&prompt(&[0]), Instant::now()).unwrap();
        poison.check(&prompt(&[1]), Instant::now()).unwrap_err();
    }
}
