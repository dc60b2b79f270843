//! Builds a network of layers from a job's `[model]`, without allocating a tensor.
//!
//! Takes the features of the data; gives blocks, a loss and the layout of the parameters. Refuses shapes that do
//! not match, with the layer, the shape it needs and the shape it got.

mod bert;
mod builder;
mod cnn;
#[cfg(test)]
mod equivalence_tests;
mod factorized;
#[cfg(test)]
mod freeze_tests;
mod gpt;
#[cfg(test)]
mod int8_tests;
mod layer_list;
mod llama;
mod mlp;
mod mobilenet;
mod resnet;
mod transformer;
mod units;
#[cfg(test)]
mod units_tests;
mod vision;
mod vit;

pub use builder::{
    FEATURE_MAPS, FeatureOptions, LossOptions, ModelError, NetworkBuilder, block_named, describe_target,
};
pub use units::{unit_groups, without_pruned};

use crate::base::features::{Features, InputSpec};
use crate::graph::network::Network;
use crate::job::{ModelConfig, PruneStructure, Reductions};
use crate::params::{ParamLayout, ParamRules};

/// A network and the layout of its parameters.
pub struct BuiltModel {
    pub network: Network,
    pub layout: ParamLayout,
}

/// Builds the network that a job declares, for samples of these features, with the loss that fits the target.
pub fn build(model: &ModelConfig, features: &Features) -> Result<BuiltModel, ModelError> {
    build_with(model, features, &LossOptions::default(), &ParamRules::default())
}

/// As [`build`], with layers that are smaller than `model` says.
pub fn build_reduced(
    model: &ModelConfig,
    features: &Features,
    reductions: &Reductions,
) -> Result<BuiltModel, ModelError> {
    build_with(model, features, &LossOptions::default(), &ParamRules::of_reductions(reductions))
}

/// As [`build`], with this loss, and with parameters frozen, grouped and pruned, and layers made smaller, by `rules`.
pub fn build_with(
    model: &ModelConfig,
    features: &Features,
    loss: &LossOptions,
    rules: &ParamRules,
) -> Result<BuiltModel, ModelError> {
    let mut builder = NetworkBuilder::new(features, loss, rules);
    match (model.supports_embedding(), &features.input) {
        (false, InputSpec::Tabular { .. }) => {
            return Err(ModelError::Data {
                kind: model.kind(),
                needs: "images or tokens",
                got: "categories to embed".into(),
            });
        }
        _ => builder.embed_categories(),
    }
    match model {
        ModelConfig::Mlp(mlp) => mlp::build(mlp, &mut builder)?,
        ModelConfig::Cnn(cnn) => cnn::build(cnn, &mut builder)?,
        ModelConfig::Gpt(gpt) => gpt::build(gpt, &mut builder)?,
        ModelConfig::Llama(llama) => llama::build(llama, &mut builder)?,
        ModelConfig::Bert(bert) => bert::build(bert, &mut builder)?,
        ModelConfig::Vit(vit) => vit::build(vit, &mut builder)?,
        ModelConfig::Resnet(resnet) => resnet::build(resnet, &mut builder)?,
        ModelConfig::Mobilenet(mobilenet) => mobilenet::build(mobilenet, &mut builder)?,
        ModelConfig::Layers(layers) => layer_list::build(layers, &mut builder)?,
    }
    let mut built = builder.finish()?;
    if rules.keeps_units() {
        let all = [PruneStructure::Channels, PruneStructure::Heads];
        let groups: Vec<_> =
            all.into_iter().flat_map(|structure| unit_groups(model, structure, &built.layout)).collect();
        rules.check_kept(&groups)?;
    }
    if let Some(structure) = rules.unit_structure() {
        let groups = unit_groups(model, structure, &built.layout);
        built.layout.prune_units(groups, rules)?;
    }
    Ok(built)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::features::TargetSpec;
    use crate::job::{MobilenetConfig, ResnetConfig};

    fn image_features(shape: [usize; 3], classes: usize) -> Features {
        let names = (0..classes).map(|c| c.to_string()).collect();
        Features::new(InputSpec::Floats { shape: shape.into() }, TargetSpec::Class { names })
    }

    fn build_error(toml: &str, shape: [usize; 3]) -> String {
        match build(&toml::from_str(toml).unwrap(), &image_features(shape, 10)) {
            Err(error) => error.to_string(),
            Ok(_) => panic!("built"),
        }
    }

    #[test]
    fn parameters_are_as_many_as_published() {
        let count = |model: ModelConfig| {
            let built = build(&model, &image_features([224, 224, 3], 1000)).unwrap();
            assert_eq!(built.network.micro_batch_multiple(), 32);
            built.layout.params.len
        };
        let resnet = |depth| count(ModelConfig::Resnet(ResnetConfig { depth, ..ResnetConfig::default() }));
        assert_eq!([resnet(18), resnet(34), resnet(50)], [11_689_512, 21_797_672, 25_557_032]);
        assert_eq!(count(ModelConfig::Mobilenet(MobilenetConfig::default())), 3_504_872);
    }

    #[test]
    fn a_wrong_shape_names_the_layer_and_what_it_needs() {
        let text = build_error("kind = 'layers'\nlayers = [{ kind = 'linear', outputs = 3 }]", [8, 8, 1]);
        assert_eq!(
            text,
            "layer `layers.0` needs vectors (add a `flatten` or `global_pool` layer before it), and got samples \
             of shape [8, 8, 1]"
        );
        let text =
            build_error("kind = 'layers'\nlayers = [{ kind = 'conv', channels = 4, kernel = 9 }]", [8, 8, 1]);
        assert_eq!(
            text,
            "layer `layers.0` needs images of at least 9 x 9, and got samples of shape [8, 8, 1]"
        );
        let branch = "{ kind = 'residual', layers = [{ kind = 'conv', channels = 4, kernel = 1 }] }";
        let text = build_error(&format!("kind = 'layers'\nlayers = [{branch}]"), [8, 8, 1]);
        assert_eq!(
            text,
            "layer `layers.0` needs a branch and a shortcut of the same output shape, not [8, 8, 4] and [8, 8, 1], \
             and got samples of shape [8, 8, 1]"
        );
        let text = build_error(
            "kind = 'layers'\nlayers = [{ kind = 'residual', layers = [{ kind = 'dropout', p = 0.0 }] }]",
            [8, 8, 1],
        );
        assert_eq!(
            text,
            "layer `layers.0` needs a branch with layers other than `flatten` and `dropout` with p = 0, \
             and got samples of shape [8, 8, 1]"
        );
        let text =
            build_error("kind = 'layers'\nlayers = [{ kind = 'flatten' }, { kind = 'max_pool' }]", [8, 8, 1]);
        assert_eq!(
            text,
            "layer `layers.1` needs images (height, width, channels), and got samples of shape [64]"
        );
        let text = build_error("kind = 'layers'\nlayers = [{ kind = 'group_norm', groups = 3 }]", [8, 8, 4]);
        assert_eq!(
            text,
            "layer `layers.0` needs channels divisible into 3 groups, and got samples of shape [8, 8, 4]"
        );
    }
}
