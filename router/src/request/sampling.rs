//! How tokens are to be drawn: shared by chat and completions.

use std::collections::HashMap;

use serde_json::Value;
use thalweg_proto::v1;

use crate::error::RouterError;

use super::fields::{Fields, token_ids};
use super::limits::{LOGIT_BIAS_MAX, STOP_BYTES_MAX, STOP_IDS_MAX, STOP_STRINGS_MAX};

/// Reads every sampling field but `max_tokens` and the log probabilities, which depend on the endpoint. A seed is
/// drawn from `draw_seed` where the client gave none.
pub(super) fn sampling(
    fields: &Fields<'_>,
    vocab_size: usize,
    draw_seed: &dyn Fn() -> u64,
) -> Result<v1::SamplingParams, RouterError> {
    let penalty = |name| fields.number(name, "from -2 to 2", |v| (-2.0..=2.0).contains(&v));
    Ok(v1::SamplingParams {
        temperature: fields.number("temperature", "at least 0", |v| v >= 0.0)?.unwrap_or(1.0),
        top_k: top_k(fields)?,
        top_p: fields.number("top_p", "above 0 and at most 1", |v| v > 0.0 && v <= 1.0)?.unwrap_or(1.0),
        min_p: fields.number("min_p", "from 0 to 1", |v| (0.0..=1.0).contains(&v))?.unwrap_or(0.0),
        presence_penalty: penalty("presence_penalty")?.unwrap_or(0.0),
        frequency_penalty: penalty("frequency_penalty")?.unwrap_or(0.0),
        repetition_penalty: fields.number("repetition_penalty", "above 0", |v| v > 0.0)?.unwrap_or(1.0),
        seed: seed(fields)?.unwrap_or_else(draw_seed),
        max_tokens: 0,
        min_tokens: fields.count("min_tokens", 0)?.unwrap_or(0),
        stop_token_ids: stop_token_ids(fields, vocab_size)?,
        ignore_eos: fields.boolean("ignore_eos")?.unwrap_or(false),
        logprobs: None,
        prompt_logprobs: None,
        logit_bias: logit_bias(fields, vocab_size)?,
    })
}

/// `n`, 1 unless given.
pub(super) fn choices(fields: &Fields<'_>, most: u32) -> Result<u32, RouterError> {
    let n = fields.integer("n", 1..=i64::from(most))?;
    Ok(n.and_then(|n| u32::try_from(n).ok()).unwrap_or(1))
}

/// `stop`: none, one string or several.
pub(super) fn stop_strings(fields: &Fields<'_>) -> Result<Vec<String>, RouterError> {
    let wrong = || fields.error("stop", "must be a string or an array of strings");
    let strings = match fields.get("stop") {
        None => Vec::new(),
        Some(Value::String(one)) => vec![one.clone()],
        Some(Value::Array(several)) => several
            .iter()
            .map(|s| s.as_str().map(str::to_owned).ok_or_else(wrong))
            .collect::<Result<_, _>>()?,
        Some(_) => return Err(wrong()),
    };
    if strings.len() > STOP_STRINGS_MAX {
        return Err(fields.error("stop", format!("takes at most {STOP_STRINGS_MAX} strings")));
    }
    if strings.iter().any(String::is_empty) {
        return Err(fields.error("stop", "must not hold an empty string"));
    }
    if strings.iter().any(|s| s.len() > STOP_BYTES_MAX) {
        return Err(fields.error("stop", format!("takes strings of at most {STOP_BYTES_MAX} bytes")));
    }
    Ok(strings)
}

/// vLLM's -1 and 0 both mean off.
fn top_k(fields: &Fields<'_>) -> Result<u32, RouterError> {
    let top_k = fields.integer("top_k", -1..=i64::from(u32::MAX))?.unwrap_or(0);
    Ok(u32::try_from(top_k).unwrap_or(0))
}

/// Any 64-bit integer, signed or not.
fn seed(fields: &Fields<'_>) -> Result<Option<u64>, RouterError> {
    if let Some(unsigned) = fields.get("seed").and_then(Value::as_u64) {
        return Ok(Some(unsigned));
    }
    let signed = fields.integer("seed", i64::MIN..=i64::MAX)?;
    Ok(signed.map(i64::cast_unsigned))
}

fn stop_token_ids(fields: &Fields<'_>, vocab_size: usize) -> Result<Vec<u32>, RouterError> {
    let values = fields.array("stop_token_ids")?.unwrap_or_default();
    if values.len() > STOP_IDS_MAX {
        return Err(fields.error("stop_token_ids", format!("takes at most {STOP_IDS_MAX} ids")));
    }
    token_ids(values, vocab_size, "stop_token_ids")
}

fn logit_bias(fields: &Fields<'_>, vocab_size: usize) -> Result<HashMap<u32, f32>, RouterError> {
    let Some(object) = fields.object("logit_bias")? else { return Ok(HashMap::new()) };
    if object.len() > LOGIT_BIAS_MAX {
        return Err(fields.error("logit_bias", format!("takes at most {LOGIT_BIAS_MAX} entries")));
    }
    let entries = Fields::within(object, "logit_bias.");
    let mut bias = HashMap::with_capacity(object.len());
    for name in object.keys() {
        let Some(id) = name.parse::<u32>().ok().filter(|id| (*id as usize) < vocab_size) else {
            let last = vocab_size.saturating_sub(1);
            return Err(entries.error(name, format!("is no token id of this model; ids are 0 to {last}")));
        };
        let value = entries.number(name, "from -100 to 100", |v| (-100.0..=100.0).contains(&v))?;
        let Some(value) = value else {
            return Err(entries.error(name, "must be a number from -100 to 100, not null"));
        };
        bias.insert(id, value);
    }
    Ok(bias)
}
