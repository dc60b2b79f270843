//! The job in `model.json`, the description that every export has. It is checked like a job file: people edit
//! descriptions, and building a model relies on the ranges of the keys.

use std::path::Path;

use serde_json::Value;

use crate::job::{ErrorCode, Job, JobError};

/// The description that every export has.
pub const DESCRIPTION: &str = "model.json";

/// Tables that only training reads: they may be of an earlier version or of a build with other features.
const TRAINING_ONLY_TABLES: [&str; 6] = ["checkpoint", "distill", "log", "optimizer", "schedule", "stop"];

/// Keys among which contradictions are refused: the model, its data, and what makes its layers smaller.
const CONFLICT_CHECKED_KEYS: [&str; 4] = ["data", "lowrank.ranks", "model", "prune.kept"];

/// The job of the description of the export in `folder`, or why it cannot be used. The files that it names need not
/// exist.
pub fn described_job(description: &Value, folder: &Path) -> Result<Job, String> {
    let unreadable = |error: String| format!("the job in `{DESCRIPTION}` cannot be read: {error}");
    let job: Job =
        serde_json::from_value(description["job"].clone()).map_err(|error| unreadable(error.to_string()))?;
    // A description may hold values that TOML cannot represent; in `Job::to_toml` that would be a bug.
    let text = toml::to_string(&job).map_err(|error| unreadable(error.to_string()))?;
    let Err(errors) = Job::parse(&text, &folder.join(DESCRIPTION), &[]) else { return Ok(job) };
    let problems: Vec<String> =
        errors.0.iter().filter(|error| concerns_trained_model(error)).map(describe).collect();
    match &problems[..] {
        [] => Ok(job),
        problems => Err(format!("the job in `{DESCRIPTION}` cannot be used: {}", problems.join("; "))),
    }
}

/// Whether a mistake is about what a trained model needs.
fn concerns_trained_model(error: &JobError) -> bool {
    let is_in = |table: &&str| {
        let rest = error.key.as_deref().and_then(|key| key.strip_prefix(*table));
        rest.is_some_and(|rest| rest.is_empty() || rest.starts_with(['.', '[']))
    };
    match error.code {
        // Paths of a resolved job are absolute: what looks like a variable there is part of a name.
        ErrorCode::UnsetVariable | ErrorCode::More => false,
        ErrorCode::Contradiction => CONFLICT_CHECKED_KEYS.iter().any(is_in),
        _ => !TRAINING_ONLY_TABLES.iter().any(is_in),
    }
}

fn describe(error: &JobError) -> String {
    match &error.allowed {
        Some(allowed) => format!("{}; allowed: {allowed}", error.message),
        None => error.message.clone(),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    const JOB: &str = "[model]\nkind = 'cnn'\nstages = [{ channels = 4 }, { channels = 8 }]\n\
        [data]\nkind = 'csv'\ntrain = 'gone.csv'\ntarget = 'y'\n[train]\nsteps = 9\n";

    fn described(change: impl FnOnce(&mut Value)) -> Result<Job, String> {
        let job = Job::parse(JOB, "job.toml".as_ref(), &[]).unwrap_or_else(|errors| panic!("{errors}"));
        let mut description = json!({ "job": job });
        change(&mut description["job"]);
        described_job(&description, "export".as_ref())
    }

    /// Older versions, other builds and other machines wrote jobs that are no mistake here.
    #[test]
    fn what_only_training_reads_is_not_checked() {
        assert!(described(|_| {}).is_ok());
        for (table, key, value) in [
            ("data", "train", json!(["/data/${TRAINER_TEST_UNSET}/a.csv"])),
            ("log", "mlflow", json!("https://example.org")),
            ("checkpoint", "keep", json!(0)),
            ("schedule", "warmup_steps", json!(1000)),
            ("train", "a_key_of_another_version", json!(true)),
        ] {
            let found = described(|job| job[table][key] = value);
            assert!(found.is_ok(), "{table}.{key}: {found:?}");
        }
        let reduced = described(|job| {
            job["prune"] = json!({ "kept": { "stages.0": 3 } });
            job["lowrank"] = json!({ "energy": 0.5, "ranks": { "stages.1": 2 } });
        });
        let reduced = reduced.unwrap();
        assert_eq!((reduced.ranks().len(), reduced.prune.unwrap().kept.len()), (1, 1));
    }

    #[test]
    fn what_the_model_needs_is_named() {
        let refused =
            |key: &str, value: Value| described(|job| *job.pointer_mut(key).unwrap() = value).unwrap_err();
        let text = refused("/model/stages/1/stride", json!(0));
        let expected = "`model.json` cannot be used: `model.stages[1].stride` cannot be 0; allowed: ";
        assert!(text.contains(expected), "{text}");
        let text = refused("/model/stages/1/kernel", json!(1u64 << 62));
        assert!(text.contains("`model.stages[1].kernel` cannot be 4611686018427387904"), "{text}");
        let text = refused("/model/stages/1/kernel", json!(u64::MAX));
        assert!(text.contains("the job in `model.json` cannot be "), "{text}");
        let text = refused("/train/batch_size", json!(0));
        assert!(text.contains("`train.batch_size` cannot be 0"), "{text}");
    }
}
