//! A `trainer fit` in a child process: it ends when its parent does, and a signal to the terminal reaches it through
//! its parent only.

use std::ffi::OsString;
use std::fs::File;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use crate::train::Failure;
use crate::train::parent_death;
use crate::train::run_dir::RunDir;
use crate::train::signals::Signal;

/// What every child has in common.
#[derive(Clone, Debug)]
pub struct ChildOptions {
    /// `--device` and `--backend`.
    pub arguments: Vec<OsString>,
    /// Compute threads of a child.
    pub threads: usize,
}

impl ChildOptions {
    /// Starts or continues the run of this job, up to `max_steps` updates in total. It prints into `log`.
    pub fn start(&self, job: &Path, run: &RunDir, max_steps: u64, log: &Path) -> Result<FitProcess, Failure> {
        let program = std::env::current_exe().map_err(Failure::io("find", "this program"))?;
        let started = || {
            let output = File::options().create(true).append(true).open(log)?;
            let mut command = Command::new(&program);
            command.arg("fit").arg(job).arg("--run-dir").arg(&run.root).args(["--resume", "--quiet"]);
            command.arg("--max-steps").arg(max_steps.to_string()).args(&self.arguments);
            command.env("RAYON_NUM_THREADS", self.threads.to_string());
            command.stdin(Stdio::null()).stdout(output.try_clone()?).stderr(output);
            parent_death::end_with_this_process(&mut command);
            // A terminal signals its foreground group: the first Ctrl-C must count once.
            #[cfg(unix)]
            std::os::unix::process::CommandExt::process_group(&mut command, 0);
            command.spawn()
        };
        started().map(FitProcess).map_err(Failure::io("start", &program))
    }
}

/// A running child.
pub struct FitProcess(Child);

impl FitProcess {
    /// Its exit code once it has ended: 128 plus the signal if one ended it.
    pub fn exit_code(&mut self) -> Result<Option<i32>, Failure> {
        let status = self.0.try_wait().map_err(Failure::io("wait for", "a trial"))?;
        Ok(status.map(|status| {
            #[cfg(unix)]
            if let Some(signal) = std::os::unix::process::ExitStatusExt::signal(&status) {
                return 128 + signal;
            }
            status.code().unwrap_or(1)
        }))
    }

    /// Signals it to stop with a checkpoint; a second request of the same kind ends it at once.
    pub fn stop(&mut self, signal: Signal) {
        #[cfg(unix)]
        {
            use rustix::process::{Pid, Signal as Number, kill_process};
            let number = if signal == Signal::Interrupt { Number::INT } else { Number::TERM };
            // One that has exited and is not yet reaped ignores it.
            let _ = kill_process(Pid::from_child(&self.0), number);
        }
        #[cfg(not(unix))]
        {
            let _ = (signal, self.0.kill());
        }
    }
}

impl Drop for FitProcess {
    /// After an error of the sweep: no child is left behind.
    fn drop(&mut self) {
        if matches!(self.0.try_wait(), Ok(None)) {
            self.stop(Signal::Terminate);
            let _ = self.0.wait();
        }
    }
}
