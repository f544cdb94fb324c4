//! Calls written as Python, `get_weather(city="Oslo", days=3)`: literals only.

use serde_json::{Map, Number, Value, json};

/// Nesting of literals; calls of models stay under five.
const DEPTH_MAX: usize = 32;

/// Names and arguments of the calls that a code consists of, one a line or as a list; None if it is anything else.
/// A call within `print(..)` is that call.
pub(super) fn calls(code: &str) -> Option<Vec<(String, Value)>> {
    let mut reader = Reader { rest: code.trim() };
    let listed = reader.takes('[');
    let mut calls = Vec::new();
    while !(reader.rest.is_empty() || listed && reader.takes(']')) {
        calls.push(reader.call()?);
        let _ = reader.takes(',') || reader.takes(';');
    }
    (reader.rest.trim().is_empty() && !calls.is_empty()).then_some(calls)
}

struct Reader<'a> {
    rest: &'a str,
}

impl Reader<'_> {
    fn call(&mut self) -> Option<(String, Value)> {
        let name = self.name()?;
        if !self.takes('(') {
            return None;
        }
        if name == "print" {
            let call = self.call()?;
            return self.takes(')').then_some(call);
        }
        let mut arguments = Map::new();
        while !self.takes(')') {
            let key = self.name()?;
            if !self.takes('=') {
                return None;
            }
            arguments.insert(key, self.literal(0)?);
            if !self.takes(',') && !self.rest.starts_with(')') {
                return None;
            }
        }
        Some((name, Value::Object(arguments)))
    }

    fn literal(&mut self, depth: usize) -> Option<Value> {
        if depth > DEPTH_MAX {
            return None;
        }
        self.rest = self.rest.trim_start();
        match self.rest.chars().next()? {
            quote @ ('"' | '\'') => self.string(quote).map(Value::String),
            '[' | '(' => self.list(depth),
            '{' => self.dictionary(depth),
            _ => self.word(),
        }
    }

    fn list(&mut self, depth: usize) -> Option<Value> {
        let close = if self.takes('[') { ']' } else { ')' };
        if close == ')' {
            self.takes('(');
        }
        let mut items = Vec::new();
        while !self.takes(close) {
            items.push(self.literal(depth + 1)?);
            if !self.takes(',') && !self.rest.starts_with(close) {
                return None;
            }
        }
        Some(Value::Array(items))
    }

    fn dictionary(&mut self, depth: usize) -> Option<Value> {
        self.takes('{');
        let mut fields = Map::new();
        while !self.takes('}') {
            let Value::String(key) = self.literal(depth + 1)? else { return None };
            if !self.takes(':') {
                return None;
            }
            fields.insert(key, self.literal(depth + 1)?);
            if !self.takes(',') && !self.rest.starts_with('}') {
                return None;
            }
        }
        Some(Value::Object(fields))
    }

    fn string(&mut self, quote: char) -> Option<String> {
        let mut text = String::new();
        let mut chars = self.rest.char_indices().skip(1);
        while let Some((at, char)) = chars.next() {
            match char {
                '\\' => text.push(match chars.next()?.1 {
                    'n' => '\n',
                    't' => '\t',
                    'r' => '\r',
                    other => other,
                }),
                end if end == quote => {
                    self.rest = self.rest[at + 1..].trim_start();
                    return Some(text);
                }
                other => text.push(other),
            }
        }
        None
    }

    fn word(&mut self) -> Option<Value> {
        let end = self.rest.find([',', ')', ']', '}', ':', ' ', '\n']).unwrap_or(self.rest.len());
        let (word, rest) = self.rest.split_at(end);
        self.rest = rest.trim_start();
        match word {
            "True" | "true" => Some(json!(true)),
            "False" | "false" => Some(json!(false)),
            "None" | "null" => Some(Value::Null),
            number => number.parse::<Number>().ok().map(Value::Number),
        }
    }

    fn name(&mut self) -> Option<String> {
        self.rest = self.rest.trim_start();
        let is_part = |c: char| c.is_alphanumeric() || matches!(c, '_' | '-' | '.');
        let end = self.rest.find(|c| !is_part(c)).unwrap_or(self.rest.len());
        let (name, rest) = self.rest.split_at(end);
        self.rest = rest;
        (!name.is_empty()).then(|| name.to_owned())
    }

    /// Skips white space and the character, if it is the next.
    fn takes(&mut self, wanted: char) -> bool {
        let rest = self.rest.trim_start();
        let Some(rest) = rest.strip_prefix(wanted) else {
            self.rest = rest;
            return false;
        };
        self.rest = rest.trim_start();
        true
    }
}
