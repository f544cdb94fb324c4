//! Server-sent events: what chunks look like.

pub(crate) mod chunk;

#[cfg(test)]
mod tests;
