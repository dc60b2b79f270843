//! `trainer init`: a commented job to start from.

use std::fs::OpenOptions;
use std::io::{self, Write};
use std::path::PathBuf;

use anyhow::Context;
use clap::Args;

use super::{CliError, Exit, print_line};

/// A job to start from.
struct Template {
    name: &'static str,
    about: &'static str,
    /// Its file in `configs/`.
    text: &'static str,
}

macro_rules! template {
    ($name:literal, $about:literal) => {
        Template { name: $name, about: $about, text: include_str!(concat!("../../configs/", $name, ".toml")) }
    };
}

/// The templates, by what the reader brings.
const TEMPLATES: [(&str, &[Template]); 3] = [
    (
        "your data: set the file in the job",
        &[
            template!("csv", "a table: predict a column from the others"),
            template!("images", "images in folders named by class"),
            template!("text", "a language model of text files"),
            template!("chat", "a language model of chats in JSON lines"),
            template!("tokens", "a language model of token ids (.bin, .npy)"),
        ],
    ),
    (
        "a model on generated data: run as they are",
        &[
            template!("quickstart", "a small convolutional network"),
            template!("mlp", "an MLP"),
            template!("layers", "a network declared layer by layer"),
            template!("resnet", "a ResNet-18 for small images"),
            template!("mobilenet", "a MobileNet-v2"),
            template!("vit", "a small vision transformer"),
            template!("gpt", "a small GPT-2"),
            template!("llama", "a small Llama"),
            template!("bert", "a small BERT that classifies sequences"),
        ],
    ),
    (
        "a published dataset: set the variable that the first lines name",
        &[
            template!("mnist", "handwritten digits"),
            template!("fashion-mnist", "clothes"),
            template!("signs", "photographs of hands that show digits"),
            template!("housing", "house prices of California"),
            template!("shakespeare", "Tiny Shakespeare, with nanoGPT's CPU configuration"),
            template!("shakespeare-gpu", "the same, with nanoGPT's GPU configuration"),
        ],
    ),
];

fn templates() -> impl Iterator<Item = &'static Template> {
    TEMPLATES.iter().flat_map(|(_, group)| group.iter())
}

/// Write a commented job to start from
#[derive(Clone, Debug, Args)]
#[command(after_help = "\
Examples:
  trainer init --list                        the templates
  trainer init csv -o job.toml               a job for a table of your own
  trainer init                               print the quickstart job")]
pub struct InitArgs {
    /// The template; `--list` shows them
    #[arg(default_value = "quickstart")]
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
            list().iter().try_for_each(print_line)?;
            return Ok(Exit::Done);
        }
        let Some(template) = templates().find(|template| template.name == self.template) else {
            return Err(unknown_template(&self.template).into());
        };
        let Some(path) = &self.output else {
            print_line(template.text.trim_end())?;
            return Ok(Exit::Done);
        };
        let shown = path.display();
        let file = OpenOptions::new().write(true).create_new(true).open(path);
        if file.as_ref().is_err_and(|e| e.kind() == io::ErrorKind::AlreadyExists) {
            let error = CliError::usage(format!("`{shown}` already exists"), "choose another name with `-o`");
            return Err(error.into());
        }
        file.and_then(|mut file| file.write_all(template.text.as_bytes()))
            .with_context(|| format!("cannot write `{shown}`"))?;
        let set = if is_for_own_data(template) { "set `train` in it, then " } else { "" };
        print_line(format_args!("wrote {shown}; {set}train it with `trainer fit {shown}`"))?;
        Ok(Exit::Done)
    }
}

fn is_for_own_data(template: &Template) -> bool {
    TEMPLATES[0].1.iter().any(|own| own.name == template.name)
}

/// The templates under their headings.
fn list() -> Vec<String> {
    let group = |(heading, group): &(&str, &[Template])| {
        let lines = group.iter().map(|template| format!("  {:<16} {}", template.name, template.about));
        std::iter::once((*heading).to_owned()).chain(lines).collect::<Vec<_>>()
    };
    TEMPLATES.iter().flat_map(group).collect()
}

fn unknown_template(name: &str) -> CliError {
    let similar = templates().map(|template| (strsim::jaro_winkler(name, template.name), template.name));
    let best = similar.filter(|(similarity, _)| *similarity > 0.8).max_by(|a, b| a.0.total_cmp(&b.0));
    let hint = match best {
        Some((_, best)) => format!("did you mean `{best}`? The templates are:"),
        None => "the templates are:".to_owned(),
    };
    let all: String = list().iter().map(|line| format!("\n    {line}")).collect();
    CliError::usage(format!("there is no template `{name}`"), hint + &all)
}
