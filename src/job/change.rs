//! What may not change between a run and its resumption.

use std::collections::BTreeMap;

use serde::Serialize;

use super::Job;

/// Keys, or tables, that a resumed run may have otherwise than the run it goes on from.
const HARMLESS: [&str; 12] = [
    "name",
    "data.workers",
    "data.prefetch",
    "train.epochs",
    "train.steps",
    "train.clip_norm",
    "optimizer.lr",
    "optimizer.weight_decay",
    "schedule",
    "memory",
    "eval",
    "checkpoint",
];

/// A key that differs between two jobs. A side that lacks the key says `absent`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Change {
    pub key: String,
    pub was: String,
    pub now: String,
}

impl Job {
    /// The keys in which `now` is another experiment than `self`, so that it cannot go on from its
    /// checkpoints. The batch may be split otherwise as long as an update sees as many samples.
    pub fn structural_changes(&self, now: &Job) -> Vec<Change> {
        let (before, after) = (leaves(self), leaves(now));
        let same_update = self.train.samples_per_update() == now.train.samples_per_update();
        let harmless = |key: &str| {
            HARMLESS
                .iter()
                .any(|h| key.strip_prefix(h).is_some_and(|rest| rest.is_empty() || rest.starts_with('.')))
                || key.starts_with("log.")
                || (same_update && ["train.batch_size", "train.accumulation_steps"].contains(&key))
        };
        let keys: std::collections::BTreeSet<&String> = before.keys().chain(after.keys()).collect();
        let value = |job: &BTreeMap<String, String>, key: &str| {
            job.get(key).cloned().unwrap_or_else(|| "absent".into())
        };
        keys.into_iter()
            .filter(|key| before.get(*key) != after.get(*key) && !harmless(key))
            .map(|key| Change { key: key.clone(), was: value(&before, key), now: value(&after, key) })
            .collect()
    }
}

/// Every value of the resolved job by its dotted key.
fn leaves(job: &Job) -> BTreeMap<String, String> {
    fn walk(path: &str, value: &serde_json::Value, out: &mut BTreeMap<String, String>) {
        match value.as_object() {
            Some(table) => {
                for (key, value) in table {
                    walk(&if path.is_empty() { key.clone() } else { format!("{path}.{key}") }, value, out);
                }
            }
            None => drop(out.insert(path.into(), value.to_string())),
        }
    }
    let mut out = BTreeMap::new();
    walk("", &job.to_json(), &mut out);
    out
}
