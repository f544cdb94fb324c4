//! Grammars of models that think before they answer: the answer is held to one, the thoughts are not.

use std::fmt::Write;

use serde_json::{Value, json};

use super::blanks::{JsonBlanks, has_options, put_pattern};
use super::schema;
use super::source::GrammarSource;

/// Behind the thoughts models write a blank line.
const GAP: &str = r"/[ \n]{1,4}/";

impl GrammarSource {
    /// Texts of this grammar behind thoughts that end with `</think>`. `begun`: the prompt has begun them; else the model
    /// may begin some with `<think>`. `pattern`: as in [`Self::with_blanks_pattern`]. None where the source cannot be part of another:
    /// a whole grammar of rules, or a schema that tells the library how to read it or that cannot be enforced.
    pub fn behind_thoughts(&self, begun: bool, blanks: JsonBlanks, pattern: Option<&str>) -> Option<Self> {
        let answer = match self {
            Self::JsonObject => json_rule(json!({"type": "object"}), blanks, pattern)?,
            Self::JsonSchema(text) => {
                let schema = serde_json::from_str::<Value>(text).ok()?;
                json_rule(schema, blanks, pattern)?
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

fn json_rule(mut schema: Value, blanks: JsonBlanks, pattern: Option<&str>) -> Option<String> {
    let object = schema.as_object_mut().filter(|object| !has_options(object))?;
    pattern.into_iter().for_each(|pattern| put_pattern(object, pattern));
    schema::prepare(&mut schema).ok()?;
    blanks.put_into(&mut schema);
    Some(format!("%json {schema}"))
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
