//! Who may go now, who waits and who is refused.

mod accounts;
mod gate;
mod lines;
mod queue;

pub use accounts::{AdmissionLimits, Usage};
pub use gate::{Ask, Gate, Permit};
