//! Bodies of chat and completion requests: parsed, tokenised, refused, and never a panic.
#![cfg_attr(fuzzing, no_main)]

#[cfg(fuzzing)]
libfuzzer_sys::fuzz_target!(|bytes: &[u8]| thalweg_router::fuzzing::body(bytes));

#[cfg(not(fuzzing))]
fn main() {}
