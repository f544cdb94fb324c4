//! Sampling against its definition in f64.

use thalweg_worker::backend::cpu::KvDtype;
use thalweg_worker::backend::cuda::abi::{
    BIAS_MAX, Bias, COUNTS, END_IDS_MAX, LogitRow, N_LOGIT_ROWS, N_SLOT_INITS, Sampled, SlotParams, SlotStart,
};
use thalweg_worker::backend::cuda::kernels::{SampleArgs, SlotsArgs};

use crate::support::{Array, Bench, numbers};

/// What one slot starts with.
#[derive(Clone, Default)]
pub(crate) struct Slot {
    pub(crate) params: SlotParams,
    pub(crate) prompt: Vec<i32>,
    pub(crate) output: Vec<i32>,
    pub(crate) bias: Vec<Bias>,
    pub(crate) ends: Vec<i32>,
}

pub(crate) fn greedy() -> SlotParams {
    SlotParams { top_p: 1.0, repetition: 1.0, ..SlotParams::default() }
}

/// Slots on the GPU.
pub(crate) struct Slots {
    bench: Bench,
    vocab: usize,
    params: Array,
    bias: Array,
    ends: Array,
    last: Array,
    seen: Array,
}

impl Slots {
    pub(crate) fn new(vocab: usize, slots: &[Slot]) -> Self {
        let bench = Bench::new(64, KvDtype::Bf16);
        let n = slots.len();
        let sizes = [n * 64, n * 8 * BIAS_MAX, n * 4 * END_IDS_MAX, n * 4, n * 4 * vocab];
        let [params, bias, ends, last, seen] = sizes.map(|bytes| bench.poisoned(bytes as u64));
        let this = Self { bench, vocab, params, bias, ends, last, seen };
        this.start(slots);
        this
    }

    fn start(&self, slots: &[Slot]) {
        let (mut starts, mut tokens, mut ends) = (Vec::new(), Vec::<i32>::new(), Vec::<i32>::new());
        let mut bias = Vec::<Bias>::new();
        for (slot, init) in slots.iter().enumerate() {
            let p = &init.params;
            let has_penalty = p.presence != 0.0 || p.frequency != 0.0 || p.repetition != 1.0;
            starts.push(SlotStart {
                slot: slot as i32,
                last_token: init.output.last().copied().unwrap_or(-1),
                tokens_offset: tokens.len() as i32,
                n_prompt: if has_penalty { init.prompt.len() as i32 } else { 0 },
                n_output: if has_penalty { init.output.len() as i32 } else { 0 },
                bias_offset: bias.len() as i32,
                end_offset: ends.len() as i32,
                reserved: 0,
                params: SlotParams {
                    n_bias: init.bias.len() as i32,
                    n_end: init.ends.len() as i32,
                    has_penalty: i32::from(has_penalty),
                    ..*p
                },
            });
            if has_penalty {
                tokens.extend(init.prompt.iter().chain(&init.output).copied());
            }
            bias.extend(&init.bias);
            ends.extend(&init.ends);
        }
        let mut counts = [0i32; COUNTS];
        counts[N_SLOT_INITS] = starts.len() as i32;
        let b = &self.bench;
        let (counts, starts_at, tokens) = (b.put(&counts), b.put(&starts), b.put(&tokens));
        let (bias, ends) = (b.put(&bias), b.put(&ends));
        let args = SlotsArgs {
            counts: counts.at(),
            starts: starts_at.at(),
            tokens: tokens.at(),
            start_bias: bias.at(),
            start_ends: ends.at(),
            params: self.params.at(),
            bias: self.bias.at(),
            ends: self.ends.at(),
            last_token: self.last.at(),
            seen: self.seen.at(),
            vocab: self.vocab,
        };
        // SAFETY: arrays of these shapes; the grid is larger than the count.
        unsafe { b.kernels.slots_init(b.launcher(), starts.len() + 1, args) }.unwrap();
        b.stream.synchronize().unwrap();
    }

    /// Results of rows over their logits, and what became of the logits.
    pub(crate) fn sample(&self, rows: &[LogitRow], logits: &[f32]) -> Vec<Sampled> {
        self.sample_masked(rows, logits, &[0])
    }

    /// The same under masks, one behind the other.
    fn sample_masked(&self, rows: &[LogitRow], logits: &[f32], masks: &[u32]) -> Vec<Sampled> {
        let mut counts = [0i32; COUNTS];
        counts[N_LOGIT_ROWS] = rows.len() as i32;
        let b = &self.bench;
        let (counts, rows_at, logits_at) = (b.put(&counts), b.put(rows), b.put(logits));
        let masks = b.put(masks);
        let out = b.poisoned((rows.len() * size_of::<Sampled>()) as u64);
        let args = SampleArgs {
            counts: counts.at(),
            rows: rows_at.at(),
            first: 0,
            logits: logits_at.at(),
            vocab: self.vocab,
            params: self.params.at(),
            bias: self.bias.at(),
            ends: self.ends.at(),
            last_token: self.last.at(),
            seen: self.seen.at(),
            masks: masks.at(),
            out: out.at(),
        };
        // SAFETY: arrays of these shapes; the grid is larger than the count.
        unsafe { b.kernels.sample(b.launcher(), rows.len() + 1, args) }.unwrap();
        b.get(&out, rows.len())
    }

    pub(crate) fn tokens(&self, output_index: i32, logits: &[f32]) -> Vec<i32> {
        let rows: Vec<LogitRow> =
            (0..logits.len() / self.vocab).map(|slot| draw(slot as i32, output_index)).collect();
        self.sample(&rows, logits).iter().map(|result| result.token).collect()
    }
}

pub(crate) fn draw(slot: i32, output_index: i32) -> LogitRow {
    LogitRow { token: 0, slot, target: -1, top: -1, output_index, mask: -1 }
}

const VOCABS: [usize; 4] = [320, 1000, 49_152, 262_144];

#[test]
fn greedy_takes_the_largest_and_the_lower_of_ties() {
    for vocab in VOCABS {
        let mut rows = Vec::new();
        let mut expected = Vec::new();
        let largest = |at: &[(usize, f32)]| {
            let mut logits = numbers(vocab, 5);
            at.iter().for_each(|(id, logit)| logits[*id] = *logit);
            logits
        };
        let last = vocab - 1;
        for (changes, token) in [
            (vec![(last, 3.0)], last),
            (vec![(17, 3.0), (300, 3.0)], 17),
            (vec![(300, 3.0), (last, 3.0)], 300),
            (vec![(5, f32::NAN), (6, 2.0)], 6),
            (vec![(7, f32::INFINITY), (8, f32::MAX)], 7),
            (vec![(0, f32::NEG_INFINITY), (9, 1.5)], 9),
        ] {
            rows.extend(largest(&changes));
            expected.push(token as i32);
        }
        rows.extend(vec![f32::NAN; vocab]);
        expected.push(0);
        let slots = Slots::new(vocab, &vec![Slot { params: greedy(), ..Slot::default() }; expected.len()]);
        assert_eq!(slots.tokens(0, &rows), expected, "{vocab}");
        let last: Vec<i32> = slots.bench.get(&slots.last, expected.len());
        assert_eq!(last, expected, "what the next step begins with");
    }
}

#[test]
fn edits_decide_the_largest() {
    let vocab = 1000;
    let mut logits = vec![0.0f32; vocab];
    (logits[10], logits[20], logits[30]) = (5.0, 4.0, -1.0);
    let with = |params: SlotParams, prompt: &[i32], output: &[i32]| Slot {
        params,
        prompt: prompt.to_vec(),
        output: output.to_vec(),
        ..Slot::default()
    };
    let plain = Slot { params: greedy(), ..Slot::default() };
    let bias = |id: i32, value: f32| Slot { bias: vec![Bias { id, value }], ..plain.clone() };
    let cases = [
        (plain.clone(), 10),
        (bias(20, 1.5), 20),
        (bias(10, f32::NEG_INFINITY), 20),
        (Slot { ends: vec![10, 20], params: SlotParams { min_tokens: 3, ..greedy() }, ..plain.clone() }, 0),
        (Slot { ends: vec![10], params: SlotParams { min_tokens: 2, ..greedy() }, ..plain.clone() }, 10),
        (with(SlotParams { repetition: 2.0, ..greedy() }, &[10], &[]), 20),
        (with(SlotParams { presence: 1.5, ..greedy() }, &[10], &[]), 10),
        (with(SlotParams { presence: 1.5, ..greedy() }, &[], &[10, 10]), 20),
        (with(SlotParams { frequency: 0.6, ..greedy() }, &[], &[10]), 10),
        (with(SlotParams { frequency: 0.6, ..greedy() }, &[], &[10, 10]), 20),
    ];
    let slots = Slots::new(vocab, &cases.iter().map(|(slot, _)| slot.clone()).collect::<Vec<_>>());
    let rows: Vec<f32> = cases.iter().flat_map(|_| logits.clone()).collect();
    let expected: Vec<i32> = cases.iter().map(|(_, token)| *token).collect();
    assert_eq!(slots.tokens(2, &rows), expected);
}

/// Whatever way it draws, a masked row yields what may be drawn, and its logprobs are those of all tokens.
#[test]
fn masks_decide_what_may_be_drawn() {
    for vocab in VOCABS {
        let words = vocab.div_ceil(32);
        let allowed = [[vocab - 1, 31, 64], [0, 5, vocab - 2]];
        let masks: Vec<u32> = allowed
            .iter()
            .flat_map(|ids| {
                (0..words)
                    .map(|w| ids.iter().filter(|id| *id / 32 == w).map(|id| 1 << (id % 32)).sum::<u32>())
            })
            .collect();
        let ways = [
            greedy(),
            SlotParams { temperature: 0.8, ..greedy() },
            SlotParams { temperature: 0.8, top_k: 50, ..greedy() },
            SlotParams { temperature: 0.8, top_p: 0.9, ..greedy() },
            SlotParams { temperature: 0.8, min_p: 0.05, ..greedy() },
            SlotParams { temperature: 0.8, top_k: 2000, top_p: 0.9, frequency: 0.5, ..greedy() },
        ];
        let slots: Vec<Slot> =
            ways.iter().map(|params| Slot { params: *params, ..Slot::default() }).collect();
        let logits = numbers(vocab, 11);
        for index in 0..20 {
            let slots_on_gpu = Slots::new(vocab, &slots);
            let row =
                |slot: usize| LogitRow { top: 0, mask: slot as i32 % 3 - 1, ..draw(slot as i32, index) };
            let rows: Vec<LogitRow> = (0..slots.len()).map(row).collect();
            let all: Vec<f32> = rows.iter().flat_map(|_| logits.clone()).collect();
            let free = slots_on_gpu
                .sample(&rows.iter().map(|row| LogitRow { mask: -1, ..*row }).collect::<Vec<_>>(), &all);
            let slots_on_gpu = Slots::new(vocab, &slots);
            let results = slots_on_gpu.sample_masked(&rows, &all, &masks);
            let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            let sum: f64 = logits.iter().map(|x| f64::from(x - largest).exp()).sum();
            for (row, (result, free)) in rows.iter().zip(results.iter().zip(&free)) {
                let token = result.token as usize;
                match usize::try_from(row.mask) {
                    Ok(mask) => assert!(allowed[mask].contains(&token), "{vocab} {row:?} {token}"),
                    Err(_) => assert_eq!(result.token, free.token, "{vocab} {row:?}"),
                }
                let logprob = f64::from(logits[token] - largest) - sum.ln();
                assert!((f64::from(result.logprob) - logprob).abs() < 1e-4, "{vocab} {row:?} {result:?}");
            }
            let greedy = logits[allowed[0][0]].max(logits[allowed[0][1]]).max(logits[allowed[0][2]]);
            let masked =
                slots_on_gpu.sample_masked(&[LogitRow { mask: 0, ..draw(0, index) }], &logits, &masks);
            assert_eq!(logits[masked[0].token as usize], greedy, "{vocab}");
        }
    }
}

#[test]
fn drawn_tokens_count_for_penalties() {
    let vocab = 320;
    let slots =
        Slots::new(vocab, &[Slot { params: SlotParams { frequency: 1.0, ..greedy() }, ..Slot::default() }]);
    let mut logits = vec![0.0; vocab];
    (logits[3], logits[4]) = (2.5, 2.0);
    let tokens: Vec<i32> = (0..5).map(|index| slots.tokens(index, &logits)[0]).collect();
    // 2.5 and 2.0, each less one for every time it came.
    assert_eq!(tokens, [3, 4, 3, 4, 3]);
    slots.start(&[Slot { params: SlotParams { frequency: 1.0, ..greedy() }, ..Slot::default() }]);
    assert_eq!(slots.tokens(0, &logits), [3], "a new sequence has said nothing");
}

#[test]
fn logprobs_ranks_and_alternatives() {
    for vocab in VOCABS {
        let logits: Vec<f32> = numbers(vocab, 9).into_iter().map(|x| 8.0 * x).collect();
        let slots = Slots::new(vocab, &[Slot { params: greedy(), ..Slot::default() }]);
        let targets = [0, 77, vocab as i32 - 1];
        let mut rows: Vec<LogitRow> = targets
            .map(|target| LogitRow { token: 0, slot: 0, target, top: 5, output_index: -1, mask: -1 })
            .into();
        rows.push(LogitRow { token: 0, slot: 0, target: -1, top: 20, output_index: 0, mask: -1 });
        rows.push(LogitRow { token: 0, slot: 0, target: 7, top: 0, output_index: 1, mask: -1 });
        let all: Vec<f32> = rows.iter().flat_map(|_| logits.clone()).collect();
        let results = slots.sample(&rows, &all);
        let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let sum: f64 = logits.iter().map(|x| f64::from(x - largest).exp()).sum();
        let logprob = |id: usize| f64::from(logits[id] - largest) - sum.ln();
        let rank = |id: usize| 1 + logits.iter().filter(|x| **x > logits[id]).count() as i32;
        let mut order: Vec<usize> = (0..vocab).collect();
        order.sort_by(|a, b| logits[*b].total_cmp(&logits[*a]).then(a.cmp(b)));
        for (row, result) in rows.iter().zip(&results) {
            if row.target >= 0 {
                let target = row.target as usize;
                assert!(
                    (f64::from(result.target_logprob) - logprob(target)).abs() < 1e-4,
                    "{vocab} {row:?} {result:?}"
                );
                assert_eq!(result.target_rank, rank(target), "{vocab} {row:?}");
            }
            if row.output_index >= 0 {
                assert_eq!((result.token, result.rank), (order[0] as i32, 1), "{vocab} {row:?}");
                assert!(
                    (f64::from(result.logprob) - logprob(order[0])).abs() < 1e-4,
                    "{vocab} {row:?} {result:?}"
                );
            } else {
                assert_eq!(result.token, -1, "{vocab}: nothing was to be drawn");
            }
            assert_eq!(result.n_top, row.top, "{vocab} {row:?}");
            for (place, id) in order.iter().take(row.top as usize).enumerate() {
                assert_eq!(result.top_ids[place], *id as i32, "{vocab} {row:?} place {place}");
                let told = f64::from(result.top_logprobs[place]);
                assert!((told - logprob(*id)).abs() < 1e-4, "{vocab} {row:?} place {place}");
            }
        }
    }
}
