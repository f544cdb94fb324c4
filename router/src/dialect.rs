//! How a served model writes what is more than text: tool calls and thoughts. Its chat template shows it.

use thalweg_model::chat_template::ChatTemplate;

use crate::output::reader::Reasoning;
use crate::output::tools::ToolFormat;

/// Which parser finds tool calls, named as vLLM names them.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum, serde::Serialize, serde::Deserialize,
)]
#[serde(rename_all = "snake_case")]
#[value(rename_all = "snake_case")]
pub enum ToolCallParser {
    /// As the model's chat template writes them
    #[default]
    Auto,
    /// Calls are text
    None,
    /// JSON between tool_call tags: Hermes, Qwen2.5, Qwen3, SmolLM2
    Hermes,
    /// JSON with name and parameters, perhaps behind python_tag: Llama 3
    Llama3Json,
    /// JSON behind TOOL_CALLS
    Mistral,
    /// JSON or Python, perhaps in a fence: Gemma 3
    Gemma3,
}

/// Which parser finds thoughts, named as vLLM names them.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum, serde::Serialize, serde::Deserialize,
)]
#[serde(rename_all = "snake_case")]
#[value(rename_all = "snake_case")]
pub enum ReasoningParser {
    /// Between think tags, where the model's chat template knows them
    #[default]
    Auto,
    /// Thoughts are text
    None,
    /// What stands between think tags
    Qwen3,
    /// Everything before the closing think tag, also without an opening one
    DeepseekR1,
}

/// What a chat template shows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Dialect {
    /// How the model writes calls.
    pub(crate) tools: ToolFormat,
    /// The template tells the model of the request's tools.
    pub(crate) renders_tools: bool,
    /// The template knows of thoughts.
    pub(crate) thinks: bool,
}

impl Dialect {
    /// Of a model with this template, or none.
    pub fn of(template: Option<&ChatTemplate>) -> Self {
        let source = template.map_or("", ChatTemplate::source);
        Self {
            tools: tools(source),
            renders_tools: source.contains("tools"),
            thinks: source.contains("<think>") || source.contains("</think>"),
        }
    }

    /// The format of calls; None: they are text.
    pub(crate) fn tool_format(self, parser: ToolCallParser) -> Option<ToolFormat> {
        match parser {
            ToolCallParser::Auto => Some(self.tools),
            ToolCallParser::None => None,
            ToolCallParser::Hermes => Some(ToolFormat::Hermes),
            ToolCallParser::Llama3Json => Some(ToolFormat::Llama3Json),
            ToolCallParser::Mistral => Some(ToolFormat::Mistral),
            ToolCallParser::Gemma3 => Some(ToolFormat::Gemma3),
        }
    }

    /// How thoughts are told; None: they are text.
    pub(crate) fn reasoning(self, parser: ReasoningParser) -> Option<Reasoning> {
        match parser {
            ReasoningParser::Auto => self.thinks.then_some(Reasoning::Marked),
            ReasoningParser::None => None,
            ReasoningParser::Qwen3 => Some(Reasoning::Marked),
            ReasoningParser::DeepseekR1 => Some(Reasoning::Assumed),
        }
    }
}

/// Marks that only one family writes come before those that several do.
fn tools(source: &str) -> ToolFormat {
    let has = |mark: &str| source.contains(mark);
    match () {
        () if has("[TOOL_CALLS]") => ToolFormat::Mistral,
        () if has("<tool_call>") => ToolFormat::Hermes,
        () if has("<|python_tag|>") || has("<|start_header_id|>") => ToolFormat::Llama3Json,
        () if has("<start_of_turn>") => ToolFormat::Gemma3,
        () => ToolFormat::Hermes,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn families_are_told_by_their_marks() {
        let check = |source: &str, expected: ToolFormat| assert_eq!(tools(source), expected, "{source}");
        check("{{ '[TOOL_CALLS][' }}", ToolFormat::Mistral);
        check("<|im_start|> <tool_call>", ToolFormat::Hermes);
        check("<|start_header_id|> <|python_tag|>", ToolFormat::Llama3Json);
        check("<start_of_turn>user", ToolFormat::Gemma3);
        check("<|im_start|>user", ToolFormat::Hermes);
        check("", ToolFormat::Hermes);
    }
}
