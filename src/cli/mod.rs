//! The command line: what was typed, in types, and one file a command.
//!
//! Takes arguments, gives an [`Exit`]. Data goes to stdout, everything for people about the work to
//! stderr. Owns no training: a command builds options and calls one function.

mod check;
mod completions;
pub mod exit;
pub mod fit;
mod init;
pub mod plan;
mod probe;
mod schema;
mod verify;

use std::ffi::OsString;
use std::io::{self, IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use clap::error::ErrorKind;
use clap::{Args, Parser, Subcommand, ValueEnum};

use crate::data::{Opening, Unwatched, Watch};
use crate::job::Job;
use crate::kernels::dispatch::{self, Dispatch};
use crate::memory::budget;
use crate::memory::card::{self, Card, CardError, Seen};
use crate::report::{Look, Passes, Verbosity};
pub use exit::{Exit, Stop};

/// Trains a declared model within a memory budget.
///
/// A job file states the experiment; the trainer plans its memory before the first step, makes it
/// fit, and loses nothing when disturbed.
#[derive(Debug, Parser)]
#[command(
    name = "trainer",
    version,
    after_help = "\
Examples:
  trainer init -o job.toml                 write a commented job to start from
  trainer check job.toml                   find every mistake in a job
  trainer plan job.toml                    what memory it will take, and whether it fits
  trainer fit job.toml                     train it
  trainer verify job.toml                  prove that memory does not change its result
  trainer fit job.toml --set train.epochs=20 --resume

Exit codes:
  0 done             1 the run failed     2 bad usage or bad job     3 does not fit in memory
  4 bad data         5 loss not finite    130, 143 interrupted, checkpoint written"
)]
pub struct Cli {
    #[command(flatten)]
    pub common: Common,
    #[command(subcommand)]
    pub command: Command,
}

/// Flags of every command.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Common options")]
pub struct Common {
    /// Set a key of the job, such as `train.batch_size=32`; may be repeated
    #[arg(long, global = true, value_name = "KEY=VALUE")]
    pub set: Vec<String>,
    /// Where to compute: auto, cpu, cuda or cuda:N
    #[arg(long, global = true, value_name = "DEVICE", default_value = "auto")]
    pub device: Device,
    /// Print for programs: one JSON document, or one a line, on stdout
    #[arg(long, global = true)]
    pub json: bool,
    /// Say less
    #[arg(short, long, global = true, conflicts_with = "verbose")]
    pub quiet: bool,
    /// Say more
    #[arg(short, long, global = true)]
    pub verbose: bool,
    /// When to colour what people read
    #[arg(long, global = true, value_name = "WHEN", default_value = "auto")]
    pub color: Color,
}

impl Common {
    /// Loads the job at `path` with this command line's `--set`s over it.
    pub fn job(&self, path: &Path) -> anyhow::Result<Job> {
        Ok(Job::load(path, &self.set)?)
    }

    /// The card to compute on, opened within the job's budget; none where that is the CPU.
    pub fn card(&self, memory: &crate::job::Memory) -> anyhow::Result<Option<Arc<Card>>> {
        let Some(seen) = self.seen()? else { return Ok(None) };
        let card = Card::open(seen.ordinal, |seen| budget::card(memory, seen));
        Ok(Some(Arc::new(card.map_err(no_card)?)))
    }

    /// The card that is meant, as it is now.
    pub fn seen(&self) -> anyhow::Result<Option<Seen>> {
        let ordinal = match self.device {
            Device::Cpu => return Ok(None),
            Device::Auto => None,
            Device::Cuda(ordinal) => Some(ordinal),
        };
        let mut cards = card::all().into_iter();
        match (ordinal, cards.find(|seen| ordinal.is_none_or(|n| n == seen.ordinal))) {
            (Some(ordinal), None) => {
                Err(no_card(CardError::NoCard { ordinal, why: "the driver does not show it".into() }).into())
            }
            (_, found) => Ok(found),
        }
    }

    /// The means to open data: long passes over files show their progress where people read.
    pub fn opening(&self) -> Opening {
        let watched = !self.quiet && io::stderr().is_terminal();
        let watch: Arc<dyn Watch> = if watched { Arc::new(Passes::default()) } else { Arc::new(Unwatched) };
        Opening { watch, ..Opening::default() }
    }

    /// How to show things where people read, which is a terminal or is not.
    pub fn look(&self, terminal: bool) -> Look {
        let verbosity = match (self.quiet, self.verbose) {
            (true, _) => Verbosity::Quiet,
            (_, true) => Verbosity::Verbose,
            _ => Verbosity::Normal,
        };
        Look { verbosity, color: self.color.on(terminal), live: terminal }
    }
}

#[derive(Debug, Subcommand)]
pub enum Command {
    Fit(fit::Fit),
    Plan(plan::Plan),
    Check(check::Check),
    Verify(verify::Verify),
    Probe(probe::Probe),
    Schema(schema::Schema),
    Init(init::Init),
    Completions(completions::Completions),
}

/// Where to compute, as typed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Device {
    /// The fastest this build and this machine have.
    Auto,
    Cpu,
    /// The card of this number.
    Cuda(usize),
}

impl std::str::FromStr for Device {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let device = match text {
            "auto" => Device::Auto,
            "cpu" => Device::Cpu,
            "cuda" => Device::Cuda(0),
            _ => text
                .strip_prefix("cuda:")
                .and_then(|n| n.parse().ok())
                .map(Device::Cuda)
                .ok_or("allowed: auto, cpu, cuda, cuda:N")?,
        };
        match device {
            Device::Cuda(_) if !cfg!(feature = "cuda") => Err("this build has no CUDA".into()),
            device => Ok(device),
        }
    }
}

fn no_card(error: CardError) -> Stop {
    Stop::usage(error.to_string(), "`trainer probe` lists the devices there are; `--device cpu` needs none")
}

/// When to colour.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Color {
    /// On a terminal, unless `NO_COLOR` is set
    Auto,
    Always,
    Never,
}

impl Color {
    /// Whether to colour what goes to a terminal, or not to one.
    pub fn on(self, terminal: bool) -> bool {
        match self {
            Color::Auto => terminal && std::env::var_os("NO_COLOR").is_none_or(|v| v.is_empty()),
            Color::Always => true,
            Color::Never => false,
        }
    }
}

/// The job file of a command.
#[derive(Clone, Debug, Args)]
pub struct JobFile {
    /// The job, a TOML file
    #[arg(value_name = "JOB", value_hint = clap::ValueHint::FilePath)]
    pub path: PathBuf,
}

/// Runs the command in `args`, the program's name first.
pub fn run(args: impl IntoIterator<Item = OsString>) -> Exit {
    let args: Vec<OsString> = args.into_iter().collect();
    let cli = match Cli::try_parse_from(&args) {
        Ok(cli) => cli,
        Err(error) => return usage(&error, args.iter().any(|arg| arg == "--json")),
    };
    let common = &cli.common;
    // `fit` decides for itself: its worker has a supervisor.
    if !matches!(cli.command, Command::Fit(_))
        && let Err(error) = crate::memory::refusal::end_with(Exit::Memory.code().into())
    {
        return exit::tell(&error.into(), common.json, common.color);
    }
    if let Err(error) = dispatch::requested() {
        let hint = format!(
            "unset `{}` for the best that there is: `{}`",
            dispatch::VARIABLE,
            Dispatch::best().name()
        );
        return exit::tell(&Stop::usage(error.to_string(), hint).into(), common.json, common.color);
    }
    let done = match &cli.command {
        Command::Fit(fit) => fit.run(common),
        Command::Plan(plan) => plan.run(common),
        Command::Check(check) => check.run(common),
        Command::Verify(verify) => verify.run(common),
        Command::Probe(probe) => probe.run(common),
        Command::Schema(schema) => schema.run(),
        Command::Init(init) => init.run(),
        Command::Completions(completions) => completions.run(),
    };
    done.unwrap_or_else(|error| exit::tell(&error, common.json, common.color))
}

/// Starts the threads that compute, before anything needs them: a system that refuses one is an error then.
pub fn start_threads() -> Result<(), Stop> {
    match rayon::ThreadPoolBuilder::new().build_global() {
        // Without a cause they run already.
        Err(error) => match std::error::Error::source(&error) {
            Some(cause) => Err(Stop {
                exit: Exit::Failure,
                message: format!("cannot start the threads that compute: {cause}"),
                hint: Some(
                    "raise the limits on processes (`ulimit -u`) and addresses (`ulimit -v`), or set RAYON_NUM_THREADS"
                        .into(),
                ),
            }),
            None => Ok(()),
        },
        Ok(()) => Ok(()),
    }
}

/// Help and version are data; what clap refuses is bad usage.
fn usage(error: &clap::Error, json: bool) -> Exit {
    // A reader that went away is not an error.
    let _ = error.print();
    match error.kind() {
        ErrorKind::DisplayHelp | ErrorKind::DisplayVersion => Exit::Done,
        _ => {
            if json {
                let text = error.render().to_string();
                let message = text.lines().next().unwrap_or_default().trim_start_matches("error: ");
                let document = serde_json::json!({ "error": { "exit_code": 2, "message": message } });
                let _ = writeln!(io::stdout().lock(), "{document}");
            }
            Exit::Usage
        }
    }
}

/// Writes a line to stdout; a reader that went away ends the program quietly.
pub fn say(text: impl std::fmt::Display) -> io::Result<()> {
    writeln!(io::stdout().lock(), "{text}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_well_formed() {
        <Cli as clap::CommandFactory>::command().debug_assert();
    }

    #[test]
    fn devices_parse() {
        assert_eq!("auto".parse(), Ok(Device::Auto));
        assert_eq!("cpu".parse(), Ok(Device::Cpu));
        assert!("cuda:".parse::<Device>().is_err());
        assert!("gpu".parse::<Device>().is_err());
        assert_eq!("cuda:1".parse::<Device>().is_ok(), cfg!(feature = "cuda"));
    }
}
