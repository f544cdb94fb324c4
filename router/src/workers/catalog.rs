//! Which models are served, derived from the workers that are there.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use super::Worker;
use super::health::HealthState;
use crate::dialect::Dialect;
use crate::models::{AdapterOf, ModelEntry, Weights};

/// The table of models and adapters. A name belongs to what it stood for first, as long as a worker of that lives, so that
/// a stray worker with other weights under the same name gets nothing; else to what the first worker means by it, models
/// before adapters. A name stays known after its last worker.
pub(super) fn of_workers(
    workers: &[Arc<Worker>],
    known: &BTreeMap<String, Arc<ModelEntry>>,
) -> BTreeMap<String, Arc<ModelEntry>> {
    let mut table = known.clone();
    for (name, offers) in offers(workers) {
        let before = table.get(name);
        let Some(weights) = choose(before.map(|entry| entry.weights()), &offers) else { continue };
        // What a worker was that is gone binds nobody, once it is known what others are.
        let counts = |offer: &&Offer<'_>| offer.alive || before.is_none();
        let matching = || offers.iter().filter(|offer| offer.weights == weights).filter(counts);
        let (Some(max_model_len), Some(first)) =
            (matching().map(|offer| offer.max_model_len).min(), matching().next())
        else {
            continue;
        };
        if before.is_some_and(|e| e.weights() == weights && e.max_model_len == max_model_len) {
            continue;
        }
        let Some(worker) = workers.iter().find(|worker| worker.about.fingerprint == weights.model) else {
            continue;
        };
        let text = &worker.text;
        let entry = ModelEntry {
            name: name.to_owned(),
            created: before.map_or_else(unix_seconds, |entry| entry.created),
            dialect: Dialect::of(text.template.as_deref()),
            tokenizer: Arc::clone(&text.tokenizer),
            template: text.template.clone(),
            max_model_len,
            block_tokens: first.block_size as usize,
            fingerprint: weights.model,
            adapter: weights
                .adapter
                .map(|fingerprint| AdapterOf { base: first.base.to_owned(), fingerprint }),
        };
        table.insert(name.to_owned(), Arc::new(entry));
    }
    table
}

/// What one worker means by a name.
#[derive(Debug)]
struct Offer<'a> {
    weights: Weights,
    /// Main name of its model.
    base: &'a str,
    max_model_len: u32,
    block_size: u32,
    alive: bool,
}

fn offers(workers: &[Arc<Worker>]) -> BTreeMap<&str, Vec<Offer<'_>>> {
    let mut by_name: BTreeMap<&str, Vec<Offer<'_>>> = BTreeMap::new();
    for worker in workers {
        let about = &worker.about;
        for (name, weights) in worker.offers() {
            by_name.entry(name).or_default().push(Offer {
                weights: weights.clone(),
                base: about.models.first().map_or("", String::as_str),
                max_model_len: about.max_model_len,
                block_size: about.block_size,
                alive: worker.state() != HealthState::Gone,
            });
        }
    }
    by_name
}

fn choose(before: Option<Weights>, offers: &[Offer<'_>]) -> Option<Weights> {
    let alive = || offers.iter().filter(|offer| offer.alive);
    let model_first = |offer: &&Offer<'_>| offer.weights.adapter.is_some();
    let first = || alive().min_by_key(model_first).map(|offer| offer.weights.clone());
    match before {
        Some(current) if alive().any(|offer| offer.weights == current) => Some(current),
        Some(current) => Some(first().unwrap_or(current)),
        None => offers.iter().min_by_key(model_first).map(|offer| offer.weights.clone()),
    }
}

fn unix_seconds() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs())
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;

    use super::*;

    /// Such as `a` of a model, and `a+x` of adapter x on it.
    fn weights(text: &str) -> Weights {
        let bytes = |text: &str| Bytes::copy_from_slice(text.as_bytes());
        let (model, adapter) = text.split_once('+').map_or((text, None), |(m, a)| (m, Some(a)));
        Weights { model: bytes(model), adapter: adapter.map(bytes) }
    }

    fn check(before: Option<&str>, offers: &[(&str, bool)], expected: Option<&str>) {
        let offer = |&(text, alive)| Offer {
            weights: weights(text),
            base: "m",
            max_model_len: 1,
            block_size: 16,
            alive,
        };
        let offers: Vec<Offer<'_>> = offers.iter().map(offer).collect();
        let got = choose(before.map(weights), &offers);
        assert_eq!(got, expected.map(weights), "{before:?}, {offers:?}");
    }

    #[test]
    fn a_name_keeps_its_weights_while_a_worker_of_them_lives() {
        check(None, &[], None);
        check(None, &[("a", true), ("b", true)], Some("a"));
        check(Some("b"), &[("a", true), ("b", true)], Some("b"));
        check(Some("b"), &[("a", true), ("b", false)], Some("a"));
        check(Some("b"), &[("a", false), ("b", false)], Some("b"));
        check(Some("b"), &[("a", true)], Some("a"));
    }

    #[test]
    fn adapters_of_one_name_are_not_mixed_and_models_go_first() {
        check(None, &[("a+x", true), ("b+x", true)], Some("a+x"));
        check(Some("b+x"), &[("a+x", true), ("b+x", true)], Some("b+x"));
        check(Some("a+x"), &[("a+y", true), ("a+x", true)], Some("a+x"));
        check(Some("a+x"), &[("a+y", true), ("a+x", false)], Some("a+y"));
        check(None, &[("a+x", true), ("b", true)], Some("b"));
        check(Some("a+x"), &[("a+x", true), ("b", true)], Some("a+x"));
        check(Some("a+x"), &[("a+y", true), ("b", true)], Some("b"));
    }
}
