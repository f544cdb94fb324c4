//! Server-sent events from a byte stream, cut anywhere.

/// Longest event that is read: no answer comes near it.
const EVENT_BYTES_MAX: usize = 16 << 20;

/// Collects bytes into events. Only `data` fields matter here; others and comments are skipped.
#[derive(Debug, Default)]
pub(crate) struct EventReader {
    /// The line begun.
    line: Vec<u8>,
    /// Data lines of the event begun, each ended by a line feed.
    data: Vec<u8>,
    /// The last byte was a carriage return: a line feed belongs to it.
    after_return: bool,
}

/// The event is longer than any answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TooLong;

impl EventReader {
    /// Calls `on_event` with the data of every event that these bytes complete.
    pub(crate) fn push(&mut self, bytes: &[u8], mut on_event: impl FnMut(&[u8])) -> Result<(), TooLong> {
        let mut rest = bytes;
        while let Some(&first) = rest.first() {
            if std::mem::take(&mut self.after_return) && first == b'\n' {
                rest = &rest[1..];
                continue;
            }
            let Some(end) = rest.iter().position(|byte| matches!(byte, b'\n' | b'\r')) else {
                self.line.extend_from_slice(rest);
                break;
            };
            self.line.extend_from_slice(&rest[..end]);
            self.after_return = rest[end] == b'\r';
            rest = &rest[end + 1..];
            self.end_line(&mut on_event);
        }
        if self.line.len() + self.data.len() > EVENT_BYTES_MAX { Err(TooLong) } else { Ok(()) }
    }

    fn end_line(&mut self, on_event: &mut impl FnMut(&[u8])) {
        if self.line.is_empty() {
            if let Some((_, data)) = self.data.split_last() {
                on_event(data);
            }
            self.data.clear();
        } else if let Some(value) = self.line.strip_prefix(b"data:") {
            self.data.extend_from_slice(value.strip_prefix(b" ").unwrap_or(value));
            self.data.push(b'\n');
        }
        self.line.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Events of a stream that comes in two parts, whatever the cut, and byte by byte.
    fn check(stream: &str, expected: &[&str]) {
        let bytes = stream.as_bytes();
        let cuts = (0..=bytes.len()).map(|at| vec![&bytes[..at], &bytes[at..]]);
        for parts in cuts.chain(std::iter::once(bytes.chunks(1).collect())) {
            let mut reader = EventReader::default();
            let mut events = Vec::new();
            for part in parts {
                reader.push(part, |data| events.push(String::from_utf8(data.to_vec()).unwrap())).unwrap();
            }
            assert_eq!(events, expected, "{stream:?}");
        }
    }

    #[test]
    fn events_are_whole_however_the_stream_is_cut() {
        check("data: {\"é\":1}\n\ndata: [DONE]\n\n", &["{\"é\":1}", "[DONE]"]);
        check("data:a\r\n\r\ndata: b\r\rdata:  c\n\n", &["a", "b", " c"]);
        check(": comment\nevent: x\nid: 1\ndata: two\ndata: lines\n\n", &["two\nlines"]);
        check("\n\n: ping\n\ndata: last is not complete\n", &[]);
        check("data\n\ndata:\n\n", &[""]);
    }

    #[test]
    fn an_endless_event_is_refused() {
        let mut reader = EventReader::default();
        let part = vec![b'x'; 1 << 20];
        let pushed = (0..17).map(|_| reader.push(&part, |_| {})).filter(Result::is_err).count();
        assert_eq!(pushed, 1);
    }
}
