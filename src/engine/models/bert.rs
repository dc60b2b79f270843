//! `kind = "bert"`: BERT's encoder with a classifier over its first token, with the parameter names of transformers'
//! `BertForSequenceClassification`. Every token has the first token type.

use super::transformer::{
    WEIGHT_INIT, add_linear, add_residual, attention_sizes, classification_head, kept_heads, token_dims,
};
use super::{ModelError, NetworkBuilder};
use crate::job::BertConfig;
use crate::kernels::Activation;
use crate::kernels::linear::WeightLayout;
use crate::layers::attention::Attention;
use crate::layers::embedding::Embedding;
use crate::layers::first_token::FirstToken;
use crate::layers::norm::NormLayer;
use crate::layers::packed_linear::PackedLinear;

const EPS: f64 = 1e-12;

pub(super) fn build(bert: &BertConfig, b: &mut NetworkBuilder) -> Result<(), ModelError> {
    let (length, vocab) = token_dims(b, "bert", bert.context)?;
    let width = bert.width;
    let heads =
        attention_sizes("bert.encoder.layer.0.attention.self", length, width, (bert.heads, bert.heads))?;

    let name = "bert.embeddings";
    b.begin_block(name);
    let d = &mut b.registry;
    let table = format!("{name}.word_embeddings.weight");
    let embedding = Embedding::new(d, name, &table, (vocab, length, width), WEIGHT_INIT)
        .with_positions(d, &format!("{name}.position_embeddings.weight"), bert.context, WEIGHT_INIT)
        .with_token_types(d, &format!("{name}.token_type_embeddings.weight"), 2, WEIGHT_INIT);
    b.push_layer(embedding);
    add_norm(b, &format!("{name}.LayerNorm"));
    b.dropout(&format!("{name}.dropout"), bert.dropout);

    for n in 0..bert.layers {
        let name = format!("bert.encoder.layer.{n}");
        b.begin_block(&name);
        let attention = format!("{name}.attention");
        let heads = kept_heads(b, &format!("{attention}.self"), heads)?;
        let hidden = b.kept_units(&format!("{name}.intermediate.dense"), bert.hidden)?;
        add_residual(b, &attention, |b| {
            let own = format!("{attention}.self");
            let parts = ["query", "key", "value"].map(|part| (part, heads.width()));
            let packed = PackedLinear::new(&mut b.registry, &own, &b.shape, &parts, WEIGHT_INIT, true);
            b.push_layer(packed);
            b.push_layer(Attention {
                name: own,
                sizes: heads,
                causal: false,
                rotary: None,
                dropout: bert.dropout,
                padded: b.features.is_padded(),
            });
            let dense = format!("{attention}.output.dense");
            add_linear(b, &dense, width, WeightLayout::OutIn, Activation::Identity, WEIGHT_INIT);
            b.dropout(&format!("{attention}.output.dropout"), bert.dropout);
            Ok(())
        })?;
        add_norm(b, &format!("{attention}.output.LayerNorm"));
        add_residual(b, &format!("{name}.output"), |b| {
            let dense = format!("{name}.intermediate.dense");
            add_linear(b, &dense, hidden, WeightLayout::OutIn, Activation::Gelu, WEIGHT_INIT);
            let dense = format!("{name}.output.dense");
            add_linear(b, &dense, width, WeightLayout::OutIn, Activation::Identity, WEIGHT_INIT);
            b.dropout(&format!("{name}.output.dropout"), bert.dropout);
            Ok(())
        })?;
        add_norm(b, &format!("{name}.output.LayerNorm"));
    }
    b.begin_block("bert.pooler");
    b.push_layer(FirstToken { name: "bert.pooler.first".into(), length, width });
    add_linear(b, "bert.pooler.dense", width, WeightLayout::OutIn, Activation::Tanh, WEIGHT_INIT);
    b.dropout("dropout", bert.dropout);
    classification_head(b, "classifier", "bert", WEIGHT_INIT)
}

fn add_norm(b: &mut NetworkBuilder, name: &str) {
    let layer = NormLayer::layer_norm(&mut b.registry, name, &b.shape, EPS);
    b.push_layer(layer);
}
