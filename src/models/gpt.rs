//! `kind = "gpt"`: GPT-2's shape, its parameters named as `GPT2LMHeadModel` of transformers names them.

use super::transformer::{INIT, linear, next_token, residual, sizes, tokens};
use super::{Builder, ModelError};
use crate::job::Gpt;
use crate::kernels::Activation;
use crate::kernels::linear::Lies;
use crate::layers::attention::Attention;
use crate::layers::embedding::Embedding;
use crate::layers::norm::Norm;
use crate::params::Init;

const EPS: f64 = 1e-5;

pub(super) fn build(gpt: &Gpt, b: &mut Builder) -> Result<(), ModelError> {
    let (length, vocab) = tokens(b, "gpt", gpt.context)?;
    let width = gpt.width;
    let heads = sizes("transformer.h.0.attn", length, width, (gpt.heads, gpt.heads))?;
    // Each of the sums along the residual path begins with the variance of one.
    let onto_residual = Init::Normal(0.02 / (2.0 * gpt.layers as f64).sqrt());

    b.block("transformer.wte");
    let d = &mut b.declared;
    let embedding =
        Embedding::new(d, "transformer.wte", "transformer.wte.weight", (vocab, length, width), INIT)
            .positions(d, "transformer.wpe.weight", gpt.context, INIT);
    let table = embedding.weight();
    b.layer(embedding);
    b.dropout("transformer.drop", gpt.dropout);

    for n in 0..gpt.layers {
        let name = format!("transformer.h.{n}");
        b.block(&name);
        residual(b, &format!("{name}.attn"), |b| {
            norm(b, &format!("{name}.ln_1"));
            linear(b, &format!("{name}.attn.c_attn"), 3 * width, Lies::InOut, Activation::Identity, INIT);
            b.layer(Attention {
                name: format!("{name}.attn"),
                sizes: heads,
                causal: true,
                rotary: None,
                dropout: gpt.dropout,
                padded: b.features.is_padded(),
            });
            let proj = format!("{name}.attn.c_proj");
            linear(b, &proj, width, Lies::InOut, Activation::Identity, onto_residual);
            b.dropout(&format!("{name}.attn.resid_dropout"), gpt.dropout);
            Ok(())
        })?;
        residual(b, &format!("{name}.mlp"), |b| {
            norm(b, &format!("{name}.ln_2"));
            linear(b, &format!("{name}.mlp.c_fc"), 4 * width, Lies::InOut, Activation::GeluTanh, INIT);
            let proj = format!("{name}.mlp.c_proj");
            linear(b, &proj, width, Lies::InOut, Activation::Identity, onto_residual);
            b.dropout(&format!("{name}.mlp.dropout"), gpt.dropout);
            Ok(())
        })?;
    }
    b.block("transformer.ln_f");
    norm(b, "transformer.ln_f");
    next_token(b, "gpt", vocab, gpt.tie.then_some(table))
}

fn norm(b: &mut Builder, name: &str) {
    let layer = Norm::layer(&mut b.declared, name, &b.shape, EPS);
    b.layer(layer);
}
