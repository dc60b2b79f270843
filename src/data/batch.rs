//! A batch of samples in host memory and the buffer behind it. [`HostBatch::with_capacity`] is the only place that
//! allocates batch memory.

use std::sync::Arc;

use super::bad_records::BadRecord;
use super::{BatchRow, DataError, Dataset, Features, InputSpec, PixelLut, SampleKey, SliceMut, TargetSpec};

/// The inputs or targets of a batch, row-major.
#[derive(Clone, Debug, PartialEq)]
pub enum BatchValues {
    /// Bytes that a lookup table maps to f32 values.
    U8(Vec<u8>, Arc<PixelLut>),
    F32(Vec<f32>),
    U32(Vec<u32>),
}

/// Samples of one update, in order. Row i of `inputs` and `targets` belongs to `ids[i]`.
#[derive(Clone, Debug, PartialEq)]
pub struct HostBatch {
    /// Update that these samples belong to, from 0.
    pub update: u64,
    pub epoch: u64,
    /// Positions of the sample order that the batch covers: its rows plus the records that were skipped.
    pub consumed: u64,
    /// Records that were skipped.
    pub bad_records: Vec<BadRecord>,
    /// Global sample indices.
    pub ids: Vec<u64>,
    /// (rows, input...); [`Features::input`] gives the shape.
    pub inputs: BatchValues,
    /// (rows, target...); [`Features::target`] gives the shape.
    pub targets: BatchValues,
    /// Number of non-padding positions per row; empty if no row is padded.
    pub lengths: Vec<u32>,
}

impl HostBatch {
    /// Allocates an empty batch with capacity for `rows` samples, or returns [`DataError::OutOfMemory`].
    pub fn with_capacity(features: &Features, rows: usize) -> Result<Self, DataError> {
        fn reserve<T>(len: Option<usize>) -> Option<Vec<T>> {
            let mut values = Vec::new();
            values.try_reserve_exact(len?).ok()?;
            Some(values)
        }
        let build = || {
            let inputs = rows.checked_mul(features.input_len());
            let targets = rows.checked_mul(features.target_len());
            Some(HostBatch {
                update: 0,
                epoch: 0,
                consumed: 0,
                bad_records: Vec::new(),
                ids: reserve(Some(rows))?,
                inputs: match (&features.input, &features.pixel_lut) {
                    (InputSpec::Floats { .. }, Some(palette)) => {
                        BatchValues::U8(reserve(inputs)?, palette.clone())
                    }
                    (InputSpec::Floats { .. } | InputSpec::Tabular { .. }, _) => {
                        BatchValues::F32(reserve(inputs)?)
                    }
                    (InputSpec::Tokens { .. }, _) => BatchValues::U32(reserve(inputs)?),
                },
                targets: match features.target {
                    TargetSpec::Values { .. } | TargetSpec::MultiLabel { .. } => {
                        BatchValues::F32(reserve(targets)?)
                    }
                    TargetSpec::Class { .. } | TargetSpec::MixedClass { .. } | TargetSpec::Tokens => {
                        BatchValues::U32(reserve(targets)?)
                    }
                },
                lengths: reserve(Some(if features.buckets.is_empty() { 0 } else { rows }))?,
            })
        };
        let bytes = features.sample_bytes().saturating_mul(rows as u64);
        build().ok_or(DataError::OutOfMemory { bytes })
    }

    /// A batch of one: sample `index` of `source`.
    pub fn single(source: &dyn Dataset, index: u64, key: SampleKey) -> Result<Self, DataError> {
        let features = source.features();
        let mut batch = Self::with_capacity(features, 1)?;
        batch.resize(features, 1);
        (batch.epoch, batch.consumed, batch.ids[0]) = (key.epoch, 1, index);
        let mut row = batch.row(features, 0);
        source.read(index, key, &mut row)?;
        let length = row.length;
        batch.lengths.iter_mut().for_each(|slot| *slot = length);
        Ok(batch)
    }

    /// Bytes of the samples in the batch.
    pub fn bytes(&self) -> u64 {
        let values = self.inputs.len() * self.inputs.element_bytes()
            + self.targets.len() * self.targets.element_bytes();
        (8 * self.ids.len() + values + 4 * self.lengths.len()) as u64
    }

    /// Bytes that the batch has allocated.
    #[cfg(test)]
    pub fn capacity_bytes(&self) -> u64 {
        let values = self.inputs.capacity() * self.inputs.element_bytes()
            + self.targets.capacity() * self.targets.element_bytes();
        (8 * self.ids.capacity() + values + 4 * self.lengths.capacity()) as u64
    }

    /// Sets the length to `rows`. The content of added rows is unspecified until the caller writes it.
    pub(super) fn resize(&mut self, features: &Features, rows: usize) {
        self.ids.resize(rows, 0);
        self.inputs.resize(rows * features.input_len());
        self.targets.resize(rows * features.target_len());
        if !features.buckets.is_empty() {
            self.lengths.resize(rows, 0);
        }
    }

    /// Mutable view of row `row`.
    pub(super) fn row(&mut self, features: &Features, row: usize) -> BatchRow<'_> {
        BatchRow {
            input: self.inputs.row(row, features.input_len()),
            target: self.targets.row(row, features.target_len()),
            length: features.input_len() as u32,
        }
    }
}

impl BatchValues {
    pub fn len(&self) -> usize {
        match self {
            BatchValues::U8(values, _) => values.len(),
            BatchValues::F32(values) => values.len(),
            BatchValues::U32(values) => values.len(),
        }
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Bytes per element.
    fn element_bytes(&self) -> usize {
        if let BatchValues::U8(..) = self { 1 } else { 4 }
    }

    #[cfg(test)]
    fn capacity(&self) -> usize {
        match self {
            BatchValues::U8(values, _) => values.capacity(),
            BatchValues::F32(values) => values.capacity(),
            BatchValues::U32(values) => values.capacity(),
        }
    }

    fn resize(&mut self, len: usize) {
        match self {
            BatchValues::U8(values, _) => values.resize(len, 0),
            BatchValues::F32(values) => values.resize(len, 0.0),
            BatchValues::U32(values) => values.resize(len, 0),
        }
    }

    fn row(&mut self, row: usize, len: usize) -> SliceMut<'_> {
        let range = row * len..(row + 1) * len;
        match self {
            BatchValues::U8(values, _) => SliceMut::U8(&mut values[range]),
            BatchValues::F32(values) => SliceMut::F32(&mut values[range]),
            BatchValues::U32(values) => SliceMut::U32(&mut values[range]),
        }
    }
}
