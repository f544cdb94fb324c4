//! Grammars of models that think before they answer: the answer is held to one, the thoughts are not.

use std::fmt::Write;

use serde_json::{Value, json};

use super::source::{GrammarSource, JsonBlanks, OPTIONS, with_blanks};

/// Behind the thoughts models write a blank line.
const GAP: &str = r"/[ \n]{1,4}/";

impl GrammarSource {
    /// Texts of this grammar behind thoughts that end with `</think>`. `begun`: the prompt has begun them; else the model
    /// may begin some with `<think>`. None where the source cannot be part of another: a whole grammar of rules.
    pub fn behind_thoughts(&self, begun: bool, blanks: JsonBlanks) -> Option<Self> {
        let answer = match self {
            Self::JsonObject => format!("%json {}", with_blanks(json!({"type": "object"}), blanks)),
            Self::JsonSchema(text) => {
                let schema = serde_json::from_str::<Value>(text).ok().filter(Value::is_object)?;
                if schema.get(OPTIONS).is_some() {
                    return None;
                }
                format!("%json {}", with_blanks(schema, blanks))
            }
            Self::Regex(text) => format!("/{}/", escaped(text)),
            Self::Choice(texts) => {
                let texts: Vec<_> = texts.iter().map(|text| json!(text).to_string()).collect();
                texts.join(" | ")
            }
            Self::Lark(_) => return None,
        };
        let mut lark = String::new();
        // Writing to a string does not fail.
        let start = if begun { "thoughts" } else { "(\"<think>\" thoughts)?" };
        let _ = writeln!(lark, "start: {start} gap? answer");
        let _ = writeln!(lark, "thoughts[suffix=\"</think>\"]: /(?s:.*)/\ngap: {GAP}\nanswer: {answer}");
        Some(Self::Lark(lark))
    }
}

/// A regular expression between slashes, on one line.
fn escaped(regex: &str) -> String {
    let mut text = String::with_capacity(regex.len());
    let mut chars = regex.chars();
    while let Some(char) = chars.next() {
        match char {
            '\\' => {
                text.push('\\');
                text.extend(chars.next());
            }
            '/' => text.push_str("\\/"),
            '\n' => text.push_str("\\n"),
            other => text.push(other),
        }
    }
    text
}
