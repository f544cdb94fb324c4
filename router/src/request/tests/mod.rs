//! Bodies that are refused, and what those that are not become.

use serde_json::{Value, json};
use thalweg_model::grammar::{GrammarSource, JsonBlanks};
use thalweg_proto::code::ErrorCode;
use thalweg_proto::v1;

use super::*;
use crate::auth::Grant;
use crate::error::RouterError;
use crate::test_support::{entry, models};
use crate::tokenize::{TokenizedPrompt, tokenize_request};

mod fields;
mod limits;
mod prompts;

fn parse(endpoint: Endpoint, body: &Value) -> Result<ValidRequest, RouterError> {
    let models = models();
    let served = Served { models: &models, choices_max: 128, surface: &Surface::default(), draw_seed: &|| 7 };
    let object = parse_object(body.to_string().as_bytes())?;
    match endpoint {
        Endpoint::Chat | Endpoint::Responses => parse_chat(object, &served),
        Endpoint::Completions => parse_completion(object, &served),
    }
}

/// A sound body with some fields replaced; null takes a field out.
fn with(endpoint: Endpoint, changes: Value) -> Value {
    let mut body = match endpoint {
        Endpoint::Chat | Endpoint::Responses => {
            json!({"model": "tiny", "messages": [{"role": "user", "content": "hi"}]})
        }
        Endpoint::Completions => json!({"model": "tiny", "prompt": "hi"}),
    };
    for (name, value) in changes.as_object().expect("an object") {
        body[name] = value.clone();
    }
    body
}

fn refused(endpoint: Endpoint, changes: Value) -> RouterError {
    let body = with(endpoint, changes);
    let tokenized = parse(endpoint, &body).and_then(|mut request| tokenize_request(&mut request));
    tokenized.err().unwrap_or_else(|| panic!("{body} was let through"))
}

fn check_refused(endpoint: Endpoint, changes: Value, param: &str, part: &str) {
    let error = refused(endpoint, changes);
    assert_eq!(error.code, ErrorCode::InvalidRequest, "{}", error.message);
    assert_eq!(error.param.as_deref(), Some(param), "{}", error.message);
    assert!(error.message.contains(part), "{part:?} is not in {:?}", error.message);
}

fn accepted(endpoint: Endpoint, changes: Value) -> ValidRequest {
    parse(endpoint, &with(endpoint, changes)).unwrap_or_else(|error| panic!("{}", error.message))
}

fn tokenized(endpoint: Endpoint, changes: Value) -> Vec<TokenizedPrompt> {
    tokenize_request(&mut accepted(endpoint, changes)).unwrap_or_else(|error| panic!("{}", error.message))
}
