//! Bounds on grammars. A refusal names the bound; nothing that is within them holds a service up.

use std::time::Duration;

/// Bytes of a schema, regular expression, list of choices or Lark grammar.
pub const GRAMMAR_BYTES_MAX: usize = 256 << 10;

/// Brackets within brackets, in JSON and in Lark.
pub const NESTING_MAX: usize = 64;

/// Strings of a choice.
pub const CHOICES_MAX: usize = 10_000;

/// How long a request waits for its grammar, the wait for a place included.
pub const COMPILE_TIME_MAX: Duration = Duration::from_secs(2);

/// Grammars that are compiled at once for one tokenizer. One that overruns its time keeps its place until a bound on its size
/// ends it.
pub const COMPILATIONS_MAX: usize = 2;

/// Requests that wait for a place to compile; more are refused at once.
pub const WAITING_MAX: usize = 64;

/// Compiled grammars that are kept for one tokenizer, and refusals.
pub const CACHED_MAX: usize = 64;

/// Spaces, tabs and line breaks in a row between two tokens of JSON, where nobody says otherwise: enough to indent seven levels by
/// four, and an end for models that would go on for ever.
pub const JSON_BLANKS_DEFAULT: u32 = 32;

/// The most that they may be set to.
pub const JSON_BLANKS_MAX: u32 = 1024;

/// Bytes of a regular expression for what stands between two tokens of JSON.
pub const BLANKS_PATTERN_BYTES_MAX: usize = 256;

/// Work on finding out what it matches, at 20,000 a millisecond.
pub(super) const BLANKS_PATTERN_FUEL_MAX: u64 = 400_000;

/// Symbols of a grammar's productions. FHIR's schema, the largest in wide use, has 200,000.
pub(super) const GRAMMAR_SYMBOLS_MAX: usize = 250_000;

/// Work on a grammar's regular expressions when it is compiled, at 50,000 a millisecond on fast cores.
pub(super) const LEXER_FUEL_MAX: u64 = 500_000;

/// States of a sequence's lexer, of 1 to 2 KiB each.
pub(super) const LEXER_STATES_MAX: usize = 50_000;

/// Stack of the threads that compile: what nests within the bounds above must not overflow it.
pub(super) const COMPILE_STACK_BYTES: usize = 256 << 20;

/// A grammar that has taken longer than this to compile is not looked at any further before it is followed.
pub(super) const SCOUT_BEFORE: Duration = Duration::from_secs(1);

/// Time for that, about: no more answers are made up then.
pub(super) const SCOUT_TIME_MAX: Duration = Duration::from_millis(50);

/// Tokens of those answers, all together.
pub(super) const SCOUTED_TOKENS_MAX: usize = 1024;

/// States of the lexer that they bring up, about. Each sequence copies them.
pub(super) const SCOUTED_STATES_MAX: usize = 512;

/// Bytes that are kept of what they show, about.
pub(super) const SCOUTED_BYTES_MAX: usize = 1 << 20;
