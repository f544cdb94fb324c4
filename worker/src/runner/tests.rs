//! The runner against a device that only notes what it is told.

use std::sync::mpsc::{Receiver, Sender, channel};

use super::*;
use crate::backend::{Backend, Projection};
use crate::plan::{AdapterSlot, BlockId, Row, RowInput, SlotId, Want};
use crate::pooling::Pooling;

/// Notes operations; panics in attention, or refuses, for marked tokens.
struct Fake {
    notes: Sender<String>,
    token: u32,
}

const PANICS: u32 = 13;
const REFUSED: u32 = 14;

impl Fake {
    fn note(&self, text: impl Into<String>) {
        // The test may have stopped listening.
        let _ = self.notes.send(text.into());
    }
}

impl Backend for Fake {
    fn layers(&self) -> usize {
        2
    }

    fn begin(&mut self, plan: &StepPlan) -> Result<(), BackendError> {
        if let Some(RowInput::Tokens(ids)) = plan.rows.first().map(|row| &row.input) {
            self.token = ids[0];
        }
        self.note("begin");
        let refused = BackendError { device: "fake".into(), reason: "refused".into() };
        if self.token == REFUSED { Err(refused) } else { Ok(()) }
    }

    fn set_masks(&mut self, masks: StepMasks) -> Result<(), BackendError> {
        self.note(format!("{} masks", masks.0.len()));
        Ok(())
    }

    fn embed(&mut self) {
        self.note("embed");
    }

    fn pool(&mut self) {
        self.note("pool");
    }

    fn norm_qkv(&mut self, layer: usize) {
        self.note(format!("qkv {layer}"));
    }

    fn attention(&mut self, layer: usize) {
        assert!(self.token != PANICS, "unlucky");
        self.note(format!("attention {layer}"));
    }

    fn project_residual(&mut self, layer: usize, projection: Projection) {
        self.note(format!("{projection:?} {layer}"));
    }

    fn norm_gate_up_act(&mut self, layer: usize) {
        self.note(format!("gate {layer}"));
    }

    fn logit_passes(&self) -> usize {
        2
    }

    fn logits(&mut self, pass: usize) {
        self.note(format!("logits {pass}"));
    }

    fn sample(&mut self, pass: usize) {
        self.note(format!("sample {pass}"));
    }

    fn copy_blocks(&mut self, _group: usize, _pairs: &[(BlockId, BlockId)]) {}

    fn finish(&mut self) -> Result<StepOutput, BackendError> {
        self.note("finish");
        Ok(StepOutput { rows: Vec::new(), seconds: f64::from(self.token) })
    }
}

fn runner() -> (ModelRunner, Receiver<String>) {
    let (notes, heard) = channel();
    (ModelRunner::start(Fake { notes, token: 0 }).expect("a thread"), heard)
}

fn plan(token: u32) -> StepPlan {
    let input = RowInput::Tokens(vec![token]);
    let row = Row {
        slot: SlotId(0),
        adapter: AdapterSlot::BASE,
        input,
        context: 0,
        tables: Default::default(),
        want: Want::Nothing,
    };
    StepPlan { rows: vec![row], ..StepPlan::default() }
}

/// Only the first draw waits: masks that come late hold up nothing before it.
#[test]
fn masks_come_between_logits_and_draw() {
    let (mut runner, heard) = runner();
    let step = runner.submit(StepPlan { constrained: vec![0], ..plan(1) }).expect("room");
    while heard.recv().expect("a note") != "logits 0" {}
    assert!(heard.try_recv().is_err(), "it waits");
    runner.provide_masks(StepId(7), StepMasks::default()).expect_err("of another step");
    runner.provide_masks(step, StepMasks(vec![None])).expect("masks in time");
    runner.collect(step).expect("a step");
    drop(runner);
    assert_eq!(heard.iter().collect::<Vec<_>>().join(", "), "1 masks, sample 0, logits 1, sample 1, finish");
}

#[test]
fn a_runner_that_waits_for_masks_can_be_dropped() {
    let (mut runner, heard) = runner();
    runner.submit(StepPlan { constrained: vec![0], ..plan(1) }).expect("room");
    while heard.recv().expect("a note") != "logits 0" {}
    drop(runner);
    assert_eq!(heard.iter().count(), 0, "nothing is drawn");
}

#[test]
fn operations_in_order() {
    let (mut runner, heard) = runner();
    let step = runner.submit(plan(1)).expect("room");
    assert_eq!(runner.collect(step).expect("a step").seconds, 1.0);
    drop(runner);
    let expected = "begin, embed, \
        qkv 0, attention 0, Attention 0, gate 0, Mlp 0, qkv 1, attention 1, Attention 1, gate 1, Mlp 1, \
        logits 0, sample 0, logits 1, sample 1, finish";
    assert_eq!(heard.iter().collect::<Vec<_>>().join(", "), expected);
}

/// Behind the layers, in steps that want it and in no others.
#[test]
fn hidden_states_are_pooled_once_a_step() {
    let (mut runner, heard) = runner();
    let mut pooled = plan(1);
    pooled.rows[0].want = Want::Embedding { pooling: Pooling::Mean, ends: false };
    let step = runner.submit(pooled).expect("room");
    runner.collect(step).expect("a step");
    drop(runner);
    let heard: Vec<String> = heard.iter().collect();
    let behind: Vec<&str> =
        heard.iter().map(String::as_str).skip_while(|note| *note != "Mlp 1").take(3).collect();
    assert_eq!(behind, ["Mlp 1", "pool", "logits 0"]);
}

#[test]
fn an_empty_step_runs_no_layers() {
    let (mut runner, heard) = runner();
    let step = runner.submit(StepPlan::default()).expect("room");
    runner.collect(step).expect("a step");
    drop(runner);
    assert_eq!(heard.iter().collect::<Vec<_>>(), ["begin", "finish"]);
}

#[test]
fn two_in_flight_collected_in_order() {
    let (mut runner, _heard) = runner();
    let steps = [runner.submit(plan(1)).expect("room"), runner.submit(plan(2)).expect("room")];
    let full = runner.submit(plan(3)).expect_err("no room").to_string();
    assert!(full.contains("2 steps are in flight"), "{full}");
    let wrong = runner.collect(steps[1]).expect_err("not the oldest").to_string();
    assert!(wrong.contains("not the oldest"), "{wrong}");
    assert_eq!(runner.collect(steps[0]).expect("a step").seconds, 1.0);
    let third = runner.submit(plan(3)).expect("room again");
    assert_eq!(runner.collect(steps[1]).expect("a step").seconds, 2.0);
    assert_eq!(runner.collect(third).expect("a step").seconds, 3.0);
}

#[test]
fn failures_surface_from_collect_and_stay() {
    for (token, reason) in [(PANICS, "runner: panicked: unlucky"), (REFUSED, "fake: refused")] {
        let (mut runner, _heard) = runner();
        let good = runner.submit(plan(1)).expect("room");
        let bad = runner.submit(plan(token)).expect("room");
        runner.collect(good).expect("a step");
        assert_eq!(runner.collect(bad).expect_err("it failed").to_string(), reason);
        let after = runner.submit(plan(2)).and_then(|step| runner.collect(step));
        assert_eq!(after.expect_err("its state is lost").to_string(), "runner: an earlier step failed");
    }
}

/// A device that works by itself: it takes a step before the one ahead is finished.
#[test]
fn two_are_enqueued_before_the_first_is_finished() {
    let (notes, heard) = channel();
    let mut runner = DeviceRunner::new(Fake { notes, token: 0 });
    let steps = [runner.submit(plan(1)).expect("room"), runner.submit(StepPlan::default()).expect("room")];
    let full = runner.submit(plan(3)).expect_err("no room").to_string();
    assert!(full.contains("2 steps are in flight"), "{full}");
    let wrong = runner.collect(steps[1]).expect_err("not the oldest").to_string();
    assert!(wrong.contains("not the oldest"), "{wrong}");
    for step in steps {
        runner.collect(step).expect("a step");
    }
    drop(runner);
    let heard: Vec<String> = heard.iter().collect();
    let of_interest = |note: &&String| ["begin", "embed", "sample 1", "finish"].contains(&note.as_str());
    let heard: Vec<&String> = heard.iter().filter(of_interest).collect();
    assert_eq!(heard, ["begin", "embed", "sample 1", "begin", "finish", "finish"]);
}

#[test]
fn a_failed_device_stays_failed() {
    let (notes, _heard) = channel();
    let mut runner = DeviceRunner::new(Fake { notes, token: 0 });
    let good = runner.submit(plan(1)).expect("room");
    assert_eq!(runner.submit(plan(REFUSED)).expect_err("it failed").to_string(), "fake: refused");
    let after = runner.collect(good).expect_err("its state is lost").to_string();
    assert_eq!(after, "runner: an earlier step failed");
    assert!(runner.submit(plan(2)).is_err());
}
