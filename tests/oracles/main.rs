//! Every model against PyTorch: ten losses, and every gradient by name at the first step. `make.py`, beside
//! this file, made the numbers; weights and samples follow from a formula that both sides have.

mod case;

use case::{language, pictures, texts};
use trainer::job::{Bert, Gpt, Llama, Model, Vit};

#[test]
fn gpt() {
    let model = Model::Gpt(Gpt { layers: 2, heads: 3, width: 24, context: 80, dropout: 0.0, tie: true });
    language("gpt", model, 3, 70, 37).proven(&[&[1, 2], &[2, 1], &[1, 1, 1]]);
}

#[test]
fn llama() {
    let model = Model::Llama(Llama {
        layers: 2,
        heads: 6,
        kv_heads: 2,
        width: 24,
        hidden: 40,
        context: 80,
        rope_theta: 5000.0,
        tie: false,
    });
    language("llama", model, 3, 70, 37).proven(&[&[1, 2], &[1, 1, 1]]);
}

#[test]
fn bert() {
    let model = Model::Bert(Bert { layers: 2, heads: 3, width: 24, hidden: 40, context: 80, dropout: 0.0 });
    texts("bert", model, (6, 70, 37), 5).proven(&[&[1, 2, 3], &[5, 1]]);
}

#[test]
fn vit() {
    let model = Model::Vit(Vit { patch: 4, layers: 2, heads: 3, width: 24, ratio: 2, dropout: 0.0 });
    pictures("vit", model, 4, [12, 12, 3], 5).proven(&[&[1, 3], &[2, 1, 1]]);
}
