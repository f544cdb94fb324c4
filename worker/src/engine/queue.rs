//! Whether a request may join the queue: while a place is free, or while little prefill waits. The rest waits in the router,
//! where it can still go elsewhere.

use std::time::Duration;

use super::handle::Refusal;
use super::load::LoadSnapshot;
use super::request::EngineRequest;

/// How much may wait.
#[derive(Clone, Copy, Debug)]
pub(super) struct QueueLimits {
    /// Sequences.
    pub(super) waiting_max: usize,
    /// Sequences that run at once: while fewer are here, a request is taken whatever its prompt costs.
    pub(super) running_max: usize,
    /// Prompt tokens per second to assume until they are measured; 0: not known.
    pub(super) prefill_rate: f64,
}

/// Prefill that may wait once all places are taken.
const PREFILL_AHEAD_MAX: Duration = Duration::from_secs(1);

/// Steps after which a measured rate is trusted.
const RATE_SAMPLES_MIN: u32 = 20;

/// What the engine has before it.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Backlog {
    /// Sequences that run or wait.
    active: usize,
    /// Of these, those that wait.
    waiting: usize,
    prefill_tokens: usize,
    /// Prompt tokens per second as measured, once that can be trusted.
    prefill_rate: Option<f64>,
}

impl Backlog {
    pub(super) fn of(load: &LoadSnapshot) -> Self {
        let rates = &load.rates;
        let is_measured = rates.prefill_samples >= RATE_SAMPLES_MIN && rates.prefill_tokens_per_second > 0.0;
        Self {
            active: (load.running + load.waiting) as usize,
            waiting: load.waiting as usize,
            prefill_tokens: load.prefill_tokens_ahead as usize,
            prefill_rate: is_measured.then_some(rates.prefill_tokens_per_second),
        }
    }

    pub(super) fn add(&mut self, other: &Self) {
        self.active += other.active;
        self.waiting += other.waiting;
        self.prefill_tokens += other.prefill_tokens;
    }

    /// What a request adds, as long as nobody has looked for its prompt in the cache. Choices share the prompt.
    pub(super) fn of_request(request: &EngineRequest) -> Self {
        let open = || request.choices.iter().filter(|c| !c.finished);
        let sequences = open().count();
        let outputs: usize = open().map(|c| c.output.len()).sum();
        let prefill_tokens = request.prompt.len() + outputs;
        Self { active: sequences, waiting: sequences, prefill_tokens, prefill_rate: None }
    }
}

impl QueueLimits {
    /// Whether `new` may join what is there.
    pub(super) fn check(&self, there: &Backlog, new: &Backlog) -> Result<(), Refusal> {
        if there.waiting + new.waiting > self.waiting_max {
            return Err(Refusal::Overloaded { waiting: there.waiting, limit: self.waiting_max });
        }
        let rate = there.prefill_rate.unwrap_or(self.prefill_rate);
        if there.active < self.running_max || self.prefill_rate <= 0.0 || rate <= 0.0 {
            return Ok(());
        }
        // Its own prompt does not count: a long one would find no moment at which it may come, while short ones keep every place taken.
        let ahead = Duration::try_from_secs_f64(there.prefill_tokens as f64 / rate);
        match ahead.unwrap_or(Duration::MAX) {
            ahead if ahead > PREFILL_AHEAD_MAX => {
                Err(Refusal::Backlogged { ahead, limit: PREFILL_AHEAD_MAX })
            }
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: QueueLimits = QueueLimits { waiting_max: 100, running_max: 4, prefill_rate: 1000.0 };

    fn there(active: usize, waiting: usize, prefill_tokens: usize, prefill_rate: Option<f64>) -> Backlog {
        Backlog { active, waiting, prefill_tokens, prefill_rate }
    }

    fn check(
        limits: QueueLimits,
        there: Backlog,
        (sequences, tokens): (usize, usize),
        expected: Option<&str>,
    ) {
        let new =
            Backlog { active: sequences, waiting: sequences, prefill_tokens: tokens, prefill_rate: None };
        let refusal = limits.check(&there, &new).err().map(|refusal| refusal.to_string());
        let is_as_expected = match (&refusal, expected) {
            (None, None) => true,
            (Some(refusal), Some(says)) => refusal.contains(says),
            _ => false,
        };
        assert!(is_as_expected, "{new:?} to {there:?}: {refusal:?}");
    }

    #[test]
    fn places_and_one_second_of_prefill() {
        let seconds = Some("prompts of 1.0 s wait");
        check(LIMITS, there(0, 0, 0, None), (1, 5000), None);
        check(LIMITS, there(3, 0, 9000, None), (8, 5000), None);
        check(LIMITS, there(4, 0, 0, None), (1, 1 << 40), None);
        check(LIMITS, there(4, 0, 1000, None), (1, 1 << 40), None);
        check(LIMITS, there(4, 0, 1001, None), (1, 1), seconds);
        check(LIMITS, there(9, 5, 1001, None), (1, 1), seconds);
        check(LIMITS, there(4, 0, 101, Some(100.0)), (1, 1), seconds);
        check(LIMITS, there(4, 0, 2000, Some(2000.0)), (1, 100), None);
        check(LIMITS, there(99, 99, 0, None), (1, 1), None);
        check(LIMITS, there(100, 99, 0, None), (2, 1), Some("99 sequences wait and at most 100 may"));
        let unknown = QueueLimits { prefill_rate: 0.0, ..LIMITS };
        check(unknown, there(50, 46, 1 << 40, Some(1.0)), (1, 5000), None);
        check(LIMITS, there(4, 0, usize::MAX >> 1, Some(1e-300)), (1, 1), Some(" s wait"));
    }
}
