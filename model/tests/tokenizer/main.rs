//! Text to ids and back: against other engines' ids, and against rules that hold for all text.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

#[path = "../support/mod.rs"]
mod support;

mod control_tokens;
mod detokenizer;
mod folders;
mod gguf;
mod golden;
mod models;
mod start_time;
