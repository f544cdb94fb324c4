//! Prompts to token ids that are known to fit the context.

use std::sync::Arc;

use thalweg_model::chat_template::ChatInput;
use thalweg_model::tokenizer::Specials;
use thalweg_proto::code::ErrorCode;

use crate::error::RouterError;
use crate::models::ModelEntry;
use crate::request::{Chat, MaxTokens, Prompt, ValidEmbedding, ValidRequest};

/// Text of more than so many bytes per token of context is tried by its head before it is tokenised whole.
const HEAD_BYTES_PER_TOKEN: usize = 8;
/// A head that may fit the context is followed by one so many times as long: runs of one character make long tokens.
const HEAD_GROWTH: usize = 4;

/// Bytes of text that are tokenised for their own sake, at /tokenize, where no context bounds them: some 0.3 s of work.
const TOKENIZE_BYTES_MAX: usize = 1 << 20;

/// Tokens that cutting a text could have added at the cut, generously.
const HEAD_SLACK: usize = 64;

/// A prompt that fits, with what may follow it.
#[derive(Clone, Debug, PartialEq)]
pub struct TokenizedPrompt {
    /// Not empty.
    pub ids: Arc<[u32]>,
    /// Tokens that each choice may have; 0 where nothing is to follow the prompt.
    pub max_tokens: u32,
    /// The client's own words, if it wants them echoed.
    pub echo: Option<String>,
}

/// Tokenises every prompt of a request, which forgets them: a stream need not hold a long text to its end. Takes time
/// in proportion to their length: never call it on the reactor.
pub fn tokenize_request(request: &mut ValidRequest) -> Result<Vec<TokenizedPrompt>, RouterError> {
    let prompts = request.take_prompts();
    let is_one = prompts.len() == 1;
    let (model, wanted, most) = (request.model(), request.max_tokens(), request.truncate_to());
    let fits = |prompt: Prompt| -> Result<_, RouterError> {
        // What is cut off has to be tokenised too.
        let mut ids = tokenize(&prompt, model, most.is_none().then_some(wanted))?;
        if let Some(most) = most {
            ids.drain(..ids.len().saturating_sub(most));
        }
        let max_tokens = fit(&ids, wanted, model)?;
        let echo = match prompt {
            Prompt::Text { text, .. } if request.reply().echo => Some(text),
            _ => None,
        };
        Ok(TokenizedPrompt { ids: ids.into(), max_tokens, echo })
    };
    let one = |(at, prompt): (usize, Prompt)| {
        fits(prompt).map_err(|error| {
            if is_one {
                return error;
            }
            let param = format!("prompt[{at}]");
            RouterError { message: format!("{} (`{param}`)", error.message), param: Some(param), ..error }
        })
    };
    prompts.into_iter().enumerate().map(one).collect()
}

/// Tokenises every input of an embeddings request, which forgets them. Each fits the context, cut off behind so many tokens
/// where the request says so. Never call it on the reactor.
pub fn tokenize_inputs(request: &mut ValidEmbedding) -> Result<Vec<Arc<[u32]>>, RouterError> {
    let inputs = request.take_inputs();
    let (model, most) = (request.model(), request.truncate_to());
    let is_one = inputs.len() == 1;
    let one = |(at, input): (usize, Prompt)| {
        let ids = tokenize_input(&input, model, most);
        ids.map(Arc::from).map_err(|error| {
            let param = if is_one { "input".to_owned() } else { format!("input[{at}]") };
            RouterError { message: format!("`{param}`: {}", error.message), param: Some(param), ..error }
        })
    };
    inputs.into_iter().enumerate().map(one).collect()
}

fn tokenize_input(input: &Prompt, model: &ModelEntry, most: Option<usize>) -> Result<Vec<u32>, RouterError> {
    let mut ids = match input {
        Prompt::Text { text, bos } => {
            // What is cut off has to be tokenised too.
            refuse_hopeless(text, Specials::Parse, model, most.is_none().then_some(MaxTokens::Default(0)))?;
            model.tokenizer.encode_to_embed(text, *bos)
        }
        other => tokenize(other, model, None)?,
    };
    if let Some(most) = most.filter(|most| ids.len() > *most) {
        let last = ids.last().copied().filter(|id| model.tokenizer.bundle().text_end_id == Some(*id));
        ids.truncate(most);
        // The end that the tokenizer wrote stays the end: it is what last-token pooling looks at.
        if let (Some(place), Some(end)) = (ids.last_mut(), last) {
            *place = end;
        }
    }
    let context = model.max_model_len as usize;
    match ids.len() {
        0 => Err(RouterError::new(ErrorCode::InvalidRequest, "the text has no tokens; send at least one")),
        tokens if tokens > context => {
            let message = format!(
                "the model's context is {context} tokens, but the text has {tokens}; shorten it, or send \
                 `truncate_prompt_tokens`"
            );
            Err(RouterError::new(ErrorCode::ContextLengthExceeded, message))
        }
        _ => Ok(ids),
    }
}

/// Ids of one prompt. With `limit`, text that is hopelessly over the context is refused by its head alone; without, text
/// that would keep others waiting.
pub fn tokenize(
    prompt: &Prompt,
    model: &ModelEntry,
    limit: Option<MaxTokens>,
) -> Result<Vec<u32>, RouterError> {
    let tokenizer = &model.tokenizer;
    match prompt {
        Prompt::Ids(ids) => Ok(ids.clone()),
        Prompt::Text { text, bos } => {
            refuse_hopeless(text, Specials::Parse, model, limit)?;
            Ok(tokenizer.encode(text, Specials::Parse, *bos))
        }
        Prompt::Chat(chat) => tokenize_chat(chat, model, limit),
    }
}

fn tokenize_chat(chat: &Chat, model: &ModelEntry, limit: Option<MaxTokens>) -> Result<Vec<u32>, RouterError> {
    let Some(template) = &model.template else {
        return Err(RouterError::new(
            ErrorCode::Internal,
            "a chat was let through for a model without template",
        ));
    };
    let input = ChatInput {
        messages: &chat.messages,
        tools: &chat.tools,
        add_generation_prompt: chat.add_generation_prompt,
        continue_final_message: chat.continue_final_message,
        kwargs: &chat.kwargs,
    };
    let rendered = template
        .render(&input, &model.tokenizer)
        .map_err(|error| RouterError::field("messages", format!("the model's {error}")))?;
    refuse_hopeless(&rendered.plain_text(), Specials::Plain, model, limit)?;
    Ok(model.tokenizer.encode_chat(&rendered))
}

/// What is left for the answer, once prompt and wish fit the context.
fn fit(ids: &[u32], wanted: MaxTokens, model: &ModelEntry) -> Result<u32, RouterError> {
    if ids.is_empty() {
        return Err(RouterError::field("prompt", "the prompt has no tokens; send at least one"));
    }
    let context = model.max_model_len as usize;
    let room = context.saturating_sub(ids.len());
    match wanted {
        MaxTokens::Explicit(0) if ids.len() <= context => Ok(0),
        _ if room == 0 => Err(over_context(&format!("{}", ids.len()), None, context)),
        // However short the prompt, or cut.
        MaxTokens::Explicit(max) if max as usize >= context => {
            let what = format!("max_tokens is {max}, which leaves no room for a prompt");
            Err(beyond_context(&what, "lower max_tokens", context))
        }
        MaxTokens::Explicit(max) if max as usize > room => {
            Err(over_context(&format!("{}", ids.len()), Some(max), context))
        }
        MaxTokens::Explicit(max) => Ok(max),
        MaxTokens::Default(max) => Ok(u32::try_from(room).map_or(max, |room| max.min(room))),
    }
}

/// Tokenising 32 MiB takes seconds, finding out that its first part is over the context does not: at most as much is tokenised as the longest
/// tokens that fit the context have bytes, a few times over.
fn refuse_hopeless(
    text: &str,
    specials: Specials,
    model: &ModelEntry,
    limit: Option<MaxTokens>,
) -> Result<(), RouterError> {
    let context = model.max_model_len as usize;
    let Some(limit) = limit else { return refuse_long(text) };
    let mut head_bytes = context.saturating_mul(HEAD_BYTES_PER_TOKEN);
    while text.len() / 2 > head_bytes {
        let head = &text[..text.floor_char_boundary(head_bytes)];
        let least = model.tokenizer.encode(head, specials, false).len().saturating_sub(HEAD_SLACK);
        if least >= context {
            let max = match limit {
                MaxTokens::Explicit(max) if max > 0 => Some(max),
                MaxTokens::Explicit(_) | MaxTokens::Default(_) => None,
            };
            return Err(over_context(&format!("more than {least}"), max, context));
        }
        head_bytes = head_bytes.saturating_mul(HEAD_GROWTH);
    }
    Ok(())
}

fn refuse_long(text: &str) -> Result<(), RouterError> {
    if text.len() <= TOKENIZE_BYTES_MAX {
        return Ok(());
    }
    let message = format!(
        "the text has {} bytes, but {TOKENIZE_BYTES_MAX} at most are tokenised at once; send it in parts",
        text.len()
    );
    Err(RouterError::field("prompt", message))
}

fn over_context(prompt: &str, max_tokens: Option<u32>, context: usize) -> RouterError {
    let (what, advice) = match max_tokens {
        None => (format!("the prompt has {prompt} tokens"), "shorten the prompt"),
        Some(max) => (
            format!("the prompt has {prompt} tokens and max_tokens is {max}"),
            "shorten the prompt or lower max_tokens",
        ),
    };
    beyond_context(&what, advice, context)
}

fn beyond_context(what: &str, advice: &str, context: usize) -> RouterError {
    // Clients that do not read codes, LiteLLM for one, know the fault by these first words.
    let message = format!("this model's maximum context length is {context} tokens, but {what}; {advice}");
    RouterError::new(ErrorCode::ContextLengthExceeded, message)
}
