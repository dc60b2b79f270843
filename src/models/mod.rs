//! From a job's `[model]` to a network of layers, without allocating a tensor.
//!
//! A model takes the features of the data and gives blocks, a loss and the layout of its parameters.
//! What does not fit together is refused here, by the name of the layer, the shape it got and the
//! shape it needs.

mod bert;
mod build;
mod cnn;
mod gpt;
mod layers;
mod llama;
mod mlp;
mod mobilenet;
mod picture;
mod resnet;
mod transformer;
mod vit;

pub use build::{Builder, ModelError};

use crate::features::{Features, Input};
use crate::job::Model;
use crate::layers::network::Network;
use crate::params::Layout;

/// A network and where its parameters lie.
pub struct Built {
    pub network: Network,
    pub layout: Layout,
}

/// Builds the network a job declares for samples of these features.
pub fn build(model: &Model, features: &Features) -> Result<Built, ModelError> {
    let mut builder = Builder::new(features);
    match (model.embeds(), &features.input) {
        (false, Input::Row { .. }) => {
            return Err(ModelError::Data {
                kind: model.kind(),
                needs: "pictures or tokens",
                got: "categories to embed".into(),
            });
        }
        _ => builder.embed(),
    }
    match model {
        Model::Mlp(mlp) => mlp::build(mlp, &mut builder)?,
        Model::Cnn(cnn) => cnn::build(cnn, &mut builder)?,
        Model::Gpt(gpt) => gpt::build(gpt, &mut builder)?,
        Model::Llama(llama) => llama::build(llama, &mut builder)?,
        Model::Bert(bert) => bert::build(bert, &mut builder)?,
        Model::Vit(vit) => vit::build(vit, &mut builder)?,
        Model::Resnet(resnet) => resnet::build(resnet, &mut builder)?,
        Model::Mobilenet(mobilenet) => mobilenet::build(mobilenet, &mut builder)?,
        Model::Layers(layers) => layers::build(layers, &mut builder)?,
    }
    builder.finish()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::features::Target;
    use crate::job::{Mobilenet, Resnet};

    fn pictures(shape: [usize; 3], classes: usize) -> Features {
        let names = (0..classes).map(|c| c.to_string()).collect();
        Features::new(Input::Floats { shape: shape.into() }, Target::Class { names })
    }

    fn refused(toml: &str, shape: [usize; 3]) -> String {
        match build(&toml::from_str(toml).unwrap(), &pictures(shape, 10)) {
            Err(error) => error.to_string(),
            Ok(_) => panic!("built"),
        }
    }

    #[test]
    fn parameters_are_as_many_as_published() {
        let count = |model: Model| {
            let built = build(&model, &pictures([224, 224, 3], 1000)).unwrap();
            let of_layers: usize = built.network.layers().iter().map(|l| l.parameters()).sum();
            let all = of_layers + built.network.loss.parameters();
            assert_eq!(all, built.layout.params.len, "what layers say and what is declared");
            assert_eq!(built.network.group(), 32);
            all
        };
        let resnet = |depth| count(Model::Resnet(Resnet { depth, ..Resnet::default() }));
        assert_eq!([resnet(18), resnet(34), resnet(50)], [11_689_512, 21_797_672, 25_557_032]);
        assert_eq!(count(Model::Mobilenet(Mobilenet::default())), 3_504_872);
    }

    #[test]
    fn a_wrong_shape_names_the_layer_and_what_it_needs() {
        let text = refused("kind = 'layers'\nlayers = [{ kind = 'linear', outputs = 3 }]", [8, 8, 1]);
        assert_eq!(
            text,
            "layer `layers.0` got samples of shape [8, 8, 1] and needs vectors; a `flatten` or `global_pool` layer makes them of pictures"
        );
        let text =
            refused("kind = 'layers'\nlayers = [{ kind = 'conv', channels = 4, kernel = 9 }]", [8, 8, 1]);
        assert_eq!(
            text,
            "layer `layers.0` got samples of shape [8, 8, 1] and needs pictures of at least 9 x 9"
        );
        let branch = "{ kind = 'residual', layers = [{ kind = 'conv', channels = 4, kernel = 1 }] }";
        let text = refused(&format!("kind = 'layers'\nlayers = [{branch}]"), [8, 8, 1]);
        assert_eq!(
            text,
            "layer `layers.0` got samples of shape [8, 8, 1] and needs a branch and a shortcut of one shape, and its branch gives [8, 8, 4]"
        );
        let text = refused(
            "kind = 'layers'\nlayers = [{ kind = 'residual', layers = [{ kind = 'dropout', p = 0.0 }] }]",
            [8, 8, 1],
        );
        assert_eq!(
            text,
            "layer `layers.0` got samples of shape [8, 8, 1] and needs a branch that computes something"
        );
        let text =
            refused("kind = 'layers'\nlayers = [{ kind = 'flatten' }, { kind = 'max_pool' }]", [8, 8, 1]);
        assert_eq!(
            text,
            "layer `layers.1` got samples of shape [64] and needs pictures, (height, width, channels)"
        );
        let text = refused("kind = 'layers'\nlayers = [{ kind = 'group_norm', groups = 3 }]", [8, 8, 4]);
        assert_eq!(
            text,
            "layer `layers.0` got samples of shape [8, 8, 4] and needs channels divisible into 3 groups"
        );
    }
}
