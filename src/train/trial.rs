//! `plan --measure`: the few best ways of running, each for some updates of the real job, and the clock decides.
//!
//! In this process, with the job's own data, under a ledger with the job's budget; leaves no run behind.

use std::time::{Duration, Instant};

use super::Failure;
use super::engine::{Engine, Ledgers};
use super::setup::Setup;
use crate::data::loader::Loader;
use crate::data::order::Cursor;
use crate::layers::network::StepError;
use crate::memory::Role;
use crate::memory::budget::Machine;
use crate::memory::estimate::Estimator;
use crate::memory::ladder;
use crate::memory::plan::{Plan, Verdict};
use crate::memory::search::{Considered, Request, Search};

/// Ways that are run, and updates of each: the first warms up, the fastest of the others counts.
const WAYS: usize = 4;
const UPDATES: u64 = 6;
/// After this long a way gets no further update.
const ENOUGH: Duration = Duration::from_secs(5);

/// The plan whose way was measured to be the fastest of the best.
pub fn plan(setup: &mut Setup, machine: &Machine) -> Result<Plan, Failure> {
    let request = Request { more: true, ..setup.request(machine) };
    let found = setup.with_subject_on(machine, |subject| {
        let predict = Estimator::new(*subject);
        let mut search = Search::new(&request, &predict);
        search.fastest().map(|planned| (planned, best(&search)))
    });
    let Some((planned, ways)) = found else { return Ok(setup.plan_for(machine)) };
    let mut measured = Vec::new();
    for way in ways {
        if let Some(seconds) = run(setup, machine, &request, way)? {
            measured.push((way, seconds));
        }
    }
    Ok(setup.with_subject_on(machine, |subject| {
        let predict = Estimator::new(*subject);
        let mut search = Search::new(&request, &predict);
        search.fastest();
        decide(&request, &predict, &search, planned, &measured)
    }))
}

/// The ways that fit and are predicted to be the fastest.
fn best(search: &Search) -> Vec<Considered> {
    let mut fitting: Vec<Considered> = search.seen.iter().filter(|one| search.fits(one)).copied().collect();
    fitting.sort_by(|a, b| a.time.total_cmp(&b.time));
    fitting.truncate(WAYS);
    fitting
}

/// The plan of the fastest measured, with all that was measured on the scale of the predictions: the way that
/// was planned takes as long as predicted.
fn decide(
    request: &Request,
    predict: &Estimator,
    search: &Search,
    planned: Considered,
    measured: &[(Considered, f64)],
) -> Plan {
    let fastest = measured.iter().min_by(|a, b| a.1.total_cmp(&b.1)).map_or(planned, |(way, _)| *way);
    let mut plan = ladder::describe(request, predict, search, fastest);
    let as_written = search.as_written();
    if let Some((_, base)) = measured.iter().find(|(way, _)| *way == planned) {
        for (way, seconds) in measured {
            let change = if *way == as_written { String::new() } else { ladder::changed(request, way) };
            let time = seconds / base * planned.time / as_written.time;
            plan.rungs.iter_mut().filter(|rung| rung.change == change).for_each(|rung| {
                rung.measured_time = Some(time);
            });
        }
    }
    if search.fits(&as_written) {
        plan.verdict = Verdict::Fits;
        plan.shrunk.iter_mut().for_each(|rung| rung.why = "measured to be faster".into());
    }
    let split = fastest.split;
    if fastest.split != planned.split
        && split.micro_batch * split.accumulation_steps == plan.samples_per_update
    {
        plan.advice = Some(format!(
            "measured to be the fastest: set `train.batch_size = {}` and `train.accumulation_steps = {}`",
            split.micro_batch, split.accumulation_steps
        ));
    }
    plan
}

/// Seconds of an update run in this way; none where it does not fit after all.
fn run(
    setup: &mut Setup,
    machine: &Machine,
    request: &Request,
    one: Considered,
) -> Result<Option<f64>, Failure> {
    let eight_bit = request.optimizer_8bit.as_ref().filter(|_| one.way.eight_bit);
    setup.take_optimizer(eight_bit.unwrap_or(&request.optimizer));
    setup.offload = one.way.offload;
    let ran = updates(setup, Ledgers::new(setup, machine.ram, None), one);
    setup.take_optimizer(&request.optimizer);
    setup.offload = &[];
    match ran {
        Ok(seconds) => Ok(Some(seconds)),
        Err(Failure::OutOfMemory { .. }) => Ok(None),
        Err(failure) => Err(failure),
    }
}

fn updates(setup: &Setup, ledgers: Ledgers, one: Considered) -> Result<f64, Failure> {
    let mut engine = Engine::new(
        setup,
        ledgers.clone(),
        one.way.recompute,
        setup.job.memory.graphs && setup.offload.is_empty(),
    )?;
    let micro_batch = one.split.micro_batch.min(setup.sets.train.len() as usize);
    let prefetch = ledgers.host.reserve(Role::DataPipeline, "prefetch", setup.pipeline(micro_batch));
    let _prefetch = prefetch.map_err(StepError::Oom)?;
    let source = setup.sets.train.clone();
    let mut loader = Loader::start(
        source,
        setup.order.clone(),
        Cursor::default(),
        UPDATES,
        setup.reading(micro_batch, setup.prefetch),
    )?;
    let (begun, mut fastest) = (Instant::now(), f64::INFINITY);
    for number in 1..=UPDATES {
        let update = Instant::now();
        let (mut counted, mut samples) = (Vec::new(), 0);
        while samples < setup.order.update(number - 1).len() {
            let Some(batch) = loader.next()? else { break };
            samples += batch.taken;
            if !batch.ids.is_empty() {
                counted.push(engine.learn(&batch, 1.0)?);
            }
        }
        let finding = engine.weigh(&counted, 1.0, true)?;
        // At a rate of 0 the weights stay, and every update does the same work.
        engine.update(&finding, 0.0, number)?;
        if number > 1 {
            fastest = fastest.min(update.elapsed().as_secs_f64());
        }
        if number > 1 && begun.elapsed() > ENOUGH {
            break;
        }
    }
    Ok(fastest)
}
