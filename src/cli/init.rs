//! `trainer init`: a commented, runnable job to start from.

use std::fs::OpenOptions;
use std::io::{self, Write};
use std::path::PathBuf;

use anyhow::Context;
use clap::Args;
use clap::builder::PossibleValuesParser;

use super::{CliError, Exit, print_line};

macro_rules! template {
    ($name:literal, $about:literal) => {
        ($name, $about, include_str!(concat!("../../configs/", $name, ".toml")))
    };
}

/// A template: its name, its description, and its file in `configs/`.
const TEMPLATES: [(&str, &str, &str); 15] = [
    template!("quickstart", "a small convolutional network on generated images"),
    template!("mlp", "an MLP on generated images"),
    template!("layers", "a network declared layer by layer"),
    template!("resnet", "a ResNet-18 for small images"),
    template!("mobilenet", "a MobileNet-v2"),
    template!("vit", "a small vision transformer"),
    template!("gpt", "a small GPT-2"),
    template!("llama", "a small Llama"),
    template!("bert", "a small BERT that classifies sequences"),
    template!("mnist", "MNIST from its published files"),
    template!("fashion-mnist", "Fashion-MNIST from its published files"),
    template!("signs", "images in folders named by class"),
    template!("housing", "house prices of California from a csv file"),
    template!("shakespeare", "characters of a text file, with nanoGPT's CPU configuration"),
    template!("shakespeare-gpu", "the same, with nanoGPT's GPU configuration"),
];

/// Write a commented, runnable job to start from
#[derive(Clone, Debug, Args)]
#[command(after_help = "\
Examples:
  trainer init --list
  trainer init                               print the quickstart job
  trainer init mlp -o job.toml")]
pub struct InitArgs {
    /// The template
    #[arg(default_value = "quickstart", value_parser = PossibleValuesParser::new(TEMPLATES.map(|t| t.0)))]
    pub template: String,
    /// The file to write; must not exist [default: stdout]
    #[arg(short, long, value_name = "FILE", value_hint = clap::ValueHint::FilePath)]
    pub output: Option<PathBuf>,
    /// List the templates
    #[arg(long, conflicts_with = "output")]
    pub list: bool,
}

impl InitArgs {
    pub fn run(&self) -> anyhow::Result<Exit> {
        if self.list {
            for (name, about, _) in TEMPLATES {
                print_line(format_args!("{name:<16} {about}"))?;
            }
            return Ok(Exit::Done);
        }
        let (_, _, text) = TEMPLATES
            .iter()
            .find(|(name, ..)| *name == self.template)
            .with_context(|| format!("no template `{}`; `trainer init --list` lists them", self.template))?;
        let Some(path) = &self.output else {
            print_line(text.trim_end())?;
            return Ok(Exit::Done);
        };
        let shown = path.display();
        let file = OpenOptions::new().write(true).create_new(true).open(path);
        if file.as_ref().is_err_and(|e| e.kind() == io::ErrorKind::AlreadyExists) {
            let error = CliError::usage(format!("`{shown}` already exists"), "choose another name with `-o`");
            return Err(error.into());
        }
        file.and_then(|mut file| file.write_all(text.as_bytes()))
            .with_context(|| format!("cannot write `{shown}`"))?;
        print_line(format_args!("wrote {shown}; train it with `trainer fit {shown}`"))?;
        Ok(Exit::Done)
    }
}
