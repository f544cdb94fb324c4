//! Marks in users' text that keep it from becoming control tokens.

use std::borrow::Cow;
use std::cell::RefCell;
use std::collections::HashSet;

use serde_json::{Map, Value};

use super::Prepared;
use crate::tokenizer::ControlTokens;

const FIRST_CANDIDATE: char = '\u{FDD0}';

/// Puts markers into users' text.
pub(super) struct Guard<'a> {
    control: &'a ControlTokens,
    marker: char,
}

/// Where markers go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Style {
    /// Into every control token's text, and around every text but names, within its outer white space.
    Enclose,
    /// Only into text that is, begins or ends a control token.
    Minimal,
}

impl<'a> Guard<'a> {
    pub(super) fn new(control: &'a ControlTokens, prepared: &Prepared<'_>, source: &str) -> Self {
        Self { control, marker: unused_char(control, prepared, source) }
    }

    pub(super) fn marker(&self) -> char {
        self.marker
    }

    /// Some text could become a control token or a part of one.
    pub(super) fn is_needed(&self, prepared: &Prepared<'_>) -> bool {
        !prepared.all(&|text, place| {
            let inner = text.trim();
            let has_token = !self.control.breaks(text).is_empty();
            if has_token || place == Place::Name {
                return !has_token;
            }
            self.control.open_end(inner) == 0
                && self.control.open_start(inner) == 0
                && self.control.open_end(text) == 0
                && self.control.open_start(text) == 0
                && !self.control.is_fragment(inner)
        })
    }

    /// A copy with markers.
    pub(super) fn apply(&self, prepared: &Prepared<'_>, style: Style) -> Prepared<'static> {
        let mark = |value: &Value| Cow::Owned(self.mark(value, style));
        let messages = prepared.messages.as_array().into_iter().flatten();
        let messages = messages.map(|message| self.mark_message(message, style)).collect();
        Prepared {
            messages: Cow::Owned(Value::Array(messages)),
            tools: mark(&prepared.tools),
            kwargs: mark(&prepared.kwargs),
        }
    }

    /// Templates make control tokens of roles (`'<|' + role + '|>'`), so these are never enclosed.
    fn mark_message(&self, message: &Value, style: Style) -> Value {
        let Some(fields) = message.as_object() else { return self.mark(message, style) };
        let marked = fields.iter().map(|(key, value)| {
            let value = match value {
                Value::String(text) if is_name(key) => Value::String(self.mark_name(text)),
                _ => self.mark(value, style),
            };
            (self.mark_name(key), value)
        });
        Value::Object(marked.collect())
    }

    fn mark(&self, value: &Value, style: Style) -> Value {
        match value {
            Value::String(text) => Value::String(self.mark_text(text, style)),
            Value::Array(items) => Value::Array(items.iter().map(|item| self.mark(item, style)).collect()),
            Value::Object(fields) => {
                let entries =
                    fields.iter().map(|(key, value)| (self.mark_name(key), self.mark(value, style)));
                Value::Object(entries.collect::<Map<_, _>>())
            }
            plain => plain.clone(),
        }
    }

    /// Only whole control tokens are broken.
    fn mark_name(&self, name: &str) -> String {
        insert(name, self.control.breaks(name), self.marker)
    }

    fn mark_text(&self, text: &str, style: Style) -> String {
        let mut at = self.control.breaks(text);
        let start = text.len() - text.trim_start().len();
        let stop = text.trim_end().len().max(start);
        match style {
            Style::Enclose if start < stop => at.extend([start, stop]),
            Style::Enclose => {}
            Style::Minimal => {
                at.extend(self.edges(text).into_iter().chain(self.edges_within(text, start, stop)))
            }
        }
        insert(text, at, self.marker)
    }

    fn edges_within(&self, text: &str, start: usize, stop: usize) -> Vec<usize> {
        self.edges(&text[start..stop]).into_iter().map(|at| start + at).collect()
    }

    /// Breaks of what is begun at the text's end, behind its first character, and ended at its start, before its last.
    fn edges(&self, text: &str) -> Vec<usize> {
        let mut at = Vec::new();
        let end = self.control.open_end(text);
        if end > 0 {
            let begun = text.len() - end;
            at.push(begun + text[begun..].chars().next().map_or(0, char::len_utf8));
        }
        let start = self.control.open_start(text);
        if start > 0 {
            at.push(start - text[..start].chars().next_back().map_or(0, char::len_utf8));
        }
        at
    }
}

/// One that occurs neither in what users gave nor in the template. A text that holds every candidate loses one of its characters.
pub(super) fn unused_char(control: &ControlTokens, prepared: &Prepared<'_>, source: &str) -> char {
    let used = RefCell::new(HashSet::new());
    let note = |text: &str| used.borrow_mut().extend(text.chars().filter(|char| is_candidate(*char)));
    note(source);
    prepared.all(&|text, _| {
        note(text);
        true
    });
    let used = used.into_inner();
    let unused = candidates().find(|char| control.lacks(*char) && !used.contains(char));
    unused.unwrap_or(FIRST_CANDIDATE)
}

/// Characters without a meaning between systems: noncharacters, then those for private use.
fn candidates() -> impl Iterator<Item = char> {
    (FIRST_CANDIDATE..='\u{FDEF}').chain('\u{E000}'..='\u{F8FF}').chain('\u{F0000}'..='\u{FFFFD}')
}

fn is_candidate(char: char) -> bool {
    matches!(char, FIRST_CANDIDATE..='\u{FDEF}' | '\u{E000}'..='\u{F8FF}' | '\u{F0000}'..='\u{FFFFD}')
}

/// A text with a marker at each offset.
fn insert(text: &str, mut at: Vec<usize>, marker: char) -> String {
    at.sort_unstable();
    at.dedup();
    let mut marked = String::with_capacity(text.len() + at.len() * marker.len_utf8());
    let mut done = 0;
    for offset in at {
        marked.push_str(&text[done..offset]);
        marked.push(marker);
        done = offset;
    }
    marked + &text[done..]
}

/// What a text is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    /// A role, a type or a key: templates compare it, look it up and make control tokens of it.
    Name,
    /// Anything else.
    Body,
}

impl Prepared<'_> {
    /// Every text that users gave passes.
    fn all(&self, passes: &dyn Fn(&str, Place) -> bool) -> bool {
        let messages = self.messages.as_array().into_iter().flatten();
        let mut fields = messages.flat_map(|message| message.as_object().into_iter().flatten());
        fields.all(|(key, value)| match value {
            Value::String(text) if is_name(key) => passes(text, Place::Name) && passes(key, Place::Name),
            _ => passes(key, Place::Name) && all_of(value, passes),
        }) && all_of(&self.tools, passes)
            && all_of(&self.kwargs, passes)
    }
}

fn is_name(key: &str) -> bool {
    matches!(key, "role" | "type")
}

fn all_of(value: &Value, passes: &dyn Fn(&str, Place) -> bool) -> bool {
    match value {
        Value::String(text) => passes(text, Place::Body),
        Value::Array(items) => items.iter().all(|item| all_of(item, passes)),
        Value::Object(fields) => {
            fields.iter().all(|(key, value)| passes(key, Place::Name) && all_of(value, passes))
        }
        _ => true,
    }
}
