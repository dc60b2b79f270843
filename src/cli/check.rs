//! `trainer check`: reports every mistake in a job without training it.

use std::collections::BTreeSet;

use clap::Args;
use serde_json::{Value, json};

use super::{CommonArgs, Exit, JobFile, print_line, start_threads};
use crate::base::MicroBatchSpec;
use crate::base::units::{Bytes, counted, format_count};
use crate::data::warnings;
use crate::job::{Job, RunLength};
use crate::layers::Layer;
use crate::params::ParamId;
use crate::report::plan::{parameter_counts, prediction_rows, pruned_model};
use crate::report::{data, text};
use crate::train::Failure;
use crate::train::setup::Setup;

/// Find mistakes in a job and show how its data is read, without training
#[derive(Clone, Debug, Args)]
#[command(after_help = "\
Examples:
  trainer check job.toml
  trainer check job.toml -v                  also the layers, and the job with all defaults
  trainer check job.toml --json              the mistakes, or the resolved job, for a program")]
pub struct CheckArgs {
    #[command(flatten)]
    pub job: JobFile,
}

impl CheckArgs {
    pub fn run(&self, common: &CommonArgs) -> anyhow::Result<Exit> {
        let job = common.load_job(&self.job.path)?;
        start_threads()?;
        // No budget: opening the data and building the network allocates no tensors.
        let setup = Setup::open(job, u64::MAX, &common.open_options())?;
        setup.initial_weights()?;
        let (sets, skip_bad) = (&setup.datasets, setup.loader_options(1, 0).skip_bad);
        let preview = data::preview(sets.train.as_ref(), sets.valid.as_ref(), setup.job.seed, skip_bad);
        let mut preview = preview.map_err(Failure::from)?;
        for (set, name) in [(&sets.train, "training"), (&sets.valid, "validation")] {
            let bad = warnings::check_rows(set.as_ref(), setup.job.seed, skip_bad).map_err(Failure::from)?;
            // The training set reports its own.
            if bad > 0 && name == "validation" {
                preview
                    .warnings
                    .push(format!("{} of the {name} set will be skipped", counted(bad, "bad row")));
            }
        }
        preview.warnings.extend(frozen_at_random(&setup));
        preview.warnings.extend(pruning_cut_short(&setup));
        preview.warnings.extend(quantization_never_starts(&setup));
        preview.test_samples = setup.test_samples;
        if common.json {
            let layers: Vec<Value> = layer_rows(&setup).iter().map(LayerRow::json).collect();
            let mut found = json!({
                "ok": true,
                "data": preview,
                "parameters": setup.num_parameters(),
                "trained_parameters": setup.num_trained(),
                "layers": layers,
                "job": setup.job.to_json(),
            });
            if let Some(smaller) = setup.smaller_model() {
                found["prediction"] = json!(smaller);
            }
            if let Some(model) = setup.pruned_model() {
                found["pruned"] = json!(model);
            }
            if let Some((layers, whole_parameters)) = setup.factorized() {
                found["factorized"] = json!({ "layers": layers, "whole_parameters": whole_parameters });
            }
            print_line(found)?;
        } else if !common.quiet {
            let counts = parameter_counts(setup.num_parameters(), setup.num_trained());
            let parameters = ("parameters".to_owned(), counts.replacen(" parameters", "", 1));
            let pruned = setup.pruned_model().map(|model| ("pruned".to_owned(), pruned_model(model)));
            let factorized = setup.factorized().map(|(layers, whole)| {
                let (layers, whole) = (counted(layers as u64, "layer"), format_count(whole));
                ("low rank".to_owned(), format!("{layers} factorized, of {whole} parameters as a whole"))
            });
            let rows: Vec<(String, String)> =
                preview.lines().into_iter().chain([parameters]).chain(factorized).chain(pruned).collect();
            let width = console::Term::stdout().size_checked().map(|(_, columns)| columns.into());
            print_line(text::wrap_to(&[summary(&setup.job)], width, 4).join("\n"))?;
            let smaller = setup.smaller_model().filter(|_| common.verbose);
            let smaller =
                smaller.iter().flat_map(prediction_rows).map(|(name, cost)| (name.to_owned(), cost));
            print_line(aligned(&rows.into_iter().chain(smaller).collect::<Vec<_>>(), width).join("\n"))?;
            if common.verbose {
                print_line(format_args!("\n{}", layer_table(&layer_rows(&setup))))?;
                print_line(format_args!("\n{}", setup.job.to_toml().trim_end()))?;
            }
        }
        Ok(Exit::Done)
    }
}

/// Maximum width of the names in columns; the value of a longer name goes on the next line.
const MAX_NAME: usize = 24;

/// Names and values in two columns, broken to a width.
fn aligned(rows: &[(String, String)], width: Option<usize>) -> Vec<String> {
    let columns = |name: &str| console::measure_text_width(name);
    let most = width.map_or(MAX_NAME, |width| MAX_NAME.min(width / 3));
    let names = rows.iter().map(|(name, _)| columns(name)).filter(|n| *n <= most);
    let column = names.max().unwrap_or(0).max(14);
    let indent = 4 + column + 1;
    let lines = rows.iter().flat_map(|(name, value)| match columns(name) > column {
        true => vec![format!("    {name}"), format!("{:indent$}{value}", "")],
        false => vec![format!("    {name}{:1$} {value}", "", column - columns(name))],
    });
    let lines = text::wrap_to(&lines.collect::<Vec<_>>(), width, indent);
    let Some(width) = width else { return lines };
    lines.into_iter().flat_map(|line| break_long_words(line, width, indent)).collect()
}

/// Breaks a line in the middle of a word if that is wider than the terminal, such as the name of a table column.
fn break_long_words(line: String, width: usize, indent: usize) -> Vec<String> {
    if console::measure_text_width(&line) <= width {
        return vec![line];
    }
    let (mut lines, mut columns) = (vec![String::new()], 0);
    for c in line.chars() {
        let wide = console::measure_text_width(c.encode_utf8(&mut [0; 4]));
        if columns + wide > width && width > indent + wide {
            lines.push(" ".repeat(indent));
            columns = indent;
        }
        columns += wide;
        if let Some(last) = lines.last_mut() {
            last.push(c);
        }
    }
    lines
}

/// A warning, if frozen parameters have random initial values.
fn frozen_at_random(setup: &Setup) -> Option<String> {
    let random = setup.num_trained() < setup.num_parameters() && setup.job.train.init.is_none();
    random
        .then(|| "`train.freeze` keeps random weights: `train.init` names trained ones to start from".into())
}

/// A warning, if the run ends before values are rounded. With `train.steps` that is an error of the job.
fn quantization_never_starts(setup: &Setup) -> Option<String> {
    let (begin, last) = (setup.job.quantize.as_ref()?.begin_step?, setup.total_steps);
    (begin > last)
        .then(|| format!("rounding begins after step {begin} and the run ends at step {last}, in floats"))
}

/// A warning, if the run ends before pruning does. With `train.steps` that is an error of the job.
fn pruning_cut_short(setup: &Setup) -> Option<String> {
    let (prune, last) = (setup.job.pruning()?, setup.total_steps);
    (prune.last_step() > last).then(|| {
        format!(
            "pruning ends at step {} and the run at step {last}, with a sparsity of {:.3} instead of {}",
            prune.last_step(),
            prune.sparsity(last),
            prune.target()
        )
    })
}

/// A row of the layer table. FLOPs and bytes are for one micro-batch of the job's `batch_size`.
struct LayerRow {
    name: String,
    output: Vec<usize>,
    parameters: usize,
    flops: u64,
    saved_bytes: u64,
}

impl LayerRow {
    fn json(&self) -> Value {
        json!({
            "name": self.name, "output": self.output, "parameters": self.parameters,
            "flops": self.flops, "saved_bytes": self.saved_bytes,
        })
    }
}

fn layer_rows(setup: &Setup) -> Vec<LayerRow> {
    let at =
        MicroBatchSpec { batch: setup.job.train.batch_size, dtype: setup.dtype, backend: setup.backend() };
    let params = &setup.layout.params;
    let mut counted = BTreeSet::new();
    // A parameter that two layers share counts for the first.
    let mut num_parameters = |read: Vec<ParamId>| {
        let own: Vec<ParamId> = read.into_iter().filter(|param| counted.insert(param.index)).collect();
        params.num_values(&own)
    };
    let layer = |layer: &dyn Layer| {
        let cost = layer.cost(at);
        let kept_bytes = if cost.saves_output { cost.output } else { 0 }
            + if cost.saves_input { cost.input_grad } else { 0 };
        LayerRow {
            name: layer.name().to_owned(),
            output: layer.output_shape(),
            parameters: num_parameters(layer.params()),
            flops: cost.flops,
            saved_bytes: cost.saved + kept_bytes,
        }
    };
    let mut rows: Vec<LayerRow> = setup.network.layers().into_iter().map(layer).collect();
    let loss = &setup.network.loss;
    rows.push(LayerRow {
        name: loss.name().to_owned(),
        output: vec![],
        parameters: num_parameters(loss.params()),
        flops: loss.cost(at).flops,
        saved_bytes: 0,
    });
    rows
}

fn layer_table(rows: &[LayerRow]) -> String {
    let cells = |row: &LayerRow| {
        let output = if row.output.is_empty() { "loss".into() } else { format!("{:?}", row.output) };
        [
            row.name.clone(),
            output,
            format_count(row.parameters as u64),
            format_count(row.flops),
            Bytes(row.saved_bytes).to_string(),
        ]
    };
    let head = ["layer", "output", "parameters", "operations", "saved"].map(str::to_owned);
    let lines: Vec<[String; 5]> = std::iter::once(head).chain(rows.iter().map(cells)).collect();
    let width = |column: usize| lines.iter().map(|line| line[column].len()).max().unwrap_or(0);
    let widths: [usize; 5] = std::array::from_fn(width);
    let text = lines.iter().map(|[name, output, rest @ ..]| {
        let rest: String = rest.iter().zip(&widths[2..]).map(|(cell, w)| format!("  {cell:>w$}")).collect();
        format!("{name:<0$}  {output:<1$}{rest}", widths[0], widths[1]).trim_end().to_owned()
    });
    text.collect::<Vec<_>>().join("\n")
}

/// Summarizes the job in a line or two.
fn summary(job: &Job) -> String {
    let length = match job.train.length() {
        RunLength::Epochs(n) => counted(n, "epoch"),
        RunLength::Steps(n) => counted(n, "step"),
    };
    format!(
        "ok: {} trains {} on {} for {length}, {} per update",
        job.name,
        job.model.kind(),
        job.data.source.kind(),
        counted(job.train.samples_per_update() as u64, "sample"),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_values_stay_in_their_columns_at_any_width() {
        let row = |name: &str, value: &str| (name.to_owned(), value.to_owned());
        let long = "a column with a name that is longer than any";
        let rows = [
            row("input", "[3] numbers"),
            row("a long name of 20", "x, y"),
            row(long, "number, standardized"),
        ];
        assert_eq!(
            aligned(&rows, None),
            [
                "    input             [3] numbers",
                "    a long name of 20 x, y",
                &format!("    {long}"),
                "                      number, standardized",
            ]
        );
        let name = "a_column_name_that_has_forty_two_letters_x";
        for width in [40, 60, 61, 62] {
            let sample = row("sample 0", &format!("row {name} = -1.703, b = 2  target a"));
            let lines = aligned(&[row(name, "number"), sample], Some(width));
            assert!(lines.iter().all(|line| line.len() <= width), "{width}: {lines:?}");
            assert!(
                lines[2..]
                    .iter()
                    .all(|line| line.starts_with("    sample 0") || line.starts_with(&" ".repeat(19)))
            );
        }
        for width in 40..100 {
            let lines = aligned(
                &[row("target", "2 classes: no, yes, and some more of them"), rows[0].clone()],
                Some(width),
            );
            assert!(lines.iter().all(|line| line.len() <= width), "{width}: {lines:?}");
            assert!(
                lines[1..lines.len() - 1].iter().all(|line| line.starts_with(&" ".repeat(19))),
                "{lines:?}"
            );
        }
    }
}
