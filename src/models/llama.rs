//! `kind = "llama"`: Llama's shape, its parameters named as `LlamaForCausalLM` of transformers names them.

use std::sync::Arc;

use super::transformer::{INIT, next_token, residual, sizes, tokens};
use super::{Builder, ModelError};
use crate::job::Llama;
use crate::kernels::Activation;
use crate::kernels::linear::Lies;
use crate::kernels::rotary::Rotary;
use crate::layers::attention::Attention;
use crate::layers::embedding::Embedding;
use crate::layers::linear::{Linear, Options};
use crate::layers::norm::Norm;
use crate::layers::packed::Packed;
use crate::layers::swiglu::Swiglu;

const EPS: f64 = 1e-6;

pub(super) fn build(llama: &Llama, b: &mut Builder) -> Result<(), ModelError> {
    let (length, vocab) = tokens(b, "llama", llama.context)?;
    let attn = "model.layers.0.self_attn";
    let heads = sizes(attn, length, llama.width, (llama.heads, llama.kv_heads))?;
    if !heads.head.is_multiple_of(2) {
        return Err(ModelError::Shape {
            layer: attn.into(),
            got: vec![length, llama.width],
            needs: format!("an even number of values a head, now {}, to turn in pairs", heads.head),
        });
    }
    let rotary = Arc::new(Rotary::new(length, heads.head, llama.rope_theta));

    let table = "model.embed_tokens";
    b.block(table);
    let sizes = (vocab, length, llama.width);
    let embedding = Embedding::new(&mut b.declared, table, &format!("{table}.weight"), sizes, INIT);
    let table = embedding.weight();
    b.layer(embedding);

    for n in 0..llama.layers {
        let name = format!("model.layers.{n}");
        b.block(&name);
        residual(b, &format!("{name}.self_attn"), |b| {
            norm(b, &format!("{name}.input_layernorm"));
            let kv = heads.kv_heads * heads.head;
            packed(
                b,
                &format!("{name}.self_attn"),
                &[("q_proj", heads.width()), ("k_proj", kv), ("v_proj", kv)],
            );
            let (name, rotary) = (format!("{name}.self_attn"), Some(rotary.clone()));
            let padded = b.features.is_padded();
            b.layer(Attention {
                name: name.clone(),
                sizes: heads,
                causal: true,
                rotary,
                dropout: 0.0,
                padded,
            });
            plain(b, &format!("{name}.o_proj"), llama.width);
            Ok(())
        })?;
        residual(b, &format!("{name}.mlp"), |b| {
            norm(b, &format!("{name}.post_attention_layernorm"));
            packed(b, &format!("{name}.mlp"), &[("gate_proj", llama.hidden), ("up_proj", llama.hidden)]);
            b.layer(Swiglu { name: format!("{name}.mlp.act_fn"), shape: vec![length, llama.hidden] });
            plain(b, &format!("{name}.mlp.down_proj"), llama.width);
            Ok(())
        })?;
    }
    b.block("model.norm");
    norm(b, "model.norm");
    next_token(b, "llama", vocab, llama.tie.then_some(table))
}

fn norm(b: &mut Builder, name: &str) {
    let layer = Norm::rms(&mut b.declared, name, &b.shape, EPS);
    b.layer(layer);
}

fn packed(b: &mut Builder, name: &str, parts: &[(&str, usize)]) {
    let layer = Packed::new(&mut b.declared, name, &b.shape, parts, INIT, false);
    b.layer(layer);
}

fn plain(b: &mut Builder, name: &str, width: usize) {
    let options =
        Options { bias: false, act: Activation::Identity, lies: Lies::OutIn, init: INIT, bias_init: INIT };
    let layer = Linear::new(&mut b.declared, name, &b.shape, width, options);
    b.layer(layer);
}
