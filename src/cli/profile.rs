//! `trainer profile`: where the time and the memory of an update go.

use std::fs;
use std::io::{self, IsTerminal};
use std::path::{Path, PathBuf};

use clap::Args;

use super::eval::counting_bar;
use super::plan::{eprint_plan, local_machine};
use super::{CommonArgs, Exit, JobFile, print_line, start_threads};
use crate::report;
use crate::train::Failure;
use crate::train::profile::{Profile, profile};
use crate::train::setup::Setup;

/// Measure where the time and the memory of an update go
#[derive(Clone, Debug, Args)]
#[command(after_help = "\
Examples:
  trainer profile job.toml                     the slowest layers, and the hotspots in words
  trainer profile job.toml -v --steps 50       every layer, and what recomputing each block would free and cost
  trainer profile job.toml -o profile          also profile.json, trace.json (chrome://tracing, \
Perfetto) and a flame graph")]
pub struct ProfileArgs {
    #[command(flatten)]
    pub job: JobFile,
    /// Updates to profile; as many are timed without the profile, for its overhead
    #[arg(long, value_name = "N", default_value_t = 10, value_parser = clap::value_parser!(u64).range(1..=100_000))]
    pub steps: u64,
    /// A folder for profile.json, trace.json and flamegraph.svg
    #[arg(short, long, value_name = "DIR", value_hint = clap::ValueHint::DirPath)]
    pub output: Option<PathBuf>,
}

impl ProfileArgs {
    pub fn run(&self, common: &CommonArgs) -> anyhow::Result<Exit> {
        let job = common.load_job(&self.job.path)?;
        start_threads()?;
        let (machine, job_memory) = (local_machine(&job, common)?, job.memory.clone());
        let mut setup = Setup::open(job, machine.ram, &common.open_options())?.with_process_measured();
        setup.set_reference(common.uses_reference());
        let setup = setup.on_gpu(common.open_gpu(&job_memory)?);
        let display = common.display_options(io::stderr().is_terminal());
        let bar = counting_bar(display, self.steps, "profile", "updates");
        // On a pool thread, as in a run.
        let measured = rayon::scope(|_| profile(&setup, &machine, self.steps, |done| bar.set_position(done)));
        bar.finish_and_clear();
        if let Err(Failure::DoesNotFit(plan)) = &measured {
            eprint_plan(plan, common)?;
        }
        let measured = measured?;
        if let Some(folder) = &self.output {
            write_files(&measured, folder).map_err(Failure::io("write", folder))?;
        }
        if common.json {
            print_line(serde_json::to_string_pretty(&measured)?)?;
        } else if !common.quiet {
            let display = common.display_options(io::stdout().is_terminal());
            let lines = report::profile::lines(&measured, display);
            report::fit_terminal(lines, &console::Term::stdout()).iter().try_for_each(print_line)?;
        }
        Ok(Exit::Done)
    }
}

fn write_files(profile: &Profile, folder: &Path) -> io::Result<()> {
    fs::create_dir_all(folder)?;
    fs::write(folder.join("profile.json"), serde_json::to_vec_pretty(profile)?)?;
    fs::write(folder.join("trace.json"), serde_json::to_vec(&report::profile::trace(profile))?)?;
    let mut options = inferno::flamegraph::Options::default();
    options.title = format!("an update of {:.3} ms", 1e3 * profile.update_s);
    options.count_name = "µs".into();
    let stacks = report::profile::folded_stacks(profile);
    let mut svg = io::BufWriter::new(fs::File::create(folder.join("flamegraph.svg"))?);
    inferno::flamegraph::from_lines(&mut options, stacks.iter().map(String::as_str), &mut svg)
        .map_err(io::Error::other)
}
