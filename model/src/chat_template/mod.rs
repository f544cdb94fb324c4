//! Chat messages to one text, by the model's own Jinja template.

mod environment;
mod guard;
mod python;
mod strftime;

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::path::Path;

use minijinja::value::Serde;
use minijinja::{Environment, Value as Jinja};
use serde_json::{Map, Value, json};

use self::guard::{Guard, Style};
use crate::error::ModelError;
use crate::tokenizer::{Tokenizer, TokenizerBundle};

/// A compiled chat template.
#[derive(Debug)]
pub struct ChatTemplate {
    environment: Environment<'static>,
    source: String,
    tokens: Map<String, Value>,
}

/// A chat to render, in OpenAI's shapes; text parts already joined.
#[derive(Clone, Debug)]
pub struct ChatInput<'a> {
    /// `[{"role": .., "content": .., "tool_calls": ..}, ..]`.
    pub messages: &'a Value,
    /// OpenAI tool definitions, or null.
    pub tools: &'a Value,
    /// Ends with the assistant's header.
    pub add_generation_prompt: bool,
    /// Ends within the last message, for the model to go on with it: with its content, and nothing that closes it.
    pub continue_final_message: bool,
    /// `chat_template_kwargs` of the request: an object, or null.
    pub kwargs: &'a Value,
}

/// A rendered chat in which text that users wrote can still be told from what the template wrote: control-token text
/// within user text is broken by a marker character that occurs nowhere else.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RenderedChat {
    pub(crate) text: String,
    pub(crate) marker: char,
}

/// The template refused the messages, with its own words.
#[derive(Debug, thiserror::Error)]
#[error("chat template: {0}")]
pub struct TemplateError(pub String);

impl ChatTemplate {
    /// Compiles a template; it may refer to the bundle's `template_tokens`.
    pub fn new(source: &str, bundle: &TokenizerBundle) -> Result<Self, ModelError> {
        let environment = environment::compile(source).map_err(|error| {
            let reason = format!("does not compile: {error}; give another with --chat-template");
            ModelError::malformed(Path::new("chat template"), reason)
        })?;
        let tokens = bundle.template_tokens.iter().map(|(name, text)| (name.clone(), json!(text))).collect();
        Ok(Self { environment, source: source.to_owned(), tokens })
    }

    /// As it was given.
    pub fn source(&self) -> &str {
        &self.source
    }

    /// Renders; the tokenizer's control tokens are what must not come out of user text.
    pub fn render(
        &self,
        input: &ChatInput<'_>,
        tokenizer: &Tokenizer,
    ) -> Result<RenderedChat, TemplateError> {
        let mut prepared = Prepared::new(input);
        let seam = input.continue_final_message.then(|| {
            let seam = guard::unused_char(tokenizer.control(), &prepared, &self.source);
            prepared.end_with(seam);
            seam
        });
        let guard = Guard::new(tokenizer.control(), &prepared, &self.source);
        let plain = self.render_lenient(&prepared, input.add_generation_prompt)?;
        let text = if guard.is_needed(&prepared) {
            self.render_guarded(&prepared, input.add_generation_prompt, &guard, plain)?
        } else {
            plain
        };
        let text = match seam {
            Some(seam) => cut(text, seam, guard.marker(), blanks_of_last(input.messages))?,
            None => text,
        };
        Ok(RenderedChat { text, marker: guard.marker() })
    }

    /// Markers around every user text keep control tokens from forming across its edges, but a template that looks at
    /// how a text begins would see them: then only what could do harm is marked.
    fn render_guarded(
        &self,
        prepared: &Prepared<'_>,
        generate: bool,
        guard: &Guard<'_>,
        plain: String,
    ) -> Result<String, TemplateError> {
        let enclosed = self.render_lenient(&guard.apply(prepared, Style::Enclose), generate);
        match enclosed {
            Ok(text) if text.replace(guard.marker(), "") == plain => Ok(text),
            _ => self.render_lenient(&guard.apply(prepared, Style::Minimal), generate),
        }
    }

    /// Templates that cannot take a missing content (as of an assistant that only calls tools) get an empty one.
    fn render_lenient(&self, prepared: &Prepared<'_>, generate: bool) -> Result<String, TemplateError> {
        self.render_once(prepared, generate).or_else(|error| match prepared.with_contents() {
            Some(filled) => self.render_once(&filled, generate).map_err(|_| error),
            None => Err(error),
        })
    }

    fn render_once(&self, prepared: &Prepared<'_>, generate: bool) -> Result<String, TemplateError> {
        let kwargs = prepared.kwargs.as_object().into_iter().flatten();
        let given = kwargs.chain(&self.tokens).map(|(name, value)| (name.as_str(), jinja(value)));
        let ours = [
            ("messages", jinja(&prepared.messages)),
            ("tools", jinja(&prepared.tools)),
            ("add_generation_prompt", Jinja::from(generate)),
        ];
        let defaults = [("documents", Jinja::from(()))];
        let context: BTreeMap<&str, Jinja> = defaults.into_iter().chain(given).chain(ours).collect();
        let template = self.environment.get_template(environment::NAME);
        template
            .and_then(|template| template.render(context))
            .map_err(|error| TemplateError(environment::words(&error)))
    }
}

/// The text up to the seam. Where the template has taken the space behind the seam away, it trims what it writes: then the content's own
/// last blanks go as well (much as in transformers' `apply_chat_template`).
fn cut(mut text: String, seam: char, marker: char, blanks: &str) -> Result<String, TemplateError> {
    let Some(at) = text.rfind(seam) else {
        let message = "it does not write the last message as it is, so that it cannot be continued";
        return Err(TemplateError(message.to_owned()));
    };
    let is_trimmed = !text[at + seam.len_utf8()..].trim_start_matches(marker).starts_with(' ');
    text.truncate(at);
    if is_trimmed && text.ends_with(blanks) {
        text.truncate(at - blanks.len());
    }
    Ok(text)
}

/// White space behind the last message's content.
fn blanks_of_last(messages: &Value) -> &str {
    let last = messages.as_array().and_then(|messages| messages.last()?["content"].as_str());
    last.map_or("", |content| match content.trim_end() {
        "" => "",
        text => &content[text.len()..],
    })
}

fn jinja(value: &Value) -> Jinja {
    Jinja::from(Serde(value))
}

impl RenderedChat {
    /// The text as the model's own tools would render it, without markers.
    pub fn plain_text(&self) -> String {
        self.text.replace(self.marker, "")
    }
}

/// What users gave, in the shapes that templates expect.
struct Prepared<'a> {
    messages: Cow<'a, Value>,
    tools: Cow<'a, Value>,
    kwargs: Cow<'a, Value>,
}

impl<'a> Prepared<'a> {
    fn new(input: &ChatInput<'a>) -> Self {
        let none = input.tools.as_array().is_some_and(Vec::is_empty);
        Self {
            messages: with_parsed_arguments(input.messages),
            tools: if none { Cow::Owned(Value::Null) } else { Cow::Borrowed(input.tools) },
            kwargs: Cow::Borrowed(input.kwargs),
        }
    }

    /// Marks where the last message's content ends.
    fn end_with(&mut self, seam: char) {
        let last = self.messages.to_mut().as_array_mut().and_then(|messages| messages.last_mut());
        if let Some(message) = last.filter(|message| message.is_object()) {
            message["content"] = json!(format!("{}{seam} ", message["content"].as_str().unwrap_or_default()));
        }
    }

    /// The same with an empty content in every message that has none, or None if all have one.
    fn with_contents(&self) -> Option<Self> {
        let lacks = |message: &Value| message["content"].is_null();
        if !self.messages.as_array()?.iter().any(lacks) {
            return None;
        }
        let mut messages = self.messages.as_ref().clone();
        for message in messages.as_array_mut().into_iter().flatten().filter(|message| lacks(message)) {
            message["content"] = json!("");
        }
        Some(Self { messages: Cow::Owned(messages), tools: self.tools.clone(), kwargs: self.kwargs.clone() })
    }
}

/// OpenAI gives the arguments of past calls as JSON text, templates expect the object.
fn with_parsed_arguments(messages: &Value) -> Cow<'_, Value> {
    let calls = |message: &Value| message["tool_calls"].is_array();
    if !messages.as_array().is_some_and(|messages| messages.iter().any(calls)) {
        return Cow::Borrowed(messages);
    }
    let mut messages = messages.clone();
    let of_messages = messages.as_array_mut().into_iter().flatten();
    for call in of_messages.filter_map(|message| message.get_mut("tool_calls")?.as_array_mut()).flatten() {
        let Some(arguments) = call.get_mut("function").and_then(|function| function.get_mut("arguments"))
        else {
            continue;
        };
        let parsed =
            arguments.as_str().and_then(|text| serde_json::from_str::<Map<String, Value>>(text).ok());
        if let Some(parsed) = parsed {
            *arguments = Value::Object(parsed);
        }
    }
    Cow::Owned(messages)
}
