//! Which models are served, derived from the workers that are there.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use bytes::Bytes;

use super::Worker;
use super::health::HealthState;
use super::tokenizers::Tokenizers;
use crate::dialect::Dialect;
use crate::models::ModelEntry;

/// The table of models. A name belongs to one fingerprint at a time: the one that it has, as long as a worker of it
/// lives, so that a stray worker with other weights under the same name gets nothing; else that of the first worker. A
/// name stays known after its last worker.
pub(super) fn of_workers(
    workers: &[Arc<Worker>],
    known: &[Arc<ModelEntry>],
    tokenizers: &Tokenizers,
) -> BTreeMap<String, Arc<ModelEntry>> {
    let mut table: BTreeMap<String, Arc<ModelEntry>> =
        known.iter().map(|entry| (entry.name.clone(), Arc::clone(entry))).collect();
    for (name, offers) in offers(workers) {
        let before = table.get(&name);
        let Some(fingerprint) = choose(before.map(|entry| &entry.fingerprint), &offers) else { continue };
        let matching = || offers.iter().filter(|o| o.fingerprint == fingerprint);
        let (Some(max_model_len), Some(first)) =
            (matching().map(|o| o.max_model_len).min(), matching().next())
        else {
            continue;
        };
        let block_tokens = first.block_size as usize;
        if before.is_some_and(|e| e.fingerprint == fingerprint && e.max_model_len == max_model_len) {
            continue;
        }
        let Some(text) = tokenizers.get(&fingerprint) else { continue };
        let created = before.map_or_else(unix_seconds, |entry| entry.created);
        let (tokenizer, template) = (text.tokenizer, text.template);
        let entry = ModelEntry {
            name: name.clone(),
            created,
            fingerprint,
            tokenizer,
            dialect: Dialect::of(template.as_deref()),
            template,
            max_model_len,
            block_tokens,
        };
        table.insert(name, Arc::new(entry));
    }
    table
}

/// One worker's offer of a name.
#[derive(Debug)]
struct Offer {
    fingerprint: Bytes,
    max_model_len: u32,
    block_size: u32,
    alive: bool,
}

fn offers(workers: &[Arc<Worker>]) -> BTreeMap<String, Vec<Offer>> {
    let mut by_name: BTreeMap<String, Vec<Offer>> = BTreeMap::new();
    for worker in workers {
        let about = &worker.about;
        for name in &about.models {
            by_name.entry(name.clone()).or_default().push(Offer {
                fingerprint: about.fingerprint.clone(),
                max_model_len: about.max_model_len,
                block_size: about.block_size,
                alive: worker.state() != HealthState::Gone,
            });
        }
    }
    by_name
}

fn choose(before: Option<&Bytes>, offers: &[Offer]) -> Option<Bytes> {
    let alive = || offers.iter().filter(|o| o.alive);
    match before {
        Some(current) if alive().any(|o| o.fingerprint == *current) => Some(current.clone()),
        Some(current) => Some(alive().next().map_or(current.clone(), |o| o.fingerprint.clone())),
        None => offers.first().map(|o| o.fingerprint.clone()),
    }
}

fn unix_seconds() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_keeps_its_weights_while_a_worker_of_them_lives() {
        let check =
            |before: Option<&'static str>, offers: &[(&'static str, bool)], expected: Option<&str>| {
                let offers: Vec<Offer> = offers
                    .iter()
                    .map(|&(print, alive)| Offer {
                        fingerprint: Bytes::from_static(print.as_bytes()),
                        max_model_len: 1,
                        block_size: 16,
                        alive,
                    })
                    .collect();
                let before = before.map(|b| Bytes::from_static(b.as_bytes()));
                let got = choose(before.as_ref(), &offers);
                assert_eq!(got.as_deref(), expected.map(str::as_bytes), "{before:?}, {offers:?}");
            };
        check(None, &[], None);
        check(None, &[("a", true), ("b", true)], Some("a"));
        check(Some("b"), &[("a", true), ("b", true)], Some("b"));
        check(Some("b"), &[("a", true), ("b", false)], Some("a"));
        check(Some("b"), &[("a", false), ("b", false)], Some("b"));
        check(Some("b"), &[("a", true)], Some("a"));
    }
}
