//! Thoughts between `<think>` and `</think>`, told from the answer behind them.

use super::part::Part;

pub(crate) const OPEN: &str = "<think>";
pub(crate) const CLOSE: &str = "</think>";

/// Splits one choice's text. White space next to the two marks belongs to neither side.
#[derive(Debug)]
pub(super) struct ReasoningReader {
    phase: Phase,
    held: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// Nothing but white space so far, or the beginning of `<think>`.
    Undecided,
    /// The prompt ends within the thoughts; the model may open them once more.
    Told,
    /// Behind `<think>`, before the first thought.
    Entered,
    Inside,
    /// Behind `</think>`, before the answer.
    Left,
    Outside,
}

impl ReasoningReader {
    /// `inside`: the prompt ends within the model's thoughts.
    pub(super) fn new(inside: bool) -> Self {
        Self { phase: if inside { Phase::Told } else { Phase::Undecided }, held: String::new() }
    }

    /// The next character is a thought, as far as is known.
    pub(super) fn inside(&self) -> bool {
        matches!(self.phase, Phase::Told | Phase::Entered | Phase::Inside)
    }

    /// Takes more text; returns what belongs to the answer.
    pub(super) fn push(&mut self, text: &str, parts: &mut Vec<Part>) -> String {
        if self.phase == Phase::Outside {
            return text.to_owned();
        }
        self.held.push_str(text);
        loop {
            let before = self.phase;
            match before {
                Phase::Undecided | Phase::Told => self.decide(),
                Phase::Entered | Phase::Left => self.skip_space(),
                Phase::Inside => self.think(parts),
                Phase::Outside => return std::mem::take(&mut self.held),
            }
            if self.phase == before {
                return String::new();
            }
        }
    }

    /// The text has ended; returns what belongs to the answer.
    pub(super) fn finish(&mut self, parts: &mut Vec<Part>) -> String {
        let held = std::mem::take(&mut self.held);
        match self.phase {
            Phase::Undecided | Phase::Outside => held,
            Phase::Told => {
                push_reasoning(parts, held.trim());
                String::new()
            }
            Phase::Inside => {
                push_reasoning(parts, held.trim_end());
                String::new()
            }
            Phase::Entered | Phase::Left => String::new(),
        }
    }

    fn decide(&mut self) {
        let begun = self.held.trim_start();
        if let Some(rest) = begun.strip_prefix(OPEN) {
            self.held = rest.to_owned();
            self.phase = Phase::Entered;
        } else if !OPEN.starts_with(begun) {
            self.phase = if self.phase == Phase::Told { Phase::Entered } else { Phase::Outside };
        }
    }

    fn skip_space(&mut self) {
        let rest = self.held.trim_start();
        if rest.is_empty() {
            self.held.clear();
            return;
        }
        self.held = rest.to_owned();
        self.phase = if self.phase == Phase::Entered { Phase::Inside } else { Phase::Outside };
    }

    fn think(&mut self, parts: &mut Vec<Part>) {
        if let Some(at) = self.held.find(CLOSE) {
            push_reasoning(parts, self.held[..at].trim_end());
            self.held.drain(..at + CLOSE.len());
            self.phase = Phase::Left;
            return;
        }
        let begun = (1..CLOSE.len()).rev().find(|length| self.held.ends_with(&CLOSE[..*length])).unwrap_or(0);
        let certain = self.held[..self.held.len() - begun].trim_end().len();
        push_reasoning(parts, &self.held[..certain]);
        self.held.drain(..certain);
    }
}

fn push_reasoning(parts: &mut Vec<Part>, text: &str) {
    match parts.last_mut() {
        _ if text.is_empty() => {}
        Some(Part::Reasoning(last)) => last.push_str(text),
        _ => parts.push(Part::Reasoning(text.to_owned())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Whole, in two pieces cut anywhere, and character by character.
    fn check(inside: bool, text: &str, reasoning: &str, content: &str) {
        let run = |pieces: &[&str]| {
            let (mut reader, mut parts) = (ReasoningReader::new(inside), Vec::new());
            let mut answer = String::new();
            for piece in pieces {
                answer.push_str(&reader.push(piece, &mut parts));
            }
            answer.push_str(&reader.finish(&mut parts));
            let thoughts: String = parts
                .iter()
                .map(|part| match part {
                    Part::Reasoning(text) => text.as_str(),
                    other => panic!("{other:?}"),
                })
                .collect();
            assert_eq!((thoughts.as_str(), answer.as_str()), (reasoning, content), "{pieces:?}");
        };
        for at in (0..=text.len()).filter(|at| text.is_char_boundary(*at)) {
            run(&[&text[..at], &text[at..]]);
        }
        run(&text.split("").collect::<Vec<_>>());
    }

    #[test]
    fn thoughts_are_told_from_the_answer() {
        check(false, "<think>\nhm, 大阪\n</think>\n\nyes", "hm, 大阪", "yes");
        check(true, "\nhm\n</think>\n\nyes", "hm", "yes");
        check(false, "<think>\n\n</think>\n\nyes", "", "yes");
        check(false, "\n<think>a b", "a b", "");
        check(true, "cut </thin", "cut </thin", "");
        check(true, "<think>hm</think>yes", "hm", "yes");
        check(true, "\n<think>\n</think>yes", "", "yes");
        check(true, "<think> <think></think>yes", "<think>", "yes");
        check(true, "<thin", "<thin", "");
        check(true, "a </ b\n\nc </think> d </think> e", "a </ b\n\nc", "d </think> e");
    }

    #[test]
    fn an_answer_without_thoughts_is_an_answer() {
        check(false, "plain <think> text", "", "plain <think> text");
        check(false, " <thin", "", " <thin");
        check(false, "", "", "");
    }
}
