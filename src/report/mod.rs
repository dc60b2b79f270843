//! Everything people see of a run: terminal, TensorBoard, `report.html`, plans and summaries, as renderings of its
//! events. Errors of the run itself are not rendered here; the caller that receives them reports them.

mod axes;
pub mod chart;
mod confusion_image;
pub mod data;
mod event_lines;
#[cfg(test)]
pub(crate) mod fixtures;
pub mod frontier;
pub mod html;
pub mod lr_curve;
pub mod mlflow;
pub mod plan;
pub mod profile;
mod progress;
mod reference;
pub mod runs;
mod scan_progress;
mod sentence;
mod summary;
pub mod tensorboard;
pub mod terminal;
pub(crate) mod text;
pub mod tune;
pub mod verify;
pub mod watch;

pub use mlflow::Mlflow;
pub use reference::events_markdown;
pub use scan_progress::ScanProgress;
pub use tensorboard::TensorBoard;
pub use terminal::Terminal;
pub use text::number;

/// Breaks lines to the width of a terminal; leaves them as they are elsewhere.
pub fn fit_terminal(lines: Vec<String>, terminal: &console::Term) -> Vec<String> {
    match terminal.size_checked() {
        Some((_, columns)) => text::wrap(&lines, columns.into()),
        None => lines,
    }
}

/// How much to show people.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Verbosity {
    /// Warnings only.
    Quiet,
    #[default]
    Normal,
    /// Also every part of the plan, every candidate considered, every checkpoint.
    Verbose,
}

/// How output looks to people. The caller knows the terminal, the flags and `NO_COLOR`.
#[derive(Clone, Copy, Debug, Default)]
pub struct DisplayOptions {
    pub verbosity: Verbosity,
    /// ANSI colors.
    pub color: bool,
    /// A terminal: a live progress bar, and block characters in tables.
    pub interactive: bool,
}
