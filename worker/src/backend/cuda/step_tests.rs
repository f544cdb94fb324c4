//! Plans to arrays, against what they should be.

use std::sync::Arc;

use super::super::abi::{AttnItem, DecodeItem, MergeItem};
use super::super::slots::start_tokens;
use super::*;
use crate::plan::{AdapterSlot, BlockId, SlotId};
use crate::pooling::Pooling;
use crate::sampling::SamplingParams;

fn limits() -> Limits {
    Limits {
        max_tokens: 64,
        max_slots: 4,
        max_model_len: 4096,
        vocab: 100,
        blocks: [1000, 1000],
        windows: [None, Some(20)],
        used: [true, true],
        gqa_group: 4,
        ways: Ways { whole_rows: 64, prefill: false, runs: None, shared: None },
        partials: 8,
        tables: 1000,
    }
}

fn row(slot: u32, input: RowInput, context: usize, window: Option<usize>, want: Want) -> Row {
    let blocks = (context + input.len()).div_ceil(BLOCK_TOKENS) as u32;
    let first = window.map_or(0, |window| (context + 1).saturating_sub(window) / BLOCK_TOKENS) as u32;
    let table = |first: u32, base: u32| BlockTable {
        first,
        blocks: (base + first..base + blocks).map(BlockId).collect(),
    };
    let tables = [table(0, 100 * slot), table(first, 500 + 100 * slot)];
    Row { slot: SlotId(slot), adapter: AdapterSlot::BASE, input, context: context as u32, tables, want }
}

fn init(slot: u32, output: &[u32]) -> SlotInit {
    let sampling = Arc::new(SamplingParams { logprobs: Some(2), ..SamplingParams::greedy() });
    SlotInit { slot: SlotId(slot), sampling, choice: 0, prompt: Arc::from([]), output: output.to_vec() }
}

fn tokens(count: usize) -> RowInput {
    RowInput::Tokens((0..count as u32).collect())
}

fn loaded(plan: &StepPlan, limits: &Limits) -> Result<(Step, Vec<SlotState>), String> {
    let (mut step, mut slots) = (Step::default(), vec![SlotState::default(); limits.max_slots]);
    step.load(plan, &mut slots, limits)?;
    Ok((step, slots))
}

#[test]
fn ragged_rows() {
    let rows = vec![
        row(2, tokens(3), 14, Some(20), Want::Nothing),
        row(1, RowInput::LastSampled, 40, Some(20), Want::Sample { output_index: 7 }),
    ];
    let (step, slots) = loaded(
        &StepPlan { slots: vec![init(1, &[9]), init(2, &[])], rows, ..StepPlan::default() },
        &limits(),
    )
    .unwrap();
    assert_eq!(step.token_src, [0, 1, 2, -2]);
    assert_eq!(step.positions, [14, 15, 16, 40]);
    // Blocks 200, 201 and 102; sliding 700, 701 and 602.
    assert_eq!(step.places[0], [200 * 16 + 14, 200 * 16 + 15, 201 * 16, 102 * 16 + 8]);
    assert_eq!(step.places[1], [700 * 16 + 14, 700 * 16 + 15, 701 * 16, 602 * 16 + 8]);
    assert_eq!(step.tables, [200, 201, 700, 701, 100, 101, 102, 601, 602]);
    let meta = |start, len, context, slot, table_offset, table_first| RowMeta {
        start,
        len,
        context,
        slot,
        table_offset,
        table_first,
    };
    assert_eq!(step.rows, [meta(0, 3, 14, 2, [0, 2], [0, 0]), meta(3, 1, 40, 1, [4, 7], [0, 1])]);
    let wanted = LogitRow { token: 3, slot: 1, target: -1, top: 2, output_index: 7, mask: -1 };
    assert_eq!(step.logit_rows, [wanted]);
    assert_eq!(step.wanted, [Wanted { row: 1, target: None, sample: Some(Some(2)) }]);
    assert_eq!((slots[1].has_last, slots[2].has_last, slots[0].is_set), (true, false, false));
}

#[test]
fn prompt_logprobs_and_a_sample() {
    let want = Want::PromptLogprobs { top: 5, next: None, output_index: Some(3) };
    let plan = StepPlan {
        slots: vec![init(0, &[])],
        rows: vec![row(0, tokens(3), 0, None, want)],
        ..StepPlan::default()
    };
    let (step, slots) = loaded(&plan, &limits()).unwrap();
    let row =
        |token, target, top, output_index| LogitRow { token, slot: 0, target, top, output_index, mask: -1 };
    assert_eq!(step.logit_rows, [row(0, 1, 5, -1), row(1, 2, 5, -1), row(2, -1, 2, 3)]);
    assert!(slots[0].has_last);
}

#[test]
fn hidden_states_are_added_up_where_they_are_wanted() {
    let embedding = |pooling, ends| Want::Embedding { pooling, ends };
    let (last, mean) = (Pooling::Last, Pooling::Mean);
    let rows = vec![
        row(0, tokens(5), 0, Some(20), embedding(mean, false)),
        row(1, tokens(1), 9, Some(20), Want::Nothing),
        row(2, tokens(7), 40, Some(20), embedding(mean, true)),
        row(3, tokens(4), 17, Some(20), embedding(last, true)),
    ];
    let pooled = |start, len, slot, goes_on, vector| PooledRow { start, len, slot, goes_on, vector };
    let check = |rows: Vec<Row>, expected: &[PooledRow], embedded: &[usize]| {
        let (step, slots) = loaded(&StepPlan { rows, ..StepPlan::default() }, &limits()).unwrap();
        assert_eq!((&step.pooled[..], &step.embedded[..]), (expected, embedded));
        assert!(step.logit_rows.is_empty() && slots.iter().all(|slot| !slot.has_last), "nothing is drawn");
    };
    check(rows, &[pooled(0, 5, 0, 0, -1), pooled(6, 7, 2, 1, 0), pooled(16, 1, 3, 0, 1)], &[2, 3]);
    check(vec![row(1, tokens(3), 0, None, embedding(last, false))], &[], &[]);
    check(vec![row(1, tokens(3), 0, None, embedding(mean, true))], &[pooled(0, 3, 1, 0, 0)], &[0]);
}

fn item(row: i32, q_start: i32, chunk: i32, partial: i32) -> AttnItem {
    AttnItem { row, q_start, chunk, partial }
}

#[test]
fn few_queries_are_split_until_partials_run_out() {
    let rows = [(0, 1), (255, 1), (256, 1), (1100, 1)]
        .into_iter()
        .enumerate()
        .map(|(slot, (context, len))| row(slot as u32, tokens(len), context, Some(20), Want::Nothing));
    let plan = StepPlan { slots: Vec::new(), rows: rows.collect(), ..StepPlan::default() };
    let (step, _) = loaded(&plan, &Limits { partials: 5, ..limits() }).unwrap();
    let [full, sliding] = &step.items;
    // The last row would need five partial results, of which three are left.
    assert_eq!(full.split, [item(0, 0, 0, -1), item(1, 0, 0, -1), item(2, 0, 0, 0), item(2, 0, 1, 1)]);
    assert_eq!(full.merge, [MergeItem { row: 2, q_start: 0, partial_first: 0, n_partials: 2 }]);
    assert_eq!(full.whole, [item(3, 0, 0, 5)]);
    // Twenty tokens back: the third row still sees the chunk before.
    assert_eq!(sliding.split[2..], [item(2, 0, 0, 0), item(2, 0, 1, 1), item(3, 0, 4, -1)]);
}

#[test]
fn many_queries_take_tiles() {
    // Four query heads to one: tiles of sixteen tokens.
    let plan = StepPlan {
        slots: Vec::new(),
        rows: vec![row(0, tokens(40), 500, Some(20), Want::Nothing)],
        ..StepPlan::default()
    };
    let (step, _) = loaded(&plan, &limits()).unwrap();
    assert_eq!(step.items[0].whole, [item(0, 0, 0, 3), item(0, 16, 0, 3), item(0, 32, 0, 3)]);
    // Position 516 sees from 497 on, 532 from 513.
    assert_eq!(step.items[1].whole, [item(0, 0, 1, 3), item(0, 16, 1, 3), item(0, 32, 2, 3)]);
    let ways = Ways { whole_rows: 64, prefill: true, runs: None, shared: None };
    let (step, _) = loaded(&plan, &Limits { ways, ..limits() }).unwrap();
    assert_eq!(step.items[0].whole.iter().map(|item| item.q_start).collect::<Vec<_>>(), [32, 16, 0]);
    // Of two rows: the longer half of each, then what is shorter.
    let rows = [0, 1].map(|slot| row(slot, tokens(520), 0, Some(20), Want::Nothing));
    let plan = StepPlan { rows: rows.into(), ..StepPlan::default() };
    let ways = Ways { whole_rows: 512, prefill: true, runs: None, shared: None };
    let (step, _) = loaded(&plan, &Limits { ways, max_tokens: 2000, vocab: 1000, ..limits() }).unwrap();
    let order: Vec<_> = step.items[0].whole.iter().map(|item| (item.row, item.q_start)).collect();
    assert_eq!(order[..4], [(0, 512), (1, 512), (0, 384), (0, 256)]);
    assert_eq!(order[4..], [(1, 384), (1, 256), (0, 128), (0, 0), (1, 128), (1, 0)]);
}

#[test]
fn decoding_rows_share_the_gpu_by_their_keys() {
    let check = |contexts: &[usize], runs: usize, partials: usize, expected: &[(i32, i32, i32, i32, i32)]| {
        let rows = contexts.iter().enumerate();
        let rows = rows.map(|(slot, context)| row(slot as u32, tokens(1), *context, Some(20), Want::Nothing));
        let plan = StepPlan { slots: Vec::new(), rows: rows.collect(), ..StepPlan::default() };
        let ways = Ways { whole_rows: 128, prefill: true, runs: Some(runs), shared: None };
        let (step, _) = loaded(&plan, &Limits { ways, partials, ..limits() }).unwrap();
        let told = |i: &DecodeItem| (i.row, i.key_begin, i.key_end, i.partial, i.n_partials);
        assert_eq!(
            step.items[0].decode.iter().map(told).collect::<Vec<_>>(),
            expected,
            "{contexts:?} {runs}"
        );
        assert!(
            step.items[0]
                .decode
                .iter()
                .all(|i| i.n_runs == i.n_partials && i.partial_first <= i.partial.max(i.partial_first))
        );
        assert!(step.items[0].split.is_empty() && step.items[0].whole.is_empty());
        step
    };
    check(&[99], 33, 8, &[(0, 0, 100, -1, 1)]);
    let step = check(&[299], 33, 8, &[(0, 0, 128, 0, 3), (0, 128, 256, 1, 3), (0, 256, 300, 2, 3)]);
    // From position 280 on: block 17 begins at 272.
    assert_eq!((step.items[1].decode[0].key_begin, step.items[1].decode[0].key_end), (272, 300));
    // Three runs of 256 would take two rounds.
    check(&[299, 149], 2, 8, &[(0, 0, 300, -1, 1), (1, 0, 150, -1, 1)]);
    check(&[299, 149], 3, 8, &[(0, 0, 192, 0, 2), (0, 192, 300, 1, 2), (1, 0, 150, -1, 1)]);
    // More rows than runs take several rounds in any case.
    check(&[149, 149, 149], 2, 8, &[(0, 0, 150, -1, 1), (1, 0, 150, -1, 1), (2, 0, 150, -1, 1)]);
    check(&[299], 33, 2, &[(0, 0, 256, 0, 2), (0, 256, 300, 1, 2)]);
    check(&[299], 33, 1, &[(0, 0, 300, -1, 1)]);
}

#[test]
fn broken_plans_are_refused_and_change_nothing() {
    let check = |change: &dyn Fn(&mut StepPlan), part: &str| {
        let rows = vec![row(0, tokens(3), 40, Some(20), Want::Sample { output_index: 0 })];
        let mut plan = StepPlan { slots: vec![init(0, &[])], rows, ..StepPlan::default() };
        change(&mut plan);
        let (mut step, mut slots) = (Step::default(), vec![SlotState::default(); 4]);
        let error = step.load(&plan, &mut slots, &limits()).unwrap_err();
        assert!(error.contains(part), "{error:?} does not say {part:?}");
        assert_eq!(slots, vec![SlotState::default(); 4]);
    };
    check(&|p| p.rows[0].input = RowInput::Tokens(vec![100, 0, 0]), "token 100 of a vocabulary of 100");
    check(&|p| p.rows[0].input = tokens(0), "no tokens");
    check(&|p| p.rows[0].input = RowInput::Tokens(vec![0; 4057]), "4097 tokens of a sequence, room for 4096");
    check(&|p| p.rows[0].tables[0].blocks = [BlockId(0); 2].into(), "group 0 has blocks 0..2 of 0..3");
    check(&|p| p.rows[0].tables[1].first = 2, "group 1 has blocks 2..4 of 1..3");
    check(
        &|p| Arc::make_mut(&mut p.rows[0].tables[0].blocks)[0] = BlockId(1000),
        "block 1000 of 1000 in group 0",
    );
    check(&|p| p.rows[0].slot = SlotId(4), "slot 4 of 4");
    check(&|p| p.rows[0].slot = SlotId(1), "slot 1 was never set");
    check(&|p| p.rows[0].input = RowInput::LastSampled, "slot 0 has sampled nothing yet");
    check(&|p| p.slots[0].slot = SlotId(7), "slot 7 of 4");
    let want = Want::PromptLogprobs { top: 21, next: None, output_index: None };
    check(&|p| p.rows[0].want = want, "21 alternatives wanted, 20 are kept");
    check(&|p| p.rows = vec![p.rows[0].clone(); 22], "66 tokens in a step, room for 64");
    let many = SamplingParams { end_ids: vec![1; 300], ..SamplingParams::greedy() };
    check(&|p| p.slots[0].sampling = Arc::new(many.clone()), "300 end ids");
}

#[test]
fn slots_come_with_what_they_need() {
    let sampling = SamplingParams {
        presence_penalty: 0.5,
        logit_bias: vec![(3, 1.0), (200, 2.0)],
        end_ids: vec![7, 300],
        top_k: u32::MAX,
        ..SamplingParams::greedy()
    };
    let with_penalty =
        SlotInit { prompt: Arc::from([1, 2, 150]), sampling: Arc::new(sampling), ..init(3, &[4, 5]) };
    let inits = [init(0, &[8]), with_penalty];
    assert_eq!(inits.each_ref().map(start_tokens), [0, 5]);
    let arrays = load_slots(&inits, 100);
    assert_eq!((arrays.tokens, arrays.ends), (vec![1, 2, 4, 5], vec![7]));
    assert_eq!(arrays.bias.iter().map(|b| (b.id, b.value)).collect::<Vec<_>>(), [(3, 1.0)]);
    let [first, second] = &arrays.starts[..] else { panic!("two slots") };
    assert_eq!((first.slot, first.last_token, first.n_prompt, first.params.has_penalty), (0, 8, 0, 0));
    assert_eq!((second.slot, second.last_token, second.n_prompt, second.n_output), (3, 5, 2, 2));
    assert_eq!((second.params.n_bias, second.params.n_end, second.params.top_k), (1, 1, i32::MAX));
}

#[test]
fn slots_with_many_tokens_go_in_pieces() {
    let init = |tokens: usize| {
        let sampling = SamplingParams { repetition_penalty: 1.1, ..SamplingParams::greedy() };
        SlotInit { prompt: vec![0; tokens].into(), sampling: Arc::new(sampling), ..init(0, &[]) }
    };
    let check = |tokens: &[usize], expected: &[usize]| {
        let inits: Vec<SlotInit> = tokens.iter().map(|count| init(*count)).collect();
        let pieces = slot_pieces(&inits, 10);
        assert_eq!(pieces.iter().map(|piece| piece.len()).collect::<Vec<_>>(), expected, "{tokens:?}");
    };
    check(&[], &[0]);
    check(&[3, 7], &[2]);
    check(&[3, 8, 2, 1], &[1, 2, 1]);
    check(&[10, 10], &[1, 1]);
}
