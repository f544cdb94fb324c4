//! Errors about a chat in the words of the Responses API.

use crate::error::RouterError;

/// Fields of a chat and what they are called here; a path keeps what follows.
const NAMES: [(&str, &str); 9] = [
    ("max_completion_tokens", "max_output_tokens"),
    ("max_tokens", "max_output_tokens"),
    ("messages", "input"),
    ("response_format.json_schema.schema", "text.format.schema"),
    ("response_format.json_schema", "text.format"),
    ("response_format", "text.format"),
    ("tool_choice.function.name", "tool_choice.name"),
    ("logprobs", "include"),
    ("reasoning_effort", "reasoning.effort"),
];

pub(super) fn translated(error: RouterError) -> RouterError {
    let Some(param) = &error.param else { return error };
    let ours = translated_path(param);
    if ours == *param {
        return error;
    }
    let message = error.message.replace(&format!("`{param}`"), &format!("`{ours}`"));
    RouterError { message, param: Some(ours), ..error }
}

fn translated_path(path: &str) -> String {
    if let Some(rest) = path.strip_prefix("tools[") {
        // Functions are not wrapped here.
        return format!("tools[{}", rest.replacen("].function", "]", 1));
    }
    if let Some(rest) = path.strip_prefix("tool_choice.allowed_tools") {
        return format!("tool_choice{}", rest.replacen(".function", "", 1));
    }
    for (theirs, ours) in NAMES {
        if let Some(rest) = path.strip_prefix(theirs)
            && (rest.is_empty() || rest.starts_with(['.', '[']))
        {
            return format!("{ours}{rest}");
        }
    }
    path.to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_are_told_in_the_words_of_this_api() {
        let check = |chat: &str, expected: &str| {
            let error = translated(RouterError::field(chat, format!("`{chat}` is wrong")));
            assert_eq!(error.param.as_deref(), Some(expected));
            assert_eq!(error.message, format!("`{expected}` is wrong"));
        };
        check("max_completion_tokens", "max_output_tokens");
        check("messages", "input");
        check("messages[3].content", "input[3].content");
        check("response_format.json_schema.schema", "text.format.schema");
        check("response_format.json_schema.name", "text.format.name");
        check("response_format.type", "text.format.type");
        check("tools[2].function.name", "tools[2].name");
        check("tools[2].function", "tools[2]");
        check("tools[2]", "tools[2]");
        check("tool_choice.function.name", "tool_choice.name");
        check("tool_choice.allowed_tools.mode", "tool_choice.mode");
        check("tool_choice.allowed_tools.tools[1].function.name", "tool_choice.tools[1].name");
        check("temperature", "temperature");
        check("max_tokens_of_another_kind", "max_tokens_of_another_kind");
    }
}
