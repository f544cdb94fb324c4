//! How models of each family write tool calls.

/// A way of writing calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ToolFormat {
    /// `<tool_call>{"name": .., "arguments": {..}}</tool_call>`: Hermes, Qwen, SmolLM (there with an array inside).
    Hermes,
    /// `{"name": .., "parameters": {..}}` as the whole answer, several with `;` between, or behind `<|python_tag|>`.
    Llama3Json,
    /// `[TOOL_CALLS][{"name": .., "arguments": {..}}]`, or `[TOOL_CALLS]name{..}` of later versions.
    Mistral,
    /// JSON as the whole answer or in a fence, or Python in a `tool_code` fence.
    Gemma3,
    /// An array of objects with `name` and `parameters` as the whole answer: what a grammar makes of `required`.
    Json,
}

/// What a call begins with.
#[derive(Debug, PartialEq)]
pub(super) struct Marker {
    pub(super) text: &'static str,
    pub(super) body: Body,
    /// What comes behind the call; empty where nothing does.
    pub(super) close: &'static str,
}

/// What stands behind a marker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Body {
    /// An object, or an array of them.
    Json,
    /// The same, but the marker is its first character. Only at the beginning of an answer.
    BareJson,
    /// As `Json`, or a name and then its arguments.
    NameOrJson,
    Python,
}

const FENCE: &str = "```";
const BARE_OBJECT: Marker = Marker { text: "{", body: Body::BareJson, close: "" };
const BARE_ARRAY: Marker = Marker { text: "[", body: Body::BareJson, close: "" };
const HERMES: &[Marker] = &[Marker { text: "<tool_call>", body: Body::Json, close: "</tool_call>" }];
const LLAMA: &[Marker] = &[Marker { text: "<|python_tag|>", body: Body::Json, close: "" }, BARE_OBJECT];
const MISTRAL: &[Marker] = &[Marker { text: "[TOOL_CALLS]", body: Body::NameOrJson, close: "" }];
const GEMMA: &[Marker] = &[
    Marker { text: "```tool_code\n", body: Body::Python, close: FENCE },
    Marker { text: "```tool_call\n", body: Body::Json, close: FENCE },
    Marker { text: "```json\n", body: Body::Json, close: FENCE },
    BARE_OBJECT,
    BARE_ARRAY,
];
const JSON: &[Marker] = &[BARE_OBJECT, BARE_ARRAY];

impl ToolFormat {
    pub(super) fn markers(self) -> &'static [Marker] {
        match self {
            Self::Hermes => HERMES,
            Self::Llama3Json => LLAMA,
            Self::Mistral => MISTRAL,
            Self::Gemma3 => GEMMA,
            Self::Json => JSON,
        }
    }

    /// An id for a call. Mistral's templates take nine letters and digits, and nothing else.
    pub(super) fn call_id(self) -> String {
        let random = format!("{:032x}", rand::random::<u128>());
        match self {
            Self::Mistral => random[..9].to_owned(),
            _ => format!("call_{}", &random[..24]),
        }
    }
}

/// Control tokens that are part of a call and must be read though control tokens are left out of text.
pub(crate) fn is_marker(text: &str) -> bool {
    matches!(
        text,
        "<tool_call>" | "</tool_call>" | "<|python_tag|>" | "[TOOL_CALLS]" | "[ARGS]" | "[CALL_ID]"
    )
}
