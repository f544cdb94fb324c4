//! Flags over environment over YAML file over defaults. The file's keys are flag names and so are the variables, so there
//! is one list of settings: what is no flag of the subcommand is refused by name.
//!
//! A value that cannot be parsed is never repeated: a secret may have landed in the wrong place.

use std::any::TypeId;
use std::ffi::OsString;
use std::path::Path;

use clap::builder::OsStr;
use clap::error::ErrorKind;
use clap::{ArgMatches, Command, CommandFactory, Error, FromArgMatches};
use serde_json::{Map, Value};

use crate::redact;

mod idle;
mod refusal;

use idle::refuse_idle;
use refusal::{Place, is_flag, refuse_userinfo, without_values};

/// Parses this process's arguments.
pub(crate) fn parse<P: CommandFactory + FromArgMatches>() -> Result<P, Error> {
    parse_from(std::env::args_os())
}

fn parse_from<P: CommandFactory + FromArgMatches>(
    args: impl IntoIterator<Item = OsString>,
) -> Result<P, Error> {
    let args: Vec<OsString> = args.into_iter().collect();
    let mut command = with_variables(P::command(), "");
    let glance = command.clone().ignore_errors(true).try_get_matches_from(&args);
    let (file, path) = glance.map(|matches| chosen(&matches)).unwrap_or_default();
    let mut settings = Map::new();
    if let Some(file) = &file {
        settings = read(Path::new(file)).map_err(|text| failure(&mut command, file, &text))?;
        command = with_defaults(command, &path, &settings)
            .map_err(|text| failure(&mut P::command(), file, &text))?;
    }
    let place = Place { args: &args, file: file.as_deref() };
    let matches = command.clone().try_get_matches_from(&args);
    let mut matches = matches.map_err(|error| without_values(error, &mut command, &path, &place))?;
    refuse_userinfo(&mut command, &matches, &place)?;
    refuse_idle(&mut command, &matches, &settings)?;
    P::from_arg_matches_mut(&mut matches).map_err(|error| error.format(&mut command))
}

/// Every flag has a variable: THALWEG_ and its name, with the tool's name before it where it is a tool's own. Help shows
/// none of their values.
fn with_variables(command: Command, tool: &str) -> Command {
    let command = command.mut_args(|arg| {
        let arg = arg.hide_env_values(true);
        let own = arg.get_long().filter(|_| arg.get_env().is_none() && !arg.is_hide_set());
        match own.map(|long| format!("THALWEG_{tool}{}", long.replace('-', "_").to_uppercase())) {
            Some(variable) => arg.env(variable),
            None => arg,
        }
    });
    command.mut_subcommands(|sub| {
        let own = format!("{}_", sub.get_name().to_uppercase());
        with_variables(sub, if tool.is_empty() { &own } else { tool })
    })
}

/// File of `--config`, and the subcommands that were chosen.
fn chosen(matches: &ArgMatches) -> (Option<String>, Vec<String>) {
    let (mut level, mut path) = (matches, Vec::new());
    let mut file = None;
    loop {
        let here = level.try_get_one::<std::path::PathBuf>("config").ok().flatten();
        file = here.map(|f| f.display().to_string()).or(file);
        match level.subcommand() {
            Some((name, below)) => {
                path.push(name.to_owned());
                level = below;
            }
            None => return (file, path),
        }
    }
}

fn read(file: &Path) -> Result<Map<String, Value>, String> {
    let text = std::fs::read_to_string(file).map_err(|error| error.to_string())?;
    if text.trim().is_empty() {
        return Ok(Map::new());
    }
    // Where, but not what: the parser's own words may repeat a value.
    serde_saphyr::from_str(&text).map_err(|error| {
        let error = error.without_snippet();
        let place = error.location().map_or_else(String::new, |at| format!(" in line {}", at.line()));
        format!(
            "it is no YAML of settings{place}; expected a line `flag: value` for each, and each flag once"
        )
    })
}

/// The command with the settings as defaults, of the subcommand at `path` or of the flags of all.
fn with_defaults(
    command: Command,
    path: &[String],
    settings: &Map<String, Value>,
) -> Result<Command, String> {
    settings.iter().try_fold(command, |command, (key, value)| {
        let given = Given::of(value)
            .ok_or_else(|| format!("{} must be a text, number, boolean or list of them", key_of(key)))?;
        with_default(command, path, key, given)
    })
}

/// What a file has for a flag.
struct Given {
    values: Vec<OsStr>,
    /// Not all of them are texts: what YAML makes of 0123, 1.10, 1e5 or no is not what was written.
    is_reread: bool,
}

fn with_default(command: Command, path: &[String], key: &str, given: Given) -> Result<Command, String> {
    let flag = key.replace('_', "-");
    let known = command.get_arguments().find(|arg| arg.get_long() == Some(&*flag) && flag != "config");
    if let Some(arg) = known
        && given.is_reread
        && arg.get_value_parser().type_id() == TypeId::of::<String>()
    {
        return Err(format!(
            "{} is a text: write it in quotes, or YAML reads it as a number or boolean",
            key_of(key)
        ));
    }
    let Given { values, is_reread } = given;
    if let Some(id) = known.map(|arg| arg.get_id().clone()) {
        // Help would show the values.
        let set = |arg: clap::Arg| {
            let takes_values = arg.get_action().takes_values();
            arg.required(false).default_values(values).hide_default_value(takes_values)
        };
        return Ok(command.mut_arg(id, set));
    }
    let Some((name, below)) = path.split_first() else {
        let name = command.get_name();
        return Err(format!(
            "unknown key {}; keys are the flags of `thalweg {name} --help` without dashes",
            key_of(key)
        ));
    };
    let mut result = Ok(());
    let command = command.mut_subcommand(name, |sub| {
        with_default(sub.clone(), below, key, Given { values, is_reread }).unwrap_or_else(|error| {
            result = Err(error);
            sub
        })
    });
    result.map(|()| command)
}

impl Given {
    fn of(value: &Value) -> Option<Self> {
        let scalar = |value: &Value| match value {
            Value::String(text) => Some(OsStr::from(text.clone())),
            Value::Number(number) => Some(OsStr::from(number.to_string())),
            Value::Bool(flag) => Some(OsStr::from(flag.to_string())),
            Value::Null | Value::Array(_) | Value::Object(_) => None,
        };
        let several = value.as_array().filter(|values| !values.is_empty());
        let given = several.map_or(std::slice::from_ref(value), Vec::as_slice);
        let values = given.iter().map(scalar).collect::<Option<_>>()?;
        Some(Self { values, is_reread: !given.iter().all(Value::is_string) })
    }
}

/// A key as messages show it: what is not of a flag's shape may be a value.
fn key_of(key: &str) -> String {
    if is_flag(key) { format!("{key:?}") } else { "that is no flag's name".to_owned() }
}

fn failure(command: &mut Command, file: &str, text: &str) -> Error {
    command.error(ErrorKind::InvalidValue, redact::userinfo(&format!("{file}: {text}")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser, Debug)]
    struct Root {
        #[arg(long, global = true)]
        config: Option<std::path::PathBuf>,
        #[arg(long, global = true, default_value = "info")]
        level: String,
        #[command(subcommand)]
        sub: Sub,
    }

    #[derive(clap::Subcommand, Debug)]
    enum Sub {
        Run {
            #[arg(long)]
            model: String,
            #[arg(long, default_value_t = 1)]
            max_seqs: u32,
            #[arg(long)]
            name: Vec<String>,
            #[arg(long)]
            flag: bool,
        },
        Other,
    }

    fn run(name: &str, yaml: &str, args: &[&str]) -> Result<Root, String> {
        let file = std::env::temp_dir().join(format!("thalweg-settings-{}-{name}.yaml", std::process::id()));
        std::fs::write(&file, yaml).unwrap();
        let base = ["thalweg", "run", "--config", file.to_str().unwrap()];
        let args = base.iter().chain(args).map(OsString::from);
        let result = parse_from::<Root>(args.collect::<Vec<_>>()).map_err(|error| error.to_string());
        std::fs::remove_file(file).unwrap();
        result
    }

    #[test]
    fn flags_go_before_the_file_and_the_file_before_defaults() {
        let yaml = "model: m\nmax_seqs: 7\nname: [a, b]\nflag: true\nlevel: debug\n";
        let root = run("all", yaml, &[]).unwrap();
        assert_eq!(root.level, "debug");
        let Sub::Run { model, max_seqs, name, flag } = root.sub else { panic!("{root:?}") };
        assert_eq!((&*model, max_seqs, name, flag), ("m", 7, vec!["a".to_owned(), "b".to_owned()], true));
        let root = run("some", "model: m\nmax-seqs: 7\n", &["--max-seqs", "9", "--model", "n"]).unwrap();
        let Sub::Run { model, max_seqs, name, flag } = root.sub else { panic!("{root:?}") };
        assert_eq!((&*model, max_seqs, name, flag), ("n", 9, vec![], false));
        assert!(run("empty", "\n", &["--model", "m"]).is_ok());
    }

    #[test]
    fn what_is_no_setting_is_refused_by_name() {
        for (name, yaml, says) in [
            ("unknown", "model: m\nmax-sequences: 7\n", "max-sequences"),
            ("itself", "model: m\nconfig: x\n", "unknown key \"config\""),
            ("object", "model: {path: m}\n", "\"model\" must be"),
            ("octal", "model: 0123\n", "\"model\" is a text: write it in quotes"),
            ("truth", "model: m\nname: [a, no]\n", "\"name\" is a text: write it in quotes"),
            ("null", "model:\n", "\"model\" must be"),
            ("list", "- model\n", "list.yaml"),
            ("twice", "model: m\nmodel: n\n", "twice.yaml"),
            ("value", "model: m\nmax-seqs: many\n", "--max-seqs <MAX_SEQS> (file "),
            ("missing", "max-seqs: 3\n", "--model"),
        ] {
            let error = run(name, yaml, &[]).unwrap_err();
            assert!(error.contains(says), "{name}: {error:?} does not say {says:?}");
        }
    }

    #[test]
    fn a_broken_file_is_told_without_its_lines() {
        for (name, yaml) in [
            ("bracket", "model: redis://u:hush@h\nname: [x\n"),
            ("quote", "model: \"redis://u:hush@h\nmax-seqs: 3\n"),
            ("indent", "model: redis://u:hush@h\n  name: x\n"),
            ("repeated", "model: m\nmodel: redis://u:hush@h\n"),
            ("tab", "model: redis://u:hush@h\n\tname: x\n"),
        ] {
            let error = run(name, yaml, &[]).unwrap_err();
            assert!(error.contains(name) && !error.contains("hush"), "{name}: {error}");
        }
    }

    #[test]
    fn a_subcommand_without_flags_takes_only_those_of_all() {
        let Root { sub, .. } = parse_from::<Root>(["thalweg", "other"].map(OsString::from)).unwrap();
        assert!(matches!(sub, Sub::Other));
    }

    #[test]
    fn every_flag_is_a_variable_and_a_key() {
        fn visit(command: &Command, path: &[String], seen: &mut usize) {
            for arg in command
                .get_arguments()
                .filter(|arg| !["config", "as-worker"].contains(&arg.get_long().unwrap_or("config")))
            {
                let long = arg.get_long().unwrap_or_default();
                let name = long.replace('-', "_").to_uppercase();
                let expected = [format!("THALWEG_{name}")].into_iter();
                let tools = path.first().map(|tool| format!("THALWEG_{}_{name}", tool.to_uppercase()));
                let variable = arg.get_env().and_then(|name| name.to_str()).unwrap_or_default();
                assert!(
                    expected.chain(tools).any(|name| name == variable),
                    "{path:?} --{long}: {variable:?}"
                );
                for key in [long.to_owned(), long.replace('-', "_")] {
                    let root = with_variables(crate::Cli::command(), "");
                    let given = Given { values: vec!["x".into()], is_reread: false };
                    with_default(root, path, &key, given).unwrap_or_else(|e| panic!("{key}: {e}"));
                }
                *seen += 1;
            }
            for sub in command.get_subcommands() {
                let path: Vec<String> = path.iter().cloned().chain([sub.get_name().to_owned()]).collect();
                visit(sub, &path, seen);
            }
        }
        let mut seen = 0;
        visit(&with_variables(crate::Cli::command(), ""), &[], &mut seen);
        assert!(seen > 150, "{seen}");
    }
}
