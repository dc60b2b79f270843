//! The selection of whole channels or heads: those whose values, in all tensors together, have the smallest mean
//! square.

use candle_core::Result;

use super::{PrunedCount, Pruning, UnitCount, narrow, pruned_count};
use crate::job::{PruneScope, UnitCounts};
use crate::kernels::host;
use crate::param_store::ParamStore;
use crate::params::UnitGroup;
use crate::params::units::ValueOrder;

/// Host bytes of a selection: score, number of values, whether it is kept, and its place in the order of scores.
pub(super) const BYTES_PER_UNIT: u64 = 64;

/// The units that layers have left at this sparsity; with a global threshold, about as many.
pub fn kept_at(groups: &[UnitGroup], sparsity: f64) -> UnitCounts {
    let kept = |group: &UnitGroup| group.units - pruned_count(sparsity, group.units);
    groups.iter().map(|group| (group.name.clone(), kept(group))).collect()
}

impl Pruning {
    pub(super) fn select_units(&self, store: &ParamStore, sparsity: f64) -> Result<PrunedCount> {
        let scores = self.scores(store)?;
        let kept = match self.config.scope {
            PruneScope::Tensor => scores.iter().flat_map(|group| largest(&[group], sparsity)).collect(),
            PruneScope::Global => largest(&scores.iter().map(Vec::as_slice).collect::<Vec<_>>(), sparsity),
        };
        let mut pruned = 0;
        for tensor in &self.tensors {
            host::write(&narrow(&self.mask, &tensor.mask)?, |mask: &mut [u8]| {
                mask.fill(1);
                for (group, kept) in self.groups.iter().zip(&kept) {
                    let strides = group.strides_in(&tensor.spec, ValueOrder::Stored);
                    strides.for_each(|strides| strides.mask(mask, kept));
                }
                pruned += mask.iter().filter(|value| **value == 0).count() as u64;
            })?;
        }
        let all = kept.iter().flatten();
        let units = UnitCount {
            pruned: all.clone().filter(|kept| !**kept).count() as u64,
            units: all.count() as u64,
        };
        Ok(PrunedCount { pruned, weights: self.mask.elem_count() as u64, units: Some(units) })
    }

    /// The mean square of the values of every unit, group by group. Summed in f64 in the order of the buffer, so that
    /// threads do not change it.
    fn scores(&self, store: &ParamStore) -> Result<Vec<Vec<f64>>> {
        let mut scores: Vec<Vec<f64>> = self.groups.iter().map(|group| vec![0.0; group.units]).collect();
        let mut values = vec![0; self.groups.len()];
        for tensor in &self.tensors {
            let weights = narrow(&store.master_weights, &tensor.weights)?;
            let weights = host::read(&weights)?;
            for ((group, scores), values) in self.groups.iter().zip(&mut scores).zip(&mut values) {
                for strides in group.strides_in(&tensor.spec, ValueOrder::Stored) {
                    strides.add_squares(&weights, scores);
                    *values += strides.values_per_unit(weights.len());
                }
            }
        }
        for (scores, values) in scores.iter_mut().zip(values) {
            scores.iter_mut().for_each(|score| *score /= values.max(1) as f64);
        }
        Ok(scores)
    }
}

/// Which units are kept, group by group, when the fraction `sparsity` of all with the smallest scores is not: of equal
/// ones the first goes. The last unit of a group always stays.
fn largest(groups: &[&[f64]], sparsity: f64) -> Vec<Vec<bool>> {
    let mut kept: Vec<Vec<bool>> = groups.iter().map(|scores| vec![true; scores.len()]).collect();
    let mut left: Vec<usize> = groups.iter().map(|scores| scores.len()).collect();
    let units = |(group, scores): (usize, &&[f64])| {
        let of_unit = |(unit, score): (usize, &f64)| (*score, group, unit);
        scores.iter().enumerate().map(of_unit).collect::<Vec<_>>()
    };
    let mut order: Vec<(f64, usize, usize)> = groups.iter().enumerate().flat_map(units).collect();
    order.sort_by(|a, b| a.0.total_cmp(&b.0).then((a.1, a.2).cmp(&(b.1, b.2))));
    let mut to_prune = pruned_count(sparsity, order.len());
    for (_, group, unit) in order {
        if to_prune > 0 && left[group] > 1 {
            kept[group][unit] = false;
            left[group] -= 1;
            to_prune -= 1;
        }
    }
    kept
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_smallest_units_go_and_one_of_each_group_stays() {
        assert_eq!(largest(&[&[3.0, 1.0, 2.0, 1.0]], 0.5), [[true, false, true, false]]);
        assert_eq!(largest(&[&[0.0, 0.0]], 0.99), [[false, true]]);
        let kept = largest(&[&[1.0, 2.0], &[10.0, 20.0, 30.0]], 0.6);
        assert_eq!(kept, [vec![false, true], vec![false, false, true]]);
    }
}
