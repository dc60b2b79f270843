//! The bad records of a pass over samples: the job says whether the first ends it, or how many are left out at most.

use crate::base::units::counted;
use crate::data::DataError;
use crate::data::bad_records::{BadRecord, BadRecordPolicy, SkippedRecords};
use crate::data::split::DatasetSplit;
use crate::job::{LoaderConfig, OnBadRecord};
use crate::train::Failure;

/// The bad records found so far.
pub(super) struct BadRecords {
    policy: BadRecordPolicy,
    skipped: SkippedRecords,
    first: Option<String>,
    /// Views of each record, and the record found last: it is usually bad in all of its views and counts once.
    views: u64,
    last: Option<u64>,
}

impl BadRecords {
    pub fn new(loading: &LoaderConfig, views: u64) -> Self {
        let policy = match loading.on_bad_record {
            OnBadRecord::Fail => BadRecordPolicy::Fail,
            OnBadRecord::Skip => BadRecordPolicy::Skip { limit: loading.max_bad_records },
        };
        Self { policy, skipped: SkippedRecords::default(), first: None, views, last: None }
    }

    /// Counts those of a micro-batch.
    pub fn add(&mut self, bad: &[BadRecord]) -> Result<(), Failure> {
        for record in bad {
            if self.policy == BadRecordPolicy::Fail {
                return Err(Failure::BadRow(record.why.clone()));
            }
            if self.last.replace(record.id / self.views) != Some(record.id / self.views) {
                self.first.get_or_insert_with(|| record.why.clone());
                self.skipped.record(DatasetSplit::Valid, 0, std::slice::from_ref(record), self.policy)?;
            }
        }
        Ok(())
    }

    /// Those that were left out.
    pub fn count(&self) -> u64 {
        self.skipped.count()
    }

    /// Refuses a pass over nothing: `set` is what was read, and `usable` its records that are not bad.
    pub fn check_usable(&self, set: &str, usable: u64) -> Result<(), Failure> {
        if usable > 0 {
            return Ok(());
        }
        let records = counted(self.count(), "bad record");
        let first = self.first.as_deref().unwrap_or("none");
        let why = format!("it has {records} and no others, the first: {first}");
        Err(DataError::NoSamples { set: set.into(), why }.into())
    }
}
