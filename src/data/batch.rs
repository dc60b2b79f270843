//! A batch of samples in host memory, and the buffer it lives in: [`Batch::with_room`] is the one place where its
//! memory is allocated.

use std::sync::Arc;

use super::bad::Bad;
use super::{DataError, Features, Input, Key, Palette, Row, Slice, Source, Target};

/// The inputs or the targets of a batch, row after row.
#[derive(Clone, Debug, PartialEq)]
pub enum Values {
    /// Bytes that stand for f32 values.
    U8(Vec<u8>, Arc<Palette>),
    F32(Vec<f32>),
    U32(Vec<u32>),
}

/// Samples of one update, in order. Row i of `inputs` and `targets` belongs to `ids[i]`.
#[derive(Clone, Debug, PartialEq)]
pub struct Batch {
    /// The update these samples belong to, from 0.
    pub update: u64,
    pub epoch: u64,
    /// Samples of the order it stands for: its rows, and those that were left out.
    pub taken: u64,
    /// The records left out.
    pub bad: Vec<Bad>,
    /// Global sample indices.
    pub ids: Vec<u64>,
    /// (rows, input...), as [`Features::input`] says.
    pub inputs: Values,
    /// (rows, target...), as [`Features::target`] says.
    pub targets: Values,
    /// Positions of each row that are not padding; empty where every row is whole.
    pub lengths: Vec<u32>,
}

impl Batch {
    /// An empty batch with room for `rows` samples, or [`DataError::OutOfMemory`].
    pub fn with_room(features: &Features, rows: usize) -> Result<Self, DataError> {
        fn room<T>(len: Option<usize>) -> Option<Vec<T>> {
            let mut values = Vec::new();
            values.try_reserve_exact(len?).ok()?;
            Some(values)
        }
        let build = || {
            let inputs = rows.checked_mul(features.input_len());
            let targets = rows.checked_mul(features.target_len());
            Some(Batch {
                update: 0,
                epoch: 0,
                taken: 0,
                bad: Vec::new(),
                ids: room(Some(rows))?,
                inputs: match (&features.input, &features.palette) {
                    (Input::Floats { .. }, Some(palette)) => Values::U8(room(inputs)?, palette.clone()),
                    (Input::Floats { .. } | Input::Row { .. }, _) => Values::F32(room(inputs)?),
                    (Input::Tokens { .. }, _) => Values::U32(room(inputs)?),
                },
                targets: match features.target {
                    Target::Values { .. } => Values::F32(room(targets)?),
                    Target::Class { .. } | Target::Mixed { .. } | Target::Tokens => {
                        Values::U32(room(targets)?)
                    }
                },
                lengths: room(Some(if features.buckets.is_empty() { 0 } else { rows }))?,
            })
        };
        let bytes = features.sample_bytes().saturating_mul(rows as u64);
        build().ok_or(DataError::OutOfMemory { bytes })
    }

    /// Sample `index` of `source`, alone.
    pub fn one(source: &dyn Source, index: u64, key: Key) -> Result<Self, DataError> {
        let features = source.features();
        let mut batch = Self::with_room(features, 1)?;
        batch.resize(features, 1);
        (batch.epoch, batch.taken, batch.ids[0]) = (key.epoch, 1, index);
        let mut row = batch.row(features, 0);
        source.read(index, key, &mut row)?;
        let length = row.length;
        batch.lengths.iter_mut().for_each(|slot| *slot = length);
        Ok(batch)
    }

    /// Bytes of the samples in it.
    pub fn bytes(&self) -> u64 {
        let values = self.inputs.len() * self.inputs.size() + self.targets.len() * self.targets.size();
        (8 * self.ids.len() + values + 4 * self.lengths.len()) as u64
    }

    /// Bytes of the memory behind it.
    pub fn room_bytes(&self) -> u64 {
        let values = self.inputs.room() * self.inputs.size() + self.targets.room() * self.targets.size();
        (8 * self.ids.capacity() + values + 4 * self.lengths.capacity()) as u64
    }

    /// Makes the batch `rows` long; what rows beyond its length hold is left to be written.
    pub(super) fn resize(&mut self, features: &Features, rows: usize) {
        self.ids.resize(rows, 0);
        self.inputs.resize(rows * features.input_len());
        self.targets.resize(rows * features.target_len());
        if !features.buckets.is_empty() {
            self.lengths.resize(rows, 0);
        }
    }

    /// Row `row`, to be written.
    pub(super) fn row(&mut self, features: &Features, row: usize) -> Row<'_> {
        Row {
            input: self.inputs.row(row, features.input_len()),
            target: self.targets.row(row, features.target_len()),
            length: features.input_len() as u32,
        }
    }
}

impl Values {
    pub fn len(&self) -> usize {
        match self {
            Values::U8(values, _) => values.len(),
            Values::F32(values) => values.len(),
            Values::U32(values) => values.len(),
        }
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Bytes of one.
    fn size(&self) -> usize {
        if let Values::U8(..) = self { 1 } else { 4 }
    }

    fn room(&self) -> usize {
        match self {
            Values::U8(values, _) => values.capacity(),
            Values::F32(values) => values.capacity(),
            Values::U32(values) => values.capacity(),
        }
    }

    fn resize(&mut self, len: usize) {
        match self {
            Values::U8(values, _) => values.resize(len, 0),
            Values::F32(values) => values.resize(len, 0.0),
            Values::U32(values) => values.resize(len, 0),
        }
    }

    fn row(&mut self, row: usize, len: usize) -> Slice<'_> {
        let range = row * len..(row + 1) * len;
        match self {
            Values::U8(values, _) => Slice::U8(&mut values[range]),
            Values::F32(values) => Slice::F32(&mut values[range]),
            Values::U32(values) => Slice::U32(&mut values[range]),
        }
    }
}
