//! One process's key in etcd, kept there for as long as the process lives: granted anew and written again after every
//! loss, for ever.

use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::timeout;

use super::Etcd;
use super::keeper::{Keeper, Wanted};
use super::keys::{self, Kind};
use super::record::Record;

/// What telling of a drain may hold up the drain itself.
const DRAINING_TIMEOUT: Duration = Duration::from_secs(1);
/// What an etcd that is gone may hold up an exit.
const DEREGISTER_TIMEOUT: Duration = Duration::from_secs(2);

/// A key that lives as long as this does. Dropping it without [`Registration::deregister`] lets the lease lapse.
pub struct Registration {
    wanted: watch::Sender<Wanted>,
    written: watch::Receiver<Option<Record>>,
    task: Mutex<Option<JoinHandle<()>>>,
}

impl Etcd {
    /// Registers a worker; call when it can serve.
    pub fn register_worker(&self, record: Record) -> Registration {
        Registration::start(self, Kind::Worker, record)
    }

    /// Registers a router.
    pub fn register_router(&self, record: Record) -> Registration {
        Registration::start(self, Kind::Router, record)
    }
}

impl Registration {
    fn start(etcd: &Etcd, kind: Kind, record: Record) -> Self {
        let key = keys::key(&etcd.prefix, kind, &record.id);
        let (wanted, wants) = watch::channel(Wanted { record, gone: false });
        let (reports, written) = watch::channel(None);
        let keeper = Keeper::new(etcd.clone(), key, wants, reports);
        let task = Mutex::new(Some(tokio::spawn(keeper.keep())));
        Self { wanted, written, task }
    }

    /// Waits until the key is in etcd, however long that takes.
    pub async fn registered(&self) {
        // The task ends with the registration alone.
        let _ = self.written.clone().wait_for(Option::is_some).await;
    }

    /// Tells all routers that this worker takes no new work; returns when etcd knows, or after a second.
    pub async fn set_draining(&self) {
        self.wanted.send_modify(|wanted| wanted.record.draining = true);
        let mut written = self.written.clone();
        let known = written.wait_for(|record| record.as_ref().is_some_and(|record| record.draining));
        if timeout(DRAINING_TIMEOUT, known).await.is_err() {
            tracing::warn!(
                "etcd was not told in time that this worker drains; routers learn it from the worker"
            );
        }
    }

    /// Takes the key away; returns when that is done, or when etcd has had its time. Again is as good as once.
    pub async fn deregister(&self) {
        self.wanted.send_modify(|wanted| wanted.gone = true);
        let task = self.task.lock().take();
        let Some(mut task) = task else { return };
        match timeout(DEREGISTER_TIMEOUT, &mut task).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => tracing::error!(%error, "keeping the lease panicked"),
            Err(_) => {
                task.abort();
                tracing::warn!(
                    "etcd did not take this process's key away in time; it goes when the lease lapses"
                );
            }
        }
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        if let Some(task) = self.task.get_mut().take() {
            task.abort();
        }
    }
}
