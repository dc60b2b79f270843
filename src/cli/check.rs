//! `trainer check`: every mistake in a job, without training it.

use clap::Args;
use serde_json::{Value, json};

use super::{Common, Exit, JobFile, say, start_threads};
use crate::job::{Job, Length};
use crate::layers::{At, Layer};
use crate::report::data;
use crate::train::Failure;
use crate::train::setup::Setup;
use crate::units::{Bytes, count};

/// Find every mistake in a job and open its data, without training
#[derive(Clone, Debug, Args)]
#[command(after_help = "\
Examples:
  trainer check job.toml
  trainer check job.toml -v                  also the layers, and the job with every default filled in
  trainer check job.toml --json              the mistakes, or the resolved job, for a program")]
pub struct Check {
    #[command(flatten)]
    pub job: JobFile,
}

impl Check {
    pub fn run(&self, common: &Common) -> anyhow::Result<Exit> {
        let job = common.job(&self.job.path)?;
        start_threads()?;
        // Opening the data and building the network needs no budget: nothing is allocated for them.
        let setup = Setup::open(job, u64::MAX, &common.opening())?;
        let (sets, skip_bad) = (&setup.sets, setup.reading(1, 0).skip_bad);
        let seen = data::look(sets.train.as_ref(), sets.valid.as_ref(), setup.job.seed, skip_bad);
        let seen = seen.map_err(Failure::from)?;
        if common.json {
            let layers: Vec<Value> = rows(&setup).iter().map(Row::json).collect();
            say(json!({
                "ok": true,
                "data": seen,
                "parameters": setup.parameters(),
                "layers": layers,
                "job": setup.job.to_json(),
            }))?;
        } else if !common.quiet {
            say(summary(&setup.job))?;
            for (name, value) in seen.lines() {
                say(format_args!("    {name:<14} {value}"))?;
            }
            say(format_args!("    {:<14} {}", "parameters", count(setup.parameters())))?;
            if common.verbose {
                say(format_args!("\n{}", table(&rows(&setup))))?;
                say(format_args!("\n{}", setup.job.to_toml().trim_end()))?;
            }
        }
        Ok(Exit::Done)
    }
}

/// A line of the layer table; operations and bytes are of one micro-batch as the job wishes it.
struct Row {
    name: String,
    output: Vec<usize>,
    parameters: usize,
    flops: u64,
    saved: u64,
}

impl Row {
    fn json(&self) -> Value {
        json!({
            "name": self.name, "output": self.output, "parameters": self.parameters,
            "flops": self.flops, "saved_bytes": self.saved,
        })
    }
}

fn rows(setup: &Setup) -> Vec<Row> {
    let at = At { batch: setup.job.train.batch_size, dtype: setup.dtype, on: setup.on() };
    let layer = |layer: &dyn Layer| {
        let cost = layer.cost(at);
        let kept =
            if cost.keeps_output { cost.output } else { 0 } + if cost.keeps_input { cost.input } else { 0 };
        Row {
            name: layer.name().to_owned(),
            output: layer.output(),
            parameters: layer.parameters(),
            flops: cost.flops,
            saved: cost.saved + kept,
        }
    };
    let mut rows: Vec<Row> = setup.network.layers().into_iter().map(layer).collect();
    let loss = &setup.network.loss;
    rows.push(Row {
        name: loss.name().to_owned(),
        output: vec![],
        parameters: loss.parameters(),
        flops: loss.cost(at).flops,
        saved: 0,
    });
    rows
}

fn table(rows: &[Row]) -> String {
    let cells = |row: &Row| {
        let output = if row.output.is_empty() { "loss".into() } else { format!("{:?}", row.output) };
        [
            row.name.clone(),
            output,
            count(row.parameters as u64),
            count(row.flops),
            Bytes(row.saved).to_string(),
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

/// What the job would do, in a line or two.
fn summary(job: &Job) -> String {
    let length = match job.train.length() {
        Length::Epochs(1) => "1 epoch".to_owned(),
        Length::Epochs(n) => format!("{n} epochs"),
        Length::Steps(n) => format!("{n} steps"),
    };
    format!(
        "ok: {} trains {} on {} for {length}, {} samples an update",
        job.name,
        job.model.kind(),
        job.data.source.kind(),
        job.train.samples_per_update(),
    )
}
