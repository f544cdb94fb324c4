//! Tool calls in a model's text, told apart as it comes.
//!
//! What may still become a call is held back, and no longer than that. A call is told of once its name is known to be a
//! tool's and its arguments have begun; text that turns out to be none is content, every character of it.

mod call;
mod format;
mod python;
#[cfg(test)]
mod tests;

use std::sync::Arc;

use call::{CallReader, Step};
use format::{Body, Marker};

pub(crate) use format::{ToolFormat, is_marker};

use super::part::{CallDelta, CallHead, Part, push_arguments, push_content};

/// Characters between `[TOOL_CALLS]` and the arguments: a name, and perhaps an id.
const NAME_CHARS_MAX: usize = 256;

/// What calls an answer may hold.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct ToolPlan {
    pub(crate) format: ToolFormat,
    /// Names of the tools.
    pub(crate) names: Arc<[String]>,
    /// More than one call is wanted.
    pub(crate) parallel: bool,
    /// The whole answer is this tool's arguments.
    pub(crate) named: Option<String>,
}

/// Finds the calls of one choice. Constant work per character.
#[derive(Debug)]
pub(crate) struct ToolReader {
    plan: ToolPlan,
    state: State,
    /// Text that may turn out to be content: since the marker, or the beginning of one.
    held: String,
    /// White space that goes if a call follows, or follows a call.
    space: String,
    /// Calls that have begun.
    calls: usize,
    /// There was content since the last call.
    said: bool,
    cut: bool,
}

#[derive(Debug)]
enum State {
    Text,
    Opened(&'static Marker, Nesting),
    /// Behind `[TOOL_CALLS]`, within a name.
    Name(&'static Marker),
    Call(&'static Marker, Nesting, Box<CallReader>),
    /// Behind a call.
    Between(&'static Marker, Nesting),
    Python(&'static Marker),
    /// The whole answer is the arguments of one call.
    Named(Box<CallReader>),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Nesting {
    Single,
    Array,
}

impl ToolReader {
    pub(crate) fn new(plan: ToolPlan) -> Self {
        let named = plan.named.clone().map(|name| State::Named(Box::new(CallReader::arguments(name))));
        Self {
            state: named.unwrap_or(State::Text),
            plan,
            held: String::new(),
            space: String::new(),
            calls: 0,
            said: false,
            cut: false,
        }
    }

    /// Takes more text.
    pub(crate) fn push(&mut self, text: &str, parts: &mut Vec<Part>) {
        for char in text.chars() {
            if self.satisfied() {
                return;
            }
            self.step(char, parts);
        }
    }

    /// One call was wanted and is complete: what follows is of no use.
    pub(crate) fn satisfied(&self) -> bool {
        let whole = !matches!(&self.state, State::Call(_, _, call) | State::Named(call) if call.begun());
        self.has_whole_calls() && whole && (!self.plan.parallel || self.plan.named.is_some())
    }

    /// The text has ended: what was held back is content after all.
    pub(crate) fn finish(&mut self, parts: &mut Vec<Part>) {
        match std::mem::replace(&mut self.state, State::Text) {
            State::Python(_) => self.read_python(parts),
            State::Call(_, _, call) if call.has_all_arguments() => {}
            State::Call(..) | State::Named(_) | State::Opened(..) | State::Name(_) => {
                self.cut = self.calls > 0;
                if self.plan.format == ToolFormat::Json {
                    // The grammar lets it be nothing but the beginning of a call.
                    self.held.clear();
                    self.space.clear();
                }
            }
            // A closing mark that did not come to its end says nothing.
            State::Between(..) => self.held.clear(),
            State::Text => {}
        }
        self.release(parts);
        if self.calls == 0 {
            push_content(parts, &std::mem::take(&mut self.space));
        }
    }

    /// The answer ends in calls, all of them complete.
    pub(crate) fn ends_in_calls(&self) -> bool {
        self.calls > 0 && !self.cut && !self.said
    }

    /// There are calls, all of them complete.
    pub(crate) fn has_whole_calls(&self) -> bool {
        self.calls > 0 && !self.cut
    }

    fn step(&mut self, char: char, parts: &mut Vec<Part>) {
        match std::mem::replace(&mut self.state, State::Text) {
            State::Text => self.text(char, parts),
            State::Opened(marker, nesting) => self.opened(marker, nesting, char, parts),
            State::Name(marker) => self.name(marker, char, parts),
            State::Call(marker, nesting, call) => self.call(marker, nesting, call, char, parts),
            State::Between(marker, nesting) => self.between(marker, nesting, char, parts),
            State::Python(marker) => self.python(marker, char, parts),
            State::Named(call) => self.named(call, char, parts),
        }
    }

    fn text(&mut self, char: char, parts: &mut Vec<Part>) {
        self.held.push(char);
        while !self.held.is_empty() {
            let may_be_bare = !self.said && self.calls == 0;
            let mut markers = self.plan.format.markers().iter().filter(|marker| {
                (may_be_bare || marker.body != Body::BareJson) && marker.text.starts_with(self.held.as_str())
            });
            let Some(marker) = markers.next() else {
                let first = self.held.remove(0);
                self.plain(first, parts);
                continue;
            };
            if marker.text == self.held {
                self.open(marker, char, parts);
            }
            return;
        }
    }

    fn open(&mut self, marker: &'static Marker, char: char, parts: &mut Vec<Part>) {
        match marker.body {
            Body::Python => self.state = State::Python(marker),
            Body::Json | Body::NameOrJson => self.state = State::Opened(marker, Nesting::Single),
            Body::BareJson => {
                self.held.clear();
                self.opened(marker, Nesting::Single, char, parts);
            }
        }
    }

    fn opened(&mut self, marker: &'static Marker, nesting: Nesting, char: char, parts: &mut Vec<Part>) {
        match char {
            '{' => self.call(marker, nesting, Box::new(CallReader::object()), char, parts),
            '[' if nesting == Nesting::Single => {
                self.held.push(char);
                self.state = State::Opened(marker, Nesting::Array);
            }
            space if space.is_whitespace() => {
                self.held.push(char);
                self.state = State::Opened(marker, nesting);
            }
            _ if marker.body == Body::NameOrJson && nesting == Nesting::Single => {
                self.name(marker, char, parts);
            }
            _ => self.no_call(char, parts),
        }
    }

    fn name(&mut self, marker: &'static Marker, char: char, parts: &mut Vec<Part>) {
        let name = self.held[marker.text.len()..].trim_start();
        if char == '{' {
            let name = name.split('[').next().unwrap_or_default().trim_end().to_owned();
            if self.knows(&name) {
                let call = Box::new(CallReader::arguments(name));
                return self.call(marker, Nesting::Single, call, char, parts);
            }
            return self.no_call(char, parts);
        }
        if char.is_whitespace() && !name.is_empty() || name.len() > NAME_CHARS_MAX {
            return self.no_call(char, parts);
        }
        self.held.push(char);
        self.state = State::Name(marker);
    }

    fn call(
        &mut self,
        marker: &'static Marker,
        nesting: Nesting,
        mut call: Box<CallReader>,
        char: char,
        parts: &mut Vec<Part>,
    ) {
        let written = call.written(char);
        let step = call.step(char, &|name| self.knows(name));
        match step {
            Step::Undecided => self.held.push(char),
            Step::NoCall => return self.no_call(char, parts),
            Step::Begins(name) => self.begin(name, written, parts),
            Step::Argument => push_arguments(parts, self.calls - 1, &written),
            Step::Beside => {}
            Step::Ends(of_arguments) => {
                if of_arguments {
                    push_arguments(parts, self.calls - 1, &written);
                }
                self.state = State::Between(marker, nesting);
                return;
            }
            Step::Whole(name, arguments) => {
                self.begin(name, arguments, parts);
                self.state = State::Between(marker, nesting);
                return;
            }
        }
        self.state = State::Call(marker, nesting, call);
    }

    /// Expects the next call or the closing mark; anything else is content again.
    fn between(&mut self, marker: &'static Marker, nesting: Nesting, char: char, parts: &mut Vec<Part>) {
        if char.is_whitespace() {
            self.state = State::Between(marker, nesting);
            return;
        }
        let several = marker.body == Body::BareJson || marker.text == "<|python_tag|>";
        self.held.push(char);
        // A brace too many is a common slip.
        let close = self.held.trim_start_matches('}');
        match (nesting, char) {
            (Nesting::Array, ',') => self.state = State::Opened(marker, Nesting::Array),
            (Nesting::Array, ']') => self.state = State::Between(marker, Nesting::Single),
            (Nesting::Single, ';' | ',') if several && self.held.len() == 1 => {
                self.state = State::Between(marker, Nesting::Single);
            }
            (Nesting::Single, '{') if several => {
                self.held.clear();
                self.opened(marker, Nesting::Single, char, parts);
                return;
            }
            (Nesting::Single, _) if marker.close == close => self.state = State::Text,
            (Nesting::Single, _) if marker.close.starts_with(close) => {
                self.state = State::Between(marker, nesting);
                return;
            }
            _ => {
                let held = std::mem::take(&mut self.held);
                return held.chars().for_each(|char| self.text(char, parts));
            }
        }
        self.held.clear();
    }

    fn python(&mut self, marker: &'static Marker, char: char, parts: &mut Vec<Part>) {
        self.held.push(char);
        if char == '`' && self.held[marker.text.len()..].ends_with(marker.close) {
            self.read_python(parts);
        } else {
            self.state = State::Python(marker);
        }
    }

    fn read_python(&mut self, parts: &mut Vec<Part>) {
        let code = self.held.split_once('\n').map_or("", |(_, code)| code.trim_end_matches('`'));
        let calls = python::calls(code).filter(|calls| calls.iter().all(|(name, _)| self.knows(name)));
        match calls {
            Some(calls) => {
                let wanted = if self.plan.parallel { calls.len() } else { 1 };
                let calls = calls.into_iter().take(wanted);
                calls.for_each(|(name, arguments)| self.begin(name, arguments.to_string(), parts));
            }
            None => self.release(parts),
        }
    }

    /// White space around the arguments is nothing; anything else that is not theirs is content.
    fn named(&mut self, mut call: Box<CallReader>, char: char, parts: &mut Vec<Part>) {
        if !call.begun() && char.is_whitespace() {
            self.state = State::Named(call);
            return;
        }
        let written = call.written(char);
        match call.step(char, &|_| true) {
            Step::Begins(name) => self.begin(name, written, parts),
            Step::Argument => push_arguments(parts, self.calls - 1, &written),
            Step::Ends(_) => return push_arguments(parts, self.calls - 1, &written),
            _ => return self.no_call(char, parts),
        }
        self.state = State::Named(call);
    }

    fn begin(&mut self, name: String, arguments: String, parts: &mut Vec<Part>) {
        self.held.clear();
        self.space.clear();
        self.said = false;
        let head = CallHead { id: self.plan.format.call_id(), name };
        parts.push(Part::Call(CallDelta { index: self.calls, head: Some(head), arguments }));
        self.calls += 1;
    }

    /// What is held was no call, and this character may be the beginning of one.
    fn no_call(&mut self, char: char, parts: &mut Vec<Part>) {
        self.state = State::Text;
        self.release(parts);
        // At the beginning of an answer alone is a bare bracket a call.
        self.said = true;
        self.text(char, parts);
    }

    fn release(&mut self, parts: &mut Vec<Part>) {
        let held = std::mem::take(&mut self.held);
        held.chars().for_each(|char| self.plain(char, parts));
    }

    fn plain(&mut self, char: char, parts: &mut Vec<Part>) {
        if char.is_whitespace() && !self.said {
            self.space.push(char);
            return;
        }
        self.said = true;
        push_content(parts, &std::mem::take(&mut self.space));
        push_content(parts, char.encode_utf8(&mut [0; 4]));
    }

    fn knows(&self, name: &str) -> bool {
        self.plan.names.iter().any(|known| known == name)
    }
}
