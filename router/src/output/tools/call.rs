//! One call written as a JSON object, `{"name": .., "arguments": {..}}`, character by character.

use serde_json::Value;

/// Names of the arguments that models write.
const ARGUMENTS: [&str; 2] = ["arguments", "parameters"];
/// Keys with which the object of a call begins; another one tells at once that it is none.
const FIRST_KEYS: [&str; 6] = ["name", "arguments", "parameters", "type", "id", "function"];

/// What a character meant.
#[derive(Debug, PartialEq)]
pub(super) enum Step {
    /// It cannot be told yet whether this is a call.
    Undecided,
    /// It is none.
    NoCall,
    /// It is one, and the character is the first of its arguments.
    Begins(String),
    /// More of the arguments.
    Argument,
    /// Of a call that has begun, but not of its arguments.
    Beside,
    /// The end of a call that has begun; if true, the character still belongs to the arguments.
    Ends(bool),
    /// The end of a call that could only be told from its whole text.
    Whole(String, String),
}

/// State between two characters. Constant work for each.
#[derive(Debug)]
pub(super) struct CallReader {
    /// Until the call has begun.
    text: String,
    depth: usize,
    in_string: bool,
    escaped: bool,
    expects: Expects,
    /// Where the present key or value begins in `text`.
    start: usize,
    key: Option<String>,
    name: Option<String>,
    begun: bool,
    in_arguments: bool,
    /// There is no object around the arguments.
    bare: bool,
    /// The first key is one that no call begins with.
    strange: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Expects {
    Key,
    Colon,
    Value,
    /// A value has begun.
    Comma,
}

impl CallReader {
    /// Before the `{` of a call's object.
    pub(super) fn object() -> Self {
        Self {
            text: String::new(),
            depth: 0,
            in_string: false,
            escaped: false,
            expects: Expects::Key,
            start: 0,
            key: None,
            name: None,
            begun: false,
            in_arguments: false,
            bare: false,
            strange: false,
        }
    }

    /// Before the `{` of the arguments of a call whose name is known.
    pub(super) fn arguments(name: String) -> Self {
        let key = Some(ARGUMENTS[0].to_owned());
        Self { depth: 1, expects: Expects::Value, key, name: Some(name), bare: true, ..Self::object() }
    }

    /// The arguments are complete, whatever of the object around them is missing.
    pub(super) fn has_all_arguments(&self) -> bool {
        self.begun && !self.in_arguments
    }

    /// The call has been told of.
    pub(super) fn begun(&self) -> bool {
        self.begun
    }

    /// Takes a character; `known` tells whether a tool has this name.
    pub(super) fn step(&mut self, char: char, known: &dyn Fn(&str) -> bool) -> Step {
        let was_argument = self.in_arguments;
        if !self.begun {
            self.text.push_str(&self.written(char));
        }
        if self.in_string {
            self.within_string(char);
        } else {
            match char {
                '"' => self.opens_string(),
                '{' | '[' => self.opens(char),
                '}' | ']' => return self.closes(was_argument, known),
                ':' if self.depth == 1 && self.expects == Expects::Colon => self.expects = Expects::Value,
                ',' if self.depth == 1 && self.expects == Expects::Comma => self.expects = Expects::Key,
                space if space.is_whitespace() => {}
                _ if self.depth > 1 => {}
                _ if matches!(self.expects, Expects::Value | Expects::Comma) => {
                    self.expects = Expects::Comma;
                }
                _ => return self.beside(Step::NoCall),
            }
        }
        if self.is_hopeless(known) {
            return Step::NoCall;
        }
        match (self.begun, self.in_arguments, was_argument) {
            (false, true, false) => {
                self.begun = true;
                self.text = String::new();
                Step::Begins(self.name.take().unwrap_or_default())
            }
            (true, true, _) | (true, false, true) => Step::Argument,
            (true, false, false) => Step::Beside,
            _ => Step::Undecided,
        }
    }

    /// The character as it belongs into JSON: models write line feeds into strings.
    pub(super) fn written(&self, char: char) -> String {
        match char {
            '\n' if self.in_string => "\\n".to_owned(),
            '\r' if self.in_string => "\\r".to_owned(),
            '\t' if self.in_string => "\\t".to_owned(),
            other => other.to_string(),
        }
    }

    fn within_string(&mut self, char: char) {
        if self.escaped {
            self.escaped = false;
        } else if char == '\\' {
            self.escaped = true;
        } else if char == '"' {
            self.in_string = false;
            if self.depth == 1 {
                self.string_ended();
            }
        }
    }

    fn opens_string(&mut self) {
        self.in_string = true;
        if self.depth == 1 && self.expects != Expects::Comma {
            self.start = self.text.len().saturating_sub(1);
        }
    }

    fn string_ended(&mut self) {
        let text = || serde_json::from_str::<String>(self.text.get(self.start..)?).ok();
        match self.expects {
            Expects::Key => {
                let key = text();
                self.strange |= self.key.is_none() && key.as_deref().is_none_or(|k| !FIRST_KEYS.contains(&k));
                self.key = key;
                self.expects = Expects::Colon;
            }
            Expects::Value => {
                if self.key.as_deref() == Some("name") && !self.begun {
                    self.name = text();
                }
                self.expects = Expects::Comma;
            }
            Expects::Colon | Expects::Comma => {}
        }
    }

    fn opens(&mut self, char: char) {
        self.depth += 1;
        if self.depth != 2 || self.expects != Expects::Value {
            return;
        }
        self.expects = Expects::Comma;
        let is_arguments = self.key.as_deref().is_some_and(|key| ARGUMENTS.contains(&key));
        self.in_arguments = is_arguments && char == '{' && !self.begun && self.name.is_some();
    }

    fn closes(&mut self, was_argument: bool, known: &dyn Fn(&str) -> bool) -> Step {
        self.depth = self.depth.saturating_sub(1);
        if self.depth == 1 && was_argument {
            self.in_arguments = false;
            return if self.bare { Step::Ends(true) } else { Step::Argument };
        }
        match (self.depth, self.begun) {
            (0, true) => Step::Ends(false),
            (0, false) => whole(&self.text, known),
            (_, true) if was_argument => Step::Argument,
            (_, true) => Step::Beside,
            (_, false) => Step::Undecided,
        }
    }

    fn beside(&self, otherwise: Step) -> Step {
        if self.begun { Step::Beside } else { otherwise }
    }

    /// A first key or a name that no call has.
    fn is_hopeless(&self, known: &dyn Fn(&str) -> bool) -> bool {
        let strange_name = self.name.as_deref().is_some_and(|name| !known(name));
        !self.begun && (strange_name || self.strange)
    }
}

fn whole(text: &str, known: &dyn Fn(&str) -> bool) -> Step {
    let call = serde_json::from_str::<Value>(text).ok().and_then(|object| call_of(&object));
    match call {
        Some((name, arguments)) if known(&name) => Step::Whole(name, arguments),
        _ => Step::NoCall,
    }
}

/// Name and arguments of a complete object; also of the forms that wrap them in `function`, or that give the
/// arguments as text.
fn call_of(object: &Value) -> Option<(String, String)> {
    let function = object.get("function").filter(|f| f.is_object()).unwrap_or(object);
    let name = function.get("name").or_else(|| object.get("function"))?.as_str()?;
    let arguments = ARGUMENTS.iter().find_map(|key| function.get(*key)).unwrap_or(&Value::Null);
    let text = match arguments {
        Value::Null => "{}".to_owned(),
        Value::String(text) if serde_json::from_str::<Value>(text).is_ok_and(|v| v.is_object()) => {
            text.clone()
        }
        Value::Object(_) => arguments.to_string(),
        _ => return None,
    };
    Some((name.to_owned(), text))
}
