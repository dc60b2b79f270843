//! Units that are pruned as a whole, channels or attention heads, and where each is in the tensors of a model.

use super::{MemoryFormat, TensorSpec};

/// The units of one layer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnitGroup {
    /// The layer that has them.
    pub name: String,
    /// How many there are.
    pub units: usize,
    /// Every tensor with values of them. Without one of its units, a network computes what it does with their
    /// values zero.
    pub slices: Vec<UnitSlice>,
}

/// The values of units in one tensor: along `axis` there are blocks of `block` values for one unit after the other,
/// once or several times.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnitSlice {
    pub tensor: String,
    /// Of the shape that checkpoints have.
    pub axis: usize,
    pub block: usize,
}

impl UnitGroup {
    /// Its slices of a tensor.
    pub fn strides_in<'a>(
        &'a self,
        spec: &'a TensorSpec,
        order: ValueOrder,
    ) -> impl Iterator<Item = UnitStrides> + 'a {
        let own = self.slices.iter().filter(|slice| slice.tensor == spec.name);
        own.map(move |slice| slice.strides(self.units, spec, order))
    }
}

impl UnitSlice {
    /// Of `units` units in a tensor of this shape.
    pub fn strides(&self, units: usize, spec: &TensorSpec, order: ValueOrder) -> UnitStrides {
        let inner = match (order, spec.memory_format, self.axis) {
            // Stored as (out, height, width, in).
            (ValueOrder::Stored, MemoryFormat::ChannelsLast, 1) => 1,
            (_, _, axis) => spec.shape[axis + 1..].iter().product(),
        };
        UnitStrides { units, len: spec.shape[self.axis], inner, block: self.block }
    }
}

/// The order of a tensor's values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ValueOrder {
    /// As in the flat buffer.
    Stored,
    /// As in files.
    Declared,
}

/// The unit of every value of a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UnitStrides {
    units: usize,
    /// Along the axis of the units: its length, and the values between two neighbours.
    len: usize,
    inner: usize,
    block: usize,
}

impl UnitStrides {
    /// Calls `visit` with each run of values of one unit, and the unit.
    fn for_runs<T>(self, values: &[T], mut visit: impl FnMut(usize, &[T])) {
        for (at, run) in values.chunks(self.inner.max(1)).enumerate() {
            visit(at % self.len / self.block % self.units, run);
        }
    }

    /// Adds the squares of each unit's values to its sum.
    pub fn add_squares(self, values: &[f32], sums: &mut [f64]) {
        self.for_runs(values, |unit, run| {
            sums[unit] += run.iter().map(|value| f64::from(*value).powi(2)).sum::<f64>();
        });
    }

    /// Sets the values of units that are not kept to 0.
    pub fn mask(self, mask: &mut [u8], kept: &[bool]) {
        for (at, run) in mask.chunks_mut(self.inner.max(1)).enumerate() {
            if !kept[at % self.len / self.block % self.units] {
                run.fill(0);
            }
        }
    }

    /// The values of the kept units.
    pub fn gather(self, values: &[f32], kept: &[bool]) -> Vec<f32> {
        let mut gathered = Vec::with_capacity(values.len());
        self.for_runs(values, |unit, run| {
            if kept[unit] {
                gathered.extend_from_slice(run);
            }
        });
        gathered
    }

    /// The length of its axis with this many units.
    pub fn reduced_len(self, kept: usize) -> usize {
        self.len / self.units * kept
    }

    /// Values of one unit in a tensor of `len` values.
    pub fn values_per_unit(self, len: usize) -> usize {
        len / self.units.max(1)
    }
}

/// The values of a tensor without the units that are not kept, group by group. A tensor may have units of two groups:
/// its outputs, and its inputs.
pub fn gather_kept(
    spec: &TensorSpec,
    mut values: Vec<f32>,
    groups: &[UnitGroup],
    kept: &[Vec<bool>],
    order: ValueOrder,
) -> Vec<f32> {
    let mut spec = spec.clone();
    for (group, kept) in groups.iter().zip(kept) {
        let count = kept.iter().filter(|kept| **kept).count();
        for slice in group.slices.iter().filter(|slice| slice.tensor == spec.name) {
            let strides = slice.strides(group.units, &spec, order);
            values = strides.gather(&values, kept);
            spec.shape[slice.axis] = strides.reduced_len(count);
        }
    }
    values
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::params::{ParamInit, ParamRegistry};

    fn strides(shape: &[usize], axis: usize, block: usize, units: usize, order: ValueOrder) -> UnitStrides {
        let mut registry = ParamRegistry::default();
        match shape {
            &[o, i, h, w] => registry.conv_weight("t", [o, i, h, w], ParamInit::Constant(0.0)),
            shape => registry.param("t", shape, ParamInit::Constant(0.0)),
        };
        let layout = registry.into_layout().unwrap();
        UnitSlice { tensor: "t".into(), axis, block }.strides(units, layout.params.spec(0), order)
    }

    #[test]
    fn rows_columns_and_blocks_of_them_belong_to_units() {
        let values: Vec<f32> = (0..12).map(|value| value as f32).collect();
        let rows = strides(&[4, 3], 0, 1, 4, ValueOrder::Declared);
        assert_eq!(rows.gather(&values, &[true, false, false, true]), [0.0, 1.0, 2.0, 9.0, 10.0, 11.0]);
        let columns = strides(&[4, 3], 1, 1, 3, ValueOrder::Declared);
        assert_eq!(columns.gather(&values, &[false, true, false]), [1.0, 4.0, 7.0, 10.0]);
        // Queries, keys and values of two heads of two values, in one bias.
        let heads = strides(&[12], 0, 2, 2, ValueOrder::Declared);
        assert_eq!(heads.gather(&values, &[false, true]), [2.0, 3.0, 6.0, 7.0, 10.0, 11.0]);
        assert_eq!((heads.reduced_len(1), rows.reduced_len(2), columns.reduced_len(2)), (6, 2, 2));
        let mut sums = [0.0; 2];
        heads.add_squares(&values, &mut sums);
        assert_eq!(sums, [0.0 + 1.0 + 16.0 + 25.0 + 64.0 + 81.0, 4.0 + 9.0 + 36.0 + 49.0 + 100.0 + 121.0]);
    }

    /// The input channels of a filter are its last dimension in the buffer, and its second one in a file.
    #[test]
    fn input_channels_come_last_in_the_buffer() {
        let kept = [true, false];
        let [mut stored, mut declared] = [[1u8; 8]; 2];
        strides(&[1, 2, 2, 2], 1, 1, 2, ValueOrder::Stored).mask(&mut stored, &kept);
        strides(&[1, 2, 2, 2], 1, 1, 2, ValueOrder::Declared).mask(&mut declared, &kept);
        assert_eq!(stored, [1, 0, 1, 0, 1, 0, 1, 0]);
        assert_eq!(declared, [1, 1, 1, 1, 0, 0, 0, 0]);
    }
}
