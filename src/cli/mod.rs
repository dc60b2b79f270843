//! The command line: arguments parsed into types, one file per command.
//!
//! Takes arguments and returns an [`Exit`]. Data goes to stdout; everything else for people goes to stderr. Contains
//! no training: a command builds options and calls one function.

mod check;
mod compare;
mod completions;
mod compress;
mod eval;
pub mod exit;
mod export;
pub mod fit;
mod generate;
mod init;
pub mod plan;
mod predict;
mod probe;
mod profile;
mod report;
mod runs;
mod schema;
mod tune;
mod verify;
mod watch;

use std::ffi::OsString;
use std::io::{self, IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{Args, Parser, Subcommand, ValueEnum};

use crate::data::{DatasetContext, NoProgress, ProgressObserver};
use crate::job::Job;
use crate::kernels::dispatch::{self, Dispatch};
use crate::memory::gpu::{self, GpuDevice, GpuError, GpuInfo};
use crate::planner::budget;
use crate::report::{DisplayOptions, ScanProgress, Verbosity};
pub use exit::{CliError, Exit};

/// Train models from a job file, within the memory of this machine
#[derive(Debug, Parser)]
#[command(
    name = "trainer",
    version,
    before_help = "\
A job is a TOML file: the model, the data, the optimizer, and how long to train. `trainer fit` trains it in a \
folder, the run, which the other commands take.",
    after_help = "\
First steps:
  trainer init --list                      templates: csv, images, text, chat, resnet, gpt and more
  trainer init csv -o job.toml             write one to a file, and edit it
  trainer check job.toml                   find mistakes, and see how the data is read
  trainer plan job.toml                    how much memory it takes, and whether it fits
  trainer fit job.toml                     train it; Ctrl-C stops it with a checkpoint
  trainer fit job.toml --resume            continue the last run
  trainer tune job.toml --set KEY=A,B      train with several settings, and compare

What happened (RUN as below):
  trainer runs                             every run: its state, best metric, time and memory
  trainer compare RUN RUN                  what differs in the jobs and the results
  trainer report RUN -o report.html        curves, memory and the plan as a page
  trainer watch RUN                        the same in the terminal, while it runs

With a trained model (RUN is a folder such as runs/job/20260101-000000):
  trainer eval RUN                         its metrics
  trainer predict RUN new.csv -o out.csv   predictions for new data
  trainer generate RUN --prompt Once       text of a language model
  trainer export RUN --format onnx -o DIR  for transformers, llama.cpp, ONNX Runtime
  trainer compress RUN --target 4x         the best smaller variant of it

Exit codes:
  0 success          1 the run failed     2 bad usage or bad job     3 does not fit in memory
  4 bad data         5 loss not finite    130, 143 interrupted, can be resumed"
)]
pub struct Cli {
    #[command(flatten)]
    pub common: CommonArgs,
    #[command(subcommand)]
    pub command: Command,
}

/// Flags of every command.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Common options")]
pub struct CommonArgs {
    /// Override a key of the job, such as train.batch_size=32; may be repeated
    #[arg(long, global = true, value_name = "KEY=VALUE")]
    pub set: Vec<String>,
    /// Device to compute on: auto, cpu, cuda or cuda:N
    #[arg(long, global = true, value_name = "DEVICE", default_value = "auto")]
    pub device: DeviceArg,
    /// Kernels: those of the device, or candle's own operations in f32, slower, to compare with
    #[arg(long, global = true, value_name = "BACKEND", default_value = "auto")]
    pub backend: BackendArg,
    /// Print JSON on stdout, for programs: one document, or one per line
    #[arg(long, global = true)]
    pub json: bool,
    /// Print only errors and warnings
    #[arg(short, long, global = true, conflicts_with = "verbose")]
    pub quiet: bool,
    /// Print more details
    #[arg(short, long, global = true)]
    pub verbose: bool,
    /// When to color the output
    #[arg(long, global = true, value_name = "WHEN", default_value = "auto")]
    pub color: ColorChoice,
}

impl CommonArgs {
    /// Loads the job at `path` and applies this command line's `--set` overrides.
    pub fn load_job(&self, path: &Path) -> anyhow::Result<Job> {
        Ok(Job::load(path, &self.set)?)
    }

    /// Opens the selected GPU within the job's budget; `None` for the CPU.
    pub fn open_gpu(&self, memory: &crate::job::MemoryConfig) -> anyhow::Result<Option<Arc<GpuDevice>>> {
        let Some(info) = self.gpu_info()? else { return Ok(None) };
        let gpu = GpuDevice::open(info.ordinal, |info| budget::gpu(memory, info));
        Ok(Some(Arc::new(gpu.map_err(gpu_error)?)))
    }

    /// The selected GPU and its current free memory; `None` for the CPU.
    pub fn gpu_info(&self) -> anyhow::Result<Option<GpuInfo>> {
        let ordinal = match self.device {
            DeviceArg::Cpu => return Ok(None),
            DeviceArg::Auto => None,
            DeviceArg::Cuda(ordinal) => Some(ordinal),
        };
        let mut gpus = gpu::all().into_iter();
        match (ordinal, gpus.find(|gpu| ordinal.is_none_or(|n| n == gpu.ordinal))) {
            (Some(ordinal), None) => {
                Err(gpu_error(GpuError::NoDevice { ordinal, why: "the driver does not list it".into() })
                    .into())
            }
            (_, found) => Ok(found),
        }
    }

    pub fn uses_reference(&self) -> bool {
        self.backend == BackendArg::Reference
    }

    /// Context for opening data. Long passes over files show progress on a terminal.
    pub fn open_options(&self) -> DatasetContext {
        let show_progress = !self.quiet && io::stderr().is_terminal();
        let observer: Arc<dyn ProgressObserver> =
            if show_progress { Arc::new(ScanProgress::default()) } else { Arc::new(NoProgress) };
        DatasetContext { observer, ..DatasetContext::default() }
    }

    /// Display options for output to a terminal, or to something else.
    pub fn display_options(&self, terminal: bool) -> DisplayOptions {
        let verbosity = match (self.quiet, self.verbose) {
            (true, _) => Verbosity::Quiet,
            (_, true) => Verbosity::Verbose,
            _ => Verbosity::Normal,
        };
        // A dumb terminal cannot redraw a line.
        let interactive = terminal && std::env::var_os("TERM").is_none_or(|term| term != "dumb");
        DisplayOptions { verbosity, color: self.color.enabled(terminal), interactive }
    }
}

#[derive(Debug, Subcommand)]
pub enum Command {
    Init(init::InitArgs),
    Check(check::CheckArgs),
    Plan(plan::PlanArgs),
    Fit(fit::FitArgs),
    Tune(tune::TuneArgs),
    Runs(runs::RunsArgs),
    Compare(compare::CompareArgs),
    Report(report::ReportArgs),
    Watch(watch::WatchArgs),
    Eval(eval::EvalArgs),
    Predict(predict::PredictArgs),
    Generate(generate::GenerateArgs),
    Export(export::ExportArgs),
    Compress(compress::CompressArgs),
    Verify(verify::VerifyArgs),
    Profile(profile::ProfileArgs),
    Probe(probe::ProbeArgs),
    Schema(schema::SchemaArgs),
    Completions(completions::CompletionsArgs),
}

/// The `--backend` argument.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum BackendArg {
    Auto,
    Reference,
}

/// The `--device` argument.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeviceArg {
    /// The fastest device of this build and machine.
    Auto,
    Cpu,
    /// The CUDA device with this ordinal.
    Cuda(usize),
}

impl std::str::FromStr for DeviceArg {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let device = match text {
            "auto" => DeviceArg::Auto,
            "cpu" => DeviceArg::Cpu,
            "cuda" => DeviceArg::Cuda(0),
            _ => text.strip_prefix("cuda:").and_then(|n| n.parse().ok()).map(DeviceArg::Cuda).ok_or_else(
                || {
                    let gpu = if text.starts_with("gpu") { "; a GPU is cuda" } else { "" };
                    format!("expected auto, cpu, cuda or cuda:N{gpu}")
                },
            )?,
        };
        match device {
            DeviceArg::Cuda(_) if !cfg!(feature = "cuda") => {
                Err("this build does not support CUDA; build with `--features cuda`".into())
            }
            device => Ok(device),
        }
    }
}

fn gpu_error(error: GpuError) -> CliError {
    CliError::usage(
        error.to_string(),
        "`trainer probe` lists the devices; `--device cpu` trains without a GPU",
    )
}

/// When to color the output.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum ColorChoice {
    // On a terminal, unless `NO_COLOR` is set. A doc comment would give every help page its long form.
    Auto,
    Always,
    Never,
}

impl ColorChoice {
    /// Whether to color output to a terminal, or to something else.
    pub fn enabled(self, terminal: bool) -> bool {
        match self {
            ColorChoice::Auto => terminal && std::env::var_os("NO_COLOR").is_none_or(|v| v.is_empty()),
            ColorChoice::Always => true,
            ColorChoice::Never => false,
        }
    }
}

/// The job file of a command.
#[derive(Clone, Debug, Args)]
pub struct JobFile {
    /// The job file (TOML)
    #[arg(value_name = "JOB", value_hint = clap::ValueHint::FilePath)]
    pub path: PathBuf,
}

/// Runs the command in `args`; the first is the program's name.
pub fn run(args: impl IntoIterator<Item = OsString>) -> Exit {
    let args: Vec<OsString> = args.into_iter().collect();
    let cli = match Cli::try_parse_from(&args) {
        Ok(cli) => cli,
        Err(error) => return handle_clap_error(error, &args),
    };
    let common = &cli.common;
    // `fit` decides for itself: a worker must abort instead of exiting.
    if !matches!(cli.command, Command::Fit(_))
        && let Err(error) = crate::memory::alloc_failure::exit_on_alloc_abort(Exit::Memory.code().into())
    {
        return exit::report_error(&error.into(), common, None);
    }
    if let Err(error) = dispatch::requested() {
        let hint = format!(
            "unset `{}` to use the best of this processor: `{}`",
            dispatch::ENV_VAR,
            Dispatch::best().name()
        );
        return exit::report_error(&CliError::usage(error.to_string(), hint).into(), common, None);
    }
    let result = match &cli.command {
        Command::Fit(fit) => fit.run(common),
        Command::Tune(tune) => tune.run(common),
        Command::Plan(plan) => plan.run(common),
        Command::Runs(runs) => runs.run(common),
        Command::Compare(compare) => compare.run(common),
        Command::Report(report) => report.run(common),
        Command::Watch(watch) => watch.run(common),
        Command::Check(check) => check.run(common),
        Command::Verify(verify) => verify.run(common),
        Command::Profile(profile) => profile.run(common),
        Command::Eval(eval) => eval.run(common),
        Command::Predict(predict) => predict.run(common),
        Command::Export(export) => export.run(common),
        Command::Compress(compress) => compress.run(common),
        Command::Generate(generate) => generate.run(common),
        Command::Probe(probe) => probe.run(common),
        Command::Schema(schema) => schema.run(),
        Command::Init(init) => init.run(),
        Command::Completions(completions) => completions.run(),
    };
    let resume = || match &cli.command {
        Command::Fit(fit) => Some(fit.resume_newest_command(common)),
        _ => None,
    };
    result.unwrap_or_else(|error| exit::report_error(&error, common, resume()))
}

/// More than machines have cores: each thread takes a stack and its part of every buffer.
const MAX_COMPUTE_THREADS: usize = 4096;

/// Starts the compute thread pool before anything uses it: a system that refuses a thread is then an error, not a
/// panic.
pub fn start_threads() -> Result<(), CliError> {
    let stated = std::env::var("RAYON_NUM_THREADS").ok().and_then(|text| text.parse::<usize>().ok());
    if let Some(threads) = stated.filter(|threads| *threads > MAX_COMPUTE_THREADS) {
        return Err(CliError {
            exit: Exit::Usage,
            message: format!("RAYON_NUM_THREADS is {threads}, expected at most {MAX_COMPUTE_THREADS}"),
            hint: None,
        });
    }
    match rayon::ThreadPoolBuilder::new().build_global() {
        // An error without a cause means that the pool is already running.
        Err(error) => match std::error::Error::source(&error) {
            Some(cause) => Err(CliError {
                exit: Exit::Failure,
                message: format!("cannot start the compute threads: {cause}"),
                hint: Some(
                    "raise the limits on processes (`ulimit -u`) and address space (`ulimit -v`), or set \
                     RAYON_NUM_THREADS"
                        .into(),
                ),
            }),
            None => Ok(()),
        },
        Ok(()) => Ok(()),
    }
}

/// Help and version are output; anything else clap refuses is a usage error.
fn handle_clap_error(mut error: clap::Error, args: &[OsString]) -> Exit {
    let hint = usage_hint(&error, args);
    if let Some(ContextValue::StyledStrs(mut tips)) = error.remove(ContextKind::Suggested) {
        // Do not suggest `--` before a flag: nobody means one as a job or a run.
        tips.retain(|tip| !tip.to_string().starts_with("to pass "));
        if !tips.is_empty() {
            error.insert(ContextKind::Suggested, ContextValue::StyledStrs(tips));
        }
    }
    if hint.is_some() {
        error.remove(ContextKind::SuggestedArg);
        error.remove(ContextKind::SuggestedSubcommand);
    }
    let json = args.iter().any(|arg| arg == "--json");
    // A closed output is not an error.
    let _ = error.print();
    if let Some(hint) = &hint {
        let _ = writeln!(io::stderr().lock(), "\n  hint: {hint}");
    }
    match error.kind() {
        ErrorKind::DisplayHelp | ErrorKind::DisplayVersion => Exit::Done,
        _ => {
            if json {
                let text = error.render().to_string();
                let message = text.lines().next().unwrap_or_default().trim_start_matches("error: ");
                let document =
                    serde_json::json!({ "error": { "exit_code": 2, "message": message, "hint": hint } });
                let _ = writeln!(io::stdout().lock(), "{document}");
            }
            Exit::Usage
        }
    }
}

/// What the flag or the command that clap does not know is called here.
fn usage_hint(error: &clap::Error, args: &[OsString]) -> Option<String> {
    let context = |kind| match error.get(kind) {
        Some(ContextValue::String(text)) => Some(text.as_str()),
        _ => None,
    };
    if let Some(command) = context(ContextKind::InvalidSubcommand) {
        return crate::job::command_called(command).map(|command| format!("here it is `trainer {command}`"));
    }
    let flag = context(ContextKind::InvalidArg).filter(|_| error.kind() == ErrorKind::UnknownArgument)?;
    let name = flag.strip_prefix("--")?;
    if context(ContextKind::SuggestedArg) == Some(flag.replace('_', "-").as_str()) {
        return None; // It is a flag, spelled as a key.
    }
    // Not for the flag itself, which another command has.
    let of_others = |note: &&str| !note.contains(&format!("`{flag}`"));
    if let Some(note) = crate::job::flag_note(name).filter(of_others) {
        return Some(note.to_owned());
    }
    let key = crate::job::flag_key(name)?;
    let given = args.iter().enumerate().find_map(|(i, arg)| {
        let arg = arg.to_str()?;
        let next = || args.get(i + 1)?.to_str().filter(|next| !next.starts_with("--"));
        arg.strip_prefix(flag)
            .and_then(|rest| rest.strip_prefix('=').or(rest.is_empty().then(next).flatten()))
    });
    let set = fit::shell_quoted(&format!("{key}={}", given.unwrap_or("VALUE")));
    Some(format!("keys of the job are set by `--set {set}`"))
}

/// Writes a line to stdout. A broken pipe ends the program quietly.
pub fn print_line(text: impl std::fmt::Display) -> io::Result<()> {
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
        assert_eq!("auto".parse(), Ok(DeviceArg::Auto));
        assert_eq!("cpu".parse(), Ok(DeviceArg::Cpu));
        assert!("cuda:".parse::<DeviceArg>().is_err());
        assert!("gpu".parse::<DeviceArg>().is_err());
        assert_eq!("cuda:1".parse::<DeviceArg>().is_ok(), cfg!(feature = "cuda"));
    }
}
