//! Where a `$ref` leads.

use std::collections::HashSet;

use serde_json::Value;

use super::places::Reference;
use super::refused;
use crate::grammar::compile::GrammarError;

/// References and combinations within each other, with nothing between them that an answer could begin with.
const DEPTH_MAX: usize = 128;

/// The JSON pointer that a reference stands for, if it is one from the root.
pub(super) fn pointer(reference: &str) -> Option<String> {
    let fragment = reference.strip_prefix('#')?;
    (fragment.is_empty() || fragment.starts_with('/')).then(|| percent_decoded(fragment))
}

/// Refuses references that only lead back to themselves, so that no answer is ever whole.
pub(super) fn check_ends(root: &Value, references: &[Reference]) -> Result<(), GrammarError> {
    let mut ends = Ends { root, known: HashSet::new(), seen: HashSet::new() };
    loop {
        let before = ends.known.len();
        ends.seen.clear();
        for Reference { from, to } in references {
            ends.reference(to, 0).map_err(|reason| refused(from, ("$ref", reason)))?;
        }
        if ends.known.len() == before {
            break;
        }
    }
    match references.iter().find(|reference| !ends.known.contains(&reference.to)) {
        Some(Reference { from, to }) => {
            let reason =
                format!("leads to `#{to}`, which only leads back to itself; say there what is meant");
            Err(refused(from, ("$ref", reason)))
        }
        None => Ok(()),
    }
}

/// What is known to come to something else than references, looked for in rounds: each schema once in a round.
struct Ends<'a> {
    root: &'a Value,
    known: HashSet<String>,
    seen: HashSet<String>,
}

impl Ends<'_> {
    fn reference(&mut self, to: &str, depth: usize) -> Result<bool, String> {
        if self.known.contains(to) {
            return Ok(true);
        }
        let Some(schema) = self.root.pointer(to).filter(|_| self.seen.insert(to.to_owned())) else {
            return Ok(false);
        };
        let ends = self.schema(schema, depth + 1)?;
        if ends {
            self.known.insert(to.to_owned());
        }
        Ok(ends)
    }

    fn schema(&mut self, schema: &Value, depth: usize) -> Result<bool, String> {
        if depth > DEPTH_MAX {
            return Err(format!(
                "leads on and on, more than {DEPTH_MAX} deep; say what is meant nearer to it"
            ));
        }
        let mut ends = true;
        if let Some(to) = schema.get("$ref").and_then(Value::as_str).and_then(pointer)
            && self.root.pointer(&to).is_some()
        {
            ends &= self.reference(&to, depth)?;
        }
        for all in schema.get("allOf").and_then(Value::as_array).into_iter().flatten() {
            ends &= self.schema(all, depth + 1)?;
        }
        for options in ["anyOf", "oneOf"].iter().filter_map(|keyword| schema.get(*keyword)?.as_array()) {
            let mut any = options.is_empty();
            for option in options {
                any |= self.schema(option, depth + 1)?;
            }
            ends &= any;
        }
        Ok(ends)
    }
}

fn percent_decoded(text: &str) -> String {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let [first, after @ ..] = rest {
        let digits =
            after.get(..2).filter(|_| *first == b'%').and_then(|digits| std::str::from_utf8(digits).ok());
        let decoded = digits.and_then(|digits| u8::from_str_radix(digits, 16).ok());
        bytes.push(decoded.unwrap_or(*first));
        rest = if decoded.is_some() { &after[2..] } else { after };
    }
    String::from_utf8_lossy(&bytes).into_owned()
}
