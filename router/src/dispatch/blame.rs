//! Which prompts are suspected of ending their workers, as plain functions of the exits that were seen.
//!
//! A worker that ends abnormally puts a *strike* on every prompt that was in flight on it, unless another one there has
//! more strikes or was tried alone. A suspected prompt stands *trial*: its copies go one at a time, and from the second
//! strike on it goes alone among all that are suspected, once the model's workers have been calm for a while. A few new
//! tokens acquit it, whoever sent it. With the third strike it is *guilty*, if nothing else explains the exits:
//! - it was tried alone, and no other worker failed shortly before or after; or
//! - copies of it went side by side: no worker failed but with it, none lives that runs it, and others live on without it.
//!
//! So a prompt that crashes its workers takes three, or as many as run it when the first one ends; and workers that are
//! killed from outside, all together or one after the other, make no prompt guilty.

use std::sync::Arc;
use std::time::Duration;

use hashbrown::HashMap;
use tokio::sync::Semaphore;
use tokio::time::Instant;

use crate::workers::failures::Life;
use crate::workers::in_flight::{OnWorker, PromptId};

/// Strikes at which a prompt may be guilty.
pub(super) const STRIKES_MAX: u32 = 3;
/// Strikes from which on it is tried alone.
const ALONE_STRIKES: u32 = 2;
/// No worker fails for so long: there is calm. Workers that fail closer together may have one cause.
pub(super) const CALM: Duration = Duration::from_secs(2);
/// New tokens that prove that a request does no harm at once: more than the steps that a worker has in flight.
pub(super) const PROVING_TOKENS: usize = 4;
/// A prompt that nobody sends any more is forgotten.
const FORGOTTEN_AFTER: Duration = Duration::from_secs(600);
/// Prompts suspected at a time; no others are above it.
const SUSPECTS_MAX: usize = 65_536;

/// All suspected prompts.
#[derive(Debug, Default)]
pub(super) struct Blame {
    suspects: HashMap<PromptId, Suspect>,
}

#[derive(Debug)]
struct Suspect {
    strikes: u32,
    /// Lives of workers that ended with it, when the first one did and when the last one did.
    lives: Vec<Life>,
    first: Instant,
    last: Instant,
    /// The last one ended while it was tried alone.
    alone: bool,
    /// Held by the copy that stands trial.
    turn: Arc<Semaphore>,
}

/// How a suspected prompt goes on.
#[derive(Clone, Debug)]
pub(super) struct Suspicion {
    pub(super) alone: bool,
    pub(super) turn: Arc<Semaphore>,
}

/// What is to be known of a prompt that may be guilty.
#[derive(Clone, Debug)]
pub(super) struct Charge {
    pub(super) lives: Vec<Life>,
    pub(super) first: Instant,
    pub(super) last: Instant,
    /// The last worker ended while it was tried alone.
    pub(super) alone: bool,
}

impl Blame {
    /// A worker ended abnormally with these in flight.
    pub(super) fn exit(&mut self, life: &Life, in_flight: &[OnWorker], now: Instant) {
        self.suspects.retain(|_, suspect| now.saturating_duration_since(suspect.last) < FORGOTTEN_AFTER);
        let tried = in_flight.iter().any(|on| on.alone);
        let accused = in_flight.iter().filter(|on| on.alone || !tried);
        let most = accused.clone().map(|on| self.strikes(&on.prompt)).max().unwrap_or(0);
        for on in accused {
            self.strike(on, most, life, now);
        }
    }

    /// Once per exit, however many copies were in flight.
    fn strike(&mut self, on: &OnWorker, most: u32, life: &Life, now: Instant) {
        let room = self.suspects.len() < SUSPECTS_MAX;
        match self.suspects.get_mut(&on.prompt) {
            Some(suspect) if suspect.strikes == most => {
                suspect.strikes += 1;
                suspect.lives.push(life.clone());
                (suspect.last, suspect.alone) = (now, on.alone);
            }
            None if most == 0 && room => {
                let suspect = Suspect {
                    strikes: 1,
                    lives: vec![life.clone()],
                    first: now,
                    last: now,
                    alone: false,
                    turn: Arc::new(Semaphore::new(1)),
                };
                self.suspects.insert(on.prompt, suspect);
            }
            _ => {}
        }
    }

    pub(super) fn strikes(&self, prompt: &PromptId) -> u32 {
        self.suspects.get(prompt).map_or(0, |suspect| suspect.strikes)
    }

    /// Whether that worker's end is put down to it.
    pub(super) fn is_blamed(&self, prompt: &PromptId, life: &Life) -> bool {
        self.suspects.get(prompt).is_some_and(|suspect| suspect.lives.contains(life))
    }

    /// Whether and how it stands trial.
    pub(super) fn suspicion(&self, prompt: &PromptId) -> Option<Suspicion> {
        let suspect = self.suspects.get(prompt)?;
        Some(Suspicion { alone: suspect.strikes >= ALONE_STRIKES, turn: Arc::clone(&suspect.turn) })
    }

    /// The same once its turn has come: None if it was acquitted or accused anew meanwhile.
    pub(super) fn still(&self, prompt: &PromptId, turn: &Arc<Semaphore>) -> Option<Suspicion> {
        self.suspicion(prompt).filter(|suspicion| Arc::ptr_eq(&suspicion.turn, turn))
    }

    /// What a prompt with strikes enough is charged with.
    pub(super) fn charge(&self, prompt: &PromptId) -> Option<Charge> {
        let suspect = self.suspects.get(prompt).filter(|suspect| suspect.strikes >= STRIKES_MAX)?;
        let Suspect { first, last, alone, .. } = *suspect;
        Some(Charge { lives: suspect.lives.clone(), first, last, alone })
    }

    /// It brought tokens where it could have done harm, or its fate is sealed.
    pub(super) fn clear(&mut self, prompt: &PromptId) {
        self.suspects.remove(prompt);
    }
}

#[cfg(test)]
mod tests {
    use thalweg_proto::ids::{WorkerEpoch, WorkerId};

    use super::*;

    fn prompt(name: &str) -> PromptId {
        blake3::hash(name.as_bytes())
    }

    /// Exits in a row, each with what was in flight (`!` for one that was tried alone), and the strikes afterwards.
    fn check(exits: &[&[&str]], expected: &[(&str, u32)]) -> Blame {
        let (mut blame, now) = (Blame::default(), Instant::now());
        for (at, in_flight) in exits.iter().enumerate() {
            let on = |name: &&str| {
                let (alone, name) = (name.starts_with('!'), name.trim_start_matches('!'));
                OnWorker { prompt: prompt(name), alone, proven: false }
            };
            let in_flight: Vec<_> = in_flight.iter().map(on).collect();
            blame.exit(&(WorkerId::new("w"), WorkerEpoch(at as u64)), &in_flight, now);
        }
        for (name, strikes) in expected {
            assert_eq!(blame.strikes(&prompt(name)), *strikes, "{name} after {exits:?}");
        }
        blame
    }

    #[test]
    fn the_most_suspicious_prompt_in_flight_takes_the_blame() {
        check(&[&["a", "b"]], &[("a", 1), ("b", 1), ("c", 0)]);
        check(&[&["a", "a", "a"]], &[("a", 1)]);
        check(&[&["a", "b"], &["a", "c"]], &[("a", 2), ("b", 1), ("c", 0)]);
        check(&[&["a", "b"], &["a", "b"], &["!a", "b"]], &[("a", 3), ("b", 2)]);
        check(&[&["a", "b"], &["b"], &["!a", "b"]], &[("a", 2), ("b", 2)]);
        check(&[&[]], &[]);
    }

    #[test]
    fn a_suspect_is_tried_alone_from_its_second_strike_on_and_charged_with_the_third() {
        let blame = check(&[&["a", "b"], &["a"]], &[]);
        assert!(blame.suspicion(&prompt("a")).unwrap().alone);
        assert!(!blame.suspicion(&prompt("b")).unwrap().alone);
        assert!(blame.suspicion(&prompt("c")).is_none());
        assert!(blame.charge(&prompt("a")).is_none());
        let charge = check(&[&["a"], &["a"], &["!a"]], &[]).charge(&prompt("a")).unwrap();
        assert_eq!((charge.lives.len(), charge.alone), (3, true));
        let charge = check(&[&["a"], &["a"], &["a"]], &[]).charge(&prompt("a")).unwrap();
        assert!(!charge.alone, "copies side by side");
    }

    #[test]
    fn an_acquitted_prompt_begins_anew_and_with_it_all_its_copies() {
        let mut blame = check(&[&["a"], &["a"]], &[]);
        let turn = blame.suspicion(&prompt("a")).unwrap().turn;
        assert!(blame.still(&prompt("a"), &turn).is_some());
        blame.clear(&prompt("a"));
        assert!(blame.still(&prompt("a"), &turn).is_none());
        let life = (WorkerId::new("w"), WorkerEpoch(9));
        blame.exit(&life, &[OnWorker { prompt: prompt("a"), alone: false, proven: false }], Instant::now());
        assert_eq!(blame.strikes(&prompt("a")), 1);
        assert!(blame.still(&prompt("a"), &turn).is_none(), "of another accusation");
    }

    #[test]
    fn a_prompt_that_nobody_sends_is_forgotten() {
        let mut blame = check(&[&["a"], &["a"]], &[]);
        let life = (WorkerId::new("w"), WorkerEpoch(9));
        blame.exit(&life, &[], Instant::now() + FORGOTTEN_AFTER);
        assert_eq!(blame.strikes(&prompt("a")), 0);
    }
}
