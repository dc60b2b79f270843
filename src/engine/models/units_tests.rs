//! A model without some of its channels or heads computes what it does with their values zero.

use candle_core::{DType, Tensor};

use super::equivalence_tests::{BATCH, Input, models};
use super::units::{resize, unit_groups};
use super::{BuiltModel, build_reduced};
use crate::graph::network::Executor;
use crate::job::{ModelConfig, PruneStructure, Reductions, UnitCounts};
use crate::kernels::update::cast_into;
use crate::layers::Mode;
use crate::layers::gradcheck::{TestContext, random_tensor, test_device, test_spec, to_f64_vec};
use crate::memory::Ledger;
use crate::param_store::ParamStore;
use crate::params::units::{ValueOrder, gather_kept};
use crate::params::{FlatLayout, ParamLayout, UnitGroup};

/// The outputs of a model in evaluation, with these weights and statistics.
fn logits(built: BuiltModel, input: Input, [weights, stats]: [&[f32]; 2]) -> Vec<f64> {
    let (context, ledger) = (TestContext::with_layout(built.layout, DType::F32, BATCH), Ledger::planning());
    let store = &context.store;
    for (values, buffer) in [(weights, &store.master_weights), (stats, &store.stats)] {
        if !values.is_empty() {
            cast_into(&Tensor::from_slice(values, values.len(), &test_device()).unwrap(), buffer).unwrap();
        }
    }
    store.sync_compute_weights().unwrap();
    let (spec, pass) = (test_spec(BATCH, DType::F32), Some(context.pass(Mode::Eval)));
    let exec = Executor::new(pass, spec, &ledger);
    let output = built.network.logits(&exec, Some(&input.batch(DType::F32).inputs)).unwrap();
    to_f64_vec(&output.unwrap())
}

/// Initial values and a little noise, so that none is zero.
fn noisy(initial: &Tensor) -> Vec<f32> {
    let values = to_f64_vec(initial);
    let noise = to_f64_vec(&random_tensor(&[values.len().max(1)], 3));
    values.iter().zip(noise).map(|(value, noise)| (value + 0.01 * noise) as f32).collect()
}

/// The values with units zeroed, and without them, in the order of `reduced`.
fn both(
    flat: &FlatLayout,
    reduced: &FlatLayout,
    mut values: Vec<f32>,
    groups: &[UnitGroup],
    kept: &[Vec<bool>],
    zeroes: bool,
) -> [Vec<f32>; 2] {
    let mut gathered = Vec::new();
    for (spec, _) in reduced.iter() {
        let (whole, range) = flat.iter().find(|(whole, _)| whole.name == spec.name).unwrap();
        let found = gather_kept(whole, values[range].to_vec(), groups, kept, ValueOrder::Stored);
        assert_eq!(found.len(), spec.len(), "{}: {:?} of {:?}", spec.name, spec.shape, whole.shape);
        gathered.extend(found);
    }
    for (spec, range) in flat.iter().filter(|_| zeroes) {
        let mut mask = vec![1; range.len()];
        for (group, kept) in groups.iter().zip(kept) {
            group.strides_in(spec, ValueOrder::Stored).for_each(|strides| strides.mask(&mut mask, kept));
        }
        values[range].iter_mut().zip(mask).for_each(|(value, mask)| *value *= f32::from(mask));
    }
    [values, gathered]
}

fn shapes(layout: &ParamLayout) -> Vec<(&str, &[usize])> {
    layout.params.iter().map(|(spec, _)| (spec.name.as_str(), spec.shape.as_slice())).collect()
}

#[test]
fn units_that_are_zero_can_be_left_out() {
    for (text, input) in &models() {
        let model: ModelConfig = toml::from_str(text).unwrap();
        for structure in [PruneStructure::Channels, PruneStructure::Heads] {
            let build = |kept: &UnitCounts, model: &ModelConfig| {
                let reductions = Reductions { kept: kept.clone(), ..Reductions::default() };
                build_reduced(model, &input.features(), &reductions).unwrap_or_else(|e| panic!("{text}: {e}"))
            };
            let whole = build(&UnitCounts::new(), &model);
            let groups = unit_groups(&model, structure, &whole.layout);
            let has_units = structure.kinds().is_some_and(|kinds| kinds.contains(&model.kind()));
            assert_eq!(!groups.is_empty(), has_units, "{text}");
            if groups.is_empty() {
                continue;
            }
            let keep = |group: &UnitGroup| (0..group.units).map(|unit| unit * 5 % 3 == 0).collect();
            let kept: Vec<Vec<bool>> = groups.iter().map(keep).collect();
            let count = |(group, kept): (&UnitGroup, &Vec<bool>)| {
                (group.name.clone(), kept.iter().filter(|kept| **kept).count())
            };
            let counts: UnitCounts = groups.iter().zip(&kept).map(count).collect();
            let reduced = build(&counts, &model);
            let (a, b) = (&whole.layout, &reduced.layout);
            let store = ParamStore::new(a.clone(), 7, DType::F32, &test_device()).unwrap();
            let [weights, fewer] =
                both(&a.params, &b.params, noisy(&store.master_weights), &groups, &kept, true);
            let [stats, fewer_stats] = both(&a.stats, &b.stats, noisy(&store.stats), &groups, &kept, false);
            let mut resized = model.clone();
            let others = resize(&mut resized, counts);
            assert_eq!(shapes(&build(&others, &resized).layout), shapes(&reduced.layout), "{text}");
            let (masked, shrunk) =
                (logits(whole, *input, [&weights, &stats]), logits(reduced, *input, [&fewer, &fewer_stats]));
            let scale = masked.iter().fold(1e-6f64, |most, value| most.max(value.abs()));
            let error = masked.iter().zip(&shrunk).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max) / scale;
            assert!(error < 1e-4, "{text} {structure:?}: {error}");
            assert!(masked.iter().any(|value| *value != masked[0]), "{text}: {masked:?}");
        }
    }
}

#[test]
fn layers_keep_what_they_have() {
    let model: ModelConfig = toml::from_str("kind = 'mlp'\nhidden = [24]").unwrap();
    let error = |layer: &str, count: usize| {
        let reductions =
            Reductions { kept: UnitCounts::from([(layer.to_owned(), count)]), ..Reductions::default() };
        build_reduced(&model, &Input::Vector.features(), &reductions).err().unwrap().to_string()
    };
    assert_eq!(error("layers.0", 25), "`prune.kept` has 25 for `layers.0`, which has 24");
    assert_eq!(
        error("layers.1", 2),
        "`prune.kept` has `layers.1`, which is no layer with channels or heads to prune; those layers are `layers.0`"
    );
    let none: ModelConfig =
        toml::from_str("kind = 'layers'\nlayers = [{ kind = 'linear', outputs = 3 }]").unwrap();
    let kept = UnitCounts::from([("layers.0".to_owned(), 2)]);
    let reductions = Reductions { kept, ..Reductions::default() };
    assert_eq!(
        build_reduced(&none, &Input::Vector.features(), &reductions).err().unwrap().to_string(),
        "`prune.kept` has `layers.0`, which is no layer with channels or heads to prune; there are none"
    );
}
