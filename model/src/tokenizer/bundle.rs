//! What a worker hands to a router, so that the router can tokenise.

use std::collections::BTreeMap;

/// Everything that tokenising and templating need, in one serialisable piece: workers hand it to routers.
#[derive(Clone, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct TokenizerBundle {
    /// A Hugging Face tokenizer.json, converted from GGUF's metadata where there was none.
    pub tokenizer_json: String,
    /// Jinja source.
    pub chat_template: Option<String>,
    /// Strings that templates refer to, such as `bos_token`.
    pub template_tokens: BTreeMap<String, String>,
    /// Beginning of sequence.
    pub bos_id: Option<u32>,
    /// A plain prompt gets `bos_id` in front.
    pub add_bos: bool,
    /// Behind a text that is embedded, where the model's tokenizer writes such a token: last-token pooling looks at it.
    #[serde(default)]
    pub text_end_id: Option<u32>,
    /// Ids that end a generation.
    pub eos_ids: Vec<u32>,
    /// Rows of the model's embedding: ids from here on are refused.
    pub vocab_size: usize,
    /// Longest context of the model, in tokens.
    pub max_position: usize,
}

impl TokenizerBundle {
    /// A copy of all but the large part.
    pub(super) fn clone_without_json(&self) -> Self {
        Self {
            tokenizer_json: String::new(),
            chat_template: self.chat_template.clone(),
            template_tokens: self.template_tokens.clone(),
            bos_id: self.bos_id,
            add_bos: self.add_bos,
            text_end_id: self.text_end_id,
            eos_ids: self.eos_ids.clone(),
            vocab_size: self.vocab_size,
            max_position: self.max_position,
        }
    }
}
