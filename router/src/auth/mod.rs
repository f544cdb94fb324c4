//! Who may ask, and for how much: API keys, known by their hashes alone.
//!
//! One layer stands in front of everything that the router serves and lets through what shows a key, and a short list of
//! public paths. Whatever is added behind it is closed until somebody opens it.

mod file;
mod grant;
mod keys;
pub(crate) mod layer;
mod reload;

pub(crate) use grant::Grant;
pub(crate) use keys::Keys;
