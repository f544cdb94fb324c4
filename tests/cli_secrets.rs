//! Whatever a user or a password came in by, no output repeats it.

use std::path::{Path, PathBuf};
use std::process::Command;

const BINARY: &str = env!("CARGO_BIN_EXE_thalweg");
const SECRET: &str = "hunter2";
const VALUE: &str = "scheme://user:hunter2@host:bad";

/// Subcommands with what each needs beside the option that is looked at.
const SUBCOMMANDS: [(&[&str], &[&str]); 7] = [
    (&["up"], &["--model=/nonexistent"]),
    (&["router"], &["--worker=grpc://127.0.0.1:1", "--http=127.0.0.1:0"]),
    (&["worker"], &["--model=/nonexistent"]),
    (&["bench", "serve"], &["--url=http://127.0.0.1:1", "--model=m", "--num-prompts=1"]),
    (&["bench", "engine"], &["--model=/nonexistent"]),
    (&["index", "top"], &["--index=redis://127.0.0.1:1"]),
    (&["index", "who-has"], &["--index=redis://127.0.0.1:1"]),
];

/// Flags that help does not tell.
const HIDDEN: [&str; 2] = ["--no-enable-prefix-caching", "--as-worker"];

#[derive(Clone, Copy, Debug)]
enum Way {
    Flag,
    Variable,
    File,
}

#[test]
fn no_option_repeats_a_password_whichever_way_it_came() {
    for (subcommand, needs) in SUBCOMMANDS {
        let help = output(thalweg(subcommand).arg("--help")).1;
        let told =
            help.lines().filter_map(|line| line.trim().strip_prefix("--")?.split([' ', '[', '=']).next());
        let mut flags: Vec<String> = told.map(|name| format!("--{name}")).collect();
        flags.sort();
        flags.dedup();
        assert!(flags.len() > 5, "{subcommand:?}: {flags:?}");
        if subcommand == ["up"] {
            flags.extend(HIDDEN.map(str::to_owned));
        }
        for flag in &flags {
            for way in [Way::Flag, Way::Variable, Way::File] {
                check(subcommand, needs, flag, &help, way);
            }
        }
    }
}

fn check(subcommand: &[&str], needs: &[&str], flag: &str, help: &str, way: Way) {
    let mut command = thalweg(subcommand);
    command.args(needs.iter().filter(|need| need.split('=').next() != Some(flag)));
    let name = flag.trim_start_matches('-');
    match way {
        Way::Flag => command.arg(format!("{flag}={VALUE}")),
        Way::Variable => {
            let tool = format!("THALWEG_{}_{}", subcommand[0].to_uppercase(), variable(name));
            let own = format!("THALWEG_{}", variable(name));
            let known = help.contains(&format!("[env: {tool}]"));
            if !known && !HIDDEN.contains(&flag) {
                assert!(help.contains(&format!("[env: {own}]")), "{subcommand:?} {flag} has no variable");
            }
            command.env(if known { tool } else { own }, VALUE)
        }
        Way::File => command.arg("--config").arg(settings(&format!("{name}: {VALUE}\n"))),
    };
    let (code, out) = output(&mut command);
    assert!(!out.contains(SECRET), "{command:?} tells it: {out}");
    // A key is taken as it is, and the server is not there; a setting that has no variable is not asked for.
    if flag != "--api-key" && !(flag == "--as-worker" && matches!(way, Way::Variable)) {
        assert_eq!(code, Some(2), "{command:?} {way:?}: {out}");
        let named = out.contains(flag) || out.contains(&format!("{name:?}"));
        assert!(named, "{command:?} {way:?} does not name {flag}: {out}");
    }
}

fn variable(name: &str) -> String {
    name.replace('-', "_").to_uppercase()
}

#[test]
fn nothing_else_repeats_it_either() {
    let worker = || thalweg(&["worker", "--model=/nonexistent"]);
    let mut commands =
        vec![thalweg(&["router", VALUE]), thalweg(&[VALUE]), thalweg(&["router", "--wrong=hunter2"])];
    commands.push(thalweg(&["index", "who-has", VALUE]));
    for yaml in [
        format!("{VALUE}: x\n"),
        format!("{VALUE}\n"),
        format!("'{VALUE}': x\n'{VALUE}': y\n"),
        format!("- {VALUE}\n"),
        format!("model: {{a: '{VALUE}'}}\n"),
        format!("model: &a !!int '{VALUE}'\n"),
        format!("model: '{VALUE}\n"),
        format!("hunter2 user: {VALUE}\n"),
    ] {
        let mut command = worker();
        command.arg("--config").arg(settings(&yaml));
        commands.push(command);
    }
    let mut filtered = worker();
    filtered.env("RUST_LOG", format!("info,{VALUE}=[=x"));
    commands.push(filtered);
    for mut command in commands {
        let (code, out) = output(&mut command);
        assert!(!out.contains(SECRET) && code == Some(2), "{command:?}: {code:?} {out}");
    }
}

#[test]
fn help_shows_no_variables_value_and_no_setting() {
    let mut command = thalweg(&["worker", "--help"]);
    command.env("THALWEG_QUEUE_TIMEOUT", SECRET).env("THALWEG_WORKER_ID", SECRET).env("THALWEG_INDEX", VALUE);
    command.arg("--config").arg(settings("worker-id: hunter2\nmetrics: hunter2\n"));
    let (code, out) = output(&mut command);
    assert!(code == Some(0) && !out.contains(SECRET) && out.contains("[env: THALWEG_WORKER_ID]"), "{out}");
}

fn thalweg(args: &[&str]) -> Command {
    let mut command = Command::new(BINARY);
    for (name, _) in std::env::vars().filter(|(name, _)| name.starts_with("THALWEG_") || name == "RUST_LOG") {
        command.env_remove(name);
    }
    command.args(args).env("HF_HUB_OFFLINE", "1");
    command
}

/// Exit code, and all that was said.
fn output(command: &mut Command) -> (Option<i32>, String) {
    let output = command.stdin(std::process::Stdio::null()).output().expect("a binary");
    (output.status.code(), String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned())
}

/// A file of settings of this test process alone.
fn settings(yaml: &str) -> PathBuf {
    let number = NEXT.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
    let file =
        Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("secrets-{}-{number}.yaml", std::process::id()));
    std::fs::write(&file, yaml).expect("a writable folder");
    file
}

static NEXT: std::sync::atomic::AtomicU32 = std::sync::atomic::AtomicU32::new(0);
