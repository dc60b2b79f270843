//! `trainer completions`: shell completions of the command line.

use std::io::{self, Write};

use clap::{Args, CommandFactory};
use clap_complete::Shell;

use super::{Cli, Exit};

/// Print completions for a shell
#[derive(Clone, Debug, Args)]
#[command(after_help = "\
Examples:
  trainer completions bash > ~/.local/share/bash-completion/completions/trainer
  trainer completions zsh > ~/.zfunc/_trainer
  trainer completions fish > ~/.config/fish/completions/trainer.fish")]
pub struct CompletionsArgs {
    pub shell: Shell,
}

impl CompletionsArgs {
    pub fn run(&self) -> anyhow::Result<Exit> {
        // Generate into memory first: the generator panics if its writer fails.
        let mut script = Vec::new();
        clap_complete::generate(self.shell, &mut Cli::command(), "trainer", &mut script);
        io::stdout().lock().write_all(&script)?;
        Ok(Exit::Done)
    }
}
