//! Weights that are already values of the format, with given scales: they are read back unchanged.

use candle_core::quantized::GgmlDType;

use super::case::{CASES, ExportCase};
use super::*;
use crate::params::TensorUse;
use crate::quantization::blocks::BlockBits;
use crate::quantization::grid::BlockGrid;

/// Rounds the weights of the case's linear layers to `grid`, with a scale that rounding again would not choose.
fn round(case: &mut ExportCase, grid: BlockGrid) -> BTreeMap<String, Vec<f32>> {
    let built = models::build(&case.model, &case.features).unwrap();
    let (mut original, mut scales) = (case.original(), BlockScales::new());
    let mut tensors = std::collections::HashMap::new();
    for spec in all_specs(&built.layout) {
        let values = original.get_mut(&spec.name).unwrap();
        let transposed = spec.usage == TensorUse::TransposedWeight;
        if let (true, &[rows, cols]) = (spec.usage != TensorUse::Table, spec.shape.as_slice())
            && spec.name != "lm_head.weight"
        {
            let (outputs, inputs) = if transposed { (cols, rows) } else { (rows, cols) };
            let at = |output: usize, input: usize| {
                if transposed { input * outputs + output } else { output * inputs + input }
            };
            let found = scales.entry(spec.name.clone()).or_default();
            for output in 0..outputs {
                for start in (0..inputs).step_by(grid.block) {
                    let block: Vec<usize> =
                        (start..(start + grid.block).min(inputs)).map(|input| at(output, input)).collect();
                    let read: Vec<f64> = block.iter().map(|at| 0.8 * f64::from(values[*at])).collect();
                    let scale = grid.choose(&read, &vec![1.0; read.len()]);
                    block.iter().for_each(|at| values[*at] = grid.rounded(0.8 * values[*at] / 2.0, scale));
                    found.push(scale);
                }
            }
        }
        let tensor = Tensor::from_vec(values.clone(), spec.shape.as_slice(), &Device::Cpu).unwrap();
        tensors.insert(spec.name.clone(), tensor);
    }
    candle_core::safetensors::save(&tensors, case.weights()).unwrap();
    case.scales = Some(scales);
    original
}

#[test]
fn rounded_weights_are_read_back_as_they_are() {
    let gguf = |quantization, dtype| {
        (ExportFormat::Gguf, QuantizedType::Gguf(quantization), super::gguf::grid(dtype).unwrap())
    };
    let forms = [
        gguf(Quantization::Q4_0, GgmlDType::Q4_0),
        gguf(Quantization::Q4_1, GgmlDType::Q4_1),
        gguf(Quantization::Q5_0, GgmlDType::Q5_0),
        gguf(Quantization::Q5_1, GgmlDType::Q5_1),
        gguf(Quantization::Q8_0, GgmlDType::Q8_0),
        (ExportFormat::Onnx, QuantizedType::Int4, BlockGrid::of_bits(BlockBits::Four)),
        (ExportFormat::Onnx, QuantizedType::Int8, BlockGrid::of_bits(BlockBits::Eight)),
    ];
    let root = tempfile::tempdir().unwrap();
    for case in CASES.into_iter().filter(|case| ["gpt", "llama", "llama-tied"].contains(&case.0)) {
        let mut case = ExportCase::new(case, root.path());
        for (format, quantized, grid) in forms {
            let rounded = round(&mut case, grid);
            let options = case.options(format, None, Some(quantized));
            let (_, tensors) = case.export(&options).unwrap();
            for name in case.scales.as_ref().unwrap().keys() {
                assert_eq!(tensors[name], rounded[name], "{} {} {name}", case.name, quantized.name());
            }
            // Without the scales another grid is chosen.
            case.scales = None;
            let (_, tensors) = case.export(&options).unwrap();
            assert!(rounded.iter().any(|(name, values)| tensors[name] != *values), "{}", case.name);
        }
    }
}

#[test]
fn gptq_without_a_grid_is_refused() {
    let root = tempfile::tempdir().unwrap();
    let error = |name: &str, format, quantize: &str| {
        let case = ExportCase::new(CASES.into_iter().find(|case| case.0 == name).unwrap(), root.path());
        let quantize = Some(quantize).filter(|word| !word.is_empty()).map(|word| word.parse().unwrap());
        let options = ExportOptions { rounding: Rounding::Gptq, ..case.options(format, None, quantize) };
        let error = options.check(case.model.kind()).unwrap_err();
        assert!(error.is_usage());
        (error.to_string(), error.hint().unwrap())
    };
    let (message, hint) = error("gpt", ExportFormat::Gguf, "q4_k_m");
    assert_eq!(message, "`--rounding gptq` is not supported for `gpt` models in `q4_k_m`");
    assert_eq!(hint, "it rounds a `gpt` model with `--quantize` int8, int4, q4_0, q4_1, q5_0, q5_1, q8_0");
    let (message, hint) = error("cnn", ExportFormat::Onnx, "int8");
    assert_eq!(message, "`--rounding gptq` is not supported for `cnn` models in `int8`");
    assert_eq!(hint, "it rounds gpt and llama models");
    let (message, _) = error("llama", ExportFormat::Gguf, "");
    assert_eq!(message, "`--rounding gptq` is not supported for weights that are not quantized");
}
