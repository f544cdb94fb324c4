//! What membership says, and what is done when it cannot be believed.

use std::sync::Arc;

use thalweg_membership::Member;
use thalweg_proto::code::ErrorCode;
use thalweg_proto::ids::WorkerId;
use thalweg_router::workers::health::HealthState;

use crate::script::{Step, about};
use crate::scripted_worker::ScriptedWorker;
use crate::{Stage, config, index_of, read, stage, stage_of};

fn member(worker: &ScriptedWorker, id: &str, draining: bool) -> Member {
    Member { id: Some(WorkerId::new(id)), address: worker.address.clone(), draining }
}

async fn until(what: impl Fn() -> bool) {
    while !what() {
        tokio::time::sleep(std::time::Duration::from_millis(5)).await;
    }
}

#[tokio::test]
async fn a_member_that_is_listed_as_draining_gets_nothing_new() {
    let stage = stage(2, vec![Step::Paced(std::time::Duration::from_millis(50))]).await;
    let held = stage.spawn(stage.request(5));
    stage.scene.wait_for_seen(1).await;
    let drained = stage.scene.seen()[0].0.clone();
    let list = |draining: bool| {
        let members = stage.workers.iter().enumerate().map(|(i, w)| (format!("w{i}"), w));
        stage.membership.set_members(members.map(|(id, w)| member(w, &id, draining && id == drained)));
    };
    list(true);
    stage.wait_for_state(&drained, HealthState::Draining).await;
    for _ in 0..10 {
        assert_ne!(stage.dispatch(1).await.unwrap().worker().as_str(), drained);
    }
    assert_eq!(held.await.unwrap(), ((0..5).collect(), Ok(())), "what runs is finished");
    list(false);
    stage.wait_for_state(&drained, HealthState::Ready).await;
}

#[tokio::test]
async fn a_worker_whose_address_changed_gets_nothing_at_the_old_one() {
    // membership-06, with the same life and with a new one.
    for epoch in [1, 2] {
        let stage = stage(2, vec![]).await;
        let moved = ScriptedWorker::start(
            &stage.scene,
            thalweg_proto::v1::DescribeResponse { epoch, hardware: "moved".to_owned(), ..about("w0") },
        );
        stage.membership.set_members([member(&moved, "w0", false), member(&stage.workers[1], "w1", false)]);
        let at_new = |w: &Arc<thalweg_router::workers::Worker>| {
            w.address == moved.address && w.state() == HealthState::Ready
        };
        until(|| stage.router.state().workers.list().iter().any(at_new)).await;
        let old = stage.workers[0].address.clone();
        let old_is_out =
            |w: &Arc<thalweg_router::workers::Worker>| w.address != old || w.state() != HealthState::Ready;
        assert!(stage.router.state().workers.list().iter().all(old_is_out));
        let held: Vec<_> = (0..20).map(|_| stage.spawn(stage.request(2))).collect();
        for held in held {
            assert_eq!(held.await.unwrap(), (vec![0, 1], Ok(())));
        }
        let (at_old, at_new) = (stage.workers[0].served(), moved.served());
        assert_eq!(at_old, 0, "epoch {epoch}");
        assert!(at_new > 0, "epoch {epoch}");
    }
}

#[tokio::test]
async fn workers_that_membership_lost_all_at_once_are_kept_while_they_answer() {
    let mut stage = stage(4, vec![]).await;
    let all: Vec<_> = stage.workers.iter().map(|w| w.address.clone()).collect();
    stage.membership.set(all[..1].iter().cloned());
    until(|| stage.shows("thalweg_membership_mass_loss 3")).await;
    for _ in 0..8 {
        assert_eq!(read(stage.dispatch(1).await.unwrap()).await.1, Ok(()));
    }
    assert!(stage.workers[1..].iter().any(|w| w.served() > 0));
    assert_eq!(stage.router.state().workers.list().len(), 4);
    stage.workers[3].kill();
    until(|| stage.shows("thalweg_membership_mass_loss 2")).await;
    stage.membership.set(all[..3].iter().cloned());
    until(|| stage.shows("thalweg_membership_mass_loss 0")).await;
}

#[tokio::test]
async fn limits_are_shared_by_the_routers_that_live() {
    let mut config = config();
    config.limits.tenant_requests_max = 4;
    let stage = stage_of(config, vec![about("w0")], vec![Step::Hold(1); 9]).await;
    let mut held = Vec::new();
    for _ in 0..2 {
        held.push(stage.dispatch(9).await.unwrap());
    }
    stage.membership.set_routers(2);
    // The change arrives by a task of its own.
    let refusal = loop {
        match stage.dispatch(9).await {
            Ok(let_through) => drop(let_through),
            Err(error) => break error,
        }
    };
    assert_eq!(refusal.code, ErrorCode::Overloaded);
    stage.membership.set_routers(1);
    while stage.dispatch(9).await.is_err() {
        tokio::task::yield_now().await;
    }
}

#[tokio::test]
async fn a_conversation_whose_worker_was_replaced_goes_on() {
    // routing-08.
    let mut stage = stage(2, vec![]).await;
    let pinned = index_of(stage.dispatch(1).await.unwrap().worker().as_str());
    let successor = ScriptedWorker::start(&stage.scene, about("w9"));
    let stays = stage.workers[1 - pinned].address.clone();
    stage.membership.set([stays, successor.address.clone()]);
    stage.workers[pinned].kill();
    for _ in 0..5 {
        assert_eq!(read(stage.dispatch(2).await.unwrap()).await, (vec![0, 1], Ok(())));
    }
    let known = |stage: &Stage| stage.router.state().workers.list().len();
    until(|| known(&stage) == 2).await;
    stage.wait_until_idle().await;
}
