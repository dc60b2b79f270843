//! Random jobs over the whole schema, and the promises that every one of them keeps.
//!
//! Forty of them run with the tests. `just trials-random 0..250` runs a range of seeds and prints the counts; `just
//! trial 17` keeps the job, the data and the runs of one seed in `target/trials/17`. On a machine without cargo, the
//! test binary takes the program from `TRAINER_BINARY`; docs/contributing.md lists all variables.

mod check;
mod coverage;
mod data;
mod draw;
mod generate;
mod report;
mod run;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::time::Duration;

use generate::Scale;
use report::TrialOptions;
use run::Runner;

use crate::harness::{assert_nothing_wrong, finish, measured_command};

/// What no generated job says, and why.
const NOT_DRAWN: [(&str, &str); 3] = [
    ("data.json.split=stratified", "as of csv and Parquet, whose rows are split by the same code"),
    ("data.shapes.augment.saturation", "the images are grey: refused"),
    ("data.shapes.augment.hue", "the images are grey: refused"),
];

#[test]
fn every_seed_is_a_valid_job_and_always_the_same() {
    for scale in [Scale::Small, Scale::Large] {
        for seed in 0..200 {
            let case = generate::case(seed, scale);
            assert_eq!(case.job, generate::case(seed, scale).job);
            let text = toml::to_string(&case.job).unwrap();
            if let Err(errors) = trainer::job::Job::parse(&text, Path::new("job.toml"), &[]) {
                panic!("seed {seed}, {scale:?}:\n{errors}\n{text}");
            }
        }
    }
}

#[test]
fn the_generator_draws_all_of_the_schema() {
    let schema = finish(&mut measured_command(&std::env::temp_dir(), &["schema"])).json();
    let drawn: BTreeSet<String> = (0..4000)
        .flat_map(|seed| coverage::job_paths(&generate::case(seed, Scale::Small).job, &schema))
        .collect();
    let known: BTreeSet<String> = NOT_DRAWN.iter().map(|(path, _)| path.to_string()).collect();
    let wanted = coverage::schema_paths(&schema);
    let missing: Vec<&String> = wanted.difference(&drawn).filter(|path| !known.contains(*path)).collect();
    assert!(missing.is_empty(), "in the schema and never drawn: {missing:#?}");
    let needless: Vec<&String> = known.intersection(&drawn).collect();
    assert!(needless.is_empty(), "drawn and named as not drawn: {needless:#?}");
    assert!(wanted.len() > 300, "only {} of a schema were found", wanted.len());
}

#[test]
fn forty_random_jobs_keep_every_promise() {
    let folder = tempfile::tempdir().unwrap();
    let trials = TrialOptions {
        seeds: (0..40).collect(),
        parallel: 2,
        limit: None,
        folder: folder.path().to_owned(),
        keep: false,
    };
    let machine = Runner::from_env();
    let done = report::run(&machine, &trials);
    println!("{}", report::table(&machine, &trials, &done));
    let broken: Vec<String> = done
        .iter()
        .flat_map(|(case, seen)| seen.violations.iter().map(move |b| (case.seed, b)))
        .map(|(seed, broken)| format!("seed {seed}: {}: {}", broken.promise, broken.what))
        .collect();
    assert_nothing_wrong(&broken);
    let tried = done.iter().filter(|(_, seen)| seen.budget.is_some()).count();
    assert!(tried >= 12, "only {tried} jobs had a budget and a kill");
}

/// The checks above notice memory that no plan knows about.
#[test]
fn memory_behind_the_plans_back_is_noticed() {
    let folder = tempfile::tempdir().unwrap();
    let disturbance = Some(("TRAINER_FAULT_UNRESERVED", "512MiB".to_owned()));
    let machine = Runner { fault_env: disturbance, ..Runner::from_env() };
    let case = generate::case(0, Scale::Small);
    report::write(&case, folder.path()).unwrap();
    let seen = check::check_case(&machine, &case, folder.path());
    assert!(seen.violations.iter().any(|b| b.promise == check::PLAN_HEAP), "{:?}", seen.violations);
}

/// Runs the seeds of `TRAINER_TRIALS_SEEDS` and prints the counts; keeps a folder for every case that broke a
/// promise.
#[test]
#[ignore = "minutes to hours: `just trials-random`"]
fn trials() {
    let variable = |name: &str| std::env::var(name).ok();
    let seeds = seeds(&variable("TRAINER_TRIALS_SEEDS").unwrap_or_else(|| "0..1000".into()));
    let number =
        |name: &str| variable(name).map(|text| text.parse::<u64>().unwrap_or_else(|e| panic!("{name}: {e}")));
    let trials = TrialOptions {
        parallel: number("TRAINER_TRIALS_PARALLEL").unwrap_or(2) as usize,
        limit: number("TRAINER_TRIALS_SECONDS").map(Duration::from_secs),
        folder: variable("TRAINER_TRIALS_FOLDER").map_or("target/trials".into(), PathBuf::from),
        keep: variable("TRAINER_TRIALS_KEEP").is_some(),
        seeds,
    };
    let mut machine = Runner::from_env();
    machine.vram = number("TRAINER_TRIALS_VRAM").unwrap_or(machine.vram);
    machine.timeout = number("TRAINER_TRIALS_RUN_SECONDS").map_or(machine.timeout, Duration::from_secs);
    std::fs::create_dir_all(&trials.folder).unwrap();
    let trials = TrialOptions { folder: std::fs::canonicalize(&trials.folder).unwrap(), ..trials };
    let done = report::run(&machine, &trials);
    let table = report::table(&machine, &trials, &done);
    std::fs::write(trials.folder.join("table.md"), &table).unwrap();
    println!("\n{table}\nwhat broke a promise is in {}", trials.folder.display());
    if done.iter().any(|(_, seen)| !seen.violations.is_empty()) {
        // Not a panic: the table must be the last output.
        std::process::exit(1);
    }
}

/// `17`, `0..250`, or several of these separated by commas.
fn seeds(text: &str) -> Vec<u64> {
    let number = |text: &str| {
        text.trim().parse::<u64>().unwrap_or_else(|e| panic!("TRAINER_TRIALS_SEEDS: `{text}`: {e}"))
    };
    text.split(',')
        .flat_map(|part| match part.split_once("..") {
            Some((first, end)) => number(first)..number(end),
            None => number(part)..number(part) + 1,
        })
        .collect()
}
