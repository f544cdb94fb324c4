//! Prompts from a file of JSON lines.

use std::path::Path;

use rand::SeedableRng;
use rand::rngs::StdRng;
use rand::seq::SliceRandom;
use serde::Deserialize;

use crate::conversation::{Conversation, Message};
use crate::error::LoadError;

#[derive(Deserialize)]
#[serde(untagged)]
enum Line {
    Prompt { prompt: String },
    Messages { messages: Vec<Said> },
}

#[derive(Deserialize)]
struct Said {
    role: String,
    content: String,
}

/// All conversations of a file, shuffled.
pub(crate) fn read(path: &Path, seed: u64) -> Result<Vec<Conversation>, LoadError> {
    let text =
        std::fs::read_to_string(path).map_err(|source| LoadError::Io { path: path.to_owned(), source })?;
    let wrong = |line: usize, reason: &str| LoadError::Dataset {
        path: path.to_owned(),
        line,
        reason: reason.to_owned(),
    };
    let lines = text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty());
    let parsed = lines.map(|(index, line)| parse(line).map_err(|reason| wrong(index + 1, reason)));
    let mut conversations: Vec<Conversation> = parsed.collect::<Result<_, _>>()?;
    if conversations.is_empty() {
        return Err(wrong(1, "the file holds no prompts"));
    }
    conversations.shuffle(&mut StdRng::seed_from_u64(seed));
    Ok(conversations)
}

/// One request a line: messages up to the last of the user, what follows is the data set's own answer.
fn parse(line: &str) -> Result<Conversation, &'static str> {
    let shape =
        "expected {\"prompt\": \"..\"} or {\"messages\": [{\"role\": \"..\", \"content\": \"..\"}, ..]}";
    match serde_json::from_str(line).map_err(|_| shape)? {
        Line::Prompt { prompt } => Ok(Conversation { opening: Vec::new(), turns: vec![prompt] }),
        Line::Messages { messages } => {
            let last = messages.iter().rposition(|said| said.role == "user");
            let last = last.ok_or("expected at least one message of role user")?;
            let mut said =
                messages.into_iter().map(|said| Message { role: said.role, content: said.content });
            let opening: Vec<Message> = said.by_ref().take(last).collect();
            Ok(Conversation {
                opening,
                turns: said.next().map(|message| message.content).into_iter().collect(),
            })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_prompts_or_messages() {
        let check = |line: &str, opening: &[&str], turn: &str| {
            let conversation = parse(line).unwrap();
            assert_eq!(conversation.opening.iter().map(|m| m.content.as_str()).collect::<Vec<_>>(), opening);
            assert_eq!(conversation.turns, [turn]);
        };
        check(r#"{"prompt": "a", "id": 3}"#, &[], "a");
        check(
            r#"{"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}"#,
            &[],
            "q",
        );
        let three = r#"{"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}]}"#;
        check(three, &["s"], "q");
    }

    #[test]
    fn other_lines_are_refused() {
        for line in ["", "[]", r#"{"text": "a"}"#, r#"{"prompt": 1}"#, r#"{"messages": []}"#] {
            assert!(parse(line).is_err(), "{line}");
        }
    }
}
