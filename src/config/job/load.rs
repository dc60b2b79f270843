//! Parses a file and its `--set` overrides into a resolved job, or into every error found.

use std::io::ErrorKind;
use std::path::Path;
use std::sync::LazyLock;

use serde::Deserialize;
use toml::de::DeTable;

use super::check::{self, SpannedError};
use super::error::{ErrorCode, JobError, JobErrors};
use super::source_map::{SourceLocation, SourceMap, WHOLE_FILE};
use super::{FilesConfig, Job, overrides, rules, schema};
use crate::base::regular_file;
use crate::base::units::counted;

/// Maximum size of a job file.
const MAX_BYTES: u64 = 1 << 20;

/// Mistakes reported at once.
const MAX_ERRORS: usize = 50;

impl Job {
    /// Reads the job at `path` with each override of `sets` (`key.path=value`) applied.
    pub fn load(path: &Path, sets: &[String]) -> Result<Job, JobErrors> {
        let file = path.display().to_string();
        let unreadable = |why: &str| JobError {
            location: Some(SourceLocation { file: file.clone(), snippet: None }),
            ..JobError::new(ErrorCode::Unreadable, format!("cannot read the job: {why}"))
        };
        let bytes = regular_file::read(path, MAX_BYTES).map_err(|error| match error.kind() {
            ErrorKind::NotFound => {
                unreadable("no such file").hint("`trainer init -o job.toml` writes one".to_owned())
            }
            ErrorKind::IsADirectory => unreadable("it is a folder"),
            ErrorKind::FileTooLarge => unreadable("expected at most 1 MiB, and it is larger"),
            // A job must be a regular file: the worker reads it again, and relative paths start at its folder.
            ErrorKind::InvalidInput => {
                unreadable(&error.to_string()).hint("write the job to a file".to_owned())
            }
            _ => unreadable(&error.to_string()),
        })?;
        match str::from_utf8(&bytes) {
            Ok(text) => Job::parse(text, path, sets),
            Err(error) => {
                let start = error.valid_up_to();
                let mut sources = SourceMap::default();
                sources.add(&file, &String::from_utf8_lossy(&bytes));
                let message = format!("the job is not UTF-8 text: byte {:#04x}", bytes[start]);
                let place = sources.locate(start..start + 1);
                Err(JobError { location: place, ..JobError::new(ErrorCode::Syntax, message) }.into())
            }
        }
    }

    /// The job in `text`, which is or could be the file at `path`: that names it and is where its
    /// relative paths start.
    pub fn parse(text: &str, path: &Path, sets: &[String]) -> Result<Job, JobErrors> {
        let mut sources = SourceMap::default();
        sources.add(&path.display().to_string(), text);
        resolve(text, path, sets, &mut sources).map_err(|mut found| {
            found.sort_by_key(|(span, _)| span.start);
            let more = found.len().saturating_sub(MAX_ERRORS);
            if more > 0 {
                found.truncate(MAX_ERRORS);
                found.push((
                    WHOLE_FILE,
                    JobError::new(
                        ErrorCode::More,
                        format!("not shown: {}", counted(more as u64, "more mistake")),
                    )
                    .into(),
                ));
            }
            let placed = |(span, error): SpannedError| JobError { location: sources.locate(span), ..*error };
            JobErrors(found.into_iter().map(placed).collect())
        })
    }
}

fn resolve(
    text: &str,
    path: &Path,
    sets: &[String],
    sources: &mut SourceMap,
) -> Result<Job, Vec<SpannedError>> {
    // Cached: the schema is the same for every job, and building it takes longer than reading a job.
    static SCHEMA: LazyLock<serde_json::Value> = LazyLock::new(schema);
    let schema = &*SCHEMA;
    let (mut tree, syntax_errors) = DeTable::parse_recoverable(text);
    let mut found: Vec<SpannedError> = syntax_errors.iter().map(syntax_error).collect();
    for set in sets {
        let start = sources.add("--set", &format!("--set {set}")) + "--set ".len();
        found.extend(overrides::apply(set, start, &mut tree, schema).err());
    }
    ensure_no_errors(found)?;

    let file = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
    ensure_no_errors(check::check(&mut tree, schema, file.parent().unwrap_or(&file)))?;

    // By way of JSON, as jobs in checkpoints are read: the code that reads a job is large, and compiled once. What the
    // schema allows, the types accept; if not, the place of the mistake is not known.
    let json = serde_json::Value::deserialize(toml::de::Deserializer::from(tree.clone()));
    let json = json.map_err(|error| vec![syntax_error(&error)])?;
    let mut job: Job = serde_json::from_value(json).map_err(|error| {
        vec![(WHOLE_FILE, JobError::new(ErrorCode::Syntax, error.to_string().to_lowercase()).into())]
    })?;
    ensure_no_errors(rules::contradictions(&job, tree.get_ref()))?;

    if job.name.is_empty() {
        job.name = check::to_name(&path.file_stem().unwrap_or_default().to_string_lossy());
    }
    job.eval.resolve();
    job.checkpoint.resolve();
    job.data.source.files_mut().into_iter().for_each(FilesConfig::resolve);
    Ok(job)
}

/// Stops at errors: the next stage would report the same mistake again.
fn ensure_no_errors(found: Vec<SpannedError>) -> Result<(), Vec<SpannedError>> {
    if found.is_empty() { Ok(()) } else { Err(found) }
}

fn syntax_error(error: &toml::de::Error) -> SpannedError {
    let message = error.message().to_lowercase();
    (error.span().unwrap_or(WHOLE_FILE), JobError::new(ErrorCode::Syntax, message).into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::job::{AdamwConfig, Interval, ModelConfig, OptimizerConfig, RunLength, SourceConfig};
    use proptest::prelude::*;

    fn parse(text: &str, sets: &[&str]) -> Result<Job, JobErrors> {
        let sets: Vec<String> = sets.iter().map(|s| s.to_string()).collect();
        Job::parse(text, Path::new("tiny.toml"), &sets)
    }

    const TINY: &str = "[model]\nkind = 'mlp'\n[data]\nkind = 'shapes'\n[train]\nepochs = 1\n";

    fn load(text: &str, sets: &[&str]) -> Job {
        parse(text, sets).unwrap_or_else(|e| panic!("{e}"))
    }

    #[test]
    fn a_small_job_gets_every_default() {
        let job = load(TINY, &[]);
        assert_eq!((job.name.as_str(), job.seed), ("tiny", 42));
        assert_eq!(job.train.length(), RunLength::Epochs(1));
        assert_eq!(job.eval.every(), Interval::Epochs(1));
        assert_eq!(job.checkpoint.every(), Interval::Epochs(1));
        assert_eq!(job.optimizer, OptimizerConfig::Adamw(AdamwConfig::default()));
    }

    #[test]
    fn the_command_line_decides_between_keys_that_exclude_each_other() {
        let job = load(TINY, &["train.steps=3", "checkpoint.every_minutes=5", "eval.every_steps=2"]);
        assert_eq!(job.train.length(), RunLength::Steps(3));
        assert_eq!(job.checkpoint.every(), Interval::Minutes(5));
        assert_eq!(job.eval.every(), Interval::Steps(2));
        let both = parse(TINY, &["train.steps=3", "train.epochs=4"]).unwrap();
        assert_eq!(both.train.length(), RunLength::Epochs(4), "the last one wins");
    }

    #[test]
    fn the_command_line_reads_a_value_as_the_kind_of_the_table_has_it() {
        let csv =
            "[model]\nkind = 'mlp'\n[data]\nkind = 'csv'\ntrain = 'a.csv'\ntarget = 'y'\n[train]\nsteps = 1";
        let SourceConfig::Csv(csv) = load(csv, &["data.classes=u,v"]).data.source else { panic!() };
        assert_eq!(csv.columns.classes, ["u", "v"]);
        let idx = "[model]\nkind = 'mlp'\n[data]\nkind = 'csv'\n[train]\nsteps = 1";
        let files = ["train_images=a", "train_labels=b", "valid_images=c", "valid_labels=d"];
        let files: Vec<String> = files.iter().map(|set| format!("data.{set}")).collect();
        let mut sets = vec!["data.kind=idx", "data.classes=7"];
        sets.extend(files.iter().map(String::as_str));
        let SourceConfig::Idx(idx) = load(idx, &sets).data.source else { panic!() };
        assert_eq!(idx.classes, 7);
    }

    #[test]
    fn a_default_kind_need_not_be_named() {
        let OptimizerConfig::Adamw(adamw) = load(TINY, &["optimizer.lr=0.5"]).optimizer else { panic!() };
        assert_eq!(adamw, AdamwConfig { lr: 0.5, ..AdamwConfig::default() });
        assert_eq!(load(&format!("{TINY}[schedule]\nwarmup_steps = 7"), &[]).schedule.warmup_steps(), 7);
    }

    #[test]
    fn a_number_names_a_column() {
        let text = "[model]\nkind = 'mlp'\n[data]\nkind = 'csv'\ntrain = 'a.csv'\ntarget = 2\nignore = [0, 'x']\n[train]\nsteps = 1";
        let job = load(text, &["data.missing=-999"]);
        let SourceConfig::Csv(csv) = &job.data.source else { panic!("{job:?}") };
        assert_eq!(csv.columns.target.to_vec(), ["2"]);
        assert_eq!(csv.columns.ignore, ["0", "x"]);
        assert_eq!(csv.columns.missing, ["-999"]);
    }

    #[test]
    fn a_set_reaches_into_lists() {
        let cnn = TINY.replace("'mlp'", "'cnn'\nstages = [{channels = 4}, {channels = 8}]");
        let ModelConfig::Cnn(model) = load(&cnn, &["model.stages.1.channels=16"]).model else { panic!() };
        assert_eq!(model.stages[1].channels, 16);
        assert!(parse(&cnn, &["model.stages.2.channels=16"]).is_err());
    }

    #[test]
    fn a_set_of_names_needs_no_quotes() {
        let csv = TINY.replace("'shapes'", "'csv'\ntrain = 'a.csv'\ntarget = 'y'");
        for (set, key, value) in [
            ("data.ignore=[id]", "ignore", serde_json::json!(["id"])),
            ("data.ignore=[id, 2]", "ignore", serde_json::json!(["id", "2"])),
            ("data.ignore=id,x", "ignore", serde_json::json!(["id", "x"])),
            ("data.ignore=['a,b']", "ignore", serde_json::json!(["a,b"])),
            ("data.missing=-999", "missing", serde_json::json!(["-999"])),
        ] {
            assert_eq!(load(&csv, &[set]).to_json()["data"][key], value, "{set}");
        }
        let JobErrors(errors) = parse(&csv, &["data.ignore=[a,,b]"]).unwrap_err();
        assert_eq!(errors[0].code, ErrorCode::Syntax);
        assert!(parse(&csv, &["eval.metrics=f1,f2"]).unwrap_err().to_string().contains("\"f2\""));
    }

    #[test]
    fn depth_and_number_are_bounded() {
        let deep = vec!["a"; 60_000].join(".");
        assert!(parse(TINY, &[&format!("{deep}=1")]).is_err());
        assert!(parse(&format!("{deep} = 1"), &[]).is_err());
        assert!(parse(&format!("x = {}", "[".repeat(60_000)), &[]).is_err());
        let wide: String = (0..60_000).map(|i| format!("k{i} = 1\n")).collect();
        let errors = parse(&wide, &[]).unwrap_err();
        assert_eq!(errors.0.len(), MAX_ERRORS + 1);
        assert_eq!(errors.0[MAX_ERRORS].message, "not shown: 59,953 more mistakes");
    }

    #[test]
    fn a_byte_order_mark_is_no_mistake() {
        assert_eq!(load(&format!("\u{feff}{TINY}"), &[]), load(TINY, &[]));
    }

    #[test]
    fn a_number_past_64_bits_is_out_of_range() {
        let errors = parse(TINY, &["seed=9223372036854775808"]).unwrap_err();
        assert_eq!(errors.0[0].code, ErrorCode::OutOfRange);
        assert_eq!(load(TINY, &["seed=9223372036854775807"]).seed, i64::MAX as u64);
    }

    fn model() -> impl Strategy<Value = Vec<String>> {
        let hidden = prop::collection::vec(1usize..2000, 0..4);
        let activation = prop::sample::select(vec!["relu", "gelu", "gelu_tanh", "silu"]);
        let stages = prop::collection::vec((1usize..200, 1usize..8, 1usize..4, 1usize..4), 1..4);
        (any::<bool>(), hidden, activation, 0.0..1.0f64, stages).prop_map(
            |(cnn, hidden, act, dropout, stages)| {
                let stage = |(c, k, s, p)| format!("{{channels={c}, kernel={k}, stride={s}, pool={p}}}");
                let stages: Vec<String> = stages.into_iter().map(stage).collect();
                let mut sets = vec![
                    format!("model.hidden={hidden:?}"),
                    format!("model.activation={act}"),
                    format!("model.dropout={dropout}"),
                ];
                if cnn {
                    sets.extend(["model.kind=cnn".into(), format!("model.stages=[{}]", stages.join(", "))]);
                }
                sets
            },
        )
    }

    fn rest() -> impl Strategy<Value = Vec<String>> {
        let length = prop::sample::select(vec!["train.epochs=3", "train.steps=5000"]);
        let every =
            prop::sample::select(vec!["eval.every_steps=9", "checkpoint.every_minutes=3", "name=a.b-c"]);
        let optimizer =
            prop::sample::select(vec!["optimizer={kind='sgd', momentum=0.9, nesterov=true}", "seed=1"]);
        let schedule = prop::sample::select(vec![
            "schedule={kind='step', every_steps=10}",
            "schedule={kind='onecycle', div=3}",
            "schedule={kind='linear', final_lr_ratio=0.1}",
        ]);
        let ram = prop_oneof![
            (0u64..1 << 50).prop_map(|b| format!("memory.ram={b}B")),
            Just("memory.ram=3.5%".into())
        ];
        (length, every, optimizer, schedule, ram, 1e-9..1.0f64).prop_map(|(a, b, c, d, ram, clip)| {
            let clip = format!("train.clip_norm={clip}");
            [a, b, c, d].map(String::from).into_iter().chain([ram, clip]).collect()
        })
    }

    proptest! {
        /// The job written to a run's folder is a valid job, and the same one.
        #[test]
        fn a_resolved_job_loads_as_itself(model in model(), rest in rest()) {
            let sets: Vec<String> = model.into_iter().chain(rest).collect();
            let job = Job::parse(TINY, Path::new("tiny.toml"), &sets);
            let job = job.map_err(|e| TestCaseError::fail(e.to_string()))?;
            let again = Job::parse(&job.to_toml(), Path::new("/runs/other.toml"), &[]);
            prop_assert_eq!(again.map_err(|e| TestCaseError::fail(e.to_string()))?, job);
        }
    }
}
