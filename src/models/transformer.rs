//! What the models over sequences have in common.

use super::{Builder, ModelError};
use crate::features::{Input, Target};
use crate::kernels::Activation;
use crate::kernels::attention::Sizes;
use crate::kernels::linear::Lies;
use crate::layers::cross_entropy::CrossEntropy;
use crate::layers::linear::{Linear, Options};
use crate::layers::network::{Node, Residual};
use crate::params::{Init, ParamId};

/// How weights begin, as GPT-2, BERT and Llama have it.
pub(super) const INIT: Init = Init::Normal(0.02);

/// (tokens of a sample, vocabulary) of the data, whose samples must fit into `context` positions.
pub(super) fn tokens(b: &Builder, kind: &'static str, context: usize) -> Result<(usize, usize), ModelError> {
    match b.features.input {
        Input::Tokens { length, vocab } if length <= context => Ok((length, vocab)),
        Input::Tokens { length, .. } => Err(ModelError::Shape {
            layer: "embedding".into(),
            got: vec![length],
            needs: format!("at most {context} tokens a sample (`model.context`)"),
        }),
        Input::Floats { ref shape } => {
            Err(ModelError::Data { kind, needs: "tokens", got: format!("samples of shape {shape:?}") })
        }
        Input::Row { .. } => Err(ModelError::Data { kind, needs: "tokens", got: "rows of a table".into() }),
    }
}

/// The sizes of the attention `layer`, whose heads must share the width evenly.
pub(super) fn sizes(
    layer: &str,
    length: usize,
    width: usize,
    (heads, kv_heads): (usize, usize),
) -> Result<Sizes, ModelError> {
    let refuse =
        |needs: String| Err(ModelError::Shape { layer: layer.into(), got: vec![length, width], needs });
    if !width.is_multiple_of(heads) {
        return refuse(format!("a width that {heads} heads can share evenly"));
    }
    if !heads.is_multiple_of(kv_heads) {
        return refuse(format!("a number of heads, now {heads}, that is a multiple of {kv_heads} key heads"));
    }
    Ok(Sizes { length, heads, kv_heads, head: width / heads })
}

/// Adds what `body` builds as a branch around which the sample goes unchanged.
pub(super) fn residual(
    b: &mut Builder,
    name: &str,
    body: impl FnOnce(&mut Builder) -> Result<(), ModelError>,
) -> Result<(), ModelError> {
    let branch = b.branch(body)?;
    b.node(Node::Residual(Residual {
        name: name.into(),
        branch,
        shortcut: Vec::new(),
        act: Activation::Identity,
        output: b.shape.clone(),
    }));
    Ok(())
}

/// Adds a linear layer over the last dimension whose bias begins at 0.
pub(super) fn linear(b: &mut Builder, name: &str, width: usize, lies: Lies, act: Activation, init: Init) {
    let options = Options { bias: true, act, lies, init, bias_init: Init::Constant(0.0) };
    let layer = Linear::new(&mut b.declared, name, &b.shape, width, options);
    b.layer(layer);
}

/// The scores of the next token at each position, with the weights `tied` to the embedding's or their own.
pub(super) fn next_token(
    b: &mut Builder,
    kind: &'static str,
    classes: usize,
    tied: Option<ParamId>,
) -> Result<(), ModelError> {
    if b.features.target != Target::Tokens {
        let got = format!("{:?}", b.features.target);
        return Err(ModelError::Data { kind, needs: "the next token as its target", got });
    }
    let (positions, width) = (b.shape[0], b.shape[1]);
    let own = |b: &mut Builder| b.declared.param("lm_head.weight", [classes, width], INIT);
    let weight = tied.unwrap_or_else(|| own(b));
    b.loss(CrossEntropy {
        name: "lm_head".into(),
        weight,
        tied: tied.is_some(),
        bias: None,
        positions,
        width,
        classes,
        smoothing: 0.0,
        class_weights: None,
    });
    Ok(())
}

/// The scores of the data's classes from a vector a sample; the bias begins at 0.
pub(super) fn classes(b: &mut Builder, name: &str, kind: &'static str, init: Init) -> Result<(), ModelError> {
    let classes = match &b.features.target {
        Target::Class { names } | Target::Mixed { names } => names.len(),
        other => {
            return Err(ModelError::Data { kind, needs: "classes to tell apart", got: format!("{other:?}") });
        }
    };
    let width = b.shape.iter().product();
    let weight = b.declared.param(format!("{name}.weight"), [classes, width], init);
    let bias = b.declared.param(format!("{name}.bias"), [classes], Init::Constant(0.0));
    b.loss(CrossEntropy {
        name: name.into(),
        weight,
        tied: false,
        bias: Some(bias),
        positions: 1,
        width,
        classes,
        smoothing: 0.0,
        class_weights: None,
    });
    Ok(())
}

#[cfg(test)]
mod tests {
    use crate::features::{Features, Input, Target};
    use crate::job::{Gpt, Llama, Model, Vit};
    use crate::models::build;

    fn refused(model: Model, input: Input, target: Target) -> String {
        let result = build(&model, &Features::new(input, target));
        result.err().map_or_else(|| "built".into(), |error| error.to_string())
    }

    fn text(length: usize) -> Input {
        Input::Tokens { length, vocab: 65 }
    }

    #[test]
    fn what_does_not_fit_is_named_with_what_would() {
        let gpt = |heads, context| Model::Gpt(Gpt { heads, context, ..Gpt::default() });
        assert_eq!(refused(gpt(4, 64), text(64), Target::Tokens), "built");
        assert_eq!(
            refused(gpt(5, 64), text(64), Target::Tokens),
            "layer `transformer.h.0.attn` got samples of shape [64, 128] and needs a width that 5 heads can share evenly"
        );
        assert_eq!(
            refused(gpt(4, 64), text(65), Target::Tokens),
            "layer `embedding` got samples of shape [65] and needs at most 64 tokens a sample (`model.context`)"
        );
        let pictures = || Input::Floats { shape: vec![30, 32, 3] };
        assert_eq!(
            refused(gpt(4, 64), pictures(), Target::Tokens),
            "a `gpt` model needs tokens, and the data has samples of shape [30, 32, 3]"
        );
        let classes = || Target::Class { names: vec!["a".into(), "b".into()] };
        assert!(refused(gpt(4, 64), text(8), classes()).contains("needs the next token as its target"));
        let llama =
            |heads, kv_heads, width| Model::Llama(Llama { heads, kv_heads, width, ..Llama::default() });
        assert!(refused(llama(6, 4, 96), text(8), Target::Tokens).contains("a multiple of 4 key heads"));
        assert!(
            refused(llama(4, 2, 36), text(8), Target::Tokens)
                .contains("an even number of values a head, now 9")
        );
        assert!(
            refused(Model::Vit(Vit::default()), pictures(), classes())
                .contains("`conv_proj` got samples of shape [30, 32, 3] and needs pictures whose height and width are multiples of the patch, 4")
        );
    }

    #[test]
    fn parameters_are_counted_as_they_are_declared() {
        for tie in [true, false] {
            let model = Model::Gpt(Gpt { tie, ..Gpt::default() });
            let built = build(&model, &Features::new(text(64), Target::Tokens)).unwrap();
            let counted: usize = built.network.layers().iter().map(|layer| layer.parameters()).sum();
            assert_eq!(counted + built.network.loss.parameters(), built.layout.params.len);
        }
    }
}
