//! The tokenizer of a hub folder: tokenizer.json and the small files beside it.

use std::collections::{BTreeMap, BTreeSet};
use std::io::ErrorKind;
use std::path::Path;

use serde_json::Value;

use super::TokenizerBundle;
use super::json::Description;
use crate::config::ModelConfig;
use crate::error::ModelError;

/// Reads tokenizer.json, tokenizer_config.json, generation_config.json and chat_template.jinja; only the first is
/// needed.
pub(crate) fn bundle(folder: &Path, config: &ModelConfig) -> Result<TokenizerBundle, ModelError> {
    let path = folder.join("tokenizer.json");
    let Some(tokenizer_json) = read_text(&path)? else {
        return Err(ModelError::unsupported(
            folder,
            "a folder without tokenizer.json",
            "save the model's fast tokenizer there (AutoTokenizer.save_pretrained), or use a GGUF file",
        ));
    };
    let description = Description::parse_file(&tokenizer_json, &path)?;
    let settings = read_object(&folder.join("tokenizer_config.json"))?;
    let template_tokens = template_tokens(&settings);
    let ids = |text: &String| id_of(text, &description, &tokenizer_json, &path);
    let bos_id = template_tokens.get("bos_token").map(&ids).transpose()?.flatten();
    let eos_token_id = template_tokens.get("eos_token").map(&ids).transpose()?.flatten();
    Ok(TokenizerBundle {
        chat_template: chat_template(folder, &settings)?,
        bos_id,
        add_bos: bos_id.is_some() && adds_bos(&settings, &description, &template_tokens),
        text_end_id: text_end_id(&settings, &description, eos_token_id),
        eos_ids: eos_ids(folder, eos_token_id)?,
        vocab_size: config.vocab_size,
        max_position: config.max_position,
        template_tokens,
        tokenizer_json,
    })
}

/// The `*_token` entries: a string, or an object with its `content`.
fn template_tokens(settings: &Value) -> BTreeMap<String, String> {
    let entries = settings.as_object().into_iter().flatten().filter(|(key, _)| key.ends_with("_token"));
    entries
        .filter_map(|(key, value)| {
            let text = value.as_str().or_else(|| value["content"].as_str())?;
            Some((key.clone(), text.to_owned()))
        })
        .collect()
}

/// Special tokens are listed; an ordinary one (a BOS without an entry) is looked up in the vocabulary.
fn id_of(text: &str, description: &Description, json: &str, path: &Path) -> Result<Option<u32>, ModelError> {
    if let Some(token) = description.added_tokens.iter().find(|token| token.content == text) {
        return Ok(Some(token.id));
    }
    let document: Value =
        serde_json::from_str(json).map_err(|error| ModelError::malformed(path, error.to_string()))?;
    Ok(document["model"]["vocab"][text].as_u64().and_then(|id| u32::try_from(id).ok()))
}

/// As the setting says; else whether the post-processor writes BOS in front of a single text.
fn adds_bos(settings: &Value, description: &Description, tokens: &BTreeMap<String, String>) -> bool {
    if let Some(setting) = settings["add_bos_token"].as_bool() {
        return setting;
    }
    steps(description).iter().any(|step| {
        let first = &step["single"][0]["SpecialToken"]["id"];
        first.is_string() && first.as_str() == tokens.get("bos_token").map(String::as_str)
    })
}

/// EOS as the setting says; else what the post-processor writes behind a single text.
fn text_end_id(settings: &Value, description: &Description, eos_token_id: Option<u32>) -> Option<u32> {
    match settings["add_eos_token"].as_bool() {
        Some(true) => eos_token_id,
        Some(false) => None,
        None => steps(description).iter().find_map(|step| {
            let name = step["single"].as_array()?.last()?["SpecialToken"]["id"].as_str()?;
            let id = step["special_tokens"][name]["ids"].get(0)?.as_u64()?;
            // A template of special tokens alone has no text to end.
            (step["single"].as_array()?.len() > 1).then(|| u32::try_from(id).ok())?
        }),
    }
}

/// Post-processors of the tokenizer, in order.
fn steps(description: &Description) -> &[Value] {
    let Some(processor) = &description.post_processor else { return &[] };
    processor["processors"].as_array().map_or(std::slice::from_ref(processor), Vec::as_slice)
}

/// generation_config.json's ids and the tokenizer's own; config.json's where neither says.
fn eos_ids(folder: &Path, eos_token_id: Option<u32>) -> Result<Vec<u32>, ModelError> {
    let mut ids: BTreeSet<u32> = eos_token_id.into_iter().collect();
    ids.extend(eos_setting(&folder.join("generation_config.json"))?);
    if ids.is_empty() {
        ids.extend(eos_setting(&folder.join("config.json"))?);
    }
    Ok(ids.into_iter().collect())
}

fn eos_setting(path: &Path) -> Result<Vec<u32>, ModelError> {
    let setting = read_object(path)?["eos_token_id"].take();
    let values = match setting {
        Value::Null => Vec::new(),
        Value::Array(values) => values,
        one => vec![one],
    };
    let id = |value: &Value| value.as_u64().and_then(|id| u32::try_from(id).ok());
    values
        .iter()
        .map(|value| {
            id(value).ok_or_else(|| {
                ModelError::malformed(path, format!("eos_token_id has {value}, expected token ids"))
            })
        })
        .collect()
}

/// The file wins over the setting, which is one template or a list of named ones.
fn chat_template(folder: &Path, settings: &Value) -> Result<Option<String>, ModelError> {
    if let Some(file) = read_text(&folder.join("chat_template.jinja"))? {
        return Ok(Some(file));
    }
    let template = &settings["chat_template"];
    let named = |name: &str| template.as_array()?.iter().find(|entry| entry["name"] == name);
    let chosen = named("default").or_else(|| template.get(0)).map_or(template, |entry| &entry["template"]);
    match chosen {
        Value::Null => Ok(None),
        Value::String(source) => Ok(Some(source.clone())),
        _ => {
            let path = folder.join("tokenizer_config.json");
            Err(ModelError::malformed(&path, "chat_template must be a string or a list of named templates"))
        }
    }
}

/// A JSON object, or an empty one where there is no such file.
fn read_object(path: &Path) -> Result<Value, ModelError> {
    let Some(text) = read_text(path)? else { return Ok(Value::Object(Default::default())) };
    match serde_json::from_str(&text) {
        Ok(value @ Value::Object(_)) => Ok(value),
        Ok(_) => Err(ModelError::malformed(path, "not a JSON object")),
        Err(error) => Err(ModelError::malformed(path, format!("not JSON: {error}"))),
    }
}

fn read_text(path: &Path) -> Result<Option<String>, ModelError> {
    match std::fs::read(path) {
        Ok(bytes) => match String::from_utf8(bytes) {
            Ok(text) => Ok(Some(text)),
            Err(_) => Err(ModelError::malformed(path, "not UTF-8 text")),
        },
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(error) => Err(ModelError::io(path, error)),
    }
}
