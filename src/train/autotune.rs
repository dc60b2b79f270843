//! `plan --measure`: times the best few execution plans on real updates of the job and picks the fastest.
//!
//! Runs in this process, on the job's own data, under a ledger with the job's budget. Leaves no run directory behind.

use std::time::{Duration, Instant};

use super::Failure;
use super::engine::Ledgers;
use super::setup::Setup;
use super::trial_updates::TrialUpdates;
use crate::graph::network::StepError;
use crate::planner::budget::TargetMachine;
use crate::planner::estimate::Estimator;
use crate::planner::plan::{MemoryPlan, PlanVerdict};
use crate::planner::search::{Candidate, PlanRequest, Search};
use crate::planner::{ExecutionPlan, ladder};

/// Candidates to time, and updates of each. The first update is a warm-up; the fastest of the others counts.
const MAX_CANDIDATES: usize = 4;
const UPDATES_PER_CANDIDATE: u64 = 6;
/// A candidate gets no further update once it has run this long.
const TIME_LIMIT: Duration = Duration::from_secs(5);

/// The memory plan of the candidate that measured fastest.
pub fn plan(setup: &Setup, machine: &TargetMachine) -> Result<MemoryPlan, Failure> {
    let request = PlanRequest { include_alternatives: true, ..setup.plan_request(machine) };
    let predictor = setup.estimator_for(machine);
    let mut search = Search::new(&request, &predictor);
    let Some(planned) = search.fastest() else { return Ok(setup.plan_for(machine)) };
    let mut measured = Vec::new();
    for candidate in fastest_candidates(&search) {
        match time_updates(setup, Ledgers::new(setup, machine.ram, None), candidate.exec_plan) {
            Ok(seconds) => measured.push((candidate, seconds)),
            // Predicted to fit, but it runs out of memory: not a candidate.
            Err(Failure::OutOfMemory { .. }) => {}
            Err(failure) => return Err(failure),
        }
    }
    let plan = plan_of_fastest(&request, &predictor, &search, planned, &measured);
    let (parameters, trained_parameters) = (setup.num_parameters(), setup.num_trained());
    let (pruned, prediction) = (setup.pruned_model().map(Box::new), setup.smaller_model());
    Ok(MemoryPlan { parameters, trained_parameters, pruned, prediction, ..plan })
}

/// The candidates that fit, fastest predicted first.
fn fastest_candidates(search: &Search) -> Vec<Candidate> {
    let mut fitting: Vec<Candidate> =
        search.candidates.iter().filter(|candidate| search.fits(candidate)).copied().collect();
    fitting.sort_by(|a, b| a.update_seconds.total_cmp(&b.update_seconds));
    fitting.truncate(MAX_CANDIDATES);
    fitting
}

/// Builds the plan of the fastest measured candidate. Measured times are rescaled so that the planned candidate takes
/// its predicted time: `measured_time` and `relative_time` are then comparable.
fn plan_of_fastest(
    request: &PlanRequest,
    predictor: &Estimator,
    search: &Search,
    planned: Candidate,
    measured: &[(Candidate, f64)],
) -> MemoryPlan {
    let fastest =
        measured.iter().min_by(|a, b| a.1.total_cmp(&b.1)).map_or(planned, |(candidate, _)| *candidate);
    let as_written = search.as_written();
    let seconds_of =
        |one: &Candidate| measured.iter().find(|(candidate, _)| candidate == one).map(|(_, s)| s);
    let measured_time = |candidate: &Candidate| {
        Some(
            seconds_of(candidate)? / seconds_of(&planned)? * planned.update_seconds
                / as_written.update_seconds,
        )
    };
    let mut plan = ladder::build_plan(request, predictor, search, fastest, &measured_time);
    if search.fits(&as_written) {
        plan.verdict = PlanVerdict::Fits;
        plan.shrunk.iter_mut().for_each(|change| change.why = "measured to be faster".into());
    }
    let split = fastest.exec_plan.split();
    if split != planned.exec_plan.split()
        && split.micro_batch * split.accumulation_steps == plan.samples_per_update
    {
        plan.advice = Some(format!(
            "measured to be the fastest: set `train.batch_size = {}` and `train.accumulation_steps = {}`",
            split.micro_batch, split.accumulation_steps
        ));
    }
    plan
}

/// Seconds per update under this plan.
fn time_updates(setup: &Setup, ledgers: Ledgers, plan: ExecutionPlan) -> Result<f64, Failure> {
    let graphs = setup.job.memory.graphs;
    let mut updates = TrialUpdates::start(setup, ledgers, plan, graphs, UPDATES_PER_CANDIDATE)?;
    let timed_update = |updates: &mut TrialUpdates| -> Result<f64, Failure> {
        let begun = Instant::now();
        updates.next_update(|_| {})?;
        setup.device().synchronize().map_err(StepError::Tensor)?;
        Ok(begun.elapsed().as_secs_f64())
    };
    timed_update(&mut updates)?;
    let (begun, mut fastest) = (Instant::now(), f64::INFINITY);
    while updates.count < UPDATES_PER_CANDIDATE && begun.elapsed() < TIME_LIMIT {
        fastest = timed_update(&mut updates)?.min(fastest);
    }
    Ok(fastest)
}
