//! `POST /v1/completions`: body to request.

use serde_json::{Map, Value};

use crate::error::RouterError;

use super::common::{self, take};
use super::fields::{Fields, invalid};
use super::limits::{PROMPTS_MAX, TOTAL_CHOICES_MAX};
use super::prompts::PromptField;
use super::unsupported::refuse_unsupported;
use super::{Endpoint, MaxTokens, Served, ValidRequest, sampling, structured};

/// Reads a completions request for one of the models served.
pub fn parse_completion(
    mut body: Map<String, Value>,
    served: &Served<'_>,
) -> Result<ValidRequest, RouterError> {
    let prompt = take(&mut body, "prompt");
    let fields = Fields::new(&body);
    let model = common::model(&fields, served.models)?;
    refuse_unsupported(&fields)?;
    super::tools::refuse_forced(&fields)?;
    let (mut params, mut reply) = common::sampling_and_reply(&fields, model.tokenizer.vocab_size(), served)?;
    if fields.get("logprobs").is_some_and(Value::is_boolean) {
        return Err(fields.error("logprobs", "must be the number of alternatives here, not a boolean"));
    }
    reply.logprobs = common::alternatives(&fields, "logprobs")?;
    reply.echo = fields.boolean("echo")?.unwrap_or(false);
    params.logprobs = reply.logprobs;
    params.prompt_logprobs = match (reply.echo, reply.logprobs) {
        (true, Some(count)) => Some(count.max(reply.prompt_logprobs.unwrap_or(0))),
        _ => reply.prompt_logprobs,
    };
    // An echo may be all that is wanted.
    let explicit = fields.count("max_tokens", i64::from(!reply.echo))?;
    common::check_min_tokens(&fields, params.min_tokens, explicit)?;
    let truncate_to = common::truncate_to(&fields, common::room_for_prompt(&model, explicit))?;
    if reply.echo && truncate_to.is_some() {
        return Err(
            fields.error("truncate_prompt_tokens", "is not available with `echo`; shorten the prompt")
        );
    }
    let bos = fields.boolean("add_special_tokens")?.unwrap_or(true);
    let vocab_size = model.tokenizer.vocab_size();
    let prompts = PromptField { name: "prompt", most: PROMPTS_MAX, vocab_size, bos }.read(prompt)?;
    let choices = sampling::choices(&fields, served.choices_max)?;
    if prompts.len() * choices as usize > TOTAL_CHOICES_MAX {
        let message = format!("{} prompts of {choices} choices are over {TOTAL_CHOICES_MAX}", prompts.len());
        return Err(invalid("n".to_owned(), message));
    }
    Ok(ValidRequest {
        endpoint: Endpoint::Completions,
        prompts,
        truncate_to,
        choices,
        sampling: params,
        max_tokens: explicit.map_or(MaxTokens::Default(common::DEFAULT_MAX_TOKENS), MaxTokens::Explicit),
        max_tokens_field: "max_tokens",
        cache_salt: common::cache_salt(&fields)?,
        priority: common::priority(&fields)?,
        structure: structured::structure(&fields)?.map(|it| it.with_blanks(served.surface.json_blanks_max)),
        reply,
        model,
    })
}
