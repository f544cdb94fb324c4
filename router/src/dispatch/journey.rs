//! What a request went through so far, and whether it may go on elsewhere: plain functions of what happened.
//!
//! Abnormal ends of workers are no fault of a request as long as its prompt is not found guilty of them (see `blame`): they
//! cost it neither tries nor resumes. They are bounded all the same, since a prompt may do harm too late to be found out.

use thalweg_proto::ids::{WorkerEpoch, WorkerId};

use super::broken::Broken;
use super::progress::Progress;
use crate::error::RouterError;
use crate::workers::failures::Life;

/// Workers that ended abnormally with a request and nothing else to put it down to.
const EXITS_MAX: u32 = 8;
/// Failures of one request, whoever is to blame: more than a cluster has that does anything else than fail.
const FAILURES_MAX: u32 = 16;

/// How often a request may go on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct TryLimits {
    /// Tries in a row without a new token, the first one included.
    pub(super) attempts_max: u32,
    /// Times that a begun answer is taken over by another worker.
    pub(super) resumes_max: u32,
}

/// State of one request over all workers that it met.
#[derive(Debug)]
pub(super) struct Journey {
    pub(super) progress: Progress,
    tried: Vec<Life>,
    /// Tokens when the present attempt began.
    tokens_before: usize,
    /// Tries since the last new token.
    tries: u32,
    resumes: u32,
    failures: u32,
    exits: u32,
}

/// What follows from a failure.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Verdict {
    /// Before the first token: another worker may be asked.
    Retry,
    /// After it: another worker may continue.
    Resume,
    /// It ends here.
    End(RouterError),
}

impl Journey {
    pub(super) fn new(choices: u32, max_tokens: u32, vocab_size: usize) -> Self {
        Self {
            progress: Progress::new(choices, max_tokens, vocab_size),
            tried: Vec::new(),
            tokens_before: 0,
            tries: 0,
            resumes: 0,
            failures: 0,
            exits: 0,
        }
    }

    /// A worker that failed it in its present life.
    pub(super) fn has_tried(&self, id: &WorkerId, epoch: WorkerEpoch) -> bool {
        self.tried.iter().any(|(tried, of)| tried == id && *of == epoch)
    }

    /// Part of the answer is there already.
    pub(super) fn begun(&self) -> bool {
        self.progress.tokens() > 0
    }

    /// The present attempt has brought tokens.
    pub(super) fn is_fruitful(&self) -> bool {
        self.progress.tokens() > self.tokens_before
    }

    /// Takes in that an attempt failed. `blamed`: the worker ended abnormally, and its prompt is suspected of it.
    pub(super) fn failed(
        &mut self,
        broken: &Broken,
        worker: Life,
        blamed: bool,
        limits: TryLimits,
    ) -> Verdict {
        let fruitful = self.is_fruitful();
        self.tokens_before = self.progress.tokens();
        if !self.tried.contains(&worker) {
            self.tried.push(worker);
        }
        if fruitful {
            self.tries = 0;
        }
        // A worker that is full or about to leave has not failed: the request waits for room again, as long as its time allows.
        if (broken.is_overload() || broken.is_hand_over()) && !fruitful {
            return if self.begun() { Verdict::Resume } else { Verdict::Retry };
        }
        self.failures += 1;
        self.exits += u32::from(blamed);
        let blameless = broken.is_exit() || broken.never_arrived() || (broken.is_hand_over() && fruitful);
        let refused = broken.is_refusal() && !fruitful;
        self.tries += u32::from(refused || (!self.begun() && !blameless));
        self.resumes += u32::from(self.begun() && !refused && !blameless);
        let only_once = if self.begun() { limits.resumes_max == 0 } else { limits.attempts_max <= 1 };
        let spent = (broken.is_exit() && only_once)
            || self.tries >= limits.attempts_max
            || self.resumes > limits.resumes_max
            || self.exits >= EXITS_MAX
            || self.failures >= FAILURES_MAX;
        if spent || !broken.retry_elsewhere() {
            return Verdict::End(broken.clone().into_error(self.progress.tokens()));
        }
        if self.begun() { Verdict::Resume } else { Verdict::Retry }
    }
}

#[cfg(test)]
mod tests {
    use thalweg_proto::code::ErrorCode;
    use thalweg_proto::v1;

    use super::*;

    const LIMITS: TryLimits = TryLimits { attempts_max: 3, resumes_max: 2 };

    fn exit() -> Broken {
        Broken::lost("connection", "reset")
    }

    fn refused(code: ErrorCode) -> Broken {
        Broken::Refused(RouterError::new(code, "refused"))
    }

    /// Per attempt: tokens that it brings, how it fails, whether its prompt is blamed. Checks the name of the last verdict;
    /// those before must let it go on.
    fn check(name: &str, attempts: &[(u32, Broken, bool)], expected: &str) {
        let mut journey = Journey::new(1, 1_000, 1_000);
        for (at, (tokens, broken, blamed)) in attempts.iter().enumerate() {
            if *tokens > 0 {
                let delta = v1::ChoiceDelta { token_ids: (0..*tokens).collect(), ..Default::default() };
                journey.progress.take(vec![delta]).unwrap();
            }
            let life = (WorkerId::new("w"), WorkerEpoch(at as u64));
            let verdict = journey.failed(broken, life.clone(), *blamed, LIMITS);
            assert!(journey.has_tried(&life.0, life.1));
            let got = match &verdict {
                Verdict::Retry => "retry",
                Verdict::Resume => "resume",
                Verdict::End(error) => error.code.as_str(),
            };
            let last = at + 1 == attempts.len();
            if last {
                assert_eq!(got, expected, "{name}: {verdict:?}");
            } else {
                assert!(matches!(got, "retry" | "resume"), "{name}, attempt {at}: {verdict:?}");
            }
        }
    }

    #[test]
    fn a_request_goes_on_within_its_limits() {
        use ErrorCode::{Draining, InvalidRequest, Overloaded};
        check("refused once", &[(0, refused(Overloaded), false)], "retry");
        check("its own fault", &[(0, refused(InvalidRequest), false)], "invalid_request");
        check("too late", &[(5, Broken::Late, false)], "deadline_exceeded");
        let three = |broken: &Broken| vec![(0, broken.clone(), false); 3];
        check("full thrice", &three(&refused(Overloaded)), "retry");
        check("cut off once", &[(5, exit(), true)], "resume");
        check("ended early thrice", &vec![(5, Broken::ended_early(), false); 3], "unavailable");
        let full = || (0, refused(Overloaded), false);
        let mut attempts = vec![(5, exit(), true), full(), full()];
        check("a refusal is no resume", &attempts, "resume");
        attempts.extend([(5, Broken::ended_early(), false)]);
        check("tries count from the last token", &attempts, "resume");
        check("handed over often", &vec![(5, refused(Draining), false); 8], "resume");
        check("turned away by all who leave", &vec![(0, refused(Draining), false); 20], "retry");
        check("at some time it is enough", &vec![(5, refused(Draining), false); 16], "draining");
    }

    #[test]
    fn ends_of_workers_cost_neither_tries_nor_resumes_and_are_bounded() {
        let exits = |count, tokens, blamed| vec![(tokens, exit(), blamed); count];
        check("in prefill", &exits(7, 0, true), "retry");
        check("behind tokens", &exits(7, 5, true), "resume");
        check("harm that nobody finds out", &exits(8, 5, true), "unavailable");
        check("somebody else's harm", &exits(15, 5, false), "resume");
        check("at some time it is enough", &exits(16, 5, false), "unavailable");
        for (tokens, limits) in
            [(0, TryLimits { attempts_max: 1, ..LIMITS }), (5, TryLimits { resumes_max: 0, ..LIMITS })]
        {
            let mut journey = Journey::new(1, 1_000, 1_000);
            journey
                .progress
                .take(vec![v1::ChoiceDelta { token_ids: (0..tokens).collect(), ..Default::default() }])
                .unwrap();
            let verdict = journey.failed(&exit(), (WorkerId::new("w"), WorkerEpoch(1)), true, limits);
            assert!(matches!(verdict, Verdict::End(_)), "where one try is all: {verdict:?}");
        }
        let mut attempts = exits(7, 5, true);
        attempts.extend(vec![(5, Broken::ended_early(), false); 2]);
        check("resumes of another kind are left", &attempts, "resume");
    }
}
