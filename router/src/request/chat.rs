//! `POST /v1/chat/completions`: body to request.

use serde_json::{Map, Value};

use crate::error::{RouterError, echo};
use crate::models::ModelEntry;
use crate::output::reader::{Reading, Reasoning};
use crate::output::reasoning::{CLOSE, OPEN};

use super::common::{self, take};
use super::fields::{Fields, invalid};
use super::tools::Tools;
use super::unsupported::refuse_unsupported;
use super::{
    Chat, Endpoint, MaxTokens, Prompt, Served, ValidRequest, messages, sampling, structured, tool_prompt,
};

/// Efforts that OpenAI's clients know.
const REASONING_EFFORTS: [&str; 7] = ["none", "minimal", "low", "medium", "high", "xhigh", "max"];

/// Reads a chat request for one of the models served.
pub fn parse_chat(mut body: Map<String, Value>, served: &Served<'_>) -> Result<ValidRequest, RouterError> {
    let chat_values = ChatValues::take(&mut body);
    let fields = Fields::new(&body);
    let model = common::model(&fields, served.models)?;
    refuse_unsupported(&fields)?;
    refuse_completions_fields(&fields)?;
    let (mut params, mut reply) = common::sampling_and_reply(&fields, model.tokenizer.vocab_size(), served)?;
    reply.logprobs = logprobs(&fields)?;
    params.logprobs = reply.logprobs;
    params.prompt_logprobs = reply.prompt_logprobs;
    let (explicit, max_tokens_field) = max_tokens(&fields)?;
    common::check_min_tokens(&fields, params.min_tokens, explicit)?;
    let (chat, tools) = chat(chat_values, &fields, &model)?;
    let structure = structured::structure(&fields)?;
    let reasoning = model.dialect.reasoning(served.surface.reasoning_parser);
    reply.reading = Reading {
        reasoning: if chat.continue_final_message { within_thoughts(&chat, reasoning) } else { reasoning },
        tools: tools.plan(model.dialect.tool_format(served.surface.tool_call_parser), structure.is_some()),
    };
    Ok(ValidRequest {
        endpoint: Endpoint::Chat,
        prompts: vec![Prompt::Chat(chat)],
        truncate_to: common::truncate_to(&fields, common::room_for_prompt(&model, explicit))?,
        choices: sampling::choices(&fields, served.choices_max)?,
        sampling: params,
        max_tokens: explicit.map_or(MaxTokens::Default(u32::MAX), MaxTokens::Explicit),
        max_tokens_field,
        cache_salt: common::cache_salt(&fields)?,
        priority: common::priority(&fields)?,
        // A forced call leaves no room for an answer in another form.
        structure: tools.forced().or(structure).map(|it| it.with_blanks(served.surface.json_blanks_max)),
        reply,
        model,
    })
}

/// The parts of a body that templates get whole.
pub(super) struct ChatValues {
    messages: Option<Value>,
    tools: Option<Value>,
    documents: Option<Value>,
    kwargs: Option<Value>,
}

impl ChatValues {
    pub(super) fn take(body: &mut Map<String, Value>) -> Self {
        Self {
            messages: take(body, "messages"),
            tools: take(body, "tools"),
            documents: take(body, "documents"),
            kwargs: take(body, "chat_template_kwargs"),
        }
    }

    pub(super) fn has_messages(&self) -> bool {
        self.messages.as_ref().is_some_and(|m| !m.is_null())
    }

    /// Refuses what no chat could use.
    pub(super) fn check(self, fields: &Fields<'_>) -> Result<(), RouterError> {
        Tools::read(self.tools, fields)?;
        template_kwargs(self.kwargs, self.documents, fields).map(|_| ())
    }
}

/// The chat of a request, for a model that has a template, and the tools that it may call.
pub(super) fn chat(
    values: ChatValues,
    fields: &Fields<'_>,
    model: &ModelEntry,
) -> Result<(Chat, Tools), RouterError> {
    let mut messages = messages::messages(values.messages)?;
    let tools = Tools::read(values.tools, fields)?;
    tool_prompt::tell(&mut messages, &tools.definitions, model.dialect);
    tool_prompt::adapt(&mut messages, model.dialect);
    let kwargs = template_kwargs(values.kwargs, values.documents, fields)?;
    if model.template.is_none() {
        let message = format!(
            "the model `{}` has no chat template; start its workers with --chat-template FILE, or use /v1/completions",
            model.name
        );
        return Err(RouterError::field("messages", message));
    }
    let continue_final_message = fields.boolean("continue_final_message")?.unwrap_or(false);
    let add_generation_prompt = fields.boolean("add_generation_prompt")?;
    if continue_final_message {
        check_continued(&messages, add_generation_prompt, fields)?;
    }
    let chat = Chat {
        messages,
        tools: tools.definitions.clone(),
        kwargs,
        add_generation_prompt: add_generation_prompt.unwrap_or(!continue_final_message),
        continue_final_message,
    };
    Ok((chat, tools))
}

/// The last message is text of the assistant that can be gone on with.
fn check_continued(
    messages: &Value,
    add_generation_prompt: Option<bool>,
    fields: &Fields<'_>,
) -> Result<(), RouterError> {
    let name = "continue_final_message";
    if add_generation_prompt == Some(true) {
        return Err(fields.error(name, "and `add_generation_prompt` exclude each other; send one of them"));
    }
    let last = messages.as_array().and_then(|messages| messages.last());
    match last.filter(|last| last["role"] == "assistant" && last["content"].is_string()) {
        Some(last) if last.get("tool_calls").is_none() => Ok(()),
        _ => Err(fields.error(name, "needs a last message of the assistant that is text and calls no tools")),
    }
}

/// What is to come where an answer goes on: the rest of thoughts that it leaves open, or none.
fn within_thoughts(chat: &Chat, reasoning: Option<Reasoning>) -> Option<Reasoning> {
    let last = chat.messages.as_array()?.last()?["content"].as_str()?;
    (last.rfind(OPEN) > last.rfind(CLOSE)).then_some(Reasoning::Assumed).filter(|_| reasoning.is_some())
}

/// What the template is told beside messages and tools, null if nothing: what the client tells it itself goes before the fields
/// that mean the same.
fn template_kwargs(
    kwargs: Option<Value>,
    documents: Option<Value>,
    fields: &Fields<'_>,
) -> Result<Value, RouterError> {
    let mut kwargs = match kwargs {
        None | Some(Value::Null) => Map::new(),
        Some(Value::Object(kwargs)) => kwargs,
        Some(_) => return Err(fields.error("chat_template_kwargs", "must be an object")),
    };
    match documents {
        None | Some(Value::Null) => {}
        Some(Value::Array(documents)) if documents.iter().all(Value::is_object) => {
            kwargs.entry("documents").or_insert(Value::Array(documents));
        }
        Some(_) => return Err(fields.error("documents", "must be an array of objects")),
    }
    match fields.string("reasoning_effort")? {
        None => {}
        Some("none") => {
            kwargs.entry("enable_thinking").or_insert(Value::Bool(false));
        }
        Some(effort) if REASONING_EFFORTS.contains(&effort) => {
            kwargs.entry("reasoning_effort").or_insert(Value::from(effort));
        }
        Some(other) => {
            let efforts = REASONING_EFFORTS.join(", ");
            let message = format!("must be one of {efforts}, not {:?}", echo(other));
            return Err(fields.error("reasoning_effort", message));
        }
    }
    Ok(if kwargs.is_empty() { Value::Null } else { Value::Object(kwargs) })
}

/// `max_completion_tokens` is the new name of `max_tokens`; given both they must agree. With the name that was sent.
fn max_tokens(fields: &Fields<'_>) -> Result<(Option<u32>, &'static str), RouterError> {
    let old = fields.count("max_tokens", 1)?;
    let new = fields.count("max_completion_tokens", 1)?;
    match (new, old) {
        (Some(new), Some(old)) if new != old => Err(fields
            .error("max_completion_tokens", format!("is {new} but `max_tokens` is {old}; send one of them"))),
        (None, old) => Ok((old, "max_tokens")),
        (new, _) => Ok((new, "max_completion_tokens")),
    }
}

fn logprobs(fields: &Fields<'_>) -> Result<Option<u32>, RouterError> {
    if fields.get("logprobs").is_some_and(Value::is_number) {
        return Err(fields.error("logprobs", "must be a boolean in a chat; `top_logprobs` takes the number"));
    }
    let wanted = fields.boolean("logprobs")?.unwrap_or(false);
    let top = common::alternatives(fields, "top_logprobs")?;
    match (wanted, top) {
        (true, top) => Ok(Some(top.unwrap_or(0))),
        (false, None | Some(0)) => Ok(None),
        (false, Some(_)) => Err(fields.error("top_logprobs", "is allowed only with \"logprobs\": true")),
    }
}

fn refuse_completions_fields(fields: &Fields<'_>) -> Result<(), RouterError> {
    if fields.boolean("echo")? == Some(true) {
        return Err(invalid("echo".to_owned(), "`echo` is not available in a chat; use /v1/completions"));
    }
    Ok(())
}
