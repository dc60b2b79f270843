//! Building blocks shared by the transformer models.

use super::builder::{HeadParams, describe_target};
use super::{ModelError, NetworkBuilder};
use crate::base::features::{InputSpec, TargetSpec};
use crate::graph::network::{Node, ResidualNode};
use crate::kernels::Activation;
use crate::kernels::attention::AttentionDims;
use crate::kernels::linear::WeightLayout;
use crate::layers::linear::LinearOptions;
use crate::params::{ParamId, ParamInit};

/// Weight initialization of GPT-2, BERT and Llama.
pub(super) const WEIGHT_INIT: ParamInit = ParamInit::Normal(0.02);

/// (tokens per sample, vocabulary size) of the data; samples must fit in `context` positions.
pub(super) fn token_dims(
    b: &NetworkBuilder,
    kind: &'static str,
    context: usize,
) -> Result<(usize, usize), ModelError> {
    match b.features.input {
        InputSpec::Tokens { length, vocab } if length <= context => Ok((length, vocab)),
        InputSpec::Tokens { length, .. } => Err(ModelError::Shape {
            layer: "embedding".into(),
            got: vec![length],
            needs: format!("at most {context} tokens per sample (`model.context`)"),
        }),
        InputSpec::Floats { ref shape } => {
            Err(ModelError::Data { kind, needs: "tokens", got: format!("samples of shape {shape:?}") })
        }
        InputSpec::Tabular { .. } => {
            Err(ModelError::Data { kind, needs: "tokens", got: "rows of a table".into() })
        }
    }
}

/// Dimensions of the attention `layer`; the number of heads must divide the width.
pub(super) fn attention_sizes(
    layer: &str,
    length: usize,
    width: usize,
    (heads, kv_heads): (usize, usize),
) -> Result<AttentionDims, ModelError> {
    let refuse =
        |needs: String| Err(ModelError::Shape { layer: layer.into(), got: vec![length, width], needs });
    if !width.is_multiple_of(heads) {
        return refuse(format!("a `width` divisible by {heads} heads"));
    }
    if !heads.is_multiple_of(kv_heads) {
        return refuse(format!("`heads`, {heads}, to be a multiple of `kv_heads`, {kv_heads}"));
    }
    Ok(AttentionDims { length, heads, kv_heads, head_dim: width / heads })
}

/// The dimensions of the attention `layer` after pruning, which removes the query heads of a key head together.
pub(super) fn kept_heads(
    b: &NetworkBuilder,
    layer: &str,
    sizes: AttentionDims,
) -> Result<AttentionDims, ModelError> {
    let kv_heads = b.kept_units(layer, sizes.kv_heads)?;
    Ok(AttentionDims { heads: sizes.heads / sizes.kv_heads * kv_heads, kv_heads, ..sizes })
}

/// Adds the nodes that `body` builds as a residual branch with an identity shortcut.
pub(super) fn add_residual(
    b: &mut NetworkBuilder,
    name: &str,
    body: impl FnOnce(&mut NetworkBuilder) -> Result<(), ModelError>,
) -> Result<(), ModelError> {
    let branch = b.build_branch(body)?;
    b.push_node(Node::Residual(ResidualNode {
        name: name.into(),
        branch,
        shortcut: Vec::new(),
        act: Activation::Identity,
        output_shape: b.shape.clone(),
    }));
    Ok(())
}

/// Adds a linear layer over the last dimension; its bias starts at 0.
pub(super) fn add_linear(
    b: &mut NetworkBuilder,
    name: &str,
    width: usize,
    weight_layout: WeightLayout,
    act: Activation,
    init: ParamInit,
) {
    let options = LinearOptions { bias: true, act, weight_layout, init, bias_init: ParamInit::Constant(0.0) };
    b.linear(name, width, options);
}

/// The weight of a language model's head; another name of the token table where the two are tied.
pub(super) const HEAD_WEIGHT: &str = "lm_head.weight";

/// The logits of the next token per position, with weights `tied` to the embedding or of their own.
pub(super) fn lm_head(
    b: &mut NetworkBuilder,
    kind: &'static str,
    classes: usize,
    tied: Option<ParamId>,
) -> Result<(), ModelError> {
    if b.features.target != TargetSpec::Tokens {
        let got = describe_target(&b.features.target);
        return Err(ModelError::Data { kind, needs: "the next token as target", got });
    }
    let (positions, width) = (b.shape[0], b.shape[1]);
    let own = |b: &mut NetworkBuilder| b.registry.param(HEAD_WEIGHT, [classes, width], WEIGHT_INIT);
    let weight = tied.unwrap_or_else(|| own(b));
    let head = HeadParams { weight, bias: None, positions, width, outputs: classes };
    b.set_class_loss("lm_head".into(), head)
}

/// The logits of the data's classes, from one vector per sample; the bias starts at 0.
pub(super) fn classification_head(
    b: &mut NetworkBuilder,
    name: &str,
    kind: &'static str,
    init: ParamInit,
) -> Result<(), ModelError> {
    let classes = match &b.features.target {
        TargetSpec::Class { names } | TargetSpec::MixedClass { names } | TargetSpec::MultiLabel { names } => {
            names.len()
        }
        other => {
            return Err(ModelError::Data { kind, needs: "classes as targets", got: describe_target(other) });
        }
    };
    let width = b.shape.iter().product();
    let weight = b.registry.param(format!("{name}.weight"), [classes, width], init);
    let bias = b.registry.param(format!("{name}.bias"), [classes], ParamInit::Constant(0.0));
    let head = HeadParams { weight, bias: Some(bias), positions: 1, width, outputs: classes };
    b.set_class_loss(name.into(), head)
}

#[cfg(test)]
mod tests {
    use crate::base::features::{Features, InputSpec, TargetSpec};
    use crate::job::{GptConfig, LlamaConfig, ModelConfig, VitConfig};
    use crate::models::build;

    fn build_error(model: ModelConfig, input: InputSpec, target: TargetSpec) -> String {
        let result = build(&model, &Features::new(input, target));
        result.err().map_or_else(|| "built".into(), |error| error.to_string())
    }

    fn text(length: usize) -> InputSpec {
        InputSpec::Tokens { length, vocab: 65 }
    }

    #[test]
    fn shape_mismatches_report_what_is_needed() {
        let gpt = |heads, context| ModelConfig::Gpt(GptConfig { heads, context, ..GptConfig::default() });
        assert_eq!(build_error(gpt(4, 64), text(64), TargetSpec::Tokens), "built");
        assert_eq!(
            build_error(gpt(5, 64), text(64), TargetSpec::Tokens),
            "layer `transformer.h.0.attn` needs a `width` divisible by 5 heads, and got samples of shape [64, 128]"
        );
        assert_eq!(
            build_error(gpt(4, 64), text(65), TargetSpec::Tokens),
            "layer `embedding` needs at most 64 tokens per sample (`model.context`), and got samples of shape [65]"
        );
        let images = || InputSpec::Floats { shape: vec![30, 32, 3] };
        assert_eq!(
            build_error(gpt(4, 64), images(), TargetSpec::Tokens),
            "models of kind `gpt` need tokens, and the data has samples of shape [30, 32, 3]"
        );
        let classes = || TargetSpec::Class { names: vec!["a".into(), "b".into()] };
        assert!(build_error(gpt(4, 64), text(8), classes()).contains("need the next token as target"));
        let llama = |heads, kv_heads, width| {
            ModelConfig::Llama(LlamaConfig { heads, kv_heads, width, ..LlamaConfig::default() })
        };
        assert!(
            build_error(llama(6, 4, 96), text(8), TargetSpec::Tokens)
                .contains("`heads`, 6, to be a multiple of `kv_heads`, 4")
        );
        assert!(
            build_error(llama(4, 2, 36), text(8), TargetSpec::Tokens)
                .contains("an even head dimension, not 9")
        );
        assert!(build_error(ModelConfig::Vit(VitConfig::default()), images(), classes()).contains(
            "needs images whose height and width are multiples of `patch`, 4, and got samples of shape [30,"
        ));
    }
}
