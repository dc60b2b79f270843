//! The model card: what the model is, and the lines that load it.

use super::super::ExportSource;
use super::super::description::{classes, input};
use crate::job::{MobilenetConfig, ModelConfig, ResnetConfig, Stem};

/// Classes that the card lists by name; more are only counted.
const LISTED_CLASSES: usize = 50;

/// `README.md`, with the front matter that the Hugging Face Hub reads.
pub(super) fn text(source: &ExportSource, has_tokenizer: bool) -> String {
    let (library, task) = match source.model {
        ModelConfig::Gpt(_) | ModelConfig::Llama(_) => ("transformers", "text-generation"),
        ModelConfig::Bert(_) => ("transformers", "text-classification"),
        ModelConfig::Vit(_) => ("transformers", "image-classification"),
        _ => ("torchvision", "image-classification"),
    };
    let mut text = format!(
        "---\nlibrary_name: {library}\npipeline_tag: {task}\n---\n\n# {}\n\nA `{}` model, trained for {} updates with \
         trainer {}.\n\n```python\n{}\n```\n\n## Input\n\n```json\n{:#}\n```\n",
        source.name,
        source.model.kind(),
        source.step,
        env!("CARGO_PKG_VERSION"),
        loading(source, has_tokenizer),
        input(source),
    );
    if let Some(image) = &source.image {
        text.push_str(&format!(
            "\nImages are scaled to 0 to 1, then normalized per channel with the mean {:?} and the standard deviation \
             {:?}.\n",
            image.mean, image.std
        ));
    }
    match classes(source) {
        Some(names) if names.len() <= LISTED_CLASSES => {
            text.push_str(&format!("\n## Classes\n\n{}\n", names.join(", ")));
        }
        Some(names) => text.push_str(&format!("\n## Classes\n\n{}, in `model.json`.\n", names.len())),
        None => {}
    }
    text.push_str("\n`model.json` has the job, the classes and the preprocessing in full.\n");
    text
}

/// The Python that loads the model from this folder.
fn loading(source: &ExportSource, has_tokenizer: bool) -> String {
    let class = match source.model {
        ModelConfig::Gpt(_) | ModelConfig::Llama(_) => "AutoModelForCausalLM",
        ModelConfig::Bert(_) => "AutoModelForSequenceClassification",
        ModelConfig::Vit(_) => "AutoModelForImageClassification",
        ModelConfig::Resnet(resnet) => return resnet_lines(source, resnet),
        ModelConfig::Mobilenet(mobilenet) => return mobilenet_lines(source, mobilenet),
        _ => return String::new(),
    };
    let mut lines = vec![
        format!("from transformers import {class}{}", if has_tokenizer { ", AutoTokenizer" } else { "" }),
        format!("model = {class}.from_pretrained(\".\")"),
    ];
    if has_tokenizer {
        lines.push("tokenizer = AutoTokenizer.from_pretrained(\".\")".into());
    }
    lines.join("\n")
}

/// Input channels of the images, and the number of classes.
fn image_dims(source: &ExportSource) -> (usize, usize) {
    let channels = match &source.features.input {
        crate::base::features::InputSpec::Floats { shape } => shape.last().copied().unwrap_or(3),
        _ => 3,
    };
    (channels, classes(source).map_or(source.features.unweighted_target_len(), <[String]>::len))
}

const LOAD: &str = "model.load_state_dict(safetensors.torch.load_file(\"model.safetensors\"))";

fn resnet_lines(source: &ExportSource, resnet: &ResnetConfig) -> String {
    let (channels, classes) = image_dims(source);
    let mut lines = vec![
        "import safetensors.torch, torch, torchvision".to_owned(),
        format!("model = torchvision.models.resnet{}(num_classes={classes})", resnet.depth),
    ];
    match resnet.stem {
        Stem::Small => lines.push(format!(
            "model.conv1, model.maxpool = torch.nn.Conv2d({channels}, 64, 3, 1, 1, bias=False), torch.nn.Identity()"
        )),
        Stem::Imagenet if channels != 3 => {
            lines.push(format!("model.conv1 = torch.nn.Conv2d({channels}, 64, 7, 2, 3, bias=False)"));
        }
        Stem::Imagenet => {}
    }
    lines.push(LOAD.into());
    lines.join("\n")
}

fn mobilenet_lines(source: &ExportSource, mobilenet: &MobilenetConfig) -> String {
    let (channels, classes) = image_dims(source);
    let width = mobilenet.width;
    let mut lines = vec![
        "import safetensors.torch, torch, torchvision".to_owned(),
        format!("model = torchvision.models.mobilenet_v2(num_classes={classes}, width_mult={width:?})"),
    ];
    if mobilenet.stem == Stem::Small || channels != 3 {
        lines.push(format!(
            "model.features[0][0] = torch.nn.Conv2d({channels}, model.features[0][0].out_channels, 3, {}, 1, \
             bias=False)",
            mobilenet.stem.stride()
        ));
    }
    lines.push(LOAD.into());
    lines.join("\n")
}
