//! `kind = "gpt"`: the GPT-2 architecture, with the parameter names of transformers' `GPT2LMHeadModel`.

use super::transformer::{
    HEAD_WEIGHT, WEIGHT_INIT, add_linear, add_residual, attention_sizes, kept_heads, lm_head, token_dims,
};
use super::{ModelError, NetworkBuilder};
use crate::job::GptConfig;
use crate::kernels::Activation;
use crate::kernels::linear::WeightLayout;
use crate::layers::attention::Attention;
use crate::layers::embedding::Embedding;
use crate::layers::norm::NormLayer;
use crate::params::ParamInit;

const EPS: f64 = 1e-5;

pub(super) fn build(gpt: &GptConfig, b: &mut NetworkBuilder) -> Result<(), ModelError> {
    let (length, vocab) = token_dims(b, "gpt", gpt.context)?;
    let width = gpt.width;
    let heads = attention_sizes("transformer.h.0.attn", length, width, (gpt.heads, gpt.heads))?;
    // Scales the projections into the residual stream by 1/sqrt(2 layers), so that their sum starts with the variance
    // of one.
    let residual_init = ParamInit::Normal(0.02 / (2.0 * gpt.layers as f64).sqrt());

    b.begin_block("transformer.wte");
    let d = &mut b.registry;
    if gpt.tie {
        d.alias("transformer.wte.weight", HEAD_WEIGHT);
    }
    let embedding =
        Embedding::new(d, "transformer.wte", "transformer.wte.weight", (vocab, length, width), WEIGHT_INIT)
            .with_positions(d, "transformer.wpe.weight", gpt.context, WEIGHT_INIT);
    let table = embedding.token_weight();
    b.push_layer(embedding);
    b.dropout("transformer.drop", gpt.dropout);

    for n in 0..gpt.layers {
        let name = format!("transformer.h.{n}");
        b.begin_block(&name);
        let heads = kept_heads(b, &format!("{name}.attn"), heads)?;
        let hidden = b.kept_units(&format!("{name}.mlp.c_fc"), 4 * width)?;
        add_residual(b, &format!("{name}.attn"), |b| {
            add_norm(b, &format!("{name}.ln_1"));
            add_linear(
                b,
                &format!("{name}.attn.c_attn"),
                heads.qkv_width(),
                WeightLayout::InOut,
                Activation::Identity,
                WEIGHT_INIT,
            );
            b.push_layer(Attention {
                name: format!("{name}.attn"),
                sizes: heads,
                causal: true,
                rotary: None,
                dropout: gpt.dropout,
                padded: b.features.is_padded(),
            });
            let proj = format!("{name}.attn.c_proj");
            add_linear(b, &proj, width, WeightLayout::InOut, Activation::Identity, residual_init);
            b.dropout(&format!("{name}.attn.resid_dropout"), gpt.dropout);
            Ok(())
        })?;
        add_residual(b, &format!("{name}.mlp"), |b| {
            add_norm(b, &format!("{name}.ln_2"));
            add_linear(
                b,
                &format!("{name}.mlp.c_fc"),
                hidden,
                WeightLayout::InOut,
                Activation::GeluTanh,
                WEIGHT_INIT,
            );
            let proj = format!("{name}.mlp.c_proj");
            add_linear(b, &proj, width, WeightLayout::InOut, Activation::Identity, residual_init);
            b.dropout(&format!("{name}.mlp.dropout"), gpt.dropout);
            Ok(())
        })?;
    }
    b.begin_block("transformer.ln_f");
    add_norm(b, "transformer.ln_f");
    lm_head(b, "gpt", vocab, gpt.tie.then_some(table))
}

fn add_norm(b: &mut NetworkBuilder, name: &str) {
    let layer = NormLayer::layer_norm(&mut b.registry, name, &b.shape, EPS);
    b.push_layer(layer);
}
