//! Weights of 8-bit integers compute what the floats compute that they stand for, whatever the model.

use std::collections::BTreeSet;

use candle_core::DType;

use super::equivalence_tests::{BATCH, models};
use super::{LossOptions, build_with};
use crate::base::Backend;
use crate::graph::network::Executor;
use crate::kernels::update::cast_into;
use crate::layers::Mode;
use crate::layers::gradcheck::{TestContext, int8_copy, test_device, test_spec, to_f64_vec};
use crate::memory::Ledger;
use crate::param_store::ParamStore;
use crate::params::{Int8Layout, ParamId, ParamRules};

#[test]
fn networks_of_8_bit_integers_compute_with_the_rounded_weights_and_are_planned() {
    // Without the largest, of 25 million weights: its layers are those of others.
    for (text, input) in models().iter().filter(|(text, _)| !text.contains("depth = 50")) {
        for (dtype, reference) in [(DType::F32, false), (DType::BF16, false), (DType::F32, true)] {
            let (model, loss) = (toml::from_str(text).unwrap(), LossOptions::default());
            let built = build_with(&model, &input.features(), &loss, &ParamRules::default()).unwrap();
            let mut spec = test_spec(BATCH, dtype);
            if reference {
                spec.backend = Backend::Reference { on_gpu: !test_device().is_cpu() };
            }
            let network = built.network.for_backend(spec, &built.layout.params);
            let of_layers = network.layers().into_iter().flat_map(|layer| layer.params());
            let params: Vec<ParamId> = of_layers.chain(network.loss.params()).collect();
            let read: BTreeSet<usize> = params.iter().map(|id| id.index).collect();
            let declared = built.layout.params.in_declaration_order().count();
            assert!(read.into_iter().eq(0..declared), "{text}: a parameter that no layer names");

            let layout = Int8Layout::new(&built.layout.params);
            // As initialized: with larger weights and the statistics of no data, deep networks overflow.
            let store = ParamStore::new(built.layout.clone(), 7, dtype, &test_device()).unwrap();
            let mut subject = TestContext { store, ..TestContext::with_layout(built.layout, dtype, BATCH) };
            let int8 = int8_copy(&subject.store);
            for (id, rounded) in int8.dequantize(&params).unwrap() {
                let view = subject.store.weight_views()[id.index].flatten_all().unwrap();
                cast_into(&rounded.flatten_all().unwrap(), &view).unwrap();
            }
            let batch = input.batch(dtype);
            let run = |subject: &TestContext, int8: Option<&Int8Layout>| {
                let ledger = Ledger::planning();
                let exec = Executor { int8, ..Executor::new(Some(subject.pass(Mode::Eval)), spec, &ledger) };
                let logits = network.logits(&exec, Some(&batch.inputs)).unwrap().unwrap();
                (to_f64_vec(&logits), ledger.peak())
            };
            let (rounded, _) = run(&subject, None);
            assert!(rounded.iter().all(|logit| logit.is_finite()), "{text} {dtype:?}");
            subject.store = int8;
            let (computed, peak) = run(&subject, Some(&layout));
            assert_eq!(computed, rounded, "{text} {dtype:?}");
            let planned = Ledger::planning();
            let exec = Executor { int8: Some(&layout), ..Executor::new(None, spec, &planned) };
            network.logits(&exec, None).unwrap();
            assert_eq!(planned.peak(), peak, "{text} {dtype:?}");
        }
    }
}
