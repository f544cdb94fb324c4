//! Structured output: what a client wants an answer to look like, compiled into masks over a model's vocabulary.
//!
//! Routers and workers compile with the same code and the same limits, so that what one of them takes, the other takes too.
//! Everything that a [`Matcher`] knows is a function of its grammar and the tokens that it has consumed.

mod blanks;
mod cache;
mod compile;
mod guide;
pub mod limits;
mod mask;
mod matcher;
mod reach;
mod schema;
mod scout;
mod source;
mod thoughts;
mod trie;
mod vocabulary;

pub use blanks::JsonBlanks;
pub use compile::{Grammar, GrammarError, Grammars};
pub use mask::TokenMask;
pub use matcher::{Matcher, MatcherError};
pub use source::GrammarSource;
