//! Every model against PyTorch: ten losses, and every gradient by name at the first step. `make.py`, beside this
//! file, computed the numbers; both sides derive weights and samples from the same formula.

mod case;

use case::{image_classifier, language_model, text_classifier};
use trainer::job::{
    BertConfig, GptConfig, LlamaConfig, MobilenetConfig, ModelConfig, ResnetConfig, Stem, VitConfig,
};

#[test]
fn gpt() {
    let model =
        ModelConfig::Gpt(GptConfig { layers: 2, heads: 3, width: 24, context: 80, dropout: 0.0, tie: true });
    language_model("gpt", model, 3, 70, 37).check_against_pytorch(&[&[1, 2], &[2, 1], &[1, 1, 1]]);
}

#[test]
fn llama() {
    let model = ModelConfig::Llama(LlamaConfig {
        layers: 2,
        heads: 6,
        kv_heads: 2,
        width: 24,
        hidden: 40,
        context: 80,
        rope_theta: 5000.0,
        norm_eps: 1e-6,
        tie: false,
    });
    language_model("llama", model, 3, 70, 37).check_against_pytorch(&[&[1, 2], &[1, 1, 1]]);
}

#[test]
fn bert() {
    let model = ModelConfig::Bert(BertConfig {
        layers: 2,
        heads: 3,
        width: 24,
        hidden: 40,
        context: 80,
        dropout: 0.0,
    });
    text_classifier("bert", model, (6, 70, 37), 5).check_against_pytorch(&[&[1, 2, 3], &[5, 1]]);
}

#[test]
fn vit() {
    let model =
        ModelConfig::Vit(VitConfig { patch: 4, layers: 2, heads: 3, width: 24, ratio: 2, dropout: 0.0 });
    image_classifier("vit", model, 4, [12, 12, 3], 5).check_against_pytorch(&[&[1, 3], &[2, 1, 1]]);
}

fn model(toml: &str) -> ModelConfig {
    toml::from_str(toml).unwrap()
}

#[test]
fn mlp() {
    let model = model("kind = 'mlp'\nhidden = [33, 17]");
    image_classifier("mlp", model, 6, [5, 7, 2], 5).check_against_pytorch(&[&[1, 5], &[2, 2, 2], &[5, 1]]);
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
    image_classifier("cnn", with("4"), 4, [19, 23, 2], 5).in_double().check_against_pytorch(&[]);
    image_classifier("cnn", with("2"), 7, [19, 23, 2], 5).check_splits(&[&[2, 2, 2, 1], &[4, 3], &[6, 1]]);
}

#[test]
fn resnet18() {
    let with = |norm_group| ModelConfig::Resnet(ResnetConfig { depth: 18, stem: Stem::Small, norm_group });
    image_classifier("resnet18", with(2), 2, [16, 16, 3], 10).in_double().check_against_pytorch(&[]);
    image_classifier("resnet18", with(2), 5, [16, 16, 3], 10).check_splits(&[&[2, 2, 1], &[4, 1]]);
}

#[test]
fn resnet50() {
    let model = ModelConfig::Resnet(ResnetConfig { depth: 50, stem: Stem::Imagenet, norm_group: 2 });
    image_classifier("resnet50", model, 2, [64, 64, 3], 10).in_double().check_against_pytorch(&[]);
}

#[test]
fn mobilenet() {
    let with = |norm_group| {
        ModelConfig::Mobilenet(MobilenetConfig { width: 0.5, stem: Stem::Imagenet, dropout: 0.0, norm_group })
    };
    image_classifier("mobilenet", with(3), 3, [64, 64, 3], 10).in_double().check_against_pytorch(&[]);
    image_classifier("mobilenet", with(2), 5, [64, 64, 3], 10)
        .in_double()
        .check_splits(&[&[2, 2, 1], &[4, 1]]);
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
    image_classifier("layers", with("4"), 4, [13, 11, 2], 5).in_double().check_against_pytorch(&[]);
    image_classifier("layers", with("2"), 5, [13, 11, 2], 5).check_splits(&[&[2, 2, 1], &[4, 1]]);
}
