//! `trainer watch`: a run in the terminal, while another process writes it.

use std::io::{self, IsTerminal};
use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use ratatui::crossterm::event::{self, Event, KeyCode, KeyEventKind, KeyModifiers};

use super::{CliError, CommonArgs, Exit};
use crate::history::RunHistory;
use crate::report::watch::Selection;

/// Watch a run in the terminal: curves, memory against the budget, progress, messages
#[derive(Clone, Debug, Args)]
#[command(after_help = "\
Examples:
  trainer watch runs/mnist/20260101-000000

Keys: q quits; tab and 1 to 4 switch panels; up and down switch curves. It only reads the run's folder, and a run that \
has ended can be watched too.")]
pub struct WatchArgs {
    /// Folder of the run
    #[arg(value_name = "RUN", value_hint = clap::ValueHint::DirPath)]
    pub run: PathBuf,
}

/// Time between two looks at the run's folder.
const INTERVAL: Duration = Duration::from_millis(500);
/// Buckets of a curve: twice as many points as the widest terminal has columns.
const MAX_BUCKETS: usize = 300;

impl WatchArgs {
    pub fn run(&self, common: &CommonArgs) -> anyhow::Result<Exit> {
        let (mut run, mut reader) = RunHistory::open(&self.run, MAX_BUCKETS)?;
        if !io::stdout().is_terminal() {
            let hint = "`trainer runs` and `trainer report` show runs without one";
            return Err(CliError::usage("`trainer watch` needs a terminal", hint).into());
        }
        run.update(&mut reader, None)?;
        let mut selection = Selection { color: common.color.enabled(true), ..Selection::default() };
        let mut terminal = ratatui::try_init()?;
        let outcome = (|| -> anyhow::Result<Exit> {
            loop {
                terminal.draw(|frame| selection.draw(frame, &run))?;
                if event::poll(INTERVAL)?
                    && let Event::Key(key) = event::read()?
                    && key.kind == KeyEventKind::Press
                {
                    match key.code {
                        KeyCode::Char('q') | KeyCode::Esc => return Ok(Exit::Done),
                        KeyCode::Char('c') if key.modifiers.contains(KeyModifiers::CONTROL) => {
                            return Ok(Exit::Done);
                        }
                        KeyCode::Tab | KeyCode::Right => selection.turn(1),
                        KeyCode::BackTab | KeyCode::Left => selection.turn(-1),
                        KeyCode::Down => selection.curve = selection.curve.wrapping_add(1),
                        KeyCode::Up => selection.curve = selection.curve.saturating_sub(1),
                        KeyCode::Char(digit) => {
                            selection.select(digit.to_digit(10).map_or(0, |digit| digit as usize));
                        }
                        _ => {}
                    }
                }
                run.update(&mut reader, None)?;
            }
        })();
        ratatui::try_restore()?;
        outcome
    }
}
