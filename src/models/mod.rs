//! From a job's `[model]` to a network of layers, without allocating a tensor.
//!
//! A model takes the features of the data and gives blocks, a loss and the layout of its parameters.
//! What does not fit together is refused here, by the name of the layer, the shape it got and the
//! shape it needs.

mod bert;
mod build;
mod cnn;
mod gpt;
mod llama;
mod mlp;
mod transformer;
mod vit;

pub use build::{Builder, ModelError};

use crate::features::Features;
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
    match model {
        Model::Mlp(mlp) => mlp::build(mlp, &mut builder)?,
        Model::Cnn(cnn) => cnn::build(cnn, &mut builder)?,
        Model::Gpt(gpt) => gpt::build(gpt, &mut builder)?,
        Model::Llama(llama) => llama::build(llama, &mut builder)?,
        Model::Bert(bert) => bert::build(bert, &mut builder)?,
        Model::Vit(vit) => vit::build(vit, &mut builder)?,
    }
    builder.finish()
}
