//! A progress bar for each pass over files that must finish before the first sample can be read.

use std::sync::Mutex;

use indicatif::{ProgressBar, ProgressStyle};

use crate::data::ProgressObserver;

/// Shows the current pass on stderr, one at a time.
#[derive(Default)]
pub struct ScanProgress(Mutex<Option<ProgressBar>>);

impl ProgressObserver for ScanProgress {
    fn report(&self, doing: &str, done: u64, all: u64) {
        let Ok(mut shown) = self.0.lock() else { return };
        let bar = shown.get_or_insert_with(|| {
            let style = ProgressStyle::with_template(
                "{msg} [{bar:30}] {binary_bytes} of {binary_total_bytes}, {eta} left",
            );
            let bar = ProgressBar::new(all);
            bar.with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()))
                .with_message(doing.to_owned())
        });
        if bar.message() != doing {
            bar.set_message(doing.to_owned());
        }
        bar.set_length(all);
        bar.set_position(done);
        if done >= all {
            bar.finish_and_clear();
            *shown = None;
        }
    }
}
