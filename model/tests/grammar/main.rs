//! Whatever is drawn under a grammar's masks is a text of the grammar; and what cannot be enforced is refused.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

#[path = "../support/mod.rs"]
mod support;

mod blanks;
mod bounds;
mod masks;
mod random;
mod refusals;
mod schemas;
mod tiny;
mod walk;
