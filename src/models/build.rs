//! What models are put together with: it follows the shape of a sample from layer to layer.

use super::Built;
use crate::features::{Features, Input, Target};
use crate::kernels::Activation;
use crate::layers::Layer;
use crate::layers::activation::Activation as ActivationLayer;
use crate::layers::cross_entropy::CrossEntropy;
use crate::layers::dropout::Dropout;
use crate::layers::flatten::Flatten;
use crate::layers::linear::{Linear, Options};
use crate::layers::lookup::Lookup;
use crate::layers::loss::Loss;
use crate::layers::network::{Block, Network, Node};
use crate::layers::pointwise_loss::{Kind, PointwiseLoss};
use crate::params::{Declared, Init, SameName};

/// Why a model cannot be built.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ModelError {
    #[error("layer `{layer}` got samples of shape {got:?} and needs {needs}")]
    Shape { layer: String, got: Vec<usize>, needs: String },
    #[error("a `{kind}` model needs {needs}, and the data has {got}")]
    Data { kind: &'static str, needs: &'static str, got: String },
    #[error(transparent)]
    Name(#[from] SameName),
    #[error("the model has no loss")]
    NoLoss,
}

/// A network under construction.
pub struct Builder {
    pub declared: Declared,
    /// Shape of a sample at this point.
    pub shape: Vec<usize>,
    pub features: Features,
    blocks: Vec<Block>,
    loss: Option<Box<dyn Loss>>,
}

impl Builder {
    pub fn new(features: &Features) -> Self {
        let shape = match &features.input {
            Input::Floats { shape } => shape.clone(),
            Input::Row { .. } => vec![features.input_len()],
            Input::Tokens { length, .. } => vec![*length],
        };
        Self {
            declared: Declared::default(),
            shape,
            features: features.clone(),
            blocks: Vec::new(),
            loss: None,
        }
    }

    /// Ends the current block: the layers that follow belong to a new one, called `name`.
    pub fn block(&mut self, name: impl Into<String>) {
        self.blocks.push(Block { name: name.into(), nodes: Vec::new(), rank: 0 });
    }

    /// Adds a layer to the current block.
    pub fn layer(&mut self, layer: impl Layer + 'static) {
        self.shape = layer.output();
        self.node(Node::Layer(Box::new(layer)));
    }

    /// Adds a part whose output has `self.shape`.
    pub fn node(&mut self, node: Node) {
        if self.blocks.is_empty() {
            self.block("input");
        }
        if let Some(block) = self.blocks.last_mut() {
            block.nodes.push(node);
        }
    }

    /// Takes out the parts added by `body`, for a branch; the shape stays as it is after them.
    pub fn branch(
        &mut self,
        body: impl FnOnce(&mut Self) -> Result<(), ModelError>,
    ) -> Result<Vec<Node>, ModelError> {
        let before = std::mem::take(&mut self.blocks);
        self.block("branch");
        let result = body(self);
        let nodes = std::mem::replace(&mut self.blocks, before).into_iter().flat_map(|b| b.nodes).collect();
        result.map(|()| nodes)
    }

    /// A learned vector for each category of a table's row; nothing where it has none to embed.
    pub fn embed(&mut self) {
        if let Input::Row { numbers, categories } = &self.features.input {
            let layer = Lookup::new(&mut self.declared, "embeddings", *numbers, categories);
            self.block("embeddings");
            self.layer(layer);
        }
    }

    /// Dense layers `name.first`, `name.first + 1`, ... each followed by its dropout; a block each.
    pub fn dense(
        &mut self,
        name: &str,
        first: usize,
        widths: &[usize],
        act: Activation,
        dropout: f64,
    ) -> usize {
        let mut index = first;
        for &width in widths {
            let path = format!("{name}.{index}");
            self.block(&path);
            let inputs = self.shape.iter().product();
            self.flatten(&format!("{path}.flatten"));
            let layer = Linear::new(&mut self.declared, &path, &[inputs], width, Options::torch(inputs, act));
            self.layer(layer);
            self.dropout(&format!("{path}.dropout"), dropout);
            index += 1;
        }
        index
    }

    /// Nothing where a sample is a vector already.
    pub fn flatten(&mut self, name: &str) {
        if self.shape.len() > 1 {
            let shape = self.shape.clone();
            self.layer(Flatten { name: name.into(), shape });
        }
    }

    /// Nothing where the chance is 0.
    pub fn dropout(&mut self, name: &str, p: f64) {
        if p > 0.0 {
            let shape = self.shape.clone();
            self.layer(Dropout { name: name.into(), shape, p });
        }
    }

    /// An activation by itself.
    pub fn activation(&mut self, name: &str, act: Activation) {
        let shape = self.shape.clone();
        self.layer(ActivationLayer { name: name.into(), shape, act });
    }

    /// The linear map over the last dimension of a sample and its loss: cross-entropy where the data has
    /// classes or tokens, the mean squared distance where it has values. Begins as `torch.nn.Linear` does.
    pub fn classify(&mut self, name: &str, kind: &'static str) -> Result<(), ModelError> {
        let init = Init::Uniform(1.0 / (self.shape.last().copied().unwrap_or(1) as f64).sqrt());
        self.classify_from(name, kind, init, init)
    }

    /// As [`Builder::classify`], with weight and bias that begin otherwise.
    pub fn classify_from(
        &mut self,
        name: &str,
        kind: &'static str,
        init: Init,
        bias_init: Init,
    ) -> Result<(), ModelError> {
        let (width, positions) = match self.shape.split_last() {
            Some((width, leading)) => (*width, leading.iter().product()),
            None => (1, 1),
        };
        let outputs = match (&self.features.target, &self.features.input) {
            (Target::Class { names } | Target::Mixed { names }, _) => names.len(),
            (Target::Tokens, Input::Tokens { vocab, .. }) => *vocab,
            (Target::Values { len }, _) if len % positions == 0 => len / positions,
            (other, _) => {
                return Err(ModelError::Data {
                    kind,
                    needs: "classes to tell apart or values to predict",
                    got: format!("{other:?}"),
                });
            }
        };
        let weight = self.declared.param(format!("{name}.weight"), [outputs, width], init);
        let bias = Some(self.declared.param(format!("{name}.bias"), [outputs], bias_init));
        let name = name.to_owned();
        match self.features.target {
            Target::Values { .. } => self.loss(PointwiseLoss {
                name,
                kind: Kind::Squared,
                weight,
                bias,
                positions,
                width,
                outputs,
            }),
            _ => self.loss(CrossEntropy {
                name,
                weight,
                tied: false,
                bias,
                positions,
                width,
                classes: outputs,
                smoothing: 0.0,
                class_weights: None,
            }),
        }
        Ok(())
    }

    pub fn loss(&mut self, loss: impl Loss + 'static) {
        self.loss = Some(Box::new(loss));
    }

    pub fn finish(self) -> Result<Built, ModelError> {
        let mut blocks: Vec<Block> =
            self.blocks.into_iter().filter(|block| !block.nodes.is_empty()).collect();
        blocks.iter_mut().enumerate().for_each(|(i, block)| block.rank = i);
        let network = Network { blocks, loss: self.loss.ok_or(ModelError::NoLoss)? };
        Ok(Built { network, layout: self.declared.layout()? })
    }
}

impl From<crate::job::Activation> for Activation {
    fn from(act: crate::job::Activation) -> Self {
        match act {
            crate::job::Activation::Relu => Self::Relu,
            crate::job::Activation::Gelu => Self::Gelu,
            crate::job::Activation::GeluTanh => Self::GeluTanh,
            crate::job::Activation::Silu => Self::Silu,
        }
    }
}
