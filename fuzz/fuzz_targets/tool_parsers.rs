//! A model's text read for calls and thoughts: the same whole and in pieces, arguments being whole JSON where a call is.
#![cfg_attr(fuzzing, no_main)]

#[cfg(fuzzing)]
libfuzzer_sys::fuzz_target!(|text: &str| thalweg_router::fuzzing::calls(text));

#[cfg(not(fuzzing))]
fn main() {}
