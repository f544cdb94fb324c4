//! Flags that would do nothing where they stand: whoever gives one expects something of it.

use clap::error::ErrorKind;
use clap::parser::ValueSource;
use clap::{ArgMatches, Command, Error};
use serde_json::{Map, Value};
use thalweg_router::config::API_KEY_VARIABLE;

/// What a subcommand was told, by flags, variables and the file, which stands for defaults.
struct Given<'a> {
    matches: &'a ArgMatches,
    file: &'a Map<String, Value>,
}

/// Flags, when they do nothing, and what to do instead.
type Idle = (&'static [&'static str], fn(&Given<'_>) -> bool, &'static str);

const IDLE: [Idle; 13] = [
    (
        &["insecure"],
        |given| !given.has("grpc"),
        "is for gRPC alone; give --grpc ADDRESS too, or leave it out",
    ),
    (
        &["metrics-public"],
        |given| !given.has("api-keys-file") && std::env::var_os(API_KEY_VARIABLE).is_none(),
        "is for routers with API keys; give --api-keys-file, or leave it out: /metrics is public without keys",
    ),
    (
        &["response-ttl", "response-bytes-max", "response-memory-bytes-max"],
        |given| given.is("response-store", "none"),
        "is for kept responses; leave it out, or --response-store none",
    ),
    (
        &["response-memory-bytes-max"],
        |given| given.is("response-store", "auto") && given.has("index") && !given.is("index", "memory"),
        "is for responses kept in memory; leave it out, or add --response-store memory: the Redis of --index keeps them",
    ),
    (
        &["harm-weight"],
        |given| !given.is("policy", "cost") && !given.is("policy", "least_queue"),
        "is for policies that predict times; leave it out, or take --policy cost or least_queue",
    ),
    (
        &["membership-lease-ttl", "advertise"],
        |given| given.is("membership", "static"),
        "is for etcd:// alone; set --membership, or leave it out",
    ),
    (
        &["tls-server-name"],
        // Workers alone have this one, by default too.
        |given| given.has("metrics"),
        "is what a router expects of its workers; leave it out: a worker is asked for its certificate alone",
    ),
    (
        &["enable-lora"],
        |given| !given.has("lora-modules"),
        "serves no adapter by itself; name some with --lora-modules NAME=FOLDER, or leave it out",
    ),
    (
        &["max-loras", "max-lora-rank"],
        |given| !given.is("enable-lora", "true"),
        "is for adapters; give --enable-lora too, or leave it out",
    ),
    (
        &[
            "seed",
            "load-format",
            "threads",
            "dtype",
            "pooling-type",
            "deterministic",
            "enforce-eager",
            "gpu-memory-utilization",
            "gpu-step-timeout",
            "cuda-library-path",
            "cuda-plan-cache",
        ],
        |given| given.is("engine", "sim"),
        "is for models that run; leave it out with --engine sim, whose --profile says everything",
    ),
    (
        &[
            "enforce-eager",
            "gpu-memory-utilization",
            "gpu-step-timeout",
            "cuda-library-path",
            "cuda-plan-cache",
        ],
        |given| given.is("device", "cpu"),
        "is for GPUs; leave it out with --device cpu",
    ),
    (
        &["threads"],
        |given| given.is("device", "cuda"),
        "is for models on the CPU; leave it out with --device cuda",
    ),
    (
        &["seed"],
        |given| given.is("load-format", "auto"),
        "is of the random weights of --load-format dummy; leave it out: requests bring a seed of their own",
    ),
];

/// Refuses the first flag that does nothing.
pub(super) fn refuse_idle(
    command: &mut Command,
    matches: &ArgMatches,
    file: &Map<String, Value>,
) -> Result<(), Error> {
    let mut leaf = matches;
    while let Some((_, below)) = leaf.subcommand() {
        leaf = below;
    }
    let given = Given { matches: leaf, file };
    for (flags, is_idle, says) in IDLE {
        if let Some(flag) = flags.iter().find(|flag| given.sets(flag) && is_idle(&given)) {
            return Err(command.error(ErrorKind::ArgumentConflict, format!("--{flag}: {says}")));
        }
    }
    Ok(())
}

impl Given<'_> {
    /// The value that holds, whatever it comes from.
    fn value(&self, flag: &str) -> Option<String> {
        let mut values = self.matches.try_get_raw(&flag.replace('-', "_")).ok().flatten()?;
        values.next().map(|value| value.to_string_lossy().into_owned())
    }

    fn has(&self, flag: &str) -> bool {
        self.value(flag).is_some()
    }

    fn is(&self, flag: &str, value: &str) -> bool {
        self.value(flag).is_some_and(|found| found == value)
    }

    /// It was given for this process, and is not switched off. Variables are shared: what one subcommand needs another finds too.
    fn sets(&self, flag: &str) -> bool {
        let is_on = self.value(flag).is_some_and(|value| value != "false");
        let source = || self.matches.value_source(&flag.replace('-', "_"));
        let in_file = || self.file.contains_key(flag) || self.file.contains_key(&flag.replace('-', "_"));
        is_on && (source().is_some_and(|source| source == ValueSource::CommandLine) || in_file())
    }
}
