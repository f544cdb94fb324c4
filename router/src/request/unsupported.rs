//! Fields that change what the output must be and are not served yet: a clear refusal, never unconstrained output.

use serde_json::Value;

use crate::error::RouterError;

use super::fields::Fields;

/// Other servers' names for what an answer is held to.
const CONSTRAINTS: [(&str, &str); 4] = [
    ("regex", "is not supported; use `guided_regex`"),
    ("ebnf", "is not supported; use `guided_grammar`, a grammar in Lark's notation"),
    ("grammar", "is not supported; use `guided_grammar`, a grammar in Lark's notation"),
    ("json_schema", "is not supported; use `guided_json`"),
];

/// Refuses what is not served, by name. Fields that nobody knows are ignored elsewhere.
pub(super) fn refuse_unsupported(fields: &Fields<'_>) -> Result<(), RouterError> {
    for name in fields.names() {
        if let Some(reason) = fields.get(name).and_then(|value| reason(name, value)) {
            return Err(fields.error(name, reason));
        }
    }
    refuse_constraints(fields)
}

/// Refuses what an answer would not be held to.
pub(super) fn refuse_constraints(fields: &Fields<'_>) -> Result<(), RouterError> {
    for (name, reason) in CONSTRAINTS {
        if fields.get(name).is_some_and(|value| value != "") {
            return Err(fields.error(name, reason));
        }
    }
    Ok(())
}

fn reason(name: &str, value: &Value) -> Option<&'static str> {
    let is_on = value != &Value::Bool(false);
    match name {
        "best_of" => (value.as_u64() != Some(1)).then_some("is not supported; use `n`"),
        "functions" | "function_call" => Some("is not supported; use `tools` and `tool_choice`"),
        "suffix" => (value.as_str() != Some("")).then_some("is not supported; send the whole prompt"),
        "use_beam_search" => is_on.then_some("is not supported; use `n` with a temperature"),
        "modalities" => (value != &serde_json::json!(["text"])).then_some("must be [\"text\"]"),
        "audio" => Some("is not supported; this model writes text only"),
        "chat_template" => Some("cannot be sent with a request; start the worker with --chat-template"),
        "prompt_embeds" => Some("is not supported; send `prompt`"),
        "logits_processors" => Some("is not supported; use `logit_bias`"),
        "bad_words" | "allowed_token_ids" => {
            (value != &serde_json::json!([])).then_some("is not supported yet; use `logit_bias`")
        }
        "structural_tag" | "thinking_token_budget" => Some("is not supported yet; leave it out"),
        _ => None,
    }
}
