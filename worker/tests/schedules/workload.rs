//! Random requests and a driver that holds every answer against the one computed alone.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::rc::Rc;
use std::sync::Arc;

use rand::rngs::StdRng;
use rand::{Rng, RngExt};
use thalweg_cache_index::event::BlockEvent;
use thalweg_model::grammar::Grammar;
use thalweg_proto::block_hash::BlockHash;
use thalweg_worker::kv::{FULL, KvConfig, SLIDING, blocks_per_sequence};
use thalweg_worker::plan::{AdapterSlot, KV_GROUPS, Logprobs, StepId};
use thalweg_worker::pooling::Pooling;
use thalweg_worker::runner::Runner;
use thalweg_worker::sampling::SamplingParams;
use thalweg_worker::scheduler::{
    FinishReason, NewSequence, PREEMPTIONS_MAX, Scheduler, SchedulerConfig, SequenceKey, Started, Update,
};

use crate::hash_model::{HashModel, HashRunner, VOCAB};

/// Random token ids.
pub(crate) fn random_ids(rng: &mut impl Rng, len: usize) -> Vec<u32> {
    (0..len).map(|_| rng.random_range(0..VOCAB)).collect()
}

/// A scheduler's configuration, often a tight one, and the model to go with it.
pub(crate) fn random_setting(rng: &mut StdRng) -> (SchedulerConfig, HashModel, usize) {
    let block_tokens = [1, 2, 4, 16][rng.random_range(0..4)];
    let has_group = [[true, false], [true, true], [true, true], [false, true]][rng.random_range(0..4)];
    let window = has_group[SLIDING].then(|| rng.random_range(2..40));
    let max_model_len = rng.random_range(20..120);
    let least = blocks_per_sequence(max_model_len, block_tokens, window);
    let slack = rng.random_range(1.0..4.0);
    let blocks = [FULL, SLIDING].map(|g| if has_group[g] { (least[g] as f64 * slack) as usize } else { 0 });
    let max_num_seqs = rng.random_range(1..8);
    let kv = KvConfig {
        block_tokens,
        blocks,
        has_group,
        sliding_window: window,
        prefix_caching: rng.random_bool(0.8),
    };
    let max_num_batched_tokens = max_num_seqs + rng.random_range(0..60);
    let model = HashModel { seed: rng.random(), has_group, window };
    (
        SchedulerConfig {
            kv,
            max_num_seqs,
            max_num_batched_tokens,
            max_num_mixed_tokens: max_num_batched_tokens,
        },
        model,
        max_model_len,
    )
}

/// What a sequence should get, from a computation of it alone.
#[derive(Clone, Debug)]
pub(crate) struct Answer {
    pub(crate) tokens: Vec<Logprobs>,
    pub(crate) finish: FinishReason,
    pub(crate) prompt_logprobs: Option<Vec<Logprobs>>,
    pub(crate) embedding: Option<Vec<f32>>,
}

/// Computes right answers.
pub(crate) type Oracle = Rc<dyn Fn(&NewSequence) -> Answer>;

/// The hash model as an oracle.
pub(crate) fn hash_oracle(model: HashModel) -> Oracle {
    Rc::new(move |new| {
        let NewSequence { key, prompt, output, sampling, output_max, .. } = new;
        let (tokens, finish) = model.answer(prompt, output, sampling, key.choice, *output_max);
        let prompt_logprobs = new.prompt_logprobs.map(|_| model.prompt_logprobs(prompt));
        let embedding = new.pooling.map(|pooling| model.embedding(prompt, pooling));
        Answer { tokens, finish, prompt_logprobs, embedding }
    })
}

/// Requests that share prefixes, roots and prompts; some resumed, some with several choices.
pub(crate) struct RequestSource {
    pub(crate) oracle: Oracle,
    /// Sampling parameters but for the seed and the ends.
    pub(crate) samplings: Vec<SamplingParams>,
    /// Of which some answers must be texts.
    pub(crate) grammars: Vec<Grammar>,
    /// Some prompts are to be embedded.
    pub(crate) embeds: bool,
    pub(crate) max_model_len: usize,
    prefixes: Vec<Vec<u32>>,
    made: u64,
}

impl RequestSource {
    pub(crate) fn new(rng: &mut StdRng, oracle: Oracle, max_model_len: usize) -> Self {
        let prefixes = (0..3).map(|_| random_ids(rng, max_model_len)).collect();
        Self {
            oracle,
            samplings: vec![SamplingParams::greedy()],
            grammars: Vec::new(),
            embeds: false,
            prefixes,
            max_model_len,
            made: 0,
        }
    }

    /// One request as sequences, the leader first.
    pub(crate) fn next(&mut self, rng: &mut StdRng) -> Vec<NewSequence> {
        self.made += 1;
        let prompt: Arc<[u32]> = self.prompt(rng).into();
        if self.embeds && rng.random_bool(0.25) {
            return vec![self.embedding(rng, prompt)];
        }
        let output_max = rng.random_range(1..=self.max_model_len - prompt.len()).min(40);
        let constrained = !self.grammars.is_empty() && rng.random_bool(0.5);
        let sampling = Arc::new(SamplingParams {
            grammar: constrained.then(|| self.grammars[rng.random_range(0..self.grammars.len())].clone()),
            seed: rng.random(),
            min_tokens: rng.random_range(0..4),
            end_ids: if rng.random_bool(0.5) { vec![3, 9] } else { Vec::new() },
            ..self.samplings[rng.random_range(0..self.samplings.len())].clone()
        });
        let prompt_logprobs = rng.random_bool(0.2).then_some(2);
        let root = BlockHash([rng.random_range(0..2); 16]);
        let leader = SequenceKey { priority: rng.random_range(0..2), request: self.made, choice: 0 };
        let choices = [1, 1, 1, 2, 3][rng.random_range(0..5)];
        (0..choices)
            .map(|choice| {
                let new = NewSequence {
                    key: SequenceKey { choice, ..leader },
                    prompt: prompt.clone(),
                    output: Vec::new(),
                    sampling: sampling.clone(),
                    output_max,
                    root,
                    adapter: AdapterSlot::BASE,
                    prompt_logprobs: prompt_logprobs.filter(|_| choice == 0),
                    pooling: None,
                    leader: (choice > 0).then_some(leader),
                };
                if rng.random_bool(0.3) { self.resumed(rng, new) } else { new }
            })
            .collect()
    }

    fn embedding(&self, rng: &mut StdRng, prompt: Arc<[u32]>) -> NewSequence {
        NewSequence {
            key: SequenceKey { priority: rng.random_range(0..2), request: self.made, choice: 0 },
            prompt,
            output: Vec::new(),
            sampling: Arc::new(SamplingParams::greedy()),
            output_max: 0,
            root: BlockHash([rng.random_range(0..2); 16]),
            adapter: AdapterSlot::BASE,
            prompt_logprobs: None,
            pooling: Some([Pooling::Last, Pooling::Mean][rng.random_range(0..2)]),
            leader: None,
        }
    }

    fn prompt(&self, rng: &mut StdRng) -> Vec<u32> {
        let shared = rng.random_range(0..self.max_model_len - 1);
        let own = rng.random_range(0..self.max_model_len - shared - 1).min(6);
        let mut prompt = self.prefixes[rng.random_range(0..3)][..shared].to_vec();
        prompt.extend(random_ids(rng, own.max(usize::from(shared == 0))));
        prompt
    }

    /// The same, as if its stream had broken somewhere.
    fn resumed(&self, rng: &mut StdRng, new: NewSequence) -> NewSequence {
        let whole = (self.oracle)(&new).tokens;
        let kept = rng.random_range(0..whole.len());
        NewSequence { output: whole[..kept].iter().map(|t| t.token).collect(), ..new }
    }
}

/// A scheduler, its runner, and what everyone should get.
pub(crate) struct Simulation<R = HashRunner> {
    pub(crate) scheduler: Scheduler,
    pub(crate) runner: R,
    oracle: Oracle,
    config: SchedulerConfig,
    in_flight: VecDeque<StepId>,
    pub(crate) live: BTreeMap<SequenceKey, Live>,
    /// Of sequences whose answers were checked.
    pub(crate) finished: Vec<SequenceKey>,
    /// Everyone who got a slot, in order, each time.
    pub(crate) started: Vec<Started>,
    /// Who had a row in the newest step.
    pub(crate) step_rows: usize,
    /// What the cache index would know.
    pub(crate) index: BTreeSet<u64>,
}

/// A sequence that has not ended, and its answer so far.
pub(crate) struct Live {
    new: NewSequence,
    pub(crate) got: Vec<Logprobs>,
    prompt_logprobs: Option<Vec<Logprobs>>,
    embedding: Option<Vec<f32>>,
}

impl Simulation {
    /// Over the hash model.
    pub(crate) fn over(config: SchedulerConfig, model: HashModel) -> Self {
        let runner = HashRunner::new(model, &config.kv, config.max_num_batched_tokens);
        Self::new(config, runner, hash_oracle(model))
    }
}

impl<R: Runner> Simulation<R> {
    pub(crate) fn new(config: SchedulerConfig, runner: R, oracle: Oracle) -> Self {
        Self {
            scheduler: Scheduler::new(config),
            runner,
            oracle,
            config,
            in_flight: VecDeque::new(),
            live: BTreeMap::new(),
            finished: Vec::new(),
            started: Vec::new(),
            step_rows: 0,
            index: BTreeSet::new(),
        }
    }

    pub(crate) fn add(&mut self, new: NewSequence) {
        self.scheduler.add(new.clone());
        self.live.insert(new.key, Live { new, got: Vec::new(), prompt_logprobs: None, embedding: None });
    }

    pub(crate) fn abort(&mut self, request: u64) {
        let keys: Vec<SequenceKey> = self.live.keys().filter(|k| k.request == request).copied().collect();
        for key in keys {
            self.scheduler.abort(key);
            self.live.remove(&key);
        }
    }

    /// Plans and submits one step; false when there was none.
    pub(crate) fn submit(&mut self) -> bool {
        let Some(planned) = self.scheduler.plan() else { return false };
        self.started.extend(&planned.started);
        self.step_rows = planned.plan.rows.len();
        self.in_flight.push_back(self.runner.submit(planned.plan).unwrap());
        self.provide_masks();
        true
    }

    /// Collects the oldest step; false when none is in flight.
    pub(crate) fn collect(&mut self) -> bool {
        let Some(step) = self.in_flight.pop_front() else { return false };
        let output = self.runner.collect(step).unwrap();
        let completed = self.scheduler.complete(output).unwrap();
        completed.updates.into_iter().for_each(|update| self.take(update));
        self.provide_masks();
        self.check_blocks();
        true
    }

    fn provide_masks(&mut self) {
        if let (Some(step), Some(masks)) = (self.in_flight.front(), self.scheduler.masks()) {
            self.runner.provide_masks(*step, masks).unwrap();
        }
    }

    /// One round as the engine does it; false when nothing is left to do.
    pub(crate) fn step(&mut self) -> bool {
        while self.submit() {}
        self.collect()
    }

    /// Until nothing runs or waits.
    pub(crate) fn finish(&mut self) {
        while self.step() {}
        self.check_idle();
    }

    /// How often the one was preempted that was most often.
    pub(crate) fn most_preemptions(&self) -> usize {
        let mut times = BTreeMap::<SequenceKey, usize>::new();
        self.started
            .iter()
            .filter(|started| started.again)
            .for_each(|s| *times.entry(s.key).or_default() += 1);
        times.into_values().max().unwrap_or_default()
    }

    fn check_idle(&self) {
        assert!(self.scheduler.is_idle(), "something waits, yet nothing can be planned");
        assert!(self.live.is_empty(), "no sequence ends without a finish reason");
        for group in 0..KV_GROUPS {
            assert_eq!(self.scheduler.usage(group).in_use, 0, "blocks leak in group {group}");
        }
        assert!(self.most_preemptions() <= PREEMPTIONS_MAX as usize, "one was preempted too often");
        let published = self.scheduler.usage(self.config.kv.published_group());
        assert_eq!(self.index.len(), published.cached, "the index knows what is cached");
    }

    fn take(&mut self, update: Update) {
        assert_eq!(update.failure, None, "grammars can be followed");
        let live = self.live.get_mut(&update.key).expect("updates are of live sequences");
        live.got.extend(update.tokens);
        if update.prompt_logprobs.is_some() {
            assert!(live.prompt_logprobs.is_none(), "prompt logprobs come once");
            live.prompt_logprobs = update.prompt_logprobs;
        }
        live.embedding = live.embedding.take().or(update.embedding);
        if let Some(reason) = update.finish {
            let live = self.live.remove(&update.key).expect("it is live");
            live.check(&(self.oracle)(&live.new), reason);
            self.finished.push(update.key);
        }
    }

    fn check_blocks(&mut self) {
        for group in 0..KV_GROUPS {
            let usage = self.scheduler.usage(group);
            assert_eq!(usage.free + usage.cached + usage.in_use, usage.total);
        }
        for event in self.scheduler.take_kv_events() {
            match event {
                BlockEvent::Stored(keys) => {
                    keys.iter().for_each(|key| assert!(self.index.insert(*key), "stored twice"));
                }
                BlockEvent::Removed(keys) => {
                    keys.iter().for_each(|key| assert!(self.index.remove(key), "removed, yet never stored"));
                }
                BlockEvent::Cleared => self.index.clear(),
            }
        }
    }
}

impl Live {
    /// What has ended by itself is a whole text of its grammar.
    fn check_text(&self, reason: FinishReason) {
        let Some(grammar) = &self.new.sampling.grammar else { return };
        let mut output: Vec<u32> =
            self.new.output.iter().copied().chain(self.got.iter().map(|t| t.token)).collect();
        if reason == FinishReason::Stop {
            output.pop();
        }
        let mut matcher = grammar.matcher();
        matcher.consume(&output).unwrap();
        assert!(reason == FinishReason::Length || matcher.is_accepting(), "{:?}: {output:?}", self.new.key);
    }

    fn check(&self, answer: &Answer, reason: FinishReason) {
        let key = self.new.key;
        assert_eq!(bits(&self.got), bits(&answer.tokens), "{key:?} differs from the sequence alone");
        assert_eq!(reason, answer.finish, "{key:?}");
        self.check_text(reason);
        let prompt_logprobs = |logprobs: &Option<Vec<Logprobs>>| logprobs.as_deref().map(bits);
        assert_eq!(
            prompt_logprobs(&self.prompt_logprobs),
            prompt_logprobs(&answer.prompt_logprobs),
            "{key:?}: prompt"
        );
        let bits =
            |vector: &Option<Vec<f32>>| vector.as_ref().map(|v| v.iter().map(|x| x.to_bits()).collect());
        let (ours, alone): (Option<Vec<u32>>, _) = (bits(&self.embedding), bits(&answer.embedding));
        assert!(ours == alone, "{key:?}: the embedding differs from that of the sequence alone");
        assert_eq!(
            ours.is_some(),
            self.new.pooling.is_some(),
            "{key:?}: an embedding where one was asked for"
        );
    }
}

/// A token, its rank, and all logprobs to the bit.
type Bits = (u32, u32, u32, Vec<(u32, u32)>);

fn bits(logprobs: &[Logprobs]) -> Vec<Bits> {
    let top = |t: &Logprobs| t.top.iter().map(|(token, logprob)| (*token, logprob.to_bits())).collect();
    logprobs.iter().map(|t| (t.token, t.rank, t.logprob.to_bits(), top(t))).collect()
}
