//! What nobody may read in messages and logs: users and passwords in URLs.

use std::borrow::Cow;
use std::io::{self, Write};

const SHOWN: &str = "[redacted]";

/// Whether a value names a user or a password, as in `scheme://user:password@host` or `user:password@host`.
pub(crate) fn has_userinfo(value: &str) -> bool {
    words(value).any(|word| word.rsplit_once('@').is_some_and(|(before, _)| before.contains(':')))
}

/// The text, with what stands between :// and the last @ of a word left out.
pub(crate) fn userinfo(text: &str) -> Cow<'_, str> {
    if !text.contains("://") || !text.contains('@') {
        return Cow::Borrowed(text);
    }
    let mut shown = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(begin) = rest.find("://").map(|at| at + 3) {
        shown.push_str(&rest[..begin]);
        rest = &rest[begin..];
        let word = words(rest).next().unwrap_or_default();
        // A word that begins later is another one.
        if let Some(at) = word.rfind('@').filter(|_| rest.starts_with(word)) {
            shown.push_str(SHOWN);
            rest = &rest[at..];
        }
    }
    shown.push_str(rest);
    Cow::Owned(shown)
}

fn words(text: &str) -> impl Iterator<Item = &str> {
    text.split(|c: char| c.is_whitespace() || matches!(c, '"' | '\'' | '`')).filter(|word| !word.is_empty())
}

/// Stderr, but for users and passwords. The logger writes a whole line at a time. A line for which there is no room, or nobody who reads it,
/// is lost and nothing else: whoever wrote it has other things to do.
pub(crate) struct Stderr;

impl Write for Stderr {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        let text = String::from_utf8_lossy(line);
        let _ = io::stderr().lock().write_all(userinfo(&text).as_bytes());
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        let _ = io::stderr().flush();
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn users_and_passwords_are_left_out() {
        let check = |text: &str, expected: &str| {
            assert_eq!(userinfo(text), expected, "{text}");
        };
        check("redis://u:hunter2@h:1/x", "redis://[redacted]@h:1/x");
        check(
            "at grpc://u:h@nter2@h and http://hunter2@g!",
            "at grpc://[redacted]@h and http://[redacted]@g!",
        );
        check(r#"{"url":"a://u:hunter2@h","at":"b@c"}"#, r#"{"url":"a://[redacted]@h","at":"b@c"}"#);
        check("a://u:hun/t,er2@h,g", "a://[redacted]@h,g");
        check("http://h:1 of me@here", "http://h:1 of me@here");
        check("http:// me@here", "http:// me@here");
        check("no url", "no url");
    }

    #[test]
    fn values_with_a_user_are_known() {
        for value in ["a://u:p@h", "a://u@h", "u:p@h", "x=a://u:p@h"] {
            assert!(has_userinfo(value), "{value}");
        }
        for value in ["", "a://h:1", "model@v2.gguf", "owner/name:part", "a@b:1", "http://h me@here"] {
            assert!(!has_userinfo(value), "{value}");
        }
    }
}
