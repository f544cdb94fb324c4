//! One choice's text by its parts: thoughts, calls and content.

use thalweg_model::tokenizer::Tokenizer;

use super::part::{Part, push_content};
use super::reasoning::{self, ReasoningReader};
use super::tools::{ToolPlan, ToolReader, is_marker};

/// What to look for in a text.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Reading {
    pub(crate) reasoning: Option<Reasoning>,
    pub(crate) tools: Option<ToolPlan>,
}

/// How a model's thoughts begin.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reasoning {
    /// With `<think>`, written by the model or at the end of the prompt.
    Marked,
    /// Always, whether marked or not.
    Assumed,
}

/// State of one choice.
#[derive(Debug)]
pub(super) struct Reader {
    reasoning: Option<ReasoningReader>,
    tools: Option<ToolReader>,
}

impl Reader {
    /// None where there is nothing to look for. `prompt` decides whether the text begins within thoughts.
    pub(super) fn new(reading: &Reading, tokenizer: &Tokenizer, prompt: &[u32]) -> Option<Self> {
        let reasoning = match reading.thoughts(tokenizer, prompt) {
            Thoughts::Begun => Some(ReasoningReader::new(true)),
            Thoughts::Possible => Some(ReasoningReader::new(false)),
            Thoughts::None => None,
        };
        let tools = reading.tools.clone().map(ToolReader::new);
        (reasoning.is_some() || tools.is_some()).then_some(Self { reasoning, tools })
    }

    /// The text of a control token that is left out of text but means something here.
    pub(super) fn marker(tokenizer: &Tokenizer, id: u32) -> Option<String> {
        if !tokenizer.is_special(id) {
            return None;
        }
        let text = tokenizer.token_text(id);
        (is_marker(&text) || text == reasoning::OPEN || text == reasoning::CLOSE).then_some(text)
    }

    pub(super) fn push(&mut self, text: &str, parts: &mut Vec<Part>) {
        match &mut self.reasoning {
            None => self.answer(text, parts),
            Some(reasoning) => {
                let answer = reasoning.push(text, parts);
                self.answer(&answer, parts);
            }
        }
    }

    pub(super) fn finish(&mut self, parts: &mut Vec<Part>) {
        if let Some(reasoning) = &mut self.reasoning {
            let answer = reasoning.finish(parts);
            self.answer(&answer, parts);
        }
        if let Some(tools) = &mut self.tools {
            tools.finish(parts);
        }
    }

    /// The model is thinking.
    pub(super) fn thinks(&self) -> bool {
        self.reasoning.as_ref().is_some_and(ReasoningReader::inside)
    }

    /// Nothing more is wanted.
    pub(super) fn satisfied(&self) -> bool {
        self.tools.as_ref().is_some_and(ToolReader::satisfied)
    }

    /// OpenAI's word for the end of an answer whose tokens ended for `reason`: a call that was cut off is never told as
    /// one to be run.
    pub(super) fn finish_reason(&self, reason: &'static str) -> &'static str {
        match &self.tools {
            Some(tools) if reason == "stop" && tools.has_whole_calls() => "tool_calls",
            Some(tools) if reason == "length" && tools.ends_in_calls() => "tool_calls",
            _ => reason,
        }
    }

    fn answer(&mut self, text: &str, parts: &mut Vec<Part>) {
        match &mut self.tools {
            Some(tools) => tools.push(text, parts),
            None => push_content(parts, text),
        }
    }
}

/// What an answer begins with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Thoughts {
    /// The prompt has begun them, or the model always does.
    Begun,
    /// The model may write `<think>`.
    Possible,
    None,
}

impl Reading {
    /// What an answer to this prompt begins with. A template that turns thinking off leaves empty thoughts at its end.
    pub(crate) fn thoughts(&self, tokenizer: &Tokenizer, prompt: &[u32]) -> Thoughts {
        /// More than both marks and the line feeds around them take, in bytes if need be.
        const LOOK_BACK_TOKENS: usize = 32;
        let Some(how) = self.reasoning else { return Thoughts::None };
        let tail = tokenizer.decode(&prompt[prompt.len().saturating_sub(LOOK_BACK_TOKENS)..], false);
        match tail.trim_end() {
            end if end.ends_with(reasoning::OPEN) => Thoughts::Begun,
            end if end.ends_with(reasoning::CLOSE) => Thoughts::None,
            _ if how == Reasoning::Assumed => Thoughts::Begun,
            _ => Thoughts::Possible,
        }
    }
}
