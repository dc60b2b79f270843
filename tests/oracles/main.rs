//! Every model against PyTorch: ten losses, and every gradient by name at the first step. `make.py`, beside
//! this file, made the numbers; weights and samples follow from a formula that both sides have.

mod case;

use case::{language, pictures, texts};
use trainer::job::{Bert, Gpt, Llama, Mobilenet, Model, Resnet, Stem, Vit};

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

fn model(toml: &str) -> Model {
    toml::from_str(toml).unwrap()
}

#[test]
fn mlp() {
    let model = model("kind = 'mlp'\nhidden = [33, 17]");
    pictures("mlp", model, 6, [5, 7, 2], 5).proven(&[&[1, 5], &[2, 2, 2], &[5, 1]]);
}

const CNN: &str = "
kind = 'cnn'
hidden = [20]
activation = 'gelu'
norm_group = GROUP
stages = [
    { channels = 8 },
    { channels = 12, kernel = 5, stride = 2, pool = 1, norm = 'batch' },
    { channels = 16, norm = 'group' },
]";

#[test]
fn cnn() {
    let with = |group: &str| model(&CNN.replace("GROUP", group));
    pictures("cnn", with("4"), 4, [19, 23, 2], 5).wide().proven(&[]);
    pictures("cnn", with("2"), 7, [19, 23, 2], 5).same_in_parts(&[&[2, 2, 2, 1], &[4, 3], &[6, 1]]);
}

#[test]
fn resnet18() {
    let with = |norm_group| Model::Resnet(Resnet { depth: 18, stem: Stem::Small, norm_group });
    pictures("resnet18", with(2), 2, [16, 16, 3], 10).wide().proven(&[]);
    pictures("resnet18", with(2), 5, [16, 16, 3], 10).same_in_parts(&[&[2, 2, 1], &[4, 1]]);
}

#[test]
fn resnet50() {
    let model = Model::Resnet(Resnet { depth: 50, stem: Stem::Imagenet, norm_group: 2 });
    pictures("resnet50", model, 2, [64, 64, 3], 10).wide().proven(&[]);
}

#[test]
fn mobilenet() {
    let with = |norm_group| {
        Model::Mobilenet(Mobilenet { width: 0.5, stem: Stem::Imagenet, dropout: 0.0, norm_group })
    };
    pictures("mobilenet", with(3), 3, [64, 64, 3], 10).wide().proven(&[]);
    pictures("mobilenet", with(2), 5, [64, 64, 3], 10).wide().same_in_parts(&[&[2, 2, 1], &[4, 1]]);
}

const LAYERS: &str = "
kind = 'layers'
layers = [
    { kind = 'conv', channels = 8, padding = 2, dilation = 2 },
    { kind = 'relu' },
    { kind = 'avg_pool' },
    { kind = 'residual', activation = 'relu', shortcut = [{ kind = 'conv', channels = 12, kernel = 1, stride = 2 }], layers = [
        { kind = 'conv', channels = 8, stride = 2, padding = 1, groups = 8 },
        { kind = 'batch_norm', group = GROUP },
        { kind = 'silu' },
        { kind = 'conv', channels = 12, kernel = 1, bias = false },
        { kind = 'group_norm', groups = 3 },
        { kind = 'squeeze_excite', ratio = 4 },
    ] },
    { kind = 'global_pool' },
    { kind = 'linear', outputs = 9 },
    { kind = 'tanh' },
]";

#[test]
fn layers() {
    let with = |group: &str| model(&LAYERS.replace("GROUP", group));
    pictures("layers", with("4"), 4, [13, 11, 2], 5).wide().proven(&[]);
    pictures("layers", with("2"), 5, [13, 11, 2], 5).same_in_parts(&[&[2, 2, 1], &[4, 1]]);
}
