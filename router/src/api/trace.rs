//! W3C trace context of a request, to be handed on to its worker.

use http::HeaderMap;

const TRACEPARENT_BYTES: usize = 55;
/// The recommendation asks for so many bytes of `tracestate` at least; whole members beyond are left out.
const TRACESTATE_BYTES_MAX: usize = 512;
/// Members of a list, and bytes of a key and of a value, as the recommendation has them.
const MEMBERS_MAX: usize = 32;
const KEY_BYTES_MAX: usize = 256;
const VALUE_BYTES_MAX: usize = 256;

/// Both parts; what is not sound is empty.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Trace {
    pub(super) parent: String,
    pub(super) state: String,
}

impl Trace {
    /// Of HTTP headers, which gRPC's metadata are too. A state without a sound parent says nothing.
    pub(super) fn of(headers: &HeaderMap) -> Self {
        let parent = headers.get("traceparent").and_then(|v| v.to_str().ok()).unwrap_or_default();
        if !is_sound_parent(parent) {
            return Self::default();
        }
        let lines: Option<Vec<_>> = headers.get_all("tracestate").iter().map(|v| v.to_str().ok()).collect();
        let state = lines.and_then(|lines| state(&lines.join(","))).unwrap_or_default();
        Self { parent: parent.to_owned(), state }
    }
}

/// `00-<32 hex digits>-<16>-<2>`: neither id is zero, and no version is ff.
fn is_sound_parent(value: &str) -> bool {
    let is_hex = |part: &str| part.bytes().all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b));
    let is_id = |part: &str| is_hex(part) && part.bytes().any(|b| b != b'0');
    let parts: Vec<_> = value.split('-').collect();
    let [version, trace, parent, flags] = parts.as_slice() else { return false };
    value.len() == TRACEPARENT_BYTES
        && [version.len(), trace.len(), parent.len()] == [2, 32, 16]
        && (is_hex(version) && *version != "ff" && is_hex(flags))
        && (is_id(trace) && is_id(parent))
}

/// The list without blanks and empty members; None if any member is malformed or a key comes twice.
fn state(text: &str) -> Option<String> {
    let members: Vec<&str> =
        text.split(',').map(|m| m.trim_matches([' ', '\t'])).filter(|m| !m.is_empty()).collect();
    let mut keys = Vec::with_capacity(members.len());
    for member in &members {
        let (key, value) = member.split_once('=')?;
        if !is_sound_key(key) || !is_sound_value(value) || keys.contains(&key) {
            return None;
        }
        keys.push(key);
    }
    if members.len() > MEMBERS_MAX {
        return None;
    }
    let mut state = String::new();
    for member in members {
        let comma = usize::from(!state.is_empty());
        if state.len() + comma + member.len() > TRACESTATE_BYTES_MAX {
            break;
        }
        state.push_str(if comma == 1 { "," } else { "" });
        state.push_str(member);
    }
    Some(state)
}

fn is_sound_key(key: &str) -> bool {
    let starts = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit();
    let goes_on = |b: u8| starts(b) || matches!(b, b'_' | b'-' | b'*' | b'/' | b'@');
    key.len() <= KEY_BYTES_MAX && key.bytes().next().is_some_and(starts) && key.bytes().all(goes_on)
}

/// Blanks around it are gone by now.
fn is_sound_value(value: &str) -> bool {
    let is_plain = |b: u8| (b' '..=b'~').contains(&b) && b != b',' && b != b'=';
    (1..=VALUE_BYTES_MAX).contains(&value.len()) && value.bytes().all(is_plain)
}

#[cfg(test)]
mod tests {
    use http::HeaderValue;

    use super::*;

    const PARENT: &str = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";

    fn trace(parent: &str, states: &[&str]) -> Trace {
        let mut headers = HeaderMap::new();
        headers.insert("traceparent", HeaderValue::from_str(parent).unwrap());
        for state in states {
            headers.append("tracestate", HeaderValue::from_str(state).unwrap());
        }
        Trace::of(&headers)
    }

    #[test]
    fn parents_are_checked() {
        let check = |value: &str, expected: &str| assert_eq!(trace(value, &[]).parent, expected);
        check(PARENT, PARENT);
        check("00-zz", "");
        check(&PARENT.to_uppercase(), "");
        check("ff-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", "");
        check("00-00000000000000000000000000000000-b7ad6b7169203331-01", "");
        check("00-0af7651916cd43dd8448eb211c80319c-0000000000000000-01", "");
        check("00-0af7651916cd43dd8448eb211c80319cb7-ad6b7169203331-01", "");
    }

    #[test]
    fn states_are_checked() {
        let check =
            |states: &[&str], expected: &str| assert_eq!(trace(PARENT, states).state, expected, "{states:?}");
        check(&["rojo=00f067aa0ba902b7,congo=t61rcWkgMzE"], "rojo=00f067aa0ba902b7,congo=t61rcWkgMzE");
        check(&["rojo=1", "congo=2"], "rojo=1,congo=2");
        check(&[" rojo=1 ,, congo=2\t"], "rojo=1,congo=2");
        check(&["tenant@vendor=a b!"], "tenant@vendor=a b!");
        check(&[], "");
        for malformed in ["rojo", "=1", "rojo=", "Rojo=1", "a=1,a=2", "a=b=c", "a=\u{e9}", "-a=1", "ok=1,b@d"]
        {
            check(&[malformed], "");
        }
        let many: Vec<_> = (0..33).map(|n| format!("k{n}=v")).collect();
        check(&[&many.join(",")], "");
        assert_eq!(trace("00-zz", &["rojo=1"]), Trace::default());
        let long = format!("a={},b={},c=1", "x".repeat(255), "y".repeat(256));
        assert_eq!(trace(PARENT, &[&long]).state, format!("a={}", "x".repeat(255)));
    }
}
