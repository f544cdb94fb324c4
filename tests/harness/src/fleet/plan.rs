//! What a fleet is made of, and how its processes are called.

use std::path::{Path, PathBuf};

use crate::node::Node;

/// What a fleet is made of.
pub struct FleetPlan {
    pub(super) binary: &'static str,
    pub(super) model: PathBuf,
    /// A profile without its faults; None runs the model.
    pub(super) profile: Option<String>,
    pub(super) workers: usize,
    pub(super) routers: usize,
    worker_args: Vec<String>,
    /// Flags of single workers, which take the place of those of all: number, flag, value.
    of_workers: Vec<(usize, String, String)>,
    router_args: Vec<String>,
    pub(super) proxies: bool,
    pub(super) alone: bool,
}

impl FleetPlan {
    /// Simulated workers; `profile` leaves the faults out.
    pub fn sim(binary: &'static str, profile: &str) -> Self {
        let mut plan = Self::model(binary, crate::models::tiny("llama3"));
        plan.profile = Some(profile.to_owned());
        plan
    }

    /// Workers that run a model.
    pub fn model(binary: &'static str, model: PathBuf) -> Self {
        let worker_args = ["--kv-cache-memory-bytes", "64MiB"].map(str::to_owned).into();
        Self {
            binary,
            model,
            profile: None,
            workers: 2,
            routers: 1,
            worker_args,
            of_workers: Vec::new(),
            router_args: Vec::new(),
            proxies: false,
            alone: false,
        }
    }

    /// How many workers; 2 by default.
    pub fn workers(mut self, workers: usize) -> Self {
        self.workers = workers;
        self
    }

    /// How many routers; 1 by default.
    pub fn routers(mut self, routers: usize) -> Self {
        self.routers = routers;
        self
    }

    /// Further flags of every worker.
    pub fn worker_args(mut self, args: &[&str]) -> Self {
        self.worker_args.extend(args.iter().map(|arg| (*arg).to_owned()));
        self
    }

    /// Gives a flag another value for one worker alone, be it there from the start or added later.
    pub fn of_worker(mut self, number: usize, flag: &str, value: &str) -> Self {
        self.of_workers.push((number, flag.to_owned(), value.to_owned()));
        self
    }

    /// Further flags of every router.
    pub fn router_args(mut self, args: &[&str]) -> Self {
        self.router_args.extend(args.iter().map(|arg| (*arg).to_owned()));
        self
    }

    /// Flags of every process.
    pub fn args(self, args: &[&str]) -> Self {
        self.worker_args(args).router_args(args)
    }

    /// Routers reach each worker through a proxy.
    pub fn proxies(mut self) -> Self {
        self.proxies = true;
        self
    }

    /// No other test runs meanwhile: it measures time, or loads the machine.
    pub fn alone(mut self) -> Self {
        self.alone = true;
        self
    }

    /// What worker `number` is called with; only a simulated one reads `profile`.
    pub(super) fn worker_call(&self, number: usize, node: &Node, profile: &Path) -> Vec<String> {
        let (grpc, metrics) = (node.address.to_string(), node.metrics.to_string());
        let model = self.model.to_str().expect("UTF-8");
        let mut args = vec!["worker", "--worker-id", &node.name, "--grpc", &grpc, "--metrics", &metrics];
        args.extend(["--model", model]);
        match self.profile {
            Some(_) => args.extend(["--engine", "sim", "--profile", profile.to_str().expect("UTF-8")]),
            None => args.extend(["--threads", "1"]),
        }
        // Routers with a list of workers are given the proxy's address.
        let is_told = self.worker_args.iter().any(|arg| arg == "--membership");
        let advertised = node.proxy.as_ref().filter(|_| is_told).map(|proxy| proxy.address().to_string());
        if let Some(address) = &advertised {
            args.extend(["--advertise", address]);
        }
        args.extend(self.worker_args.iter().map(String::as_str));
        for (_, flag, value) in self.of_workers.iter().filter(|(of, ..)| *of == number) {
            match args.iter().position(|arg| arg == flag) {
                Some(at) => args[at + 1] = value,
                None => args.extend([flag.as_str(), value]),
            }
        }
        args.into_iter().map(str::to_owned).collect()
    }

    /// What a router in front of these workers is called with.
    pub(super) fn router_call(&self, node: &Node, workers: &[Node]) -> Vec<String> {
        let mut args = vec!["router".to_owned(), "--http".to_owned(), node.address.to_string()];
        if !self.router_args.iter().any(|arg| arg == "--membership") {
            let named = |worker: &Node| ["--worker".to_owned(), format!("grpc://{}", worker.reached_at())];
            args.extend(workers.iter().flat_map(named));
        }
        args.extend_from_slice(&self.router_args);
        args
    }
}
