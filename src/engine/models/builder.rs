//! Builds networks: tracks the shape of a sample from layer to layer.

use super::BuiltModel;
use crate::base::features::{Features, InputSpec, TargetSpec};
use crate::base::units::counted;
use crate::graph::network::{FeatureMatch, LayerBlock, Network, Node};
use crate::job::LossKind;
use crate::kernels::Activation;
use crate::layers::Layer;
use crate::layers::activation::ActivationLayer;
use crate::layers::categorical_embedding::CategoricalEmbedding;
use crate::layers::cross_entropy::CrossEntropy;
use crate::layers::distillation::{DistillOptions, Distillation};
use crate::layers::dropout::Dropout;
use crate::layers::fake_quantize::FakeQuantize;
use crate::layers::flatten::Flatten;
use crate::layers::linear::LinearOptions;
use crate::layers::loss::Loss;
use crate::layers::pointwise_loss::{PointwiseLoss, PointwiseLossFn};
use crate::params::{DuplicateName, ParamId, ParamInit, ParamRegistry, ParamRules, RulesError, near_names};

/// What the names of the linear maps of features begin with: parameters of training alone.
pub const FEATURE_MAPS: &str = "distill.features.";

/// Why a model cannot be built.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ModelError {
    #[error("layer `{layer}` needs {needs}, and got samples of shape {got:?}")]
    Shape { layer: String, got: Vec<usize>, needs: String },
    #[error("models of kind `{kind}` need {needs}, and the data has {got}")]
    Data { kind: &'static str, needs: &'static str, got: String },
    #[error("`{}` needs {needs} as targets, and the data has {got}", key(loss))]
    Loss { loss: &'static str, needs: &'static str, got: String },
    #[error("`train.class_weights` names `{name}`, which is no class; the classes are {classes}")]
    ClassWeight { name: String, classes: String },
    #[error("`train.class_weights` is 0 for every class of the training set: there is nothing to learn from")]
    NoClassWeight,
    #[error(
        "`train.class_weights = \"balanced\"` needs the samples per class, and this data does not count them"
    )]
    NoClassCounts,
    #[error("`{key}` names \"{metric}\", and the data has {got}, whose metrics are {known}")]
    Metric { key: &'static str, metric: &'static str, got: String, known: String },
    #[error(transparent)]
    DuplicateName(#[from] DuplicateName),
    #[error(transparent)]
    Rules(#[from] RulesError),
    #[error("the model has no loss")]
    NoLoss,
    #[error("`distill.features` names `{name}`, which is no block of the {whose}; {near}")]
    NoBlock { whose: &'static str, name: String, near: String },
    #[error(
        "`distill.features` compares `{student}`, of shape {ours:?}, with the teacher's `{teacher}`, of shape {theirs:?}: they \
         may differ in their last dimension only"
    )]
    FeatureShape { student: String, teacher: String, ours: Vec<usize>, theirs: Vec<usize> },
}

/// The job key that sets a loss or what belongs to it.
fn key(loss: &str) -> String {
    match loss {
        "distill" => "[distill]".to_owned(),
        "class_weights" | "label_smoothing" => format!("train.{loss}"),
        _ => format!("train.loss = \"{loss}\""),
    }
}

/// The loss of a model, resolved from the job and its data.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct LossOptions {
    pub kind: LossKind,
    pub huber_delta: f64,
    pub focal_gamma: f64,
    pub label_smoothing: f64,
    /// One per class.
    pub class_weights: Option<Vec<f32>>,
    /// A teacher's part in it.
    pub distill: Option<DistillOptions>,
    /// Features of a teacher that the model learns to predict.
    pub features: Vec<FeatureOptions>,
}

/// A block of the model, and a block of its teacher whose output is to be predicted from it.
#[derive(Clone, Debug, PartialEq)]
pub struct FeatureOptions {
    pub student: String,
    /// Index of the block, and the last dimension of its output.
    pub teacher: usize,
    pub width: usize,
    /// Factor on the mean squared error.
    pub weight: f64,
}

/// The linear layer of a loss.
pub(super) struct HeadParams {
    /// (outputs, width)
    pub weight: ParamId,
    pub bias: Option<ParamId>,
    /// Rows per sample.
    pub positions: usize,
    pub width: usize,
    pub outputs: usize,
}

/// A network under construction.
pub struct NetworkBuilder {
    pub registry: ParamRegistry,
    /// Shape of one sample at this point.
    pub shape: Vec<usize>,
    pub features: Features,
    loss_options: LossOptions,
    blocks: Vec<LayerBlock>,
    loss: Option<Box<dyn Loss>>,
}

impl NetworkBuilder {
    pub fn new(features: &Features, loss: &LossOptions, rules: &ParamRules) -> Self {
        let shape = match &features.input {
            InputSpec::Floats { shape } => shape.clone(),
            InputSpec::Tabular { .. } => vec![features.input_len()],
            InputSpec::Tokens { length, .. } => vec![*length],
        };
        Self {
            registry: ParamRegistry::with_rules(rules.clone()),
            shape,
            features: features.clone(),
            loss_options: loss.clone(),
            blocks: Vec::new(),
            loss: None,
        }
    }

    /// Ends the current block: the layers that follow belong to a new one, called `name`.
    pub fn begin_block(&mut self, name: impl Into<String>) {
        self.blocks.push(LayerBlock { name: name.into(), nodes: Vec::new(), recompute_rank: 0 });
    }

    /// Adds a layer to the current block.
    pub fn push_layer(&mut self, layer: impl Layer + 'static) {
        self.shape = layer.output_shape();
        self.push_node(Node::Layer(Box::new(layer)));
    }

    /// Adds a node whose output has `self.shape`.
    pub fn push_node(&mut self, node: Node) {
        if self.blocks.is_empty() {
            self.begin_block("input");
        }
        if let Some(block) = self.blocks.last_mut() {
            block.nodes.push(node);
        }
    }

    /// Collects the nodes that `body` adds into a branch; `self.shape` stays as they leave it.
    pub fn build_branch(
        &mut self,
        body: impl FnOnce(&mut Self) -> Result<(), ModelError>,
    ) -> Result<Vec<Node>, ModelError> {
        let before = std::mem::take(&mut self.blocks);
        self.begin_block("branch");
        let result = body(self);
        let nodes = std::mem::replace(&mut self.blocks, before).into_iter().flat_map(|b| b.nodes).collect();
        result.map(|()| nodes)
    }

    /// Embeds the categorical columns of a table row; does nothing if there are none.
    pub fn embed_categories(&mut self) {
        if let InputSpec::Tabular { num_numeric, cardinalities } = &self.features.input {
            let layer =
                CategoricalEmbedding::new(&mut self.registry, "embeddings", *num_numeric, cardinalities);
            self.begin_block("embeddings");
            self.push_layer(layer);
        }
    }

    /// How many of the `units` of a layer, channels or heads, are left after pruning.
    pub(super) fn kept_units(&self, layer: &str, units: usize) -> Result<usize, ModelError> {
        Ok(self.registry.rules().kept_of(layer, units)?)
    }

    /// Dense layers `name.first`, `name.first + 1`, ... each followed by dropout, one block each.
    pub fn dense_layers(
        &mut self,
        name: &str,
        first: usize,
        widths: &[usize],
        act: Activation,
        dropout: f64,
    ) -> Result<usize, ModelError> {
        let mut index = first;
        for &width in widths {
            let path = format!("{name}.{index}");
            let width = self.kept_units(&path, width)?;
            self.begin_block(&path);
            let inputs = self.shape.iter().product();
            self.flatten(&format!("{path}.flatten"));
            self.linear(&path, width, LinearOptions::torch_default(inputs, act));
            self.dropout(&format!("{path}.dropout"), dropout);
            index += 1;
        }
        Ok(index)
    }

    /// Does nothing if a sample is already a vector.
    pub fn flatten(&mut self, name: &str) {
        if self.shape.len() > 1 {
            let shape = self.shape.clone();
            self.push_layer(Flatten { name: name.into(), shape });
        }
    }

    /// Does nothing if `p` is 0.
    pub fn dropout(&mut self, name: &str, p: f64) {
        if p > 0.0 {
            let shape = self.shape.clone();
            self.push_layer(Dropout { name: name.into(), shape, p });
        }
    }

    /// A standalone activation.
    pub fn activation(&mut self, name: &str, act: Activation) {
        let shape = self.shape.clone();
        self.push_layer(ActivationLayer { name: name.into(), shape, act });
    }

    /// The last linear layer and its loss: cross-entropy for classes or tokens, mean squared error for values.
    /// Initialized like `torch.nn.Linear`.
    pub fn add_head(&mut self, name: &str, kind: &'static str) -> Result<(), ModelError> {
        let init = ParamInit::Uniform(1.0 / (self.shape.last().copied().unwrap_or(1) as f64).sqrt());
        self.add_head_with_init(name, kind, init, init)
    }

    /// Like [`NetworkBuilder::add_head`], with explicit initialization of weight and bias.
    pub fn add_head_with_init(
        &mut self,
        name: &str,
        kind: &'static str,
        init: ParamInit,
        bias_init: ParamInit,
    ) -> Result<(), ModelError> {
        let (width, positions) = match self.shape.split_last() {
            Some((width, leading)) => (*width, leading.iter().product()),
            None => (1, 1),
        };
        let outputs = match (&self.features.target, &self.features.input) {
            (
                TargetSpec::Class { names }
                | TargetSpec::MixedClass { names }
                | TargetSpec::MultiLabel { names },
                _,
            ) => names.len(),
            (TargetSpec::Tokens, InputSpec::Tokens { vocab, .. }) => *vocab,
            (TargetSpec::Values { len }, _) if len % positions == 0 => len / positions,
            (other, _) => {
                return Err(ModelError::Data {
                    kind,
                    needs: "classes or values as targets",
                    got: describe_target(other),
                });
            }
        };
        let weight = self.registry.param(format!("{name}.weight"), [outputs, width], init);
        let bias = Some(self.registry.param(format!("{name}.bias"), [outputs], bias_init));
        let name = name.to_owned();
        let head = HeadParams { weight, bias, positions, width, outputs };
        match self.features.target {
            TargetSpec::Values { .. } => self.set_value_loss(name, head),
            _ => self.set_class_loss(name, head),
        }
    }

    /// The error of a loss, or of a key that belongs to one, which does not fit the targets.
    fn wrong_loss(&self, loss: &'static str, needs: &'static str) -> ModelError {
        ModelError::Loss { loss, needs, got: describe_target(&self.features.target) }
    }

    /// The loss over values of a linear layer.
    fn set_value_loss(&mut self, name: String, head: HeadParams) -> Result<(), ModelError> {
        let options = &self.loss_options;
        let kind = match options.kind {
            LossKind::Auto | LossKind::Mse => PointwiseLossFn::SquaredError,
            LossKind::Mae => PointwiseLossFn::AbsoluteError,
            LossKind::Huber => PointwiseLossFn::Huber { delta: options.huber_delta },
            LossKind::CrossEntropy => return Err(self.wrong_loss("cross_entropy", "classes or tokens")),
            LossKind::Bce => return Err(self.wrong_loss("bce", "several labels per sample, or two classes,")),
            LossKind::Focal => return Err(self.wrong_loss("focal", "classes or several labels per sample")),
        };
        if options.label_smoothing > 0.0 || options.class_weights.is_some() {
            let loss = if options.class_weights.is_some() { "class_weights" } else { "label_smoothing" };
            return Err(self.wrong_loss(loss, "classes"));
        }
        if options.distill.is_some() {
            return Err(self.wrong_loss("distill", "one class per sample, or tokens,"));
        }
        self.set_pointwise_loss(name, head, kind);
        Ok(())
    }

    fn set_pointwise_loss(&mut self, name: String, head: HeadParams, kind: PointwiseLossFn) {
        let HeadParams { weight, bias, positions, width, outputs, .. } = head;
        let positive_weights = self.loss_options.class_weights.clone().map(Into::into);
        let smoothing = self.loss_options.label_smoothing;
        self.set_loss(PointwiseLoss {
            name,
            kind,
            weight,
            bias,
            positions,
            width,
            outputs,
            positive_weights,
            smoothing,
        });
    }

    /// The loss over the classes or labels of a linear layer.
    pub(super) fn set_class_loss(&mut self, name: String, head: HeadParams) -> Result<(), ModelError> {
        let options = &self.loss_options;
        let (target, gamma) = (&self.features.target, options.focal_gamma);
        match options.kind {
            LossKind::Mse => return Err(self.wrong_loss("mse", "values")),
            LossKind::Mae => return Err(self.wrong_loss("mae", "values")),
            LossKind::Huber => return Err(self.wrong_loss("huber", "values")),
            _ => {}
        }
        if let TargetSpec::MultiLabel { .. } = target {
            let kind = match options.kind {
                LossKind::CrossEntropy => {
                    return Err(self.wrong_loss("cross_entropy", "one class per sample"));
                }
                LossKind::Focal => PointwiseLossFn::Focal { gamma },
                _ => PointwiseLossFn::BceWithLogits,
            };
            if options.distill.is_some() {
                return Err(self.wrong_loss("distill", "one class per sample, or tokens,"));
            }
            self.set_pointwise_loss(name, head, kind);
            return Ok(());
        }
        let focal_gamma = match (options.kind, target) {
            // The softmax over two logits is the sigmoid of their difference.
            (LossKind::Bce, TargetSpec::Class { names } | TargetSpec::MixedClass { names })
                if names.len() == 2 =>
            {
                0.0
            }
            (LossKind::Bce, _) => {
                return Err(self.wrong_loss("bce", "several labels per sample, or two classes,"));
            }
            (LossKind::Focal, TargetSpec::Class { .. }) if options.label_smoothing == 0.0 => gamma,
            (LossKind::Focal, TargetSpec::Class { .. }) => {
                return Err(self.wrong_loss("focal", "`label_smoothing = 0` and classes"));
            }
            (LossKind::Focal, _) => {
                return Err(self.wrong_loss("focal", "one class or several labels per sample"));
            }
            _ => 0.0,
        };
        let HeadParams { weight, bias, positions, width, outputs } = head;
        let (hard, distill) = (
            CrossEntropy {
                name,
                weight,
                bias,
                positions,
                width,
                classes: outputs,
                smoothing: options.label_smoothing,
                focal_gamma,
                class_weights: options.class_weights.clone().map(Into::into),
            },
            options.distill,
        );
        match distill {
            Some(options) => self.set_loss(Distillation { hard, options }),
            None => self.set_loss(hard),
        }
        Ok(())
    }

    pub fn set_loss(&mut self, loss: impl Loss + 'static) {
        self.loss = Some(Box::new(loss));
    }

    /// Declares a linear map for each feature of the teacher.
    fn match_features(&mut self, blocks: &[LayerBlock]) -> Result<Vec<FeatureMatch>, ModelError> {
        let target_rows = match self.features.target {
            TargetSpec::Tokens => self.features.input_len(),
            _ => 1,
        };
        let options = std::mem::take(&mut self.loss_options.features);
        let declare = |(i, options): (usize, &FeatureOptions)| {
            let student = block_named("model", &options.student, blocks)?;
            let shape = blocks[student].output_shape();
            let inputs = shape.last().copied().unwrap_or(1);
            let rows = shape.iter().product::<usize>() / inputs.max(1);
            if !rows.is_multiple_of(target_rows) {
                let (layer, needs) = (options.student.clone(), "one row per token".into());
                return Err(ModelError::Shape { layer, got: shape, needs });
            }
            let (name, outputs, weight) = (format!("{FEATURE_MAPS}{i}"), options.width, options.weight);
            let init = ParamInit::Uniform(1.0 / (inputs as f64).sqrt());
            // No weight of the model: pruning leaves it alone.
            let map = self.registry.table(format!("{name}.weight"), [outputs, inputs], init);
            let teacher = options.teacher;
            Ok(FeatureMatch { name, student, teacher, map, inputs, outputs, rows, target_rows, weight })
        };
        options.iter().enumerate().map(declare).collect()
    }

    pub fn finish(&mut self) -> Result<BuiltModel, ModelError> {
        let mut blocks: Vec<LayerBlock> =
            std::mem::take(&mut self.blocks).into_iter().filter(|block| !block.nodes.is_empty()).collect();
        let features = self.match_features(&blocks)?;
        blocks.iter_mut().enumerate().for_each(|(i, block)| block.recompute_rank = i);
        let loss = self.loss.take().ok_or(ModelError::NoLoss)?;
        let mut network = Network { blocks, loss, teacher: None, features };
        self.registry.check_rules()?;
        if self.registry.quantizes() {
            let registry = &mut self.registry;
            network.insert_points(&self.features.input_shape(), &mut |name, shape| {
                Some(Box::new(FakeQuantize::new(registry, name, shape)))
            });
        }
        Ok(BuiltModel { network, layout: std::mem::take(&mut self.registry).into_layout()? })
    }
}

/// Index of the block with this name.
pub fn block_named(whose: &'static str, name: &str, blocks: &[LayerBlock]) -> Result<usize, ModelError> {
    let names: Vec<&str> = blocks.iter().map(|block| block.name.as_str()).collect();
    names.iter().position(|block| *block == name).ok_or_else(|| {
        let near = near_names("its blocks", name, &names);
        ModelError::NoBlock { whose, name: name.to_owned(), near }
    })
}

/// The targets of the data, for error messages.
pub fn describe_target(target: &TargetSpec) -> String {
    match target {
        TargetSpec::Class { names } => counted(names.len() as u64, "class"),
        TargetSpec::MixedClass { names } => {
            format!("{}, mixed by mixup or CutMix", counted(names.len() as u64, "class"))
        }
        TargetSpec::MultiLabel { names } => {
            format!("any number of {} per sample", counted(names.len() as u64, "label"))
        }
        TargetSpec::Values { len } => format!("{} per sample", counted(*len as u64, "value")),
        TargetSpec::Tokens => "the next token as target".into(),
    }
}

impl From<crate::job::ActivationKind> for Activation {
    fn from(act: crate::job::ActivationKind) -> Self {
        match act {
            crate::job::ActivationKind::Relu => Self::Relu,
            crate::job::ActivationKind::Gelu => Self::Gelu,
            crate::job::ActivationKind::GeluTanh => Self::GeluTanh,
            crate::job::ActivationKind::Silu => Self::Silu,
        }
    }
}
