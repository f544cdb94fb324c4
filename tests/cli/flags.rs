//! Flags and settings that are refused: unknown, out of range, at odds with one another, or without effect.

use thalweg_harness::models;

use super::{ENGINE, ROUTER, SERVE, TOP, UP, WHO_HAS, WORKER, refused, scratch, thalweg, worker};

#[test]
fn flags_that_cannot_work_are_refused() {
    let model = models::smollm2();
    refused(worker(&model, &["--index", "memcached"]), 2, &["--index", "memory", "redis://"]);
    refused(worker(&model, &["--membership", "kubernetes"]), 2, &["--membership", "static", "etcd://"]);
    refused(worker(&model, &["--engine", "sim"]), 2, &["--profile"]);
    let few = ["--max-num-batched-tokens", "1", "--max-num-seqs", "64"];
    refused(worker(&model, &few), 2, &["--max-num-batched-tokens", "--max-num-seqs"]);
    // With the CUDA backend and without it, on a machine without a GPU.
    let says = if cfg!(feature = "cuda") { "libcuda" } else { "--features cuda" };
    refused(worker(&model, &["--device", "cuda"]), 1, &[says]);
    refused(worker(&model, &["--grpc", "0.0.0.0:0"]), 2, &["--grpc 0.0.0.0:0", "--insecure"]);
    refused(thalweg(&["router"]), 2, &["--worker"]);
    refused(thalweg(&["router", "--worker", "http://x"]), 2, &["--worker", "grpc://host:port"]);
    refused(thalweg(&["serve"]), 2, &["serve"]);
}

#[test]
fn unknown_keys_of_a_settings_file_are_refused_by_name() {
    let settings = |name: &str, text: &str| scratch(name, text.as_bytes()).to_str().unwrap().to_owned();
    let with = |file: &str| thalweg(&["worker", "--config", file]);
    let unknown = settings("unknown.yaml", "model: m\nmax-num-sequences: 3\n");
    refused(with(&unknown), 2, &["unknown.yaml", "max-num-sequences"]);
    let foreign = settings("foreign.yaml", "model: m\nworkers: 3\n");
    refused(with(&foreign), 2, &["foreign.yaml", "workers"]);
    let nested = settings("nested.yaml", "model: {path: m}\n");
    refused(with(&nested), 2, &["nested.yaml", "model"]);
    let bad = settings("bad.yaml", "model: m\nmax-num-seqs: many\n");
    refused(with(&bad), 2, &["--max-num-seqs", "from 1 to 4096", "bad.yaml"]);
    refused(with(&settings("broken.yaml", "model: [m\n")), 2, &["broken.yaml"]);
    refused(with("/nonexistent.yaml"), 2, &["/nonexistent.yaml"]);
}

const WHOLE: &[&str] = &["0", "-1", "1.5", "many", "", "nan", "inf", "99999999999999999999999"];
const FROM_0: &[&str] = &["-1", "1.5", "many", "", "nan", "inf", "99999999999999999999999"];
const TIME: &[&str] = &["0", "0.0000001", "-1", "nan", "inf", "-inf", "1e300", "31536001", "5s", ""];
const TIME_FROM_0: &[&str] = &["-1", "nan", "inf", "1e300", "31536001", "5s", ""];
const NAMES: &[&str] = &["", " ", "a b", "a\nb", "a\u{7}b", "a/b", "\u{17e}"];
const FILES: &[&str] = &["/nonexistent/file", "/", ""];

/// Subcommands, option, values that it refuses, and what the refusal says.
type Refused<'a> = (&'a [&'a [&'a str]], &'a str, &'a [&'a str], &'a str);

#[test]
fn values_out_of_range_are_refused_by_name_and_range() {
    let long = "x".repeat(300);
    let labels = ["", " ", "a\nb", "a\u{7}b", " a", &long];
    let table: [Refused<'_>; 65] = [
        (&[ROUTER, UP], "queue-timeout", TIME, "seconds from 0.001 to 31536000"),
        (&[ROUTER], "request-timeout", TIME, "seconds from 0.001"),
        (&[ROUTER], "client-stall-timeout", TIME, "seconds from 0.001"),
        (&[ROUTER], "connect-timeout", TIME, "seconds from 0.001"),
        (&[ROUTER], "sse-keep-alive", TIME_FROM_0, "seconds from 0 to 31536000"),
        (&[ROUTER], "drain-delay", TIME_FROM_0, "seconds from 0"),
        (&[ROUTER, WORKER, UP], "drain-timeout", TIME_FROM_0, "seconds from 0"),
        (&[ROUTER], "body-bytes-max", WHOLE, "from 1 to 1099511627776"),
        (&[ROUTER], "body-buffer-bytes-max", WHOLE, "from 1 to 1099511627776"),
        (&[ROUTER], "queue-requests-max", WHOLE, "from 1 to 1000000"),
        (&[ROUTER], "queue-tokens-max", WHOLE, "from 1 to 1000000000000"),
        (&[ROUTER], "tenant-requests-max", WHOLE, "from 1 to 1000000"),
        (&[ROUTER], "tenant-tokens-max", WHOLE, "from 1 to 1000000000000"),
        (&[ROUTER], "attempts-max", WHOLE, "from 1 to 100"),
        (&[ROUTER], "resumes-max", FROM_0, "from 0 to 100"),
        (&[ROUTER], "choices-max", WHOLE, "from 1 to 4096"),
        (&[ROUTER], "stream-buffer-bytes-max", WHOLE, "from 1 to 1099511627776"),
        (&[ROUTER], "harm-weight", &["-1", "nan", "inf", "1001", ""], "a number from 0 to 1000"),
        (&[ROUTER, UP], "json-blanks-max", &["-1", "1.5", "1025", ""], "from 0 to 1024"),
        (&[ROUTER], "router-seed", FROM_0, "whole number from 0"),
        (&[ROUTER], "router-id", NAMES, "ASCII letters"),
        (&[ROUTER], "worker-header", &["", "2", "maybe"], "true, false"),
        (&[ROUTER], "policy", &["", "best"], "round_robin"),
        (&[ROUTER], "http", &["", "localhost:80", "127.0.0.1", "127.0.0.1:70000"], "127.0.0.1:8080"),
        (
            &[ROUTER],
            "worker",
            &["", "127.0.0.1:1", "grpc://h", "grpc://h:0", "grpc://:1"],
            "grpc://host:port",
        ),
        (&[ROUTER, WORKER], "index", &["", "memcached", "redis://", "redis://h/x"], "redis://"),
        (&[ROUTER, WORKER], "membership", &["", "dynamic", "etcd://", "etcd://h:0"], "etcd://"),
        (&[ROUTER], "membership-lease-ttl", WHOLE, "from 2 to 3600"),
        (&[ROUTER, WORKER], "tls-cert-file", FILES, ""),
        (&[ROUTER, WORKER], "tls-key-file", FILES, ""),
        (&[ROUTER, WORKER], "tls-ca-file", FILES, ""),
        (&[ROUTER], "tls-server-name", NAMES, "ASCII letters"),
        (&[ROUTER, WORKER], "cluster-token-file", FILES, ""),
        (&[ROUTER, WORKER, TOP], "index-ca-file", FILES, ""),
        (&[ROUTER, WORKER, TOP], "index-password-file", FILES, ""),
        (&[ROUTER, WORKER], "membership-ca-file", FILES, ""),
        (&[ROUTER, WORKER], "membership-cert-file", FILES, ""),
        (&[ROUTER, WORKER], "membership-key-file", FILES, ""),
        (&[ROUTER, WORKER], "membership-password-file", FILES, ""),
        (&[ROUTER, WORKER, UP, SERVE, TOP], "log-level", &["", "verbose", "info,", "a=b", "="], "warn"),
        (&[ROUTER, WORKER, UP, SERVE, TOP], "config", FILES, ""),
        (&[WORKER, UP, ENGINE], "served-model-name", &labels, "control characters"),
        (&[WORKER], "worker-id", NAMES, "ASCII letters"),
        (&[WORKER], "grpc", &["", "localhost:80", "127.0.0.1"], "127.0.0.1:8080"),
        (&[WORKER], "metrics", &["", "localhost:80", "127.0.0.1"], "127.0.0.1:8080"),
        (&[WORKER], "advertise", &["", "h", "h:0", "http://h:1"], "grpc://host:port"),
        (&[WORKER], "advertise", &["0.0.0.0:5", "grpc://[::]:5"], "an address of this host"),
        (&[WORKER, UP], "chat-template", FILES, ""),
        (&[WORKER, UP], "profile", FILES, ""),
        (&[WORKER, UP], "cuda-library-path", &["/nonexistent", ""], ""),
        (&[WORKER], "max-model-len", WHOLE, "from 1 to 4294967295"),
        (&[WORKER], "max-num-seqs", WHOLE, "from 1 to 4096"),
        (&[WORKER], "max-num-batched-tokens", WHOLE, "from 1 to 65536"),
        (&[WORKER], "max-num-mixed-tokens", WHOLE, "from 1 to 65536"),
        (&[WORKER], "threads", WHOLE, "from 1 to 1024"),
        (&[WORKER], "kv-cache-memory-bytes", WHOLE, "such as 512MiB"),
        (&[WORKER], "gpu-memory-utilization", &["0", "1.5", "-1", "nan", "inf", ""], "above 0, at most 1"),
        (&[WORKER], "gpu-step-timeout", WHOLE, "from 1 to 3600"),
        (&[WORKER], "seed", FROM_0, "whole number from 0"),
        (&[UP], "workers", WHOLE, "from 1 to 256"),
        (&[SERVE], "request-rate", &["0", "-1", "nan", "inf", ""], "a number from 0.000001"),
        (&[SERVE], "temperature", &["-1", "nan", "inf", ""], "a number from 0 to 100"),
        (&[SERVE], "timeout", WHOLE, "from 1 to 31536000"),
        (&[TOP], "limit", WHOLE, "from 1 to 1000000"),
        (&[WHO_HAS], "worker", NAMES, "ASCII letters"),
    ];
    for (bases, flag, values, says) in table {
        for (base, value) in bases.iter().flat_map(|base| values.iter().map(move |value| (base, value))) {
            let flag = format!("--{flag}");
            let needs: Vec<&str> =
                base.iter().filter(|need| need.split('=').next() != Some(&flag)).copied().collect();
            let mut command = thalweg(&needs);
            command.arg(format!("{flag}={value}"));
            let shown = if value.starts_with("/n") { value } else { says };
            refused(command, 2, &[&flag, shown]);
        }
    }
    for flag in ["num-prompts", "concurrency", "prompt", "prefixes", "turns", "output"] {
        for value in WHOLE {
            let mut command = thalweg(SERVE);
            command.arg(format!("--{flag}={value}"));
            refused(command, 2, &[&format!("--{flag}"), "a whole number from 1 to"]);
        }
    }
    for (flag, least) in [("prompt", 1), ("output", 2), ("batch", 1), ("repeat", 1)] {
        for value in WHOLE {
            let mut command = thalweg(ENGINE);
            command.arg(format!("--{flag}={value}"));
            refused(command, 2, &[&format!("--{flag}"), &format!("a whole number from {least} to")]);
        }
    }
}

#[test]
fn options_that_contradict_each_other_are_refused() {
    let file = scratch("some.pem", b"nothing").to_str().unwrap().to_owned();
    let check = |base: &[&str], more: &[String], says: &[&str]| {
        let mut command = thalweg(base);
        command.args(more);
        refused(command, 2, says);
    };
    for flag in ["--index-ca-file", "--index-password-file", "--membership-ca-file", "--membership-cert-file"]
    {
        check(ROUTER, &[format!("{flag}={file}")], &[flag, "alone"]);
        check(WORKER, &[format!("{flag}={file}")], &[flag, "alone"]);
    }
    check(TOP, &[format!("--index-ca-file={file}")], &["--index-ca-file", "rediss://"]);
    for flag in ["--tls-cert-file", "--tls-key-file", "--tls-ca-file"] {
        check(ROUTER, &[format!("{flag}={file}")], &["--tls-cert-file, --tls-key-file and --tls-ca-file"]);
        let settings = scratch("half.yaml", format!("{}: {file}\n", &flag[2..]).as_bytes());
        check(
            WORKER,
            &["--config".into(), settings.to_str().unwrap().into()],
            &["TLS needs", "without --tls"],
        );
    }
    check(ROUTER, &["--tls-server-name=h".into()], &["TLS needs"]);
    let model = format!("--model={}", models::smollm2().display());
    let broken = scratch("broken.jinja", b"{% for message in messages %}").to_str().unwrap().to_owned();
    check(&["worker", &model], &[format!("--chat-template={broken}")], &["--chat-template", "broken.jinja"]);
    check(&["worker", &model], &[format!("--profile={file}")], &["--profile", "--engine sim"]);
    check(&["index", "who-has", "--index=redis://127.0.0.1:1"], &[], &["--worker"]);
    check(&["index", "top"], &[], &["--index"]);
    check(&["index", "who-has", "--index=redis://127.0.0.1:1"], &["+1f".into()], &["hexadecimal"]);
}

#[test]
fn flags_that_would_do_nothing_are_refused() {
    let check = |base: &[&str], more: &[&str], says: &str| {
        let mut command = thalweg(base);
        command.args(more);
        refused(command, 2, &[more[0].split('=').next().unwrap(), says]);
    };
    for base in [ROUTER, UP] {
        check(base, &["--insecure"], "--grpc ADDRESS");
        check(base, &["--metrics-public"], "--api-keys-file");
        for flag in ["--response-ttl=60", "--response-bytes-max=1000", "--response-memory-bytes-max=1000"] {
            check(base, &[flag, "--response-store=none"], "--response-store none");
        }
    }
    check(
        ROUTER,
        &["--response-memory-bytes-max=1000", "--index=redis://127.0.0.1:1"],
        "--response-store memory",
    );
    for policy in ["--policy=round_robin", "--policy=power_of_two", "--policy=prefix_hash"] {
        check(ROUTER, &["--harm-weight=2", policy], "--policy cost");
    }
    check(ROUTER, &["--membership-lease-ttl=20"], "etcd://");
    check(WORKER, &["--membership-lease-ttl=20"], "etcd://");
    check(WORKER, &["--advertise=127.0.0.1:5"], "etcd://");
    check(WORKER, &["--tls-server-name=h"], "a router");
    let gpu =
        ["--gpu-memory-utilization=0.5", "--gpu-step-timeout=9", "--cuda-plan-cache=off", "--enforce-eager"];
    for base in [WORKER, UP, ENGINE] {
        for flag in gpu.into_iter().chain(["--cuda-library-path=/"]) {
            check(base, &[flag, "--device=cpu"], "leave it out with --device cpu");
        }
        check(base, &["--threads=2", "--device=cuda"], "leave it out with --device cuda");
    }
    for base in [WORKER, UP] {
        check(base, &["--enable-lora"], "--lora-modules");
        check(base, &["--max-loras=2"], "--enable-lora");
        check(base, &["--max-lora-rank=8"], "--enable-lora");
        check(base, &["--seed=7"], "--load-format dummy");
        for flag in
            ["--seed=7", "--threads=2", "--dtype=float32", "--deterministic", "--gpu-memory-utilization=0.5"]
        {
            check(base, &[flag, "--engine=sim"], "--engine sim");
        }
    }
    // In a file too; a variable may be for another subcommand.
    let file = scratch("idle.yaml", b"metrics-public: true\n").to_str().unwrap().to_owned();
    let mut command = thalweg(ROUTER);
    command.args(["--config", &file]);
    refused(command, 2, &["--metrics-public"]);
    let mut command = thalweg(WORKER);
    command.args(["--max-loras", "2"]);
    refused(command, 2, &["--max-loras"]);
    let mut off = thalweg(ROUTER);
    off.env("THALWEG_METRICS_PUBLIC", "true").env("THALWEG_INSECURE", "true").arg("--policy=best");
    refused(off, 2, &["--policy"]);
}

/// What may do something, and what is so anyway: the model is what is wrong here.
#[test]
fn flags_that_may_do_something_are_taken() {
    let check = |base: &[&str], more: &[&str]| {
        let mut command = thalweg(base);
        command.args(more);
        refused(command, 2, &["/nonexistent", "no such file"]);
    };
    for base in [WORKER, UP] {
        check(
            base,
            &["--gpu-memory-utilization=0.5", "--cuda-plan-cache=off", "--enforce-eager", "--threads=2"],
        );
        check(base, &["--deterministic", "--device=cpu", "--threads=2"]);
        check(base, &["--enable-lora", "--lora-modules=a=/nonexistent/a"]);
    }
    check(
        WORKER,
        &["--advertise=127.0.0.1:5", "--membership=etcd://127.0.0.1:1", "--membership-lease-ttl=20"],
    );
}
