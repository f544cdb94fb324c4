//! Flags over environment over YAML file over defaults. The file's keys are flag names, so there is one list of settings:
//! what is no flag of the subcommand is refused by name.

use std::ffi::OsString;
use std::path::Path;

use clap::builder::OsStr;
use clap::error::ErrorKind;
use clap::{ArgMatches, Command, CommandFactory, Error, FromArgMatches};
use serde_json::{Map, Value};

/// Parses this process's arguments.
pub(crate) fn parse<P: CommandFactory + FromArgMatches>() -> Result<P, Error> {
    parse_from(std::env::args_os())
}

fn parse_from<P: CommandFactory + FromArgMatches>(
    args: impl IntoIterator<Item = OsString>,
) -> Result<P, Error> {
    let args: Vec<OsString> = args.into_iter().collect();
    let mut command = P::command();
    let glance = command.clone().ignore_errors(true).try_get_matches_from(&args);
    if let Some((file, path)) = glance.ok().and_then(|matches| config_file(&matches)) {
        let settings = read(Path::new(&file)).map_err(|text| failure(&mut command, &file, &text))?;
        command = with_defaults(command, &path, &settings)
            .map_err(|text| failure(&mut P::command(), &file, &text))?;
    }
    let mut matches = command.try_get_matches_from_mut(&args)?;
    P::from_arg_matches_mut(&mut matches).map_err(|error| error.format(&mut command))
}

/// File of `--config`, and the subcommands that were chosen.
fn config_file(matches: &ArgMatches) -> Option<(String, Vec<String>)> {
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
            None => return file.map(|file| (file, path)),
        }
    }
}

fn read(file: &Path) -> Result<Map<String, Value>, String> {
    let text = std::fs::read_to_string(file).map_err(|error| error.to_string())?;
    if text.trim().is_empty() {
        return Ok(Map::new());
    }
    // Without the lines around the fault: a password may stand in one of them.
    serde_saphyr::from_str(&text).map_err(|error| error.without_snippet().to_string())
}

/// The command with the settings as defaults, of the subcommand at `path` or of the flags of all.
fn with_defaults(
    command: Command,
    path: &[String],
    settings: &Map<String, Value>,
) -> Result<Command, String> {
    settings.iter().try_fold(command, |command, (key, value)| {
        let values =
            texts(value).ok_or_else(|| format!("{key:?} must be a text, number, boolean or list of them"))?;
        with_default(command, path, key, values)
    })
}

fn with_default(command: Command, path: &[String], key: &str, values: Vec<OsStr>) -> Result<Command, String> {
    let flag = key.replace('_', "-");
    let known = command.get_arguments().find(|arg| arg.get_long() == Some(&*flag) && flag != "config");
    if let Some(id) = known.map(|arg| arg.get_id().clone()) {
        return Ok(command.mut_arg(id, |arg| arg.required(false).default_values(values)));
    }
    let Some((name, below)) = path.split_first() else {
        let name = command.get_name();
        return Err(format!(
            "unknown key {key:?}; keys are the flags of `thalweg {name} --help` without dashes"
        ));
    };
    let mut result = Ok(());
    let command = command.mut_subcommand(name, |sub| {
        with_default(sub.clone(), below, key, values).unwrap_or_else(|error| {
            result = Err(error);
            sub
        })
    });
    result.map(|()| command)
}

fn texts(value: &Value) -> Option<Vec<OsStr>> {
    let scalar = |value: &Value| match value {
        Value::String(text) => Some(OsStr::from(text.clone())),
        Value::Number(number) => Some(OsStr::from(number.to_string())),
        Value::Bool(flag) => Some(OsStr::from(flag.to_string())),
        Value::Null | Value::Array(_) | Value::Object(_) => None,
    };
    match value {
        Value::Array(values) if !values.is_empty() => values.iter().map(scalar).collect(),
        value => scalar(value).map(|text| vec![text]),
    }
}

fn failure(command: &mut Command, file: &str, text: &str) -> Error {
    command.error(ErrorKind::InvalidValue, format!("{file}: {text}"))
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
            ("null", "model:\n", "\"model\" must be"),
            ("list", "- model\n", "list.yaml"),
            ("twice", "model: m\nmodel: n\n", "twice.yaml"),
            ("value", "model: m\nmax-seqs: many\n", "'many' for '--max-seqs"),
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
}
