//! What is said of arguments that cannot be: the flag and what would be right, never the value.

use std::ffi::{OsStr, OsString};

use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{ArgMatches, Command, Error};

use crate::redact;

/// Options whose values may hold a user or a password, and which show neither.
const SECRET: [&str; 3] = ["index", "membership", "api-key"];

/// Where a value can have come from.
pub(super) struct Place<'a> {
    pub(super) args: &'a [OsString],
    pub(super) file: Option<&'a str>,
}

impl Place<'_> {
    /// For messages: nothing where the flag itself was given.
    fn of(&self, flag: &str, variable: Option<&OsStr>) -> String {
        let given = |arg: &OsString| {
            let arg = arg.to_string_lossy();
            arg.strip_prefix(flag).is_some_and(|rest| rest.is_empty() || rest.starts_with('='))
        };
        match variable.filter(|name| std::env::var_os(name).is_some()) {
            _ if self.args.iter().any(given) => String::new(),
            Some(name) => format!(" (variable {})", name.display()),
            None => self.file.map(|file| format!(" (file {file})")).unwrap_or_default(),
        }
    }
}

/// The same error in words that do not repeat what was given.
pub(super) fn without_values(
    error: Error,
    command: &mut Command,
    path: &[String],
    place: &Place<'_>,
) -> Error {
    let text = |kind: ContextKind| match error.get(kind) {
        Some(ContextValue::String(text)) => Some(text.clone()),
        Some(ContextValue::Strings(texts)) => Some(texts.join(", ")),
        _ => None,
    };
    let name = text(ContextKind::InvalidArg).unwrap_or_default();
    let is_name = |text: &str| text.bytes().all(|b| b.is_ascii_lowercase() || b == b'-');
    let message = match error.kind() {
        ErrorKind::UnknownArgument if name.starts_with('-') && is_flag(&name) => return error,
        ErrorKind::UnknownArgument => "an argument was given that belongs to no flag".to_owned(),
        ErrorKind::InvalidSubcommand if text(ContextKind::InvalidSubcommand).is_some_and(|t| is_name(&t)) => {
            return error;
        }
        ErrorKind::InvalidSubcommand => "there is no such subcommand".to_owned(),
        kind => {
            if error.get(ContextKind::InvalidValue).is_none() {
                return error;
            }
            let source = std::error::Error::source(&error).map(ToString::to_string);
            let choice = text(ContextKind::ValidValue).filter(|choice| !choice.is_empty());
            let reason = match kind {
                ErrorKind::TooManyValues => "it takes no value, or not so many".to_owned(),
                _ => source
                    .or_else(|| choice.map(|choice| format!("expected one of {choice}")))
                    .unwrap_or_else(|| "it needs a value, of another kind than this".to_owned()),
            };
            let flag = name.split([' ', '=', '[']).next().unwrap_or_default();
            format!("{name}{}: {reason}", place.of(flag, variable(command, path, flag).as_deref()))
        }
    };
    command.error(error.kind(), redact::userinfo(&message))
}

pub(super) fn is_flag(text: &str) -> bool {
    text.bytes().all(|b| b.is_ascii_alphanumeric() || b"-_".contains(&b))
}

/// The variable of a flag of the subcommand at `path`.
fn variable(command: &Command, path: &[String], flag: &str) -> Option<OsString> {
    let levels = std::iter::successors(Some((command, path)), |(command, path)| {
        let (name, below) = path.split_first()?;
        Some((command.find_subcommand(name)?, below))
    });
    let mut args = levels.flat_map(|(command, _)| command.get_arguments());
    let arg = args.find(|arg| arg.get_long() == flag.strip_prefix("--"))?;
    arg.get_env().map(ToOwned::to_owned)
}

/// No option but those for secrets takes a user or a password: what gets further may be shown.
pub(super) fn refuse_userinfo(
    command: &mut Command,
    matches: &ArgMatches,
    place: &Place<'_>,
) -> Result<(), Error> {
    let found = userinfo_in(command, matches);
    found.map_or(Ok(()), |(flag, variable)| {
        let place = place.of(&flag, variable.as_deref());
        let text =
            format!("{flag}{place}: a user or a password before an @ does not belong there; leave it out");
        Err(command.error(ErrorKind::ValueValidation, text))
    })
}

fn userinfo_in(command: &Command, matches: &ArgMatches) -> Option<(String, Option<OsString>)> {
    let told = command.get_arguments().find(|arg| {
        let raw = matches.try_get_raw(arg.get_id().as_str()).ok().flatten();
        let open = arg.get_long().is_none_or(|long| !SECRET.contains(&long));
        open && raw.into_iter().flatten().any(|value| redact::has_userinfo(&value.to_string_lossy()))
    });
    let below = || {
        let (name, matches) = matches.subcommand()?;
        userinfo_in(command.find_subcommand(name)?, matches)
    };
    let named = |arg: &clap::Arg| {
        let flag = arg.get_long().map_or_else(|| arg.get_id().to_string(), |long| format!("--{long}"));
        (flag, arg.get_env().map(ToOwned::to_owned))
    };
    told.map(named).or_else(below)
}
