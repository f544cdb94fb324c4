//! Any tokens of a worker as chunks of a stream: each is whole JSON, and how tokens were grouped changes no text.
#![cfg_attr(fuzzing, no_main)]

#[cfg(fuzzing)]
libfuzzer_sys::fuzz_target!(|bytes: &[u8]| thalweg_router::fuzzing::stream(bytes));

#[cfg(not(fuzzing))]
fn main() {}
