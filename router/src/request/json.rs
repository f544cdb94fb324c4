//! Body bytes to a JSON object; a syntax error names the place and the field.

use serde_json::{Map, Value};

use crate::error::{RouterError, echo};

use super::fields::invalid;
use super::limits::JSON_VALUES_MAX;

/// What some editors write in front of UTF-8. RFC 8259 (8.1) lets who reads JSON ignore it.
const BYTE_ORDER_MARK: &[u8] = b"\xef\xbb\xbf";

/// Parses a request body, which must be one JSON object.
pub fn parse_object(body: &[u8]) -> Result<Map<String, Value>, RouterError> {
    let body = body.strip_prefix(BYTE_ORDER_MARK).unwrap_or(body);
    if body.iter().all(u8::is_ascii_whitespace) {
        return Err(invalid(None, "the request body is empty; send a JSON object"));
    }
    if body.len() > JSON_VALUES_MAX && count_separators(body) > JSON_VALUES_MAX {
        return Err(invalid(
            None,
            format!("the request body holds more than {JSON_VALUES_MAX} JSON values; send fewer"),
        ));
    }
    match serde_json::from_slice(body) {
        Ok(Value::Object(object)) => Ok(object),
        Ok(other) => {
            Err(invalid(None, format!("the request body must be a JSON object, not {}", kind(&other))))
        }
        Err(error) => Err(syntax_error(body, &error)),
    }
}

/// What a value is, as error messages call it.
pub(super) fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "an array",
        Value::Object(_) => "an object",
    }
}

fn syntax_error(body: &[u8], error: &serde_json::Error) -> RouterError {
    let (line, column) = (error.line(), error.column());
    let whole = error.to_string();
    let reason = match whole.split(" at line ").next().unwrap_or(&whole) {
        "trailing characters" => "something stands behind the end of the JSON value; send one value alone",
        reason => reason,
    };
    // What stands at the fault itself, such as a comma in place of a value, has ended no field.
    let end = offset_of(body, line, column).saturating_sub(usize::from(!error.is_eof()));
    let field = field_at_end(&body[..end]);
    let place = field.as_deref().map(|f| format!(", in `{}`", echo(f))).unwrap_or_default();
    let hint = match reason {
        "number out of range" | "expected value" => " (JSON has no NaN, no Infinity and no bare words)",
        _ => "",
    };
    invalid(field, format!("invalid JSON at line {line}, column {column}{place}: {reason}{hint}"))
}

fn offset_of(body: &[u8], line: usize, column: usize) -> usize {
    let before: usize =
        body.split_inclusive(|b| *b == b'\n').take(line.saturating_sub(1)).map(<[u8]>::len).sum();
    (before + column).min(body.len())
}

/// The key of the outermost object whose value a part of a JSON text ends in; None between fields and behind the object.
fn field_at_end(text: &[u8]) -> Option<String> {
    let mut walk = StringWalk::default();
    let (mut depth, mut start, mut last_string, mut field) = (0usize, 0, None, None);
    for (at, &byte) in text.iter().enumerate() {
        match walk.step(byte) {
            Place::Opens => start = at + 1,
            Place::Closes => last_string = Some(&text[start..at]),
            Place::Inside => {}
            Place::Outside => match byte {
                b'{' | b'[' => depth += 1,
                b'}' | b']' => {
                    depth = depth.saturating_sub(1);
                    field = field.filter(|_| depth > 0);
                }
                b':' if depth == 1 => field = last_string,
                b',' if depth == 1 => field = None,
                _ => {}
            },
        }
    }
    field.and_then(|f| String::from_utf8(f.to_vec()).ok())
}

fn count_separators(text: &[u8]) -> usize {
    let mut walk = StringWalk::default();
    text.iter().filter(|b| walk.step(**b) == Place::Outside && matches!(**b, b',' | b'[' | b'{')).count()
}

#[derive(PartialEq, Eq)]
enum Place {
    Outside,
    Opens,
    Inside,
    Closes,
}

/// Tells the bytes within JSON strings from those without.
#[derive(Default)]
struct StringWalk {
    inside: bool,
    escaped: bool,
}

impl StringWalk {
    fn step(&mut self, byte: u8) -> Place {
        let quote = byte == b'"' && !self.escaped;
        self.escaped = self.inside && byte == b'\\' && !self.escaped;
        match (self.inside, quote) {
            (false, false) => Place::Outside,
            (true, false) => Place::Inside,
            (was_inside, true) => {
                self.inside = !was_inside;
                if was_inside { Place::Closes } else { Place::Opens }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(body: &[u8], message_parts: &[&str], param: Option<&str>) {
        let error = parse_object(body).expect_err("must be refused");
        for part in message_parts {
            assert!(error.message.contains(part), "{part:?} is not in {:?}", error.message);
        }
        assert_eq!(error.param.as_deref(), param, "{}", error.message);
    }

    #[test]
    fn syntax_errors_name_place_and_field() {
        check(b"", &["empty"], None);
        check(b" \n", &["empty"], None);
        check(b"[]", &["JSON object", "array"], None);
        check(
            b"{\"model\": \"m\",\n \"temperature\": NaN}",
            &["line 2", "`temperature`", "NaN"],
            Some("temperature"),
        );
        check(b"{\"temperature\": 1e999}", &["out of range"], Some("temperature"));
        check(b"{\"a\": {\"b\": 1}, \"prompt\": \"x", &["`prompt`"], Some("prompt"));
        check(b"{\"model\": \"\\ud800\"}", &["line 1"], Some("model"));
        check(b"{\"prompt\": \"\xff\"}", &["line 1"], Some("prompt"));
        check(&b"[".repeat(500), &["recursion"], None);
        check(b"{\"prompt\": }", &["expected value"], Some("prompt"));
        check(b"{\"prompt\":", &["EOF"], Some("prompt"));
        check(b"{\"prompt\": , \"n\": 1}", &["expected value"], Some("prompt"));
    }

    #[test]
    fn one_byte_order_mark_is_ignored() {
        let body = b"\xef\xbb\xbf{\"model\": \"m\"}";
        assert_eq!(parse_object(body).ok(), parse_object(&body[3..]).ok());
        check(b"\xef\xbb\xbf", &["empty"], None);
        check(b"\xef\xbb\xbf\xef\xbb\xbf{}", &["expected value"], None);
        check(b"\xef\xbb\xbf{\"n\": }", &["column 7", "`n`"], Some("n"));
    }

    #[test]
    fn what_stands_in_no_field_is_not_reported_as_in_the_last_one() {
        let behind = "something stands behind the end of the JSON value";
        check(b"{\"model\": \"m\", \"prompt\": \"x\"} garbage", &["column 31", behind], None);
        check(b"{\"model\": \"m\"}\n}", &["line 2, column 1:", behind], None);
        check(b"{\"model\": \"m\"}{\"n\": 1}", &["column 15:", behind], None);
        check(b"{\"model\": \"m\", n: 1}", &["column 16:", "key must be a string"], None);
        check(b"{\"model\": \"m\",}", &["column 15:", "trailing comma"], None);
    }

    #[test]
    fn a_body_of_millions_of_values_is_refused_and_long_text_is_not() {
        let mut many = b"{\"prompt\":[".to_vec();
        many.extend(b"1,".repeat(JSON_VALUES_MAX + 1));
        many.extend(b"1]}");
        check(&many, &["JSON values"], None);
        let text = format!("{{\"prompt\":\"{}\"}}", "a,".repeat(JSON_VALUES_MAX + 1));
        assert!(parse_object(text.as_bytes()).is_ok());
    }
}
