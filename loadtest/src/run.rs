//! Carrying a plan out.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use indicatif::ProgressBar;
use rand::SeedableRng;
use rand::rngs::StdRng;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep_until};

use crate::client::Client;
use crate::conversation::{Conversation, History};
use crate::error::LoadError;
use crate::plan::{Arrivals, Plan, Workload};
use crate::record::Record;
use crate::report::Report;
use crate::{arrival, dataset, progress, prompts};

/// Sends what the plan says and sums up what came back. Only a plan that cannot begin is an error.
pub async fn run(plan: Plan) -> Result<Report, LoadError> {
    plan.check()?;
    let client = Client::new(&plan)?;
    let source = Source::new(&plan)?;
    let model = match &plan.model {
        Some(model) => model.clone(),
        None => client.first_model().await?,
    };
    let requests = (0..plan.conversations).map(|index| source.turns(index) as u64).sum();
    let bar = progress::bar(requests, plan.progress);
    let test = Arc::new(Test { plan, client, model, source, bar });
    let start = Instant::now();
    let records = match test.plan.arrivals {
        Arrivals::Poisson { per_second } => open_loop(&test, per_second, start).await,
        Arrivals::Closed { concurrency } => closed_loop(&test, concurrency).await,
    };
    let duration = start.elapsed();
    test.bar.finish_and_clear();
    Ok(Report::new(&test.plan, &test.model, &records, duration))
}

/// What all conversations of a test have in common.
struct Test {
    plan: Plan,
    client: Client,
    model: String,
    source: Source,
    bar: ProgressBar,
}

/// Where conversations come from.
enum Source {
    Synthetic(crate::plan::Synthetic, u64),
    Read(Vec<Conversation>),
}

/// Every conversation begins at its time, whether or not those before it have ended.
async fn open_loop(test: &Arc<Test>, per_second: f64, start: Instant) -> Vec<Record> {
    let times = arrival::poisson(per_second, StdRng::seed_from_u64(test.plan.seed));
    let mut conversations = JoinSet::new();
    for (index, time) in times.take(test.plan.conversations).enumerate() {
        sleep_until(start + time).await;
        let test = Arc::clone(test);
        conversations.spawn(async move { test.converse(index).await });
    }
    conversations.join_all().await.into_iter().flatten().collect()
}

/// As many tasks as conversations at once; each takes the next number when it is done.
async fn closed_loop(test: &Arc<Test>, concurrency: usize) -> Vec<Record> {
    let next = Arc::new(AtomicUsize::new(0));
    let mut lanes = JoinSet::new();
    for _ in 0..concurrency.min(test.plan.conversations) {
        let (test, next) = (Arc::clone(test), Arc::clone(&next));
        lanes.spawn(async move {
            let mut records = Vec::new();
            loop {
                let index = next.fetch_add(1, Ordering::Relaxed);
                if index >= test.plan.conversations {
                    return records;
                }
                records.extend(test.converse(index).await);
            }
        });
    }
    lanes.join_all().await.into_iter().flatten().collect()
}

impl Test {
    /// One conversation to its end, or to its first failure: the turns behind it would make no sense.
    async fn converse(&self, index: usize) -> Vec<Record> {
        let Conversation { opening, turns } = self.source.conversation(index);
        let mut left = turns.len() as u64;
        let mut history = History::new(&self.plan, &self.model, opening);
        let mut records = Vec::with_capacity(turns.len());
        for turn in turns {
            history.add("user", turn);
            let (record, text) = self.client.generate(history.body()).await;
            history.add("assistant", text);
            let failed = record.failure.is_some();
            records.push(record);
            if failed {
                break;
            }
            self.bar.inc(1);
            left -= 1;
        }
        self.bar.inc(left);
        records
    }
}

impl Source {
    fn new(plan: &Plan) -> Result<Self, LoadError> {
        match &plan.workload {
            Workload::Synthetic(shape) => Ok(Self::Synthetic(shape.clone(), plan.seed)),
            Workload::Dataset(path) => Ok(Self::Read(dataset::read(path, plan.seed)?)),
        }
    }

    fn conversation(&self, index: usize) -> Conversation {
        match self {
            Self::Synthetic(shape, seed) => prompts::synthetic(shape, *seed, index),
            Self::Read(conversations) => conversations[index % conversations.len()].clone(),
        }
    }

    fn turns(&self, index: usize) -> usize {
        match self {
            Self::Synthetic(shape, _) => shape.turns,
            Self::Read(conversations) => conversations[index % conversations.len()].turns.len(),
        }
    }
}
