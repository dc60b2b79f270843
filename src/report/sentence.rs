//! How a run ended, or how far it is, in one sentence.

use super::text;
use crate::base::units::{counted, format_count};
use crate::history::{RecordedState, RunRecord};

impl RunRecord {
    pub fn sentence(&self) -> String {
        let summary = &self.summary;
        let reason = summary.reason.as_deref().map(|reason| format!(" ({reason})")).unwrap_or_default();
        let steps = match summary.steps >= summary.total_steps {
            true => counted(summary.steps, "step"),
            false => format!("{} of {}", format_count(summary.steps), counted(summary.total_steps, "step")),
        };
        let time = text::duration(summary.elapsed_s);
        let (epochs, samples) = (text::epochs(summary.epochs), counted(summary.samples, "sample"));
        let what = match self.state {
            RecordedState::Running => "is running: it made".to_owned(),
            RecordedState::Killed => "was killed, or its machine stopped, after".into(),
            RecordedState::Interrupted => format!("was interrupted{reason} after"),
            RecordedState::Diverged => format!("diverged{reason} after"),
            RecordedState::Failed => format!("failed{reason} after"),
            RecordedState::Stopped => format!("was stopped{reason} after"),
            RecordedState::Finished => format!("finished{reason} after"),
        };
        let best = summary.best.as_ref().map(|best| {
            format!("; best {} {} at step {}", best.metric, text::number(best.value), format_count(best.step))
        });
        let name = self.name();
        format!("{name} {what} {steps} ({epochs}, {samples}) in {time}{}.", best.unwrap_or_default())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::events::Summary;
    use crate::report::fixtures;

    fn sentence(events: usize) -> String {
        let mut summary = Summary::default();
        fixtures::run()[..events].iter().for_each(|record| summary.add(record));
        RunRecord::new("a".into(), summary).sentence()
    }

    #[test]
    fn the_end_of_a_run_is_one_sentence() {
        assert_eq!(
            sentence(17),
            "shapes finished after 6 steps (3 epochs, 450 samples) in 9.0 s; best valid.loss 0.2500 at step 4."
        );
        assert_eq!(
            sentence(4),
            "shapes was killed, or its machine stopped, after 2 of 6 steps (1 epoch, 150 samples) in 2.0 s."
        );
    }
}
