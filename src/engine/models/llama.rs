//! `kind = "llama"`: the Llama architecture, with the parameter names of transformers' `LlamaForCausalLM`.

use std::sync::Arc;

use super::transformer::{
    HEAD_WEIGHT, WEIGHT_INIT, add_residual, attention_sizes, kept_heads, lm_head, token_dims,
};
use super::{ModelError, NetworkBuilder};
use crate::job::LlamaConfig;
use crate::kernels::Activation;
use crate::kernels::linear::WeightLayout;
use crate::kernels::rotary::Rotary;
use crate::layers::attention::Attention;
use crate::layers::embedding::Embedding;
use crate::layers::linear::LinearOptions;
use crate::layers::norm::NormLayer;
use crate::layers::packed_linear::PackedLinear;
use crate::layers::swiglu::Swiglu;

pub(super) fn build(llama: &LlamaConfig, b: &mut NetworkBuilder) -> Result<(), ModelError> {
    let (length, vocab) = token_dims(b, "llama", llama.context)?;
    let attn = "model.layers.0.self_attn";
    let heads = attention_sizes(attn, length, llama.width, (llama.heads, llama.kv_heads))?;
    if !heads.head_dim.is_multiple_of(2) {
        return Err(ModelError::Shape {
            layer: attn.into(),
            got: vec![length, llama.width],
            needs: format!("an even head dimension, not {}, for rotary embeddings", heads.head_dim),
        });
    }
    let rotary = Arc::new(Rotary::new(length, heads.head_dim, llama.rope_theta));

    let table = "model.embed_tokens";
    b.begin_block(table);
    if llama.tie {
        b.registry.alias(format!("{table}.weight"), HEAD_WEIGHT);
    }
    let sizes = (vocab, length, llama.width);
    let embedding = Embedding::new(&mut b.registry, table, &format!("{table}.weight"), sizes, WEIGHT_INIT);
    let table = embedding.token_weight();
    b.push_layer(embedding);

    for n in 0..llama.layers {
        let name = format!("model.layers.{n}");
        b.begin_block(&name);
        let heads = kept_heads(b, &format!("{name}.self_attn"), heads)?;
        let hidden = b.kept_units(&format!("{name}.mlp"), llama.hidden)?;
        add_residual(b, &format!("{name}.self_attn"), |b| {
            add_norm(b, &format!("{name}.input_layernorm"), llama.norm_eps);
            let kv = heads.kv_heads * heads.head_dim;
            add_packed_linear(
                b,
                &format!("{name}.self_attn"),
                &[("q_proj", heads.width()), ("k_proj", kv), ("v_proj", kv)],
            );
            let (name, rotary) = (format!("{name}.self_attn"), Some(rotary.clone()));
            let padded = b.features.is_padded();
            b.push_layer(Attention {
                name: name.clone(),
                sizes: heads,
                causal: true,
                rotary,
                dropout: 0.0,
                padded,
            });
            add_linear_no_bias(b, &format!("{name}.o_proj"), llama.width);
            Ok(())
        })?;
        add_residual(b, &format!("{name}.mlp"), |b| {
            add_norm(b, &format!("{name}.post_attention_layernorm"), llama.norm_eps);
            add_packed_linear(b, &format!("{name}.mlp"), &[("gate_proj", hidden), ("up_proj", hidden)]);
            b.push_layer(Swiglu { name: format!("{name}.mlp.act_fn"), shape: vec![length, hidden] });
            add_linear_no_bias(b, &format!("{name}.mlp.down_proj"), llama.width);
            Ok(())
        })?;
    }
    b.begin_block("model.norm");
    add_norm(b, "model.norm", llama.norm_eps);
    lm_head(b, "llama", vocab, llama.tie.then_some(table))
}

fn add_norm(b: &mut NetworkBuilder, name: &str, eps: f64) {
    let layer = NormLayer::rms_norm(&mut b.registry, name, &b.shape, eps);
    b.push_layer(layer);
}

fn add_packed_linear(b: &mut NetworkBuilder, name: &str, parts: &[(&str, usize)]) {
    let layer = PackedLinear::new(&mut b.registry, name, &b.shape, parts, WEIGHT_INIT, false);
    b.push_layer(layer);
}

fn add_linear_no_bias(b: &mut NetworkBuilder, name: &str, width: usize) {
    let options = LinearOptions {
        bias: false,
        act: Activation::Identity,
        weight_layout: WeightLayout::OutIn,
        init: WEIGHT_INIT,
        bias_init: WEIGHT_INIT,
    };
    b.linear(name, width, options);
}
