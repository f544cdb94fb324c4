//! Names that a worker uses for something else than this router does, and ids that two workers use, said once and by name.

use std::sync::Arc;

use thalweg_proto::ids::WorkerId;

use super::health::HealthState;
use super::{Worker, Workers};
use crate::models::{ModelEntry, Weights};

impl Workers {
    /// To be called once the worker is registered: whoever comes second is told of.
    pub(super) fn warn_of_conflicts(&self, worker: &Worker) {
        self.warn_of_namesake(worker);
        for (name, weights) in worker.offers() {
            let Some(entry) = self.models.get(name) else { continue };
            if let Some(conflict) = conflict(&entry, weights) {
                warn(&worker.id, &entry, conflict);
            } else if entry.block_tokens != worker.about.block_size as usize {
                tracing::warn!(
                    worker = %worker.id, model = name, block_size = worker.about.block_size,
                    expected = entry.block_tokens,
                    "worker has another block size than the first one of its model: its cache is not looked at"
                );
            }
        }
    }
}

impl Workers {
    /// One that has moved is listed at its new address only.
    fn warn_of_namesake(&self, worker: &Worker) {
        let listing = self.listing.lock();
        let is_namesake = |w: &&Arc<Worker>| {
            w.id == worker.id
                && w.address != worker.address
                && w.state() != HealthState::Gone
                && listing.has(&w.address)
        };
        if let Some(other) = self.list().iter().find(is_namesake) {
            tracing::warn!(
                worker = %worker.id, address = %worker.address, other = %other.address,
                "two workers have one id: only the cache of the one met last is looked at; give each worker a \
                 --worker-id of its own"
            );
        }
    }
}

/// What a worker has under a name that stands for something else.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Conflict {
    OtherModel,
    AdapterForModel,
    ModelForAdapter,
    OtherBase,
    OtherAdapter,
}

fn conflict(entry: &ModelEntry, offered: &Weights) -> Option<Conflict> {
    let known = entry.weights();
    match (&known.adapter, &offered.adapter) {
        _ if known == *offered => None,
        (None, None) => Some(Conflict::OtherModel),
        (None, Some(_)) => Some(Conflict::AdapterForModel),
        (Some(_), None) => Some(Conflict::ModelForAdapter),
        (Some(_), Some(_)) if known.model != offered.model => Some(Conflict::OtherBase),
        (Some(_), Some(_)) => Some(Conflict::OtherAdapter),
    }
}

fn warn(worker: &WorkerId, entry: &ModelEntry, conflict: Conflict) {
    let name = entry.name.as_str();
    match conflict {
        Conflict::OtherModel => tracing::warn!(
            %worker, model = name,
            "worker has other weights under a served name: it gets no work while workers of the first weights live"
        ),
        Conflict::AdapterForModel => tracing::warn!(
            %worker, adapter = name,
            "worker has an adapter under the name of a served model: requests of this name go to the model; rename \
             the adapter"
        ),
        Conflict::ModelForAdapter => tracing::warn!(
            %worker, model = name,
            "worker has a model under the name of a served adapter: requests of this name go to the adapter while \
             workers of it live; rename the adapter"
        ),
        Conflict::OtherBase => tracing::warn!(
            %worker, adapter = name, base = entry.adapter.as_ref().map(|adapter| adapter.base.as_str()),
            "worker has an adapter of a served name on another model: it gets no work by this name while workers of \
             the first live; rename it"
        ),
        Conflict::OtherAdapter => tracing::warn!(
            %worker, adapter = name, base = entry.adapter.as_ref().map(|adapter| adapter.base.as_str()),
            "worker has another adapter under a served name: it gets no work by this name while workers of the first \
             live; rename it"
        ),
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;

    use super::*;
    use crate::models::AdapterOf;
    use crate::test_support;

    #[test]
    fn what_a_name_stands_for_already_decides() {
        use Conflict::{AdapterForModel, ModelForAdapter, OtherAdapter, OtherBase, OtherModel};
        let model = test_support::entry("m", false);
        let mut adapter = Arc::into_inner(test_support::entry("m", false)).expect("not shared");
        adapter.adapter = Some(AdapterOf { base: "base".to_owned(), fingerprint: Bytes::from_static(b"x") });
        let check = |entry: &ModelEntry, model: &'static str, adapter: Option<&'static str>, expected| {
            let offered = Weights { model: model.into(), adapter: adapter.map(Bytes::from) };
            assert_eq!(conflict(entry, &offered), expected, "{offered:?}");
        };
        check(&model, "fingerprint", None, None);
        check(&model, "other", None, Some(OtherModel));
        check(&model, "fingerprint", Some("x"), Some(AdapterForModel));
        check(&adapter, "fingerprint", Some("x"), None);
        check(&adapter, "fingerprint", Some("y"), Some(OtherAdapter));
        check(&adapter, "other", Some("x"), Some(OtherBase));
        check(&adapter, "fingerprint", None, Some(ModelForAdapter));
    }
}
