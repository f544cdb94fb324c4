//! The index over real servers: what two processes see of each other, and what they do while Redis is not itself.
#![allow(clippy::unwrap_used, reason = "a test's helpers may panic")]

mod basics;
mod faults;
mod random;
mod setups;
mod support;
mod values;
