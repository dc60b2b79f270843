//! `kind = "bert"`: BERT's encoder with a classifier over its first token, its parameters named as
//! `BertForSequenceClassification` of transformers names them. Every token is of the first type.

use super::transformer::{INIT, classes, linear, residual, sizes, tokens};
use super::{Builder, ModelError};
use crate::job::Bert;
use crate::kernels::Activation;
use crate::kernels::linear::Lies;
use crate::layers::attention::Attention;
use crate::layers::embedding::Embedding;
use crate::layers::first::First;
use crate::layers::norm::Norm;
use crate::layers::packed::Packed;

const EPS: f64 = 1e-12;

pub(super) fn build(bert: &Bert, b: &mut Builder) -> Result<(), ModelError> {
    let (length, vocab) = tokens(b, "bert", bert.context)?;
    let width = bert.width;
    let heads = sizes("bert.encoder.layer.0.attention.self", length, width, (bert.heads, bert.heads))?;

    let name = "bert.embeddings";
    b.block(name);
    let d = &mut b.declared;
    let table = format!("{name}.word_embeddings.weight");
    let embedding = Embedding::new(d, name, &table, (vocab, length, width), INIT)
        .positions(d, &format!("{name}.position_embeddings.weight"), bert.context, INIT)
        .kinds(d, &format!("{name}.token_type_embeddings.weight"), 2, INIT);
    b.layer(embedding);
    norm(b, &format!("{name}.LayerNorm"));
    b.dropout(&format!("{name}.dropout"), bert.dropout);

    for n in 0..bert.layers {
        let name = format!("bert.encoder.layer.{n}");
        b.block(&name);
        let attention = format!("{name}.attention");
        residual(b, &attention, |b| {
            let own = format!("{attention}.self");
            let parts = [("query", width), ("key", width), ("value", width)];
            let packed = Packed::new(&mut b.declared, &own, &b.shape, &parts, INIT, true);
            b.layer(packed);
            b.layer(Attention {
                name: own,
                sizes: heads,
                causal: false,
                rotary: None,
                dropout: bert.dropout,
                padded: b.features.is_padded(),
            });
            let dense = format!("{attention}.output.dense");
            linear(b, &dense, width, Lies::OutIn, Activation::Identity, INIT);
            b.dropout(&format!("{attention}.output.dropout"), bert.dropout);
            Ok(())
        })?;
        norm(b, &format!("{attention}.output.LayerNorm"));
        residual(b, &format!("{name}.output"), |b| {
            let dense = format!("{name}.intermediate.dense");
            linear(b, &dense, bert.hidden, Lies::OutIn, Activation::Gelu, INIT);
            let dense = format!("{name}.output.dense");
            linear(b, &dense, width, Lies::OutIn, Activation::Identity, INIT);
            b.dropout(&format!("{name}.output.dropout"), bert.dropout);
            Ok(())
        })?;
        norm(b, &format!("{name}.output.LayerNorm"));
    }
    b.block("bert.pooler");
    b.layer(First { name: "bert.pooler.first".into(), length, width });
    linear(b, "bert.pooler.dense", width, Lies::OutIn, Activation::Tanh, INIT);
    b.dropout("dropout", bert.dropout);
    classes(b, "classifier", "bert", INIT)
}

fn norm(b: &mut Builder, name: &str) {
    let layer = Norm::layer(&mut b.declared, name, &b.shape, EPS);
    b.layer(layer);
}
