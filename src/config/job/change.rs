//! What may not change between a run and its resumption.

use std::collections::{BTreeMap, BTreeSet};

use serde::Serialize;

use super::Job;
use super::renamed::renamed;

/// Keys, or tables, that a resumed run may change.
const CHANGEABLE_ON_RESUME: [&str; 18] = [
    "name",
    "data.workers",
    "data.prefetch",
    "data.on_bad_record",
    "data.max_bad_records",
    "train.epochs",
    "train.steps",
    "train.clip_norm",
    "train.init",
    "train.init_head",
    "optimizer.lr",
    "optimizer.weight_decay",
    "schedule",
    "memory",
    "eval",
    "checkpoint",
    "stop",
    "log",
];

/// Keys that name files. If a run's data is identified by its content, the files may be moved.
const PATH_KEYS: [&str; 13] = [
    "data.train",
    "data.valid",
    "data.test",
    "data.train_images",
    "data.train_labels",
    "data.valid_images",
    "data.valid_labels",
    "data.test_images",
    "data.test_labels",
    "data.tokenizer",
    "data.tokens",
    "data.template",
    "distill.teacher",
];

/// Values of such keys that name no file.
const NON_PATH_VALUES: [&str; 9] =
    ["absent", "characters", "bytes", "auto", "chatml", "llama2", "llama3", "gemma", "plain"];

/// A key that differs between two jobs. A side that lacks the key says `absent`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct JobChange {
    pub key: String,
    pub was: String,
    pub now: String,
}

impl Job {
    /// The keys in which `now` is another experiment than `self`, so that it cannot resume from its checkpoints. The
    /// micro-batch may change as long as an update has as many samples.
    pub fn structural_changes(&self, now: &Job) -> Vec<JobChange> {
        now.structural_changes_since(&self.to_json())
    }

    /// As [`structural_changes`](Self::structural_changes), since the job whose resolved JSON was `before`.
    pub fn structural_changes_since(&self, before: &serde_json::Value) -> Vec<JobChange> {
        let before = job_values(before);
        let after = leaves(&self.to_json());
        let samples = |job: &BTreeMap<String, String>| {
            let of = |key: &str| job.get(key).and_then(|value| value.parse::<u64>().ok()).unwrap_or(1);
            of("train.batch_size") * of("train.accumulation_steps")
        };
        let same_update = samples(&before) == samples(&after);
        let may_change = |key: &str| {
            CHANGEABLE_ON_RESUME
                .iter()
                .any(|h| key.strip_prefix(h).is_some_and(|rest| rest.is_empty() || rest.starts_with('.')))
                || (same_update && ["train.batch_size", "train.accumulation_steps"].contains(&key))
        };
        let keys: BTreeSet<&String> = before.keys().chain(after.keys()).collect();
        let value = |job: &BTreeMap<String, String>, key: &str| {
            job.get(key).cloned().unwrap_or_else(|| "absent".into())
        };
        keys.into_iter()
            .filter(|key| before.get(*key) != after.get(*key) && !may_change(key))
            .map(|key| JobChange { key: key.clone(), was: value(&before, key), now: value(&after, key) })
            .collect()
    }
}

impl JobChange {
    /// Whether both values name files, so that the files decide whether anything changed.
    pub fn is_path_change(&self) -> bool {
        let is_path = |value: &str| {
            let value = value.trim_matches('"');
            !value.contains('{') && !NON_PATH_VALUES.contains(&value)
        };
        PATH_KEYS.contains(&self.key.as_str()) && is_path(&self.was) && is_path(&self.now)
    }
}

/// Every value of a job of any version, as JSON, by its dotted key. A key that an earlier version did not have has its
/// default.
pub fn job_values(stated: &serde_json::Value) -> BTreeMap<String, String> {
    let with_defaults = serde_json::from_value::<Job>(stated.clone()).map(|job| leaves(&job.to_json()));
    with_defaults.unwrap_or_default().into_iter().chain(leaves(stated)).collect()
}

/// Every value of a resolved job by its dotted key; renamed keys have their new name.
fn leaves(job: &serde_json::Value) -> BTreeMap<String, String> {
    fn walk(path: &str, value: &serde_json::Value, out: &mut BTreeMap<String, String>) {
        match value.as_object() {
            Some(table) => {
                for (key, value) in table {
                    walk(&if path.is_empty() { key.clone() } else { format!("{path}.{key}") }, value, out);
                }
            }
            None => drop(out.insert(renamed(path).unwrap_or(path).into(), value.to_string())),
        }
    }
    let mut out = BTreeMap::new();
    walk("", job, &mut out);
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn changed_keys(sets: &[&str]) -> Vec<String> {
        let text = "[model]\nkind='mlp'\n[data]\nkind='shapes'\n\
                    [train]\nepochs=1\nbatch_size=32\naccumulation_steps=4\n";
        let load = |sets: &[&str]| {
            let sets: Vec<String> = sets.iter().map(|s| s.to_string()).collect();
            Job::parse(text, "a.toml".as_ref(), &sets).unwrap_or_else(|e| panic!("{e}"))
        };
        load(&[])
            .structural_changes(&load(sets))
            .into_iter()
            .map(|c| format!("{} {} {}", c.key, c.was, c.now))
            .collect()
    }

    #[test]
    fn another_experiment_is_named_by_its_keys() {
        assert_eq!(changed_keys(&["seed=7", "model.hidden=[8]"]), ["model.hidden [256] [8]", "seed 42 7"]);
        assert_eq!(changed_keys(&["data.image_size=32", "train.precision=f32"]).len(), 2);
        assert_eq!(changed_keys(&["train.batch_size=16"]), ["train.batch_size 32 16"]);
        let sgd = changed_keys(&["optimizer.kind=sgd"]);
        assert!(sgd.contains(&r#"optimizer.kind "adamw" "sgd""#.into()), "{sgd:?}");
        assert!(sgd.contains(&"optimizer.momentum absent 0.0".into()), "{sgd:?}");
    }

    /// A run whose checkpoint has the old name of a key resumes, unless the value changed.
    #[test]
    fn renamed_keys_of_an_old_run_are_no_change() {
        let text = "[model]\nkind='mlp'\n[data]\nkind='csv'\ntrain=['a.csv']\ntarget='y'\nvalid_fraction=0.25\n\
                    [train]\nepochs=1\n[schedule]\nkind='onecycle'\n";
        let job = Job::parse(text, "a.toml".as_ref(), &[]).unwrap_or_else(|e| panic!("{e}"));
        let rename = |table: &mut serde_json::Value, new: &str, old: &str| {
            let value = table.as_object_mut().unwrap().remove(new).unwrap();
            table[old] = value;
        };
        let mut before = job.to_json();
        rename(&mut before["data"], "valid_fraction", "valid_share");
        rename(&mut before["schedule"], "warmup_fraction", "warmup_share");
        assert_eq!(job.structural_changes_since(&before), []);
        before["data"]["valid_share"] = 0.5.into();
        let (key, was, now) = ("data.valid_fraction".into(), "0.5".into(), "0.25".into());
        assert_eq!(job.structural_changes_since(&before), [JobChange { key, was, now }]);
    }

    #[test]
    fn paths_are_distinguished_from_keywords() {
        let change =
            |key: &str, was: &str, now: &str| JobChange { key: key.into(), was: was.into(), now: now.into() };
        assert!(change("data.train", r#"["a.csv"]"#, r#"["b/*.csv"]"#).is_path_change());
        assert!(change("data.tokens", r#""a.json""#, r#""b.json""#).is_path_change());
        assert!(!change("data.tokens", r#""characters""#, r#""b.json""#).is_path_change());
        assert!(!change("data.template", r#""a.jinja""#, r#""{{ x }}""#).is_path_change());
        assert!(!change("data.valid", "absent", r#"["a.csv"]"#).is_path_change());
        assert!(!change("data.field", r#""a""#, r#""b""#).is_path_change());
    }

    #[test]
    fn keys_changeable_on_resume_may_change() {
        let none: [String; 0] = [];
        assert_eq!(changed_keys(&["train.batch_size=64", "train.accumulation_steps=2"]), none);
        assert_eq!(changed_keys(&["train.steps=9", "name=b", "log.every_steps=1", "memory.ram=1GiB"]), none);
        assert_eq!(
            changed_keys(&["data.workers=3", "data.prefetch=1MiB", "optimizer.lr=1", "eval.every_steps=1"]),
            none
        );
        assert_eq!(changed_keys(&["data.on_bad_record=skip", "data.max_bad_records=7"]), none);
        assert_eq!(changed_keys(&["data.shuffle_buffer=1MiB"]).len(), 1);
    }
}
