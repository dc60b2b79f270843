//! Smaller variants of a trained model, without training: layers of lower rank, weights that are zero, and fewer bits.
//!
//! Every variant of a small grid is exported to ONNX, read back and evaluated on the validation set, so that its
//! size and its metric are those of a file. The same model and data give the same table.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde::Serialize;

use super::calibration::calibrate;
use super::evaluate::evaluate;
use super::export::{
    ExportError, ExportFormat, ExportOptions, ExportSource, NoExportProgress, QuantizedType, Rounding,
    export, read_back, shrink, write_variant,
};
use super::session::SessionOptions;
use super::trained_model::TrainedModel;
use crate::base::byte_count::ByteCount;
use crate::data::Dataset;
use crate::job::{LowRankConfig, Ranks, Reductions, SizeRatio};
use crate::kernels::low_rank;
use crate::metrics::task::TaskMetrics;
use crate::models;
use crate::quantization::{ActivationPoints, ClipMethod};
use crate::train::Failure;
use crate::train::low_rank::{LowRankError, Spectra, factorizable};

/// How many times fewer parameters factorized variants have.
const RANK_TARGETS: [&str; 2] = ["2x", "4x"];
/// Fractions of the weights that are zero.
const SPARSITIES: [f64; 3] = [0.0, 0.5, 0.8];
/// Samples that activations are calibrated on.
const CALIBRATION_SAMPLES: u64 = 512;

/// The goal of the search, and its inputs.
pub struct CompressRequest<'a> {
    /// How many times smaller, gzipped.
    pub target: SizeRatio,
    /// How much worse the metric may be.
    pub max_loss: f64,
    pub validation: &'a Arc<dyn Dataset>,
    /// Samples from which the ranges of activations are calibrated.
    pub calibration: &'a Arc<dyn Dataset>,
    pub session: &'a SessionOptions,
    /// A folder for files that are removed afterwards.
    pub scratch: &'a Path,
}

/// A variant and its results.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Variant {
    /// How many times fewer parameters its layers of lower rank leave; absent if all layers are as in the model.
    pub lowrank: Option<SizeRatio>,
    /// Fraction of the weights that is zero.
    pub sparsity: f64,
    /// The type of its weights.
    pub dtype: &'static str,
    /// Bytes of the ONNX file.
    pub bytes: u64,
    /// The same after gzip.
    pub gzipped_bytes: u64,
    /// How many times smaller than the whole model, both gzipped.
    pub ratio: f64,
    pub metric: f64,
    /// How much worse than the whole model: a difference of accuracy, or the fraction by which the loss grew.
    pub loss: f64,
    /// Whether no variant is both smaller and better.
    pub on_frontier: bool,
}

/// All variants of a model. The first is the model as it is.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Frontier {
    /// `accuracy`, of which more is better, or `loss`.
    pub metric: &'static str,
    pub variants: Vec<Variant>,
    /// The best of those that are small and good enough; of equally good ones the smallest.
    pub chosen: Option<usize>,
}

/// What a search found.
pub struct Compressed {
    pub frontier: Frontier,
    /// The folder with the files of the chosen variant, below the scratch folder.
    pub chosen: Option<PathBuf>,
    /// Bad records among the samples that activations were calibrated on, which were left out.
    pub skipped: u64,
}

/// Evaluates all variants of `model`. `progress` is called with the variants done and their number.
pub fn compress(
    model: &TrainedModel,
    request: &CompressRequest,
    mut progress: impl FnMut(usize, usize),
) -> Result<Compressed, ExportError> {
    let smaller = shrink(model, request.session.ram)?;
    let model = smaller.as_ref().map_or(model, |smaller| &smaller.model);
    if !matches!(model.points, ActivationPoints::None) {
        let problem = "its weights are quantized already".to_owned();
        return Err(Failure::UnusableExport { folder: model.folder.clone(), problem }.into());
    }
    let kind = model.job.model.kind();
    let types = [None, Some(QuantizedType::Int8), Some(QuantizedType::Int4)];
    let types: Vec<Option<QuantizedType>> =
        types.into_iter().filter(|one| one.is_none_or(|one| one.supports(kind))).collect();
    let ranks = rank_choices(model, request.session.ram)?;
    let total = ranks.len() * SPARSITIES.len() * types.len();
    let mut frontier = Frontier { metric: "loss", variants: Vec::new(), chosen: None };
    let (kept, mut most_skipped) = (request.scratch.join("chosen"), 0);
    for (lowrank, ranks) in &ranks {
        for sparsity in SPARSITIES {
            let weights = request.scratch.join("weights.safetensors");
            write_variant(model, ranks, sparsity, &weights)?;
            let mut variant = with_weights(model, ranks, &weights);
            for quantize in &types {
                progress(frontier.variants.len(), total);
                let folder = request.scratch.join("export");
                let MeasuredVariant { dtype, files, metrics, skipped } =
                    measure(&mut variant, *quantize, &folder, request)?;
                most_skipped = skipped.max(most_skipped);
                let (metric, value) = quality(&metrics);
                frontier.metric = metric;
                let (bytes, gzipped_bytes) = sizes(&files)?;
                let (ratio, loss) = match frontier.variants.first() {
                    None => (1.0, 0.0),
                    Some(whole) => (
                        whole.gzipped_bytes as f64 / gzipped_bytes as f64,
                        match metric {
                            "accuracy" => whole.metric - value,
                            _ => (value - whole.metric) / whole.metric.abs().max(f64::MIN_POSITIVE),
                        },
                    ),
                };
                frontier.variants.push(Variant {
                    lowrank: *lowrank,
                    sparsity,
                    dtype,
                    bytes,
                    gzipped_bytes,
                    ratio,
                    metric: value,
                    loss,
                    on_frontier: false,
                });
                let chosen = choose(&frontier.variants, request.target, request.max_loss);
                if chosen != frontier.chosen {
                    frontier.chosen = chosen;
                    drop(fs::remove_dir_all(&kept));
                    fs::rename(&folder, &kept).map_err(ExportError::io("keep", &folder))?;
                }
            }
        }
    }
    progress(total, total);
    mark_frontier(&mut frontier.variants);
    let chosen = frontier.chosen.map(|_| kept);
    Ok(Compressed { frontier, chosen, skipped: most_skipped })
}

/// The ranks that the model has, then those of factorized variants, as far as it has layers for them.
fn rank_choices(model: &TrainedModel, ram: u64) -> Result<Vec<(Option<SizeRatio>, Ranks)>, ExportError> {
    let reductions = Reductions::of_job(&model.job);
    let layout = models::build_reduced(&model.job.model, model.features(), &reductions)?.layout;
    let Reductions { ranks: own, kept } = reductions;
    let layers = factorizable(&model.job.model, &layout, &kept);
    let mut choices = vec![(None, own.clone())];
    if layers.is_empty() {
        return Ok(choices);
    }
    if let Some(layer) =
        layers.iter().find(|layer| low_rank::layer_bytes(layer, Some(layer.max_rank())) > ram)
    {
        let needed = low_rank::layer_bytes(layer, Some(layer.max_rank()));
        let (layer, max_bytes) = (layer.name.clone(), ram);
        return Err(Failure::LowRank(LowRankError::Memory { layer, needed, max_bytes }).into());
    }
    let spectra = Spectra::read(&model.weights, layers, layout.params.len, ram)?;
    for target in RANK_TARGETS.iter().filter_map(|text| text.parse::<SizeRatio>().ok()) {
        match spectra.of_size(target) {
            Ok(ranks) => choices.push((Some(target), ranks.into_iter().chain(own.clone()).collect())),
            Err(Failure::LowRank(LowRankError::Target { .. })) => {}
            Err(other) => return Err(other.into()),
        }
    }
    Ok(choices)
}

/// The model with these ranks and the weights in this file.
fn with_weights(model: &TrainedModel, ranks: &Ranks, weights: &Path) -> TrainedModel {
    let mut job = model.job.clone();
    // A variant has no ranges of its own: it is quantized after training.
    job.quantize = None;
    if !ranks.is_empty() {
        let whole =
            LowRankConfig { rank: None, energy: None, target: None, layers: Vec::new(), ranks: Ranks::new() };
        job.lowrank.get_or_insert(whole).ranks.clone_from(ranks);
    }
    TrainedModel {
        job,
        preprocessing: model.preprocessing.clone(),
        origin: model.origin,
        folder: model.folder.clone(),
        weights: weights.to_owned(),
        statistics: weights.to_owned(),
        step: model.step,
        is_best: model.is_best,
        uses_ema: model.uses_ema,
        points: ActivationPoints::None,
        converted: None,
    }
}

/// A variant that was exported and evaluated.
struct MeasuredVariant {
    /// The type of its weights.
    dtype: &'static str,
    /// The files of its model.
    files: Vec<PathBuf>,
    metrics: TaskMetrics,
    /// Bad records of its calibration.
    skipped: u64,
}

/// Exports a variant to `folder` and evaluates what was written.
fn measure(
    model: &mut TrainedModel,
    quantize: Option<QuantizedType>,
    folder: &Path,
    request: &CompressRequest,
) -> Result<MeasuredVariant, ExportError> {
    let (session, kind) = (request.session, model.job.model.kind());
    let options = ExportOptions {
        format: ExportFormat::Onnx,
        dtype: None,
        quantize,
        rounding: Rounding::default(),
        folder: folder.to_owned(),
        force: true,
        max_bytes: session.ram,
    };
    let calibration = match quantize.is_some_and(|quantized| quantized.quantizes_activations(kind)) {
        true => {
            let samples = CALIBRATION_SAMPLES.min(request.calibration.len());
            Some(calibrate(model, request.calibration, samples, ClipMethod::Mse, session, |_| {})?)
        }
        false => None,
    };
    let activations = calibration.as_ref().map(|calibration| &calibration.activations);
    let source = ExportSource { activations, ..ExportSource::new(model) };
    let summary = export(&source, &options, &mut NoExportProgress)?;
    let restored = request.scratch.join("read-back.safetensors");
    let points = read_back(&source, &options, &restored)?;
    let own = (model.weights.clone(), model.statistics.clone());
    (model.weights, model.statistics, model.points) = (restored.clone(), restored, points);
    let evaluation = evaluate(model, request.validation, session, |_| {});
    ((model.weights, model.statistics), model.points) = (own, ActivationPoints::None);
    let files = summary.files.iter().filter(|file| file.name.starts_with("model.onnx"));
    Ok(MeasuredVariant {
        dtype: summary.dtype,
        files: files.map(|file| folder.join(&file.name)).collect(),
        metrics: evaluation?.metrics,
        skipped: calibration.as_ref().map_or(0, |calibration| calibration.skipped),
    })
}

/// The metric that variants are compared by, and its value.
fn quality(metrics: &TaskMetrics) -> (&'static str, f64) {
    let name = match metrics {
        TaskMetrics::Classification { .. } | TaskMetrics::MultiLabel { .. } => "accuracy",
        TaskMetrics::Regression { .. } | TaskMetrics::Language { .. } => "loss",
    };
    let value = metrics.values().into_iter().find(|(metric, _)| metric == name);
    (name, value.map_or(f64::NAN, |(_, value)| value))
}

/// Bytes of files, and of the same after gzip.
fn sizes(files: &[PathBuf]) -> Result<(u64, u64), ExportError> {
    let mut sizes = (0, 0);
    for path in files {
        let read = |path: &Path| -> io::Result<(u64, u64)> {
            let mut encoder =
                flate2::write::GzEncoder::new(ByteCount::default(), flate2::Compression::default());
            let bytes = io::copy(&mut File::open(path)?, &mut encoder)?;
            Ok((bytes, encoder.finish()?.0))
        };
        let (bytes, gzipped) = read(path).map_err(ExportError::io("read", path))?;
        sizes = (sizes.0 + bytes, sizes.1 + gzipped);
    }
    Ok(sizes)
}

/// The variant with the smallest loss among those that are small and good enough; the smallest on ties.
fn choose(variants: &[Variant], target: SizeRatio, max_loss: f64) -> Option<usize> {
    let meets =
        |(_, variant): &(usize, &Variant)| variant.ratio >= target.value() && variant.loss <= max_loss;
    let best = variants
        .iter()
        .enumerate()
        .filter(meets)
        .min_by(|(_, a), (_, b)| a.loss.total_cmp(&b.loss).then(a.gzipped_bytes.cmp(&b.gzipped_bytes)));
    best.map(|(index, _)| index)
}

/// Marks the variants than which no other is both at most as large and at most as bad.
fn mark_frontier(variants: &mut [Variant]) {
    let dominates = |other: &Variant, one: &Variant| {
        other.gzipped_bytes <= one.gzipped_bytes
            && other.loss <= one.loss
            && (other.gzipped_bytes, other.loss) != (one.gzipped_bytes, one.loss)
    };
    let is_best = |one: &Variant| one.loss.is_finite() && !variants.iter().any(|other| dominates(other, one));
    let marks: Vec<bool> = variants.iter().map(is_best).collect();
    variants.iter_mut().zip(marks).for_each(|(variant, mark)| variant.on_frontier = mark);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn variant(gzipped_bytes: u64, loss: f64) -> Variant {
        Variant {
            lowrank: None,
            sparsity: 0.0,
            dtype: "f32",
            bytes: 100,
            gzipped_bytes,
            ratio: 100.0 / gzipped_bytes as f64,
            metric: 0.9 - loss,
            loss,
            on_frontier: false,
        }
    }

    #[test]
    fn the_best_of_the_small_ones_is_chosen() {
        let variants = [(100, 0.0), (50, -0.01), (24, 0.02), (20, 0.005), (10, 0.005), (5, 0.3)]
            .map(|(g, l)| variant(g, l));
        let choose = |target: &str, loss| choose(&variants, target.parse().unwrap(), loss);
        assert_eq!(choose("1.5x", 0.01), Some(1));
        assert_eq!(choose("4x", 0.01), Some(4));
        assert_eq!(choose("20x", 0.01), None);
        assert_eq!(choose("20x", 0.5), Some(5));
        let mut variants = variants;
        mark_frontier(&mut variants);
        let marked: Vec<bool> = variants.iter().map(|variant| variant.on_frontier).collect();
        assert_eq!(marked, [false, true, false, false, true, true]);
    }
}
