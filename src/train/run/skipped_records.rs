//! The bad records that a run skipped, and how many of them it reported.

use super::context::RunContext;
use crate::data::bad_records::{BadRecord, SkippedRecords};
use crate::data::split::DatasetSplit;
use crate::events::event::Event;
use crate::train::Failure;
use crate::train::setup::{Setup, bad_record_policy};

#[derive(Default)]
pub(super) struct SkippedRecordLog {
    pub records: SkippedRecords,
    reported: u64,
}

/// The counts after an update or an evaluation, and the texts to report.
pub(super) struct CountedRecords {
    records: SkippedRecords,
    texts: Vec<String>,
}

impl SkippedRecordLog {
    /// As a checkpoint has it; all of them were reported.
    pub fn resumed(records: SkippedRecords) -> Self {
        Self { reported: records.count(), records }
    }

    /// Counts `bad` as skipped, to be [kept](Self::keep) if what skipped them succeeds; fails if there are too many.
    pub fn count(
        &self,
        setup: &Setup,
        set: DatasetSplit,
        pass: u64,
        bad: &[BadRecord],
    ) -> Result<CountedRecords, Failure> {
        let mut records = self.records.clone();
        let texts = records.record(set, pass, bad, bad_record_policy(&setup.job.data.loader))?;
        Ok(CountedRecords { records, texts })
    }

    /// Keeps the counts, and reports skipped records if there are new ones to list.
    pub fn keep(&mut self, ctx: &mut RunContext, counted: CountedRecords) -> Result<(), Failure> {
        self.records = counted.records;
        if counted.texts.is_empty() { Ok(()) } else { self.report(ctx, counted.texts) }
    }

    /// Reports the number of skipped records if it has changed, listing these.
    pub fn report(&mut self, ctx: &mut RunContext, records: Vec<String>) -> Result<(), Failure> {
        let count = self.records.count();
        if count == self.reported {
            return Ok(());
        }
        self.reported = count;
        ctx.record(Event::BadRecords { step: ctx.position.step, count, records })
    }
}
