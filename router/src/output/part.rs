//! What the stretches of a model's text are: words for the user, thoughts, and calls of tools.

/// A stretch of text, in the order in which the model wrote it.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Part {
    Content(String),
    Reasoning(String),
    Call(CallDelta),
}

/// A step of one tool call.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct CallDelta {
    /// Number of the call within its choice.
    pub(crate) index: usize,
    /// In the first delta of a call alone.
    pub(crate) head: Option<CallHead>,
    /// More of the arguments' JSON text.
    pub(crate) arguments: String,
}

/// What a call begins with.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct CallHead {
    pub(crate) id: String,
    pub(crate) name: String,
}

/// Appends content, to the last part where that is content too.
pub(super) fn push_content(parts: &mut Vec<Part>, text: &str) {
    match parts.last_mut() {
        _ if text.is_empty() => {}
        Some(Part::Content(last)) => last.push_str(text),
        _ => parts.push(Part::Content(text.to_owned())),
    }
}

/// Appends to the arguments of a call that has begun.
pub(super) fn push_arguments(parts: &mut Vec<Part>, index: usize, text: &str) {
    match parts.last_mut() {
        Some(Part::Call(last)) if last.index == index => last.arguments.push_str(text),
        _ => parts.push(Part::Call(CallDelta { index, head: None, arguments: text.to_owned() })),
    }
}
