//! OpenAI's Responses API: answers that can be continued and read again by their ids.

mod create;
mod items;
mod object;
mod output;
mod script;
mod stored;

pub(crate) use create::create;
pub(crate) use script::ResponseScript;
pub(crate) use stored::{delete, input_items, retrieve};
