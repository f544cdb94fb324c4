//! Requests of adapters: only workers that have the very adapter are asked, the first time and again.

use std::sync::Arc;
use std::time::Duration;

use thalweg_proto::block_hash::{HashRoot, full_blocks};
use thalweg_proto::code::ErrorCode;
use thalweg_proto::v1;
use thalweg_router::dispatch::Tokenized;
use thalweg_router::models::ModelEntry;
use thalweg_router::workers::health::HealthState;

use crate::script::{Step, about};
use crate::scripted_worker::ScriptedWorker;
use crate::{Outcome, Stage, config, stage_of};

/// A worker whose adapters have these names and fingerprints.
fn with(id: &str, adapters: &[(&str, &'static str)]) -> v1::DescribeResponse {
    v1::DescribeResponse {
        adapters: adapters.iter().map(|(name, _)| (*name).to_owned()).collect(),
        adapter_fingerprints: adapters.iter().map(|(_, print)| (*print).into()).collect(),
        ..about(id)
    }
}

impl Stage {
    fn entry(&self, name: &str) -> Arc<ModelEntry> {
        self.router.state().models.get(name).unwrap()
    }

    fn of(&self, name: &str, max_tokens: u32) -> Tokenized {
        Tokenized { model: self.entry(name), ..self.request(max_tokens) }
    }

    async fn answer(&self, name: &str, max_tokens: u32) -> Outcome {
        self.spawn(self.of(name, max_tokens)).await.unwrap()
    }

    /// Adds a worker and waits until it is ready.
    async fn join(&mut self, about: v1::DescribeResponse) {
        let id = about.worker_id.clone();
        self.workers.push(ScriptedWorker::start(&self.scene, about));
        self.membership.set(self.workers.iter().map(|worker| worker.address.clone()));
        let workers = Arc::clone(&self.router.state().workers);
        until(|| workers.list().iter().any(|w| w.id.as_str() == id && w.state() == HealthState::Ready)).await;
    }

    /// Who was asked, in order.
    fn asked(&self) -> Vec<String> {
        self.scene.seen().into_iter().map(|(worker, _)| worker).collect()
    }
}

async fn until(holds: impl Fn() -> bool) {
    while !holds() {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

#[tokio::test]
async fn only_workers_with_the_adapter_are_asked_and_by_its_name() {
    let abouts = vec![with("w0", &[("sql", "x")]), with("w1", &[("other", "y")]), about("w2")];
    let stage = stage_of(config(), abouts, vec![]).await;
    for _ in 0..6 {
        assert_eq!(stage.answer("sql", 2).await, (vec![0, 1], Ok(())));
    }
    assert_eq!(stage.asked(), ["w0"; 6]);
    let (_, request) = stage.scene.seen().pop().unwrap();
    let told = (request.model.as_str(), request.adapter.as_str(), request.adapter_fingerprint.as_ref());
    assert_eq!(told, ("tiny", "sql", &b"x"[..]));
    assert_eq!(request.fingerprint, stage.entry("tiny").fingerprint);
    let entry = stage.entry("sql");
    assert_eq!(entry.adapter.as_ref().map(|adapter| adapter.base.as_str()), Some("tiny"));

    // What it holds of the adapter's prefix is nothing to a request of the model.
    let root = HashRoot { fingerprint: b"print", adapter: "sql", scope: "default", salt: "" };
    let keys: Vec<u64> =
        full_blocks(root.hash(), &stage.request(1).prompt_ids, 16).iter().map(|b| b.index_key()).collect();
    assert!(keys.iter().zip(stage.keys()).all(|(adapted, plain)| *adapted != plain));
    assert_eq!(stage.answer("tiny", 1).await.1, Ok(()));
    let (_, request) = stage.scene.seen().pop().unwrap();
    assert_eq!((request.adapter.as_str(), request.adapter_fingerprint.len()), ("", 0));
}

#[tokio::test]
async fn workers_of_other_names_for_the_model_are_asked_by_theirs() {
    let renamed = v1::DescribeResponse { models: vec!["alias".to_owned()], ..with("w0", &[("sql", "x")]) };
    let mut stage = stage_of(config(), vec![with("w9", &[("sql", "x")])], vec![]).await;
    stage.join(renamed).await;
    stage.workers[0].kill();
    stage.wait_for_state("w9", HealthState::Gone).await;
    assert_eq!(stage.answer("sql", 2).await.1, Ok(()));
    assert_eq!(stage.scene.seen().pop().map(|(w, r)| (w, r.model)), Some(("w0".into(), "alias".into())));
}

#[tokio::test]
async fn a_begun_answer_waits_for_a_worker_with_the_adapter() {
    let abouts = vec![with("w0", &[("sql", "x")]), with("w1", &[("sql", "x")]), about("w2")];
    let mut stage = stage_of(config(), abouts, vec![Step::CrashAfter(2), Step::CrashAfter(1)]).await;
    let running = stage.spawn(stage.of("sql", 6));
    stage.scene.wait_for_seen(2).await;
    for id in ["w0", "w1"] {
        stage.wait_for_state(id, HealthState::Gone).await;
    }
    // Another adapter of that name on the same weights is no help either.
    stage.join(with("w3", &[("sql", "y")])).await;
    let again = v1::DescribeResponse { epoch: 2, ..with("w0", &[("sql", "x")]) };
    stage.workers[0].restart(&stage.scene, again);
    let (tokens, end) = running.await.unwrap();
    assert_eq!(end.map(|()| tokens), Ok((0..6).collect()));
    let asked = stage.asked();
    assert!(asked.len() == 3 && asked.iter().all(|id| ["w0", "w1"].contains(&id.as_str())), "{asked:?}");
    assert_eq!(asked[2], "w0");
}

#[tokio::test]
async fn a_name_keeps_its_adapter_while_a_worker_of_it_lives() {
    let mut stage = stage_of(config(), vec![with("w0", &[("sql", "x")])], vec![]).await;
    stage.join(with("w1", &[("sql", "y")])).await;
    let other = v1::DescribeResponse { models: vec!["big".to_owned()], ..with("w2", &[("sql", "x")]) };
    stage.join(v1::DescribeResponse { fingerprint: b"big".to_vec().into(), ..other }).await;
    stage.join(v1::DescribeResponse { models: vec!["sql".to_owned()], ..about("w3") }).await;
    for _ in 0..6 {
        assert_eq!(stage.answer("sql", 1).await.1, Ok(()));
    }
    assert_eq!(stage.asked(), ["w0"; 6]);
    let before = stage.of("sql", 1);

    // Those that are left are asked by what the first of them means, models before adapters.
    stage.workers[0].kill();
    stage.wait_for_state("w0", HealthState::Gone).await;
    until(|| stage.entry("sql").adapter.is_none()).await;
    assert_eq!(stage.answer("sql", 1).await.1, Ok(()));
    assert_eq!(stage.asked().last().map(String::as_str), Some("w3"));
    let (_, end) = stage.spawn(before).await.unwrap();
    let error = end.unwrap_err();
    assert_eq!(error.code, ErrorCode::Unavailable);
    assert!(error.message.contains("adapter sql of tiny: 1 lost"), "{error}");
}

#[tokio::test]
async fn an_adapter_that_nobody_has_any_more_is_known() {
    let mut stage = stage_of(config(), vec![with("w0", &[("sql", "x")]), about("w1")], vec![]).await;
    stage.restart(0, 2);
    stage.wait_for_epoch("w0", 2).await;
    let (_, end) = stage.answer("sql", 1).await;
    let error = end.unwrap_err();
    assert_eq!(error.code, ErrorCode::Unavailable);
    assert!(error.message.contains("no worker has adapter sql of tiny any more"), "{error}");
    assert!(error.message.contains("--lora-modules sql=FOLDER"), "{error}");
    assert_eq!(stage.answer("tiny", 1).await.1, Ok(()));
}

#[tokio::test]
async fn a_worker_that_has_lost_the_adapter_unnoticed_is_no_end() {
    // As if it had come back without it, or with another one, and its new life were not known yet.
    for code in [ErrorCode::ModelNotFound, ErrorCode::FingerprintMismatch] {
        let abouts = vec![with("w0", &[("sql", "x")]), with("w1", &[("sql", "x")])];
        let stage = stage_of(config(), abouts, vec![Step::Refuse(code)]).await;
        assert_eq!(stage.answer("sql", 2).await, (vec![0, 1], Ok(())));
        let asked = stage.asked();
        assert!(asked.len() == 2 && asked[0] != asked[1], "{code:?}: {asked:?}");
    }
}
