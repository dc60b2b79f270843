//! Folded batch norms and 8-bit integers: what is read back has other parameters, and computes nearly the same.

use std::sync::Arc;

use candle_core::Tensor;

use super::super::*;
use super::case::{BATCH, CASES, ExportCase};
use super::check_onnx_order;
use crate::base::random::{RngKey, stream_id};
use crate::quantization::ClipMethod;
use crate::quantization::points::Observers;

fn values(tensor: &Tensor) -> Vec<f32> {
    tensor.flatten_all().unwrap().to_vec1().unwrap()
}

fn largest(values: &[f32]) -> f32 {
    values.iter().fold(0f32, |most, value| most.max(value.abs()))
}

fn largest_difference(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).fold(0f32, |most, (a, b)| most.max((a - b).abs()))
}

/// Calibrates a case on its own input.
fn calibrate(case: &mut ExportCase) {
    let observers = Arc::new(Observers::default());
    let (inputs, lengths, logits) = case.logits();
    let points = ActivationPoints::Observe(observers.clone());
    let observed = case.forward_with(&case.weights(), &case.features, &inputs, lengths.as_deref(), &points);
    // Splitting an activation from its layer rounds nothing, and points that observe change nothing.
    assert!(largest_difference(&values(&observed), &values(&logits)) <= 1e-5 * largest(&values(&logits)));
    case.activations = Some(observers.quantization(ClipMethod::MinMax));
}

/// The logits of what was exported in integers, and the step of their quantization.
fn quantized_logits(case: &ExportCase, options: &ExportOptions) -> (Tensor, f32) {
    let all = case.activations.clone().unwrap();
    let (inputs, lengths, _) = case.logits();
    let weights = options.folder.with_added_extension("safetensors");
    let head = models::build(&case.model, &case.features).unwrap().network.loss.name().to_owned();
    let step = all[&head].scale;
    let points = ActivationPoints::Quantize(Arc::new(all));
    (case.forward_with(&weights, &case.features, &inputs, lengths.as_deref(), &points), step)
}

/// Exports a case with its matrices in blocks; the logits of what was read back.
fn block_logits(case: &ExportCase, quantized: QuantizedType) -> Tensor {
    let options = case.options(ExportFormat::Onnx, None, Some(quantized));
    case.export(&options).unwrap();
    let (inputs, lengths, _) = case.logits();
    let weights = options.folder.with_added_extension("safetensors");
    case.forward(&weights, &case.features, &inputs, lengths.as_deref())
}

/// The logits of a case with its matrices in blocks of 8 and 4 bits; `None` if it has no such form.
pub(super) fn write_blocks(case: &ExportCase) -> Option<[Tensor; 2]> {
    let has_blocks = QuantizedType::Int4.supports(case.model.kind());
    has_blocks
        .then(|| [QuantizedType::Int8, QuantizedType::Int4].map(|quantized| block_logits(case, quantized)))
}

/// Exports a case in integers, in every format that has them. Returns its logits and their step.
pub(super) fn write(case: &mut ExportCase) -> Option<(Tensor, f32)> {
    if !QuantizedType::Int8.quantizes_activations(case.model.kind()) {
        return None;
    }
    calibrate(case);
    let export = |format: &ExportFormat| {
        let options = case.options(*format, None, Some(QuantizedType::Int8));
        case.export(&options).unwrap();
        options
    };
    let options: Vec<ExportOptions> = QuantizedType::Int8.formats().iter().map(export).collect();
    Some(quantized_logits(case, &options[0]))
}

/// Steps of the logits that a runtime may be away: it rounds in integers what is rounded in floats here, so that a
/// value between two steps may go to the other one, and with it what follows.
const GOLDEN_STEPS: f32 = 12.0;

/// Compares what a runtime computed from an export in integers with what is computed from it here.
pub(super) fn check_golden(
    case: &mut ExportCase,
    format: ExportFormat,
    quantized: QuantizedType,
    theirs: &[f32],
) {
    if !quantized.quantizes_activations(case.model.kind()) {
        let ours = values(&block_logits(case, quantized));
        // Of the last position for a language model.
        let rows = ours.len() / theirs.len();
        let width = theirs.len() / BATCH;
        let last: Vec<f32> = ours.chunks(width).skip(rows - 1).step_by(rows).flatten().copied().collect();
        let difference = largest_difference(&last, theirs);
        assert!(difference <= 1e-4 * largest(&ours), "{} {}: {difference}", case.name, quantized.name());
        return;
    }
    calibrate(case);
    let options = case.options(format, None, Some(quantized));
    case.export(&options).unwrap();
    let (logits, step) = quantized_logits(case, &options);
    let steps = largest_difference(&values(&logits), theirs) / step;
    assert!(steps <= GOLDEN_STEPS, "{} {}: {steps} steps", case.name, format.name());
}

#[test]
fn folded_batch_norms_compute_the_same() {
    let root = tempfile::tempdir().unwrap();
    for case in CASES.into_iter().map(|case| ExportCase::new(case, root.path())) {
        if !ExportFormat::Tflite.supports(case.model.kind()) {
            continue;
        }
        let options = case.options(ExportFormat::Tflite, None, None);
        let (summary, tensors) = case.export(&options).unwrap();
        assert_eq!((summary.dtype, tensors.len()), ("f32", case.original().len()));
        let (inputs, lengths, logits) = case.logits();
        let weights = options.folder.with_added_extension("safetensors");
        let read_back = case.forward(&weights, &case.features, &inputs, lengths.as_deref());
        let (ours, folded) = (values(&logits), values(&read_back));
        let difference = largest_difference(&ours, &folded);
        assert!(difference <= 1e-5 * largest(&ours), "{}: {ours:?} {folded:?}", case.name);
        let folds = tensors
            .iter()
            .any(|(name, values)| name.ends_with("running_var") && values.iter().all(|value| *value == 1.0));
        assert_eq!(folds, case.name == "cnn" || case.model.kind().ends_with("net"), "{}", case.name);
    }
}

/// Both formats hold the same integers, a quarter of the bytes, and logits near those of the floats.
#[test]
fn integers_compute_nearly_the_same() {
    let root = tempfile::tempdir().unwrap();
    for case in CASES {
        let mut case = ExportCase::new(case, root.path());
        if !QuantizedType::Int8.quantizes_activations(case.model.kind()) {
            continue;
        }
        calibrate(&mut case);
        let int8 = Some(QuantizedType::Int8);
        let [onnx, tflite] = [ExportFormat::Onnx, ExportFormat::Tflite].map(|format| {
            let options = case.options(format, None, int8);
            let (summary, tensors) = case.export(&options).unwrap();
            assert_eq!(summary.dtype, "int8");
            let float = case.export(&case.options(format, Some(WeightDtype::F32), None)).unwrap().0;
            // A TFLite file has 28 bytes per channel besides.
            if float.bytes > 4 << 20 {
                assert!(
                    summary.bytes < float.bytes * 35 / 100,
                    "{}: {} {}",
                    case.name,
                    summary.bytes,
                    float.bytes
                );
            }
            (options, tensors)
        });
        assert_eq!(onnx.1, tflite.1, "{}", case.name);
        check_onnx_order(case.name, &onnx.0.folder);
        let ours = values(&case.logits().2);
        let (logits, step) = quantized_logits(&case, &onnx.0);
        let difference = largest_difference(&ours, &values(&logits)) / largest(&ours);
        assert!(difference > 0.0 && difference < 0.2, "{}: {difference}", case.name);
        assert!(values(&logits).iter().all(|value| (value / step - (value / step).round()).abs() < 1e-3));
    }
}

/// Matrices in blocks are smaller with fewer bits, and further from the floats.
#[test]
fn blocks_compute_nearly_the_same() {
    let root = tempfile::tempdir().unwrap();
    for case in CASES.into_iter().map(|case| ExportCase::new(case, root.path())) {
        let Some([eight, four]) = write_blocks(&case) else { continue };
        let ours = values(&case.logits().2);
        let relative = |logits: &Tensor| largest_difference(&ours, &values(logits)) / largest(&ours);
        let (eight, four) = (relative(&eight), relative(&four));
        assert!(eight > 0.0 && eight < 0.05 && eight < four && four < 0.8, "{}: {eight} {four}", case.name);
        let options = |name: &str| case.options(ExportFormat::Onnx, None, Some(name.parse().unwrap()));
        let [eight, four] = ["int8", "int4"].map(|name| {
            let folder = options(name).folder;
            check_onnx_order(case.name, &folder);
            std::fs::metadata(folder.join("model.onnx")).unwrap().len()
        });
        assert!(four < eight, "{}: {four} {eight}", case.name);
    }
}

#[test]
fn a_range_that_is_missing_is_named() {
    let root = tempfile::tempdir().unwrap();
    let mut case =
        ExportCase::new(CASES.into_iter().find(|case| case.0 == "resnet-small").unwrap(), root.path());
    calibrate(&mut case);
    case.activations.as_mut().unwrap().remove("layer1.0.bn1").unwrap();
    let options = case.options(ExportFormat::Tflite, None, Some(QuantizedType::Int8));
    let error = case.export(&options).err().unwrap().to_string();
    assert_eq!(error, "the activations of `layer1.0.bn1` were not calibrated");
    assert!(!options.folder.exists());
}

#[test]
fn a_damaged_tflite_file_is_an_error() {
    let root = tempfile::tempdir().unwrap();
    let case = ExportCase::new(CASES.into_iter().find(|case| case.0 == "cnn").unwrap(), root.path());
    let options = case.options(ExportFormat::Tflite, None, None);
    case.export(&options).unwrap();
    let path = options.folder.join(tflite::FILE);
    let file = std::fs::read(&path).unwrap();
    let name = "stages.0.weight";
    let built = models::build(&case.model, &case.features).unwrap();
    let spec = all_specs(&built.layout).find(|spec| spec.name == name).unwrap();
    let mapping = TensorMapping::new(name, spec, Transform::Permute([0, 2, 3, 1]));
    let read = |bytes: &[u8]| {
        std::fs::write(&path, bytes).unwrap();
        tflite::TfliteReader::open(&path).and_then(|reader| reader.read(&mapping))
    };
    assert_eq!(read(&file).unwrap().len(), mapping.len());
    assert!(read(&file[..file.len() / 2]).is_err() && read(&[]).is_err());
    for length in (0..file.len()).step_by(97) {
        let _ = read(&file[..length]);
    }
    // Offsets that lead anywhere: never a panic.
    let key = RngKey::new(3, stream_id("damage"));
    for i in 0..400 {
        let mut damaged = file.clone();
        let at = (key.f64(2 * i) * file.len() as f64) as usize;
        damaged[at] ^= 1 << (key.f64(2 * i + 1) * 8.0) as u32;
        let _ = read(&damaged);
    }
}
