//! What a request went through so far, and whether it may go on elsewhere: plain functions of what happened.
//!
//! Blame. A worker that ends abnormally puts a *strike* on every request that was in flight on it; the first new token
//! takes all strikes away. So a prompt that crashes its workers collects strikes, whatever position it crashes them at,
//! while a stream that merely shared the worker loses them as it goes on elsewhere. An exit *counts* for a request unless
//! another one in flight there had more strikes. Three counted exits end a request, and its prompt is refused for a
//! while. Requests with two strikes are tried one at a time (see `carry`), so that the guilty one is alone with its third.

use thalweg_proto::code::ErrorCode;
use thalweg_proto::ids::{WorkerEpoch, WorkerId};

use super::broken::Broken;
use super::progress::Progress;
use crate::error::RouterError;

/// Abnormal exits that count for a request before it is held guilty.
const EXITS_MAX: u32 = 3;
/// Strikes from which on a request is tried apart from others like it.
const PROBATION_STRIKES: u32 = EXITS_MAX - 1;
/// Failures of one request, whoever is to blame: more than a cluster has that does anything else than fail.
const FAILURES_MAX: u32 = 16;

/// One life of a worker.
pub(super) type Life = (WorkerId, WorkerEpoch);

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
    strikes: u32,
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
    /// It ends here, and its prompt is held guilty of it.
    Guilty(RouterError),
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
            strikes: 0,
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

    /// Strikes that it has if the worker that it goes to ends abnormally before a new token.
    pub(super) fn strikes_at_exit(&self) -> u32 {
        self.strikes + 1
    }

    /// Two exits in a row without a token between: the next worker gets it alone.
    pub(super) fn on_probation(&self) -> bool {
        self.strikes >= PROBATION_STRIKES
    }

    /// Takes in that an attempt failed. `most_strikes`: of all requests in flight on the worker, if it ended abnormally.
    pub(super) fn failed(
        &mut self,
        broken: &Broken,
        worker: Life,
        most_strikes: u32,
        limits: TryLimits,
    ) -> Verdict {
        let fruitful = self.progress.tokens() > self.tokens_before;
        self.tokens_before = self.progress.tokens();
        if !self.tried.contains(&worker) {
            self.tried.push(worker);
        }
        if fruitful {
            (self.tries, self.strikes) = (0, 0);
        }
        // A full worker has not failed: the request waits for room again, as long as its time allows.
        if broken.is_overload() && !fruitful {
            return if self.begun() { Verdict::Resume } else { Verdict::Retry };
        }
        self.failures += 1;
        let mut blameless = broken.never_arrived() || (broken.is_hand_over() && fruitful);
        if broken.is_exit() {
            self.strikes += 1;
            blameless = most_strikes > self.strikes;
            self.exits += u32::from(!blameless);
        }
        if self.exits >= EXITS_MAX {
            return Verdict::Guilty(crashed(self.progress.tokens()));
        }
        let refused = broken.is_refusal() && !fruitful;
        self.tries += u32::from(refused || (!self.begun() && !blameless));
        self.resumes += u32::from(self.begun() && !refused && !blameless);
        let spent = self.tries >= limits.attempts_max
            || self.resumes > limits.resumes_max
            || self.failures >= FAILURES_MAX;
        if spent || !broken.retry_elsewhere() {
            return Verdict::End(broken.clone().into_error(self.progress.tokens()));
        }
        if self.begun() { Verdict::Resume } else { Verdict::Retry }
    }
}

fn crashed(tokens: usize) -> RouterError {
    let message = format!(
        "{EXITS_MAX} workers ended abnormally while they ran this request, which had {tokens} tokens; its prompt is \
         refused for some minutes"
    );
    RouterError::new(ErrorCode::WorkerCrashed, message)
}

#[cfg(test)]
mod tests {
    use thalweg_proto::v1;

    use super::*;

    const LIMITS: TryLimits = TryLimits { attempts_max: 3, resumes_max: 2 };

    fn exit() -> Broken {
        Broken::lost("connection", "reset")
    }

    fn refused(code: ErrorCode) -> Broken {
        Broken::Refused(RouterError::new(code, "refused"))
    }

    /// Per attempt: tokens that it brings, how it fails, most strikes in flight there. Checks the name of the last
    /// verdict; those before must let it go on.
    fn check(name: &str, attempts: &[(u32, Broken, u32)], expected: &str) {
        let mut journey = Journey::new(1, 1_000, 1_000);
        for (at, (tokens, broken, most_strikes)) in attempts.iter().enumerate() {
            if *tokens > 0 {
                let delta = v1::ChoiceDelta { token_ids: (0..*tokens).collect(), ..Default::default() };
                journey.progress.take(vec![delta]).unwrap();
            }
            let life = (WorkerId::new("w"), WorkerEpoch(at as u64));
            let verdict = journey.failed(broken, life.clone(), *most_strikes, LIMITS);
            assert!(journey.has_tried(&life.0, life.1));
            let got = match &verdict {
                Verdict::Retry => "retry",
                Verdict::Resume => "resume",
                Verdict::End(error) => error.code.as_str(),
                Verdict::Guilty(_) => "guilty",
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
        check("refused once", &[(0, refused(Overloaded), 0)], "retry");
        check("its own fault", &[(0, refused(InvalidRequest), 0)], "invalid_request");
        check("too late", &[(5, Broken::Late, 0)], "deadline_exceeded");
        let three = |broken: &Broken| vec![(0, broken.clone(), 0); 3];
        check("full thrice", &three(&refused(Overloaded)), "retry");
        check("cut off once", &[(5, exit(), 1)], "resume");
        check("ended early thrice", &vec![(5, Broken::ended_early(), 0); 3], "unavailable");
        let mut attempts = vec![(5, exit(), 1), (0, refused(Overloaded), 0), (0, refused(Overloaded), 0)];
        check("a refusal is no resume", &attempts, "resume");
        attempts.extend([(5, Broken::ended_early(), 0)]);
        check("tries count from the last token", &attempts, "resume");
        check("handed over often", &vec![(5, refused(Draining), 0); 8], "resume");
        check("handed over without having done a thing", &three(&refused(Draining)), "draining");
        check("at some time it is enough", &vec![(5, refused(Draining), 0); 16], "draining");
    }

    #[test]
    fn three_exits_that_nobody_else_explains_are_enough() {
        check("in prefill", &[(0, exit(), 1), (0, exit(), 2), (0, exit(), 3)], "guilty");
        check("at one token", &[(5, exit(), 1), (0, exit(), 2), (0, exit(), 3)], "guilty");
        check("anywhere", &[(5, exit(), 1), (5, exit(), 1), (5, exit(), 1)], "guilty");
        check("in bad company", &[(5, exit(), 1), (5, exit(), 2), (5, exit(), 3), (5, exit(), 3)], "resume");
        check("in bad company and slow", &[(5, exit(), 1), (0, exit(), 2), (0, exit(), 4)], "resume");
        check("in prefill, in bad company", &[(0, exit(), 1), (0, exit(), 2), (0, exit(), 4)], "retry");
    }

    #[test]
    fn probation_begins_with_the_second_strike_and_ends_with_a_token() {
        let mut journey = Journey::new(1, 100, 1_000);
        let life = || (WorkerId::new("w"), WorkerEpoch(1));
        assert_eq!((journey.strikes_at_exit(), journey.on_probation()), (1, false));
        journey.failed(&exit(), life(), 1, LIMITS);
        journey.failed(&exit(), life(), 2, LIMITS);
        assert_eq!((journey.strikes_at_exit(), journey.on_probation()), (3, true));
        journey.progress.take(vec![v1::ChoiceDelta { token_ids: vec![1], ..Default::default() }]).unwrap();
        journey.failed(&exit(), life(), 3, LIMITS);
        assert_eq!((journey.strikes_at_exit(), journey.on_probation()), (2, false));
    }
}
