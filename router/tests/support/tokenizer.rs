//! A tokenizer of one token per byte, so that tests see at once what is text and what is a token.

use std::collections::BTreeMap;

use serde_json::{Map, Value, json};
use thalweg_model::tokenizer::TokenizerBundle;

/// Beginning of sequence.
pub(crate) const BOS: u32 = 256;
/// End of a turn, the one end of sequence.
pub(crate) const END: u32 = 258;
/// Ids 0 to 255 are bytes; then `<s>`, `<|im_start|>` and `<|im_end|>`.
pub(crate) const VOCAB: usize = 259;

/// The bundle; with a ChatML template that writes `<s>` first, or without any.
pub(crate) fn bundle(with_template: bool, max_position: usize) -> TokenizerBundle {
    let mut vocab = Map::new();
    let spare = (0..=255u8).filter(|b| !is_itself(*b)).collect::<Vec<_>>();
    for byte in 0..=255u8 {
        let shown = match spare.iter().position(|b| *b == byte) {
            Some(at) => char::from_u32(256 + at as u32).expect("a character"),
            None => char::from(byte),
        };
        vocab.insert(shown.to_string(), json!(byte));
    }
    let specials = [(BOS, "<s>"), (257, "<|im_start|>"), (END, "<|im_end|>")];
    let added: Vec<Value> = specials
        .iter()
        .map(|(id, content)| {
            json!({"id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
                   "normalized": false, "special": true})
        })
        .collect();
    let tokenizer = json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": added, "normalizer": null,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true},
        "post_processor": null,
        "decoder": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true},
        "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
                  "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "vocab": vocab, "merges": []},
    });
    TokenizerBundle {
        tokenizer_json: tokenizer.to_string(),
        chat_template: with_template.then(|| TEMPLATE.to_owned()),
        template_tokens: BTreeMap::from([("bos_token".to_owned(), "<s>".to_owned())]),
        bos_id: Some(BOS),
        add_bos: true,
        text_end_id: None,
        eos_ids: vec![END],
        vocab_size: VOCAB,
        max_position,
    }
}

const TEMPLATE: &str = "{{ bos_token }}{% for message in messages %}<|im_start|>{{ message.role }}\n\
    {{ message.content }}<|im_end|>\n{% endfor %}{% if tools %}tools {{ tools | tojson }}\n{% endif %}\
    {% if extra %}extra {{ extra }}\n{% endif %}\
    {% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";

/// Bytes that byte-level BPE writes as themselves.
fn is_itself(byte: u8) -> bool {
    matches!(byte, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff)
}
