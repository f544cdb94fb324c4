//! `POST /v1/responses`: body to the chat request that it means.
//!
//! Items of the conversation become messages, the other fields those of a chat, and `parse_chat` does the rest; what it
//! refuses is told in the words of this API.

mod fields;
mod history;
mod items;
mod tools;
mod words;

#[cfg(test)]
mod tests;

use serde_json::{Map, Value};

use crate::error::RouterError;

use super::common::take;
use super::fields::Fields;
use super::{Endpoint, Served, ValidRequest, parse_chat};

pub(crate) use history::Kept;
pub(crate) use items::fresh_id;

/// A body whose conversation is not known yet: what it continues has to be fetched first.
#[derive(Clone, Debug)]
pub(crate) struct Draft {
    body: Map<String, Value>,
    pub(crate) previous: Option<String>,
    /// What the client says of `store`.
    pub(crate) store: Option<bool>,
}

/// What the reply is to repeat, and what has to be kept of it.
#[derive(Clone, Debug)]
pub(crate) struct Echo {
    /// Fields of the response object but for those that say how it went.
    pub(crate) fields: Map<String, Value>,
    /// Items of earlier responses, then those of this request, all with ids.
    pub(crate) history: Vec<Value>,
    pub(crate) input: Vec<Value>,
    pub(crate) store: bool,
}

impl Draft {
    /// Reads what decides where the conversation comes from.
    pub(crate) fn read(body: Map<String, Value>) -> Result<Self, RouterError> {
        let fields = Fields::new(&body);
        let previous = fields.string("previous_response_id")?.map(str::to_owned);
        let store = fields.boolean("store")?;
        fields::refuse_unsupported(&fields)?;
        Ok(Self { body, previous, store })
    }
}

/// The chat that a draft means, behind `history`; `store`: it will be kept.
pub(crate) fn parse_responses(
    draft: Draft,
    history: Vec<Value>,
    store: bool,
    served: &Served<'_>,
) -> Result<(ValidRequest, Echo), RouterError> {
    let mut body = draft.body;
    let input = items::input(take(&mut body, "input"))?;
    let fields = Fields::new(&body);
    let mut messages = items::messages(&history, &input)?;
    fields::instruct(&fields, &mut messages)?;
    let chat = fields::chat(&fields, messages)?;
    let mut request = parse_chat(chat, served).map_err(words::translated)?;
    request.endpoint = Endpoint::Responses;
    let mut echo = fields::echo(&fields, &request)?;
    echo.insert("store".to_owned(), Value::Bool(store));
    Ok((request, Echo { fields: echo, history, input, store }))
}

/// The same error in the words of this API, for what is found after parsing.
pub(crate) fn translated(error: RouterError) -> RouterError {
    words::translated(error)
}
