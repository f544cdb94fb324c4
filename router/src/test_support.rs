//! A served model for unit tests.

use std::collections::BTreeMap;
use std::sync::Arc;

use thalweg_model::chat_template::ChatTemplate;
use thalweg_model::tokenizer::Tokenizer;

use crate::dialect::Dialect;
use crate::models::{ModelEntry, Models};
use crate::output::part::Part;
use crate::output::tools::{ToolPlan, ToolReader};

#[path = "../tests/support/tokenizer.rs"]
pub(crate) mod tokenizer;

/// A model of one token per byte, with a context of 512 tokens.
pub(crate) fn entry(name: &str, with_template: bool) -> Arc<ModelEntry> {
    let bundle = tokenizer::bundle(with_template, 512);
    let template = bundle
        .chat_template
        .as_ref()
        .map(|source| Arc::new(ChatTemplate::new(source, &bundle).expect("the template compiles")));
    Arc::new(ModelEntry {
        name: name.to_owned(),
        created: 1_700_000_000,
        fingerprint: bytes::Bytes::from_static(b"fingerprint"),
        adapter: None,
        tokenizer: Arc::new(Tokenizer::new(&bundle).expect("the tokenizer loads")),
        dialect: Dialect::of(template.as_deref()),
        template,
        max_model_len: 512,
        block_tokens: 16,
    })
}

/// `tiny` with a chat template and `base` without.
pub(crate) fn models() -> Models {
    let models = Models::default();
    let table = [entry("tiny", true), entry("base", false)].map(|m| (m.name.clone(), m));
    models.replace(BTreeMap::from(table), |_| true);
    models
}

/// Content, then name and arguments of each call, then whether there are calls, all of them whole.
pub(crate) type Read = (String, Vec<(String, String)>, bool);

/// What a text in these pieces says to whoever looks for calls.
pub(crate) fn read_calls<'a>(plan: &ToolPlan, pieces: impl IntoIterator<Item = &'a str>) -> Read {
    let (mut reader, mut parts) = (ToolReader::new(plan.clone()), Vec::new());
    for piece in pieces {
        reader.push(piece, &mut parts);
    }
    reader.finish(&mut parts);
    let (mut content, mut calls) = (String::new(), Vec::<(String, String)>::new());
    for part in parts {
        match part {
            Part::Content(text) => content.push_str(&text),
            Part::Reasoning(text) => panic!("no thoughts were looked for: {text:?}"),
            Part::Call(delta) => {
                if let Some(head) = delta.head {
                    assert_eq!(delta.index, calls.len(), "calls come one after the other");
                    calls.push((head.name, String::new()));
                }
                assert_eq!(delta.index + 1, calls.len(), "arguments are of the last call");
                calls[delta.index].1.push_str(&delta.arguments);
            }
        }
    }
    assert!(reader.has_whole_calls() || !reader.satisfied(), "what was cut off is not what was wanted");
    (content, calls, reader.has_whole_calls())
}
