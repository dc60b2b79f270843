//! MLflow's store in a SQLite file, without a server: `sqlite:///mlflow.db`, as `mlflow ui --backend-store-uri` names
//! it.
//!
//! The file is opened for each call and closed after it: MLflow may migrate its tables between two of them. A new
//! file gets the tables of an early revision, which every later MLflow migrates when it opens the file. Of a file
//! that exists, the columns that a run writes must be there; rows have MLflow's own form, and nothing else of the
//! file is touched.

use std::path::{Path, PathBuf};
use std::time::Duration;

use rusqlite::{Connection, OptionalExtension, Transaction, TransactionBehavior, params};

use super::tracked_run::{MetricPoint, RunStatus, TrackedRun, TrackingStore, now_ms, tags};

/// How long a call waits for another process that writes the file.
const BUSY_TIMEOUT: Duration = Duration::from_secs(2);

/// The tables and columns that a run writes.
const COLUMNS: [(&str, &[&str]); 6] = [
    ("experiments", &["experiment_id", "name", "artifact_location", "lifecycle_stage"]),
    (
        "runs",
        &[
            "run_uuid",
            "name",
            "source_type",
            "source_name",
            "entry_point_name",
            "user_id",
            "status",
            "start_time",
            "end_time",
            "source_version",
            "lifecycle_stage",
            "artifact_uri",
            "experiment_id",
        ],
    ),
    ("tags", &["key", "value", "run_uuid"]),
    ("params", &["key", "value", "run_uuid"]),
    ("metrics", &["key", "value", "timestamp", "run_uuid", "step", "is_nan"]),
    ("latest_metrics", &["key", "value", "timestamp", "step", "is_nan", "run_uuid"]),
];

pub struct SqliteStore {
    path: PathBuf,
}

/// Why a call failed, without the name of the file.
enum StoreError {
    Sqlite(rusqlite::Error),
    Other(String),
}

impl From<rusqlite::Error> for StoreError {
    fn from(error: rusqlite::Error) -> Self {
        Self::Sqlite(error)
    }
}

/// The file that `uri` names, relative to the current folder as in MLflow; `None` for other kinds of store.
pub fn path_of(uri: &str) -> Option<&Path> {
    uri.strip_prefix("sqlite:///").map(Path::new)
}

impl SqliteStore {
    pub fn new(path: &Path) -> Self {
        Self { path: path.to_owned() }
    }

    /// Runs `body` in a transaction, in which nobody else writes.
    fn call<R>(&self, body: impl FnOnce(&Transaction) -> Result<R, StoreError>) -> Result<R, String> {
        self.try_call(body).map_err(|error| {
            let error = match error {
                StoreError::Sqlite(error) => error.to_string(),
                StoreError::Other(message) => message,
            };
            format!("{}: {error}", self.path.display())
        })
    }

    fn try_call<R>(&self, body: impl FnOnce(&Transaction) -> Result<R, StoreError>) -> Result<R, StoreError> {
        let mut file = Connection::open(&self.path)?;
        file.busy_timeout(BUSY_TIMEOUT)?;
        let transaction = file.transaction_with_behavior(TransactionBehavior::Immediate)?;
        let tables: i64 =
            transaction.query_row("SELECT count(*) FROM sqlite_master", [], |row| row.get(0))?;
        match tables {
            0 => self.create_tables(&transaction)?,
            _ => check_columns(&transaction)?,
        }
        let result = body(&transaction)?;
        transaction.commit()?;
        Ok(result)
    }

    /// The tables, and the experiment that MLflow expects in every store.
    fn create_tables(&self, file: &Transaction) -> Result<(), StoreError> {
        file.execute_batch(include_str!("tables.sql"))?;
        self.create_experiment(file, Some(0), "Default")?;
        Ok(())
    }

    fn create_experiment(&self, file: &Transaction, id: Option<i64>, name: &str) -> Result<i64, StoreError> {
        file.execute(
            "INSERT INTO experiments (experiment_id, name, lifecycle_stage) VALUES (?, ?, 'active')",
            params![id, name],
        )?;
        let id = file.last_insert_rowid();
        let folder = self.artifacts().join(id.to_string());
        file.execute(
            "UPDATE experiments SET artifact_location = ? WHERE experiment_id = ?",
            params![folder.to_string_lossy(), id],
        )?;
        if columns(file, "experiments")?.iter().any(|column| column == "creation_time") {
            file.execute(
                "UPDATE experiments SET creation_time = ?1, last_update_time = ?1 WHERE experiment_id = ?2",
                params![now_ms() as i64, id],
            )?;
        }
        Ok(id)
    }

    /// Where MLflow would keep files of runs: beside the store. A run writes none.
    fn artifacts(&self) -> PathBuf {
        let file = std::path::absolute(&self.path).unwrap_or_else(|_| self.path.clone());
        file.with_file_name("mlruns")
    }
}

fn columns(file: &Transaction, table: &str) -> Result<Vec<String>, StoreError> {
    let mut statement = file.prepare("SELECT name FROM pragma_table_info(?)")?;
    let names = statement.query_map([table], |row| row.get(0))?;
    Ok(names.collect::<Result<_, _>>()?)
}

fn check_columns(file: &Transaction) -> Result<(), StoreError> {
    for (table, wanted) in COLUMNS {
        let found = columns(file, table)?;
        let missing = wanted.iter().find(|column| !found.iter().any(|name| name == *column));
        let problem = match missing {
            _ if found.is_empty() => format!("there is no table `{table}`"),
            Some(column) => format!("the table `{table}` has no column `{column}`"),
            None => continue,
        };
        return Err(StoreError::Other(format!("not a store of MLflow that a run can write: {problem}")));
    }
    Ok(())
}

/// An error if `changed` rows of a run were none.
fn must_have_changed(changed: usize, run: &TrackedRun) -> Result<(), StoreError> {
    match changed {
        0 => Err(StoreError::Other(format!("the run `{}` of `mlflow.json` is not in it", run.run_id))),
        _ => Ok(()),
    }
}

impl TrackingStore for SqliteStore {
    fn create_run(&self, run: &mut TrackedRun, experiment: &str, name: &str) -> Result<(), String> {
        self.call(|file| {
            let known = "SELECT experiment_id FROM runs WHERE run_uuid = ?";
            let known: Option<i64> = file.query_row(known, [&run.run_id], |row| row.get(0)).optional()?;
            if let Some(experiment_id) = known {
                run.experiment_id = experiment_id.to_string();
                return Ok(());
            }
            let known = "SELECT experiment_id, lifecycle_stage = 'deleted' FROM experiments WHERE name = ?";
            let known = file.query_row(known, [experiment], |row| Ok((row.get(0)?, row.get(1)?)));
            let experiment_id: i64 = match known.optional()? {
                Some((id, false)) => id,
                Some((id, true)) => {
                    let restore = format!("`mlflow experiments restore --experiment-id {id}` restores it");
                    let message = format!("its experiment `{experiment}` is deleted: {restore}");
                    return Err(StoreError::Other(message));
                }
                None => self.create_experiment(file, None, experiment)?,
            };
            let run_id = &run.run_id;
            let artifacts = self.artifacts().join(experiment_id.to_string()).join(run_id).join("artifacts");
            file.execute(
                "INSERT INTO runs (run_uuid, name, source_type, source_name, entry_point_name, user_id, status,
                     start_time, source_version, lifecycle_stage, artifact_uri, experiment_id)
                 VALUES (?, ?, 'UNKNOWN', '', '', '', 'RUNNING', ?, '', 'active', ?, ?)",
                params![run_id, name, now_ms() as i64, artifacts.to_string_lossy(), experiment_id],
            )?;
            for (key, value) in tags().into_iter().chain([("mlflow.runName", name)]) {
                file.execute(
                    "INSERT INTO tags (key, value, run_uuid) VALUES (?, ?, ?)",
                    params![key, value, run_id],
                )?;
            }
            run.experiment_id = experiment_id.to_string();
            Ok(())
        })
    }

    fn log_parameters(&self, run: &TrackedRun, parameters: &[(String, String)]) -> Result<(), String> {
        self.call(|file| {
            let mut insert =
                file.prepare("INSERT OR IGNORE INTO params (key, value, run_uuid) VALUES (?, ?, ?)")?;
            for (key, value) in parameters {
                insert.execute(params![key, value, run.run_id])?;
            }
            Ok(())
        })
    }

    fn log_metrics(&self, run: &TrackedRun, points: &[MetricPoint]) -> Result<(), String> {
        self.call(|file| {
            let mut insert = file.prepare(
                "INSERT OR IGNORE INTO metrics (key, value, timestamp, run_uuid, step, is_nan)
                 VALUES (?1, ?2, ?3, ?4, ?5, 0)",
            )?;
            let mut latest = file.prepare(
                "INSERT INTO latest_metrics (key, value, timestamp, run_uuid, step, is_nan)
                 VALUES (?1, ?2, ?3, ?4, ?5, 0)
                 ON CONFLICT (key, run_uuid) DO UPDATE
                 SET value = excluded.value, timestamp = excluded.timestamp, step = excluded.step, is_nan = 0
                 WHERE (excluded.step, excluded.timestamp, excluded.value)
                     > (latest_metrics.step, latest_metrics.timestamp, latest_metrics.value)",
            )?;
            for point in points {
                let row = params![
                    point.key,
                    point.value,
                    point.timestamp_ms() as i64,
                    run.run_id,
                    point.step as i64
                ];
                insert.execute(row)?;
                latest.execute(row)?;
            }
            Ok(())
        })
    }

    fn update_run(&self, run: &TrackedRun, status: RunStatus) -> Result<(), String> {
        let end_time = (status != RunStatus::Running).then(|| now_ms() as i64);
        self.call(|file| {
            let changed = file.execute(
                "UPDATE runs SET status = ?, end_time = ? WHERE run_uuid = ?",
                params![status.name(), end_time, run.run_id],
            )?;
            must_have_changed(changed, run)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn store(folder: &Path) -> SqliteStore {
        SqliteStore::new(&folder.join("mlflow.db"))
    }

    fn create(store: &SqliteStore, experiment: &str, name: &str) -> Result<TrackedRun, String> {
        let mut run = TrackedRun::new("sqlite:///mlflow.db");
        store.create_run(&mut run, experiment, name).map(|()| run)
    }

    fn rows<R: rusqlite::types::FromSql>(store: &SqliteStore, query: &str) -> Vec<R> {
        let file = Connection::open(&store.path).unwrap();
        let mut statement = file.prepare(query).unwrap();
        statement.query_map([], |row| row.get(0)).unwrap().map(Result::unwrap).collect()
    }

    fn point(step: u64, value: f64) -> MetricPoint {
        MetricPoint { key: "loss".into(), value, step, t: 1.5 + step as f64, is_eval: false }
    }

    #[test]
    fn a_new_file_gets_the_tables_and_a_run_in_its_experiment() {
        let folder = tempfile::tempdir().unwrap();
        let store = store(folder.path());
        let mut run = create(&store, "one", "a").unwrap();
        assert_eq!(create(&store, "one", "b").unwrap().experiment_id, run.experiment_id);
        let known = std::mem::take(&mut run.experiment_id);
        store.create_run(&mut run, "one", "a").unwrap();
        assert_eq!(run.experiment_id, known, "a second creation of a run finds it");
        assert_eq!(rows::<String>(&store, "SELECT name FROM runs ORDER BY name"), ["a", "b"]);
        assert_eq!(rows::<String>(&store, "SELECT name FROM experiments"), ["Default", "one"]);
        assert_eq!(rows::<i64>(&store, "SELECT experiment_id FROM experiments"), [0, 1]);
        store.log_parameters(&run, &[("lr".into(), "0.1".into())]).unwrap();
        store.log_parameters(&run, &[("lr".into(), "0.1".into())]).unwrap();
        assert_eq!(rows::<String>(&store, "SELECT key || '=' || value FROM params"), ["lr=0.1"]);
        store.log_metrics(&run, &[point(1, 3.0), point(3, 1.0), point(2, 2.0), point(1, 3.0)]).unwrap();
        assert_eq!(rows::<f64>(&store, "SELECT value FROM metrics ORDER BY step"), [3.0, 2.0, 1.0]);
        assert_eq!(rows::<i64>(&store, "SELECT timestamp FROM metrics ORDER BY step"), [2500, 3500, 4500]);
        assert_eq!(rows::<f64>(&store, "SELECT value FROM latest_metrics"), [1.0]);
        for status in [RunStatus::Killed, RunStatus::Finished] {
            store.update_run(&run, status).unwrap();
        }
        let ended = "SELECT status FROM runs WHERE end_time >= start_time";
        assert_eq!(rows::<String>(&store, ended), ["FINISHED"]);
    }

    #[test]
    fn a_file_of_others_is_refused_and_left_as_it_is() {
        let folder = tempfile::tempdir().unwrap();
        let store = store(folder.path());
        Connection::open(&store.path).unwrap().execute_batch("CREATE TABLE cats (name)").unwrap();
        let error = create(&store, "one", "a").unwrap_err();
        assert!(error.ends_with("that a run can write: there is no table `experiments`"), "{error}");
        assert_eq!(rows::<String>(&store, "SELECT name FROM sqlite_master"), ["cats"]);
        std::fs::write(&store.path, "a file of text, longer than the header of SQLite".repeat(9)).unwrap();
        let error = create(&store, "one", "a").unwrap_err();
        assert!(error.contains("not a database"), "{error}");
        std::fs::remove_file(&store.path).unwrap();
        create(&store, "one", "a").unwrap();
        let old = "ALTER TABLE latest_metrics RENAME COLUMN step TO steps";
        Connection::open(&store.path).unwrap().execute_batch(old).unwrap();
        let error = create(&store, "one", "a").unwrap_err();
        assert!(error.ends_with("the table `latest_metrics` has no column `step`"), "{error}");
    }

    #[test]
    fn a_deleted_experiment_gets_no_run() {
        let folder = tempfile::tempdir().unwrap();
        let store = store(folder.path());
        create(&store, "one", "a").unwrap();
        let delete = "UPDATE experiments SET lifecycle_stage = 'deleted' WHERE name = 'one'";
        Connection::open(&store.path).unwrap().execute_batch(delete).unwrap();
        let error = create(&store, "one", "b").unwrap_err();
        assert!(
            error.contains("`one` is deleted: `mlflow experiments restore --experiment-id 1`"),
            "{error}"
        );
        assert_eq!(rows::<String>(&store, "SELECT name FROM runs"), ["a"]);
    }

    #[test]
    fn a_run_that_is_not_there_is_an_error() {
        let folder = tempfile::tempdir().unwrap();
        let run = TrackedRun::new("sqlite:///mlflow.db");
        let error = store(folder.path()).update_run(&run, RunStatus::Running).unwrap_err();
        let missing = format!("the run `{}` of `mlflow.json` is not in it", run.run_id);
        assert!(error.ends_with(&missing), "{error}");
    }
}
