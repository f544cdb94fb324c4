//! From sources to grammars, within bounds of size and time.
#![expect(
    clippy::disallowed_types,
    clippy::disallowed_methods,
    reason = "a thread at work takes real time, also where tests pause tokio's"
)]

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use llguidance::api::ParserLimits;
use llguidance::earley::SlicedBiasComputer;
use llguidance::toktrie::InferenceCapabilities;
use llguidance::{ParserFactory, TokenParser};

use super::blanks::JsonBlanks;
use super::cache::Cache;
use super::guide::Words;
use super::limits::{
    CACHED_MAX, COMPILATIONS_MAX, COMPILE_STACK_BYTES, COMPILE_TIME_MAX, GRAMMAR_SYMBOLS_MAX, LEXER_FUEL_MAX,
    LEXER_STATES_MAX, SCOUT_BEFORE, WAITING_MAX,
};
use super::matcher::Matcher;
use super::scout::scout;
use super::source::GrammarSource;
use super::vocabulary::Vocabulary;
use crate::tokenizer::Tokenizer;

/// Characters of the library's own words that a message repeats.
const REASON_CHARS_MAX: usize = 400;

/// The library's word for a grammar none of whose texts can be begun.
const NOTHING_FITS: &str = "NoExtensionBias";

/// What it says of a `oneOf` whose options it cannot tell apart, an option that no client has.
const OVERLAPPING: &str = "coerce_one_of";

/// No grammar came of a source.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum GrammarError {
    /// It is malformed, contradicts itself, or asks for what cannot be enforced.
    #[error("cannot be enforced: {reason}")]
    Invalid {
        /// What is wrong with it.
        reason: String,
    },
    /// It is over a bound.
    #[error("is too complex: {reason}; simplify it")]
    TooLarge {
        /// Which.
        reason: String,
    },
    /// Others are being compiled, for as long as one may wait. A new try may succeed.
    #[error("cannot be compiled now, since others are; try again")]
    Busy,
    /// The model takes no grammars at all.
    #[error("cannot be enforced with this model: {reason}")]
    Model {
        /// Why.
        reason: String,
    },
}

/// Compiles grammars for one tokenizer and keeps what it has compiled. Cheap to clone.
#[derive(Clone)]
pub struct Grammars(Arc<Shared>);

struct Shared {
    factory: ParserFactory,
    words: Arc<Words>,
    vocabulary: Arc<Vocabulary>,
    cache: Mutex<Cache<Result<Grammar, GrammarError>>>,
    places: Mutex<Places>,
    place_free: Condvar,
}

/// Who compiles, and who waits for it.
#[derive(Default)]
struct Places {
    taken: usize,
    waiting: usize,
}

/// A compiled grammar. Cheap to clone.
#[derive(Clone)]
pub struct Grammar {
    /// At the start. Copied, never advanced.
    start: Arc<Matcher>,
    hash: [u8; 32],
}

impl Grammars {
    /// Takes a good part of a second for a large vocabulary.
    pub fn new(tokenizer: &Tokenizer) -> Result<Self, GrammarError> {
        let vocabulary = Arc::new(Vocabulary::new(tokenizer)?);
        let slices = SlicedBiasComputer::general_slices();
        let mut factory = ParserFactory::new(&vocabulary.trie, InferenceCapabilities::default(), &slices)
            .map_err(|error| GrammarError::Model { reason: brief(&error.to_string()) })?;
        factory.quiet();
        *factory.limits_mut() = ParserLimits {
            initial_lexer_fuel: LEXER_FUEL_MAX,
            max_lexer_states: LEXER_STATES_MAX,
            max_grammar_size: GRAMMAR_SYMBOLS_MAX,
            verbose_errors: false,
            ..ParserLimits::default()
        };
        Ok(Self(Arc::new(Shared {
            words: Arc::new(Words::new(factory.slicer())),
            factory,
            vocabulary,
            cache: Mutex::new(Cache::new(CACHED_MAX)),
            places: Mutex::default(),
            place_free: Condvar::new(),
        })))
    }

    /// The grammar of a source. Waits up to [`COMPILE_TIME_MAX`]: never call it on a reactor.
    pub fn compile(&self, source: &GrammarSource, blanks: JsonBlanks) -> Result<Grammar, GrammarError> {
        // Before anything waits or is remembered.
        source.check_size(blanks)?;
        let key = source.hash(blanks);
        if let Some(known) = lock(&self.0.cache).get(&key) {
            return known;
        }
        let deadline = Instant::now() + COMPILE_TIME_MAX;
        let place = self.place(deadline)?;
        // Another request with the same source may have had the place before.
        if let Some(known) = lock(&self.0.cache).get(&key) {
            return known;
        }
        let (done, result) = sync_channel(1);
        let (grammars, source) = (self.clone(), source.clone());
        let thread = std::thread::Builder::new().name("grammar".into()).stack_size(COMPILE_STACK_BYTES);
        let started = thread.spawn(move || {
            let grammar = grammars.compile_here(&source, blanks, key);
            lock(&grammars.0.cache).put(key, grammar.clone());
            drop(place);
            // Whoever waited may have given up.
            let _ = done.send(grammar);
        });
        started.map_err(|_| GrammarError::Busy)?;
        match result.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
            Ok(grammar) => grammar,
            Err(RecvTimeoutError::Timeout) => {
                let refusal = Err(over_time());
                lock(&self.0.cache).put(key, refusal.clone());
                refusal
            }
            Err(RecvTimeoutError::Disconnected) => Err(panicked()),
        }
    }

    fn compile_here(
        &self,
        source: &GrammarSource,
        blanks: JsonBlanks,
        hash: [u8; 32],
    ) -> Result<Grammar, GrammarError> {
        let begun = Instant::now();
        let compiled = catch_unwind(AssertUnwindSafe(|| {
            let mut parser = self.begin(source, blanks)?;
            if begun.elapsed() < SCOUT_BEFORE
                && !scout(&mut parser, &self.0.words, &self.0.vocabulary.control)
            {
                parser = self.begin(source, blanks)?;
            }
            let start = Matcher::new(llguidance::Matcher::new(Ok(parser)), self.0.vocabulary.clone());
            // What has no beginning has no end; and what takes too long once would do so in every request.
            let mask = start.copy().mask(&[]);
            mask.map_err(|error| no_beginning(&error.to_string()))?;
            Ok(Grammar { start: Arc::new(start), hash })
        }));
        let grammar = compiled.unwrap_or_else(|_| Err(panicked()))?;
        // Known before those who have given up: the next request would find it, and one before it did not.
        if begun.elapsed() > COMPILE_TIME_MAX { Err(over_time()) } else { Ok(grammar) }
    }

    /// A parser before the first token, with the library's own search for what may follow.
    fn begin(&self, source: &GrammarSource, blanks: JsonBlanks) -> Result<TokenParser, GrammarError> {
        self.0.factory.create_parser(source.parse(blanks)?).map_err(|error| refusal(&error))
    }

    fn place(&self, deadline: Instant) -> Result<Place, GrammarError> {
        let mut places = lock(&self.0.places);
        if places.taken == COMPILATIONS_MAX && places.waiting == WAITING_MAX {
            return Err(GrammarError::Busy);
        }
        places.waiting += 1;
        while places.taken == COMPILATIONS_MAX {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                places.waiting -= 1;
                return Err(GrammarError::Busy);
            }
            places = self.0.place_free.wait_timeout(places, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        places.waiting -= 1;
        places.taken += 1;
        Ok(Place(self.clone()))
    }
}

/// The right to compile.
struct Place(Grammars);

impl Drop for Place {
    fn drop(&mut self) {
        let shared = &self.0.0;
        lock(&shared.places).taken -= 1;
        shared.place_free.notify_one();
    }
}

impl Grammar {
    /// State before the first token.
    pub fn matcher(&self) -> Matcher {
        self.start.copy()
    }
}

impl PartialEq for Grammar {
    fn eq(&self, other: &Self) -> bool {
        self.hash == other.hash
    }
}

impl std::fmt::Debug for Grammar {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Grammar").finish_non_exhaustive()
    }
}

impl std::fmt::Debug for Grammars {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Grammars").finish_non_exhaustive()
    }
}

/// The library's error chain in one line.
fn refusal(error: &anyhow::Error) -> GrammarError {
    let reason = format!("{error:#}");
    if reason.contains("panic:") {
        return panicked();
    }
    if reason.contains(OVERLAPPING) {
        let remedy = "use `anyOf`, or tell the options apart by a required property with a `const` in each";
        return GrammarError::Invalid { reason: format!("options of a `oneOf` may overlap; {remedy}") };
    }
    GrammarError::Invalid { reason: brief(&reason) }
}

fn no_beginning(words: &str) -> GrammarError {
    let reason = if words.contains(NOTHING_FITS) { "no text matches it" } else { words };
    GrammarError::Invalid { reason: reason.to_owned() }
}

pub(super) fn brief(reason: &str) -> String {
    let text = reason.split("<non-verbose/>").next().unwrap_or(reason);
    let words: Vec<&str> = text.split_whitespace().collect();
    words.join(" ").chars().take(REASON_CHARS_MAX).collect()
}

fn over_time() -> GrammarError {
    GrammarError::TooLarge {
        reason: format!("it takes more than {} s to compile", COMPILE_TIME_MAX.as_secs()),
    }
}

fn panicked() -> GrammarError {
    GrammarError::Invalid { reason: "it makes the compiler fail".into() }
}

/// Nothing that is held here breaks halfway.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests;
