//! Where the parameters of a model lie that is held as 8-bit integers: matrices, filters and tables in one buffer, with
//! a scale per output, or per row of a table, in another; norms and biases stay floats, in a third.

use std::ops::Range;

use super::{FlatLayout, ParamId, TensorSpec, TensorUse};

#[derive(Clone, Debug)]
pub struct Int8Layout {
    /// In declaration order.
    slots: Vec<Int8Slot>,
    /// Number of 8-bit integers, of scales and of floats.
    pub num_int8: usize,
    pub num_scales: usize,
    pub num_floats: usize,
}

/// The place of a parameter.
#[derive(Clone, Debug, PartialEq)]
pub enum Int8Slot {
    Float(Range<usize>),
    Int8 { range: Range<usize>, scales: Range<usize>, grid: ScaleGrid },
}

/// Which values of a matrix share a scale.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ScaleGrid {
    pub rows: usize,
    pub columns: usize,
    /// A column shares one, as in a weight that is (in, out). If not, a row does.
    pub per_column: bool,
}

impl ScaleGrid {
    fn of(spec: &TensorSpec) -> Self {
        let last = spec.shape.last().copied().unwrap_or(1);
        let rows = match spec.usage {
            TensorUse::Weight => spec.shape.first().copied().unwrap_or(1),
            TensorUse::TransposedWeight | TensorUse::Table => spec.len() / last.max(1),
        };
        let per_column = spec.usage == TensorUse::TransposedWeight;
        Self { rows, columns: spec.len() / rows.max(1), per_column }
    }

    pub fn num_scales(self) -> usize {
        if self.per_column { self.columns } else { self.rows }
    }
}

impl Int8Layout {
    pub fn new(params: &FlatLayout) -> Self {
        let mut all = Self { slots: Vec::new(), num_int8: 0, num_scales: 0, num_floats: 0 };
        for (spec, _) in params.in_declaration_order() {
            let take = |used: &mut usize, len: usize| {
                *used += len;
                *used - len..*used
            };
            let slot = match spec.shape.len() >= 2 {
                true => {
                    let grid = ScaleGrid::of(spec);
                    let range = take(&mut all.num_int8, spec.len());
                    Int8Slot::Int8 { range, scales: take(&mut all.num_scales, grid.num_scales()), grid }
                }
                false => Int8Slot::Float(take(&mut all.num_floats, spec.len())),
            };
            all.slots.push(slot);
        }
        all
    }

    /// In declaration order.
    pub fn slots(&self) -> &[Int8Slot] {
        &self.slots
    }

    /// Bytes of all parameters, with floats of `float_bytes`.
    pub fn bytes(&self, float_bytes: usize) -> usize {
        self.num_int8 + self.num_scales * size_of::<f32>() + self.num_floats * float_bytes
    }

    /// The sizes of those of these parameters that are 8-bit integers.
    pub fn int8_grids(&self, params: &[ParamId]) -> impl Iterator<Item = ScaleGrid> {
        params.iter().filter_map(|id| match &self.slots[id.index] {
            Int8Slot::Int8 { grid, .. } => Some(*grid),
            Int8Slot::Float(_) => None,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::params::{ParamInit, ParamRegistry};

    #[test]
    fn outputs_and_rows_of_tables_have_a_scale_and_vectors_are_floats() {
        let mut registry = ParamRegistry::default();
        let init = ParamInit::Constant(0.0);
        registry.param("linear.bias", [3], init);
        registry.param("linear.weight", [3, 2], init);
        registry.transposed_weight("c_attn.weight", [2, 5], init);
        registry.conv_weight("conv.weight", [4, 2, 3, 3], init);
        registry.table("positions", [1, 7, 2], init);
        let layout = Int8Layout::new(&registry.into_layout().unwrap().params);
        let grid = |rows, columns, per_column| ScaleGrid { rows, columns, per_column };
        let int8 = |range, scales, grid| Int8Slot::Int8 { range, scales, grid };
        assert_eq!(
            layout.slots(),
            [
                Int8Slot::Float(0..3),
                int8(0..6, 0..3, grid(3, 2, false)),
                int8(6..16, 3..8, grid(2, 5, true)),
                int8(16..88, 8..12, grid(4, 18, false)),
                int8(88..102, 12..19, grid(7, 2, false)),
            ]
        );
        assert_eq!(layout.bytes(2), 102 + 4 * 19 + 2 * 3);
    }
}
