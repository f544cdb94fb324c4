//! Server-sent events: what chunks look like.

pub(crate) mod chunk;
pub(crate) mod delta;

#[cfg(test)]
mod tests;
