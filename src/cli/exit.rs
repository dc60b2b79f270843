//! Exit codes, and how errors are reported.

use std::fmt;
use std::io::{self, IsTerminal, Write};

use serde_json::{Value, json};

use super::CommonArgs;
use crate::data::DataError;
use crate::history::HistoryError;
use crate::job;
use crate::train::Failure;
use crate::train::low_rank::LowRankError;
use crate::tune::SpaceError;

/// The exit codes. Nothing else decides one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exit {
    /// Success.
    Done,
    /// The run failed: I/O or internal error.
    Failure,
    /// Bad usage or a bad job.
    Usage,
    /// The job does not fit, or ran out of memory after every retry.
    Memory,
    /// Bad data.
    Data,
    /// Diverged: the loss is not finite.
    Diverged,
    /// Interrupted by SIGINT, after writing a checkpoint.
    Sigint,
    /// Interrupted by SIGTERM or SIGHUP, after writing a checkpoint.
    Sigterm,
    /// Exit code of the worker process, or 128 plus the signal that ended it.
    Worker(u8),
}

impl Exit {
    pub fn code(self) -> u8 {
        match self {
            Exit::Done => 0,
            Exit::Failure => 1,
            Exit::Usage => 2,
            Exit::Memory => 3,
            Exit::Data => 4,
            Exit::Diverged => 5,
            Exit::Sigint => 130,
            Exit::Sigterm => 143,
            Exit::Worker(code) => code,
        }
    }
}

impl From<Exit> for std::process::ExitCode {
    fn from(exit: Exit) -> Self {
        exit.code().into()
    }
}

/// An error with its exit code and hint. Its causes are its sources.
#[derive(Debug)]
pub struct CliError {
    pub exit: Exit,
    /// One lowercase sentence.
    pub message: String,
    pub hint: Option<String>,
}

impl CliError {
    /// A usage error.
    pub fn usage(message: impl Into<String>, hint: impl Into<String>) -> Self {
        Self { exit: Exit::Usage, message: message.into(), hint: Some(hint.into()) }
    }
}

impl fmt::Display for CliError {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for CliError {}

impl Exit {
    /// The exit code of an error.
    pub fn from_error(error: &anyhow::Error) -> Exit {
        if is_broken_pipe(error) {
            Exit::Done
        } else if let Some(cli_error) = error.downcast_ref::<CliError>() {
            cli_error.exit
        } else if error.is::<job::JobErrors>() || error.is::<SpaceError>() {
            Exit::Usage
        } else if let Some(failure) = error.downcast_ref::<Failure>() {
            Exit::from_failure(failure)
        } else if let Some(history) = error.downcast_ref::<HistoryError>() {
            if matches!(history, HistoryError::Read { .. }) { Exit::Failure } else { Exit::Usage }
        } else {
            Exit::Failure
        }
    }
}

impl Exit {
    fn from_failure(failure: &Failure) -> Exit {
        match failure {
            Failure::SessionDoesNotFit { .. } => Exit::Memory,
            Failure::LowRank(LowRankError::Memory { .. }) => Exit::Memory,
            Failure::WrongTask { .. } | Failure::Init(_) | Failure::Teacher(_) | Failure::LowRank(_) => Exit::Usage,
            Failure::BadRow(_) => Exit::Data,
            Failure::DoesNotFit(_) | Failure::OutOfMemory { .. } | Failure::Killed { .. } => Exit::Memory,
            Failure::Signal { signal, .. } => Exit::Worker((128 + signal) as u8),
            Failure::Data(error) if error.is_out_of_memory() => Exit::Memory,
            Failure::Data(
                DataError::ThreadSpawn { .. }
                | DataError::Panicked { .. }
                | DataError::BuffersExhausted { .. }
                // A failed write is not the data's fault.
                | DataError::Write { .. },
            ) => Exit::Failure,
            Failure::Data(DataError::InvalidSetting { .. } | DataError::Template { .. }) | Failure::Model(_) => {
                Exit::Usage
            }
            Failure::Data(_) => Exit::Data,
            Failure::Diverged { .. } | Failure::NotFinite { .. } => Exit::Diverged,
            Failure::FolderTaken(_)
            | Failure::NotARun(_)
            | Failure::NoCheckpoint(_)
            | Failure::NoSuchCheckpoint { .. }
            | Failure::BadOverride(_)
            // The weights are those of another model than the job's.
            | Failure::ForeignCheckpoint { .. }
            | Failure::UnsupportedModel { .. }
            | Failure::Locked { .. } => Exit::Usage,
            Failure::JobChanged(_)
            | Failure::BeyondEnd { .. }
            | Failure::UnknownExperiment(_)
            | Failure::DataChanged(_) => Exit::Usage,
            Failure::Io { .. } | Failure::DiskTooSmall { .. } => Exit::Failure,
            Failure::Report(_) | Failure::Tensor(_) => Exit::Failure,
            // The files of a trained model are the input of what uses it.
            Failure::UnusableCheckpoint { .. } | Failure::UnusableExport { .. } => Exit::Data,
            Failure::NoWholeCheckpoint { .. } => Exit::Failure,
        }
    }
}

/// Whether the reader of our output closed its end, which is not an error.
fn is_broken_pipe(error: &anyhow::Error) -> bool {
    error
        .chain()
        .any(|cause| cause.downcast_ref::<io::Error>().is_some_and(|e| e.kind() == io::ErrorKind::BrokenPipe))
}

/// Reports `error` to people on stderr and, with `--json`, to programs on stdout. Returns its exit code. `resume` is
/// the command that resumes the run, if the command is one that trains.
pub fn report_error(error: &anyhow::Error, common: &CommonArgs, resume: Option<String>) -> Exit {
    let exit = Exit::from_error(error);
    let hint = hint(error, resume.as_deref());
    if exit != Exit::Done {
        let text =
            colorize(&error_text(error, hint.as_deref()), common.color.enabled(io::stderr().is_terminal()));
        // If stdout and stderr are both closed, only the exit code is left.
        let _ = writeln!(io::stderr().lock(), "{text}");
        if common.json {
            let _ = writeln!(io::stdout().lock(), "{}", error_json(error, exit, hint));
        }
    }
    exit
}

fn hint(error: &anyhow::Error, resume: Option<&str>) -> Option<String> {
    match error.downcast_ref::<Failure>() {
        Some(failure) => match resume.filter(|_| failure.is_disk_full()) {
            Some(command) => failure.hint().map(|hint| format!("{hint}, then resume with `{command}`")),
            None => failure.hint(),
        },
        None => match (error.downcast_ref::<SpaceError>(), error.downcast_ref::<HistoryError>()) {
            (Some(error), _) => Some(error.hint().into()),
            (None, Some(error)) => error.hint(),
            (None, None) => error.downcast_ref::<CliError>()?.hint.clone(),
        },
    }
}

fn error_text(error: &anyhow::Error, hint: Option<&str>) -> String {
    if let Some(errors) = error.downcast_ref::<job::JobErrors>() {
        return errors.to_string();
    }
    let mut text = format!("error: {error}");
    error.chain().skip(1).for_each(|cause| text += &format!("\n  caused by: {cause}"));
    hint.into_iter().for_each(|hint| text += &format!("\n  hint: {hint}"));
    text
}

/// The error as one JSON document; mistakes in a job are its `problems`.
fn error_json(error: &anyhow::Error, exit: Exit, hint: Option<String>) -> Value {
    let causes: Vec<String> = error.chain().skip(1).map(|cause| cause.to_string()).collect();
    match error.downcast_ref::<job::JobErrors>() {
        Some(errors) => {
            json!({ "error": { "exit_code": exit.code(), "message": "the job is not valid", "problems": errors } })
        }
        None => json!({ "error": {
            "exit_code": exit.code(), "message": error.to_string(), "causes": causes, "hint": hint,
        } }),
    }
}

/// Colors the keywords that people look for first.
fn colorize(text: &str, color: bool) -> String {
    if !color {
        return text.to_owned();
    }
    let paint = |line: &str| {
        if let Some(rest) = line.strip_prefix("error:") {
            format!("\x1b[1;31merror:\x1b[0;1m{rest}\x1b[0m")
        } else if line.trim_start().starts_with("hint:") {
            line.replacen("hint:", "\x1b[1;36mhint:\x1b[0m", 1)
        } else if line.trim_end().ends_with('^') && line.trim_start().starts_with('|') {
            format!("\x1b[31m{line}\x1b[0m")
        } else {
            line.to_owned()
        }
    };
    text.lines().map(paint).collect::<Vec<_>>().join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;
    use anyhow::Context;

    /// Only a command that trains can be resumed.
    #[test]
    fn a_full_disk_says_how_to_resume_what_can_be_resumed() {
        let full = || anyhow::Error::from(Failure::io("write", "out.csv")(io::ErrorKind::StorageFull.into()));
        assert!(!hint(&full(), None).unwrap().contains("resume"));
        let resume = hint(&full(), Some("trainer fit job.toml --resume")).unwrap();
        assert!(
            resume.ends_with("free some space, then resume with `trainer fit job.toml --resume`"),
            "{resume}"
        );
    }

    #[test]
    fn an_error_keeps_its_exit_code_under_context() {
        let cli_error = CliError { exit: Exit::Data, message: "no rows".into(), hint: None };
        let error = Err::<(), _>(cli_error).context("cannot open the data").unwrap_err();
        assert_eq!(Exit::from_error(&error), Exit::Data);
        assert_eq!(error_text(&error, None), "error: cannot open the data\n  caused by: no rows");
        assert_eq!(Exit::from_error(&anyhow::anyhow!("disk")), Exit::Failure);
        assert_eq!(Exit::from_error(&io::Error::from(io::ErrorKind::BrokenPipe).into()), Exit::Done);
    }
}
