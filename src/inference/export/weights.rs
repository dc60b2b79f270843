//! The weights of a checkpoint, read one tensor at a time, and what becomes of each in an exported file.

use std::io;
use std::ops::Range;
use std::path::Path;

use half::{bf16, f16};

use super::error::ExportError;
use crate::params::{ParamLayout, TensorSpec};
use crate::quantization::blocks::BlockLayout;
use crate::train::tensor_reader::{TensorReader, is_float};

/// A safetensors file of which one tensor at a time is in memory.
pub(super) struct TensorFile(TensorReader);

impl TensorFile {
    pub(super) fn open(path: &Path) -> Result<Self, ExportError> {
        TensorReader::open(path).map(Self).map_err(|error| match error.kind() {
            io::ErrorKind::InvalidData => {
                ExportError::Weights { path: path.to_owned(), reason: error.to_string() }
            }
            _ => ExportError::io("open", path)(error),
        })
    }

    /// The values of a tensor of any float type, after a check of its shape.
    pub(super) fn read(&self, name: &str, shape: &[usize]) -> Result<Vec<f32>, ExportError> {
        let path = self.0.path();
        let wrong = |reason: String| Err(ExportError::Weights { path: path.to_owned(), reason });
        match self.0.info(name) {
            None => wrong(format!("the file lacks the tensor `{name}`")),
            Some(info) if info.shape != shape => {
                wrong(format!("`{name}` has shape {:?} in the file, and {shape:?} in the model", info.shape))
            }
            Some(info) if !is_float(info.dtype) => {
                wrong(format!("`{name}` is {}, not a float type", info.dtype))
            }
            Some(info) => self.0.values(info).map_err(ExportError::io("read", path)),
        }
    }
}

/// The weights of a model, and its running statistics, which may be in another file.
pub(super) struct SavedWeights {
    weights: TensorFile,
    statistics: Option<TensorFile>,
}

impl SavedWeights {
    pub(super) fn open(weights: &Path, statistics: &Path) -> Result<Self, ExportError> {
        let is_other = statistics != weights;
        Ok(Self {
            weights: TensorFile::open(weights)?,
            statistics: is_other.then(|| TensorFile::open(statistics)).transpose()?,
        })
    }

    pub(super) fn read(&self, name: &str, shape: &[usize]) -> Result<Vec<f32>, ExportError> {
        match &self.statistics {
            Some(statistics) if self.weights.0.info(name).is_none() => statistics.read(name, shape),
            _ => self.weights.read(name, shape),
        }
    }
}

/// The float type that weights are stored in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WeightDtype {
    F32,
    F16,
    Bf16,
}

impl WeightDtype {
    pub const ALL: [Self; 3] = [Self::F32, Self::F16, Self::Bf16];

    pub fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
        }
    }

    pub(super) fn bytes(self) -> usize {
        if self == Self::F32 { 4 } else { 2 }
    }

    /// Little-endian bytes of the values. Refuses a finite value that f16 would turn into an infinity.
    pub(super) fn encode(self, tensor: &str, values: &[f32]) -> Result<Vec<u8>, ExportError> {
        match self {
            Self::F32 => Ok(values.iter().flat_map(|v| v.to_le_bytes()).collect()),
            Self::Bf16 => Ok(values.iter().flat_map(|v| bf16::from_f32(*v).to_le_bytes()).collect()),
            Self::F16 => {
                check_f16(tensor, values)?;
                Ok(values.iter().flat_map(|v| f16::from_f32(*v).to_le_bytes()).collect())
            }
        }
    }

    pub(super) fn decode(self, bytes: &[u8]) -> Vec<f32> {
        match self {
            Self::F32 => bytes.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect(),
            Self::F16 => bytes.as_chunks().0.iter().map(|b| f16::from_le_bytes(*b).to_f32()).collect(),
            Self::Bf16 => bytes.as_chunks().0.iter().map(|b| bf16::from_le_bytes(*b).to_f32()).collect(),
        }
    }
}

/// Refuses a finite value that f16 would turn into an infinity.
pub(super) fn check_f16(tensor: &str, values: &[f32]) -> Result<(), ExportError> {
    match values.iter().find(|v| v.is_finite() && !f16::from_f32(**v).is_finite()) {
        None => Ok(()),
        Some(&value) => Err(ExportError::Overflow { tensor: tensor.to_owned(), value, dtype: "f16" }),
    }
}

/// What an export does to a parameter's values.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Transform {
    Copy,
    /// Swaps the two dimensions.
    Transpose,
    /// Takes these rows of the first dimension.
    Rows(Range<usize>),
    /// Moves the two halves of each head's rows next to each other: value `i` and value `i + head / 2`, which rotary
    /// embeddings rotate together here, are neighbours in llama.cpp.
    InterleaveHalves {
        heads: usize,
    },
    /// Dimension `i` of the exported tensor is this one of the parameter's four.
    Permute([usize; 4]),
}

/// A tensor of an exported file, and the parameter it comes from.
#[derive(Clone, Debug)]
pub(super) struct TensorMapping {
    pub target: String,
    /// Shape in the exported file.
    pub shape: Vec<usize>,
    pub param: String,
    pub param_shape: Vec<usize>,
    pub transform: Transform,
    /// The dimension of the exported matrix that blocks of a quantization run along, if it has them.
    pub block_axis: Option<usize>,
}

impl TensorMapping {
    pub(super) fn new(target: impl Into<String>, spec: &TensorSpec, transform: Transform) -> Self {
        let shape = match (&transform, spec.shape.as_slice()) {
            (Transform::Transpose, &[rows, cols]) => vec![cols, rows],
            (Transform::Rows(rows), [_, rest @ ..]) => [&[rows.len()], rest].concat(),
            (Transform::Permute(axes), shape) => axes.map(|axis| shape[axis]).to_vec(),
            _ => spec.shape.clone(),
        };
        let (param, param_shape) = (spec.name.clone(), spec.shape.clone());
        Self { target: target.into(), shape, param, param_shape, transform, block_axis: None }
    }

    pub(super) fn copy(spec: &TensorSpec) -> Self {
        Self::new(spec.name.clone(), spec, Transform::Copy)
    }

    pub(super) fn len(&self) -> usize {
        self.shape.iter().product()
    }

    /// The blocks of its quantization, if it has them.
    pub(super) fn blocks(&self) -> Option<BlockLayout> {
        match (self.block_axis, self.shape.as_slice()) {
            (Some(axis), &[rows, cols]) => Some(BlockLayout { rows, cols, axis }),
            _ => None,
        }
    }

    /// The values of the exported tensor.
    pub(super) fn read(&self, weights: &SavedWeights) -> Result<Vec<f32>, ExportError> {
        Ok(self.apply(weights.read(&self.param, &self.param_shape)?))
    }

    /// The values of the exported tensor, from those of the parameter.
    pub(super) fn apply(&self, values: Vec<f32>) -> Vec<f32> {
        match &self.transform {
            Transform::Copy => values,
            Transform::Transpose => transpose(&values, self.param_shape[1]),
            Transform::Rows(rows) => {
                let width: usize = self.param_shape[1..].iter().product();
                values[rows.start * width..rows.end * width].to_vec()
            }
            Transform::InterleaveHalves { .. } => self.reorder_outputs(&values),
            Transform::Permute(axes) => permute(&values, &self.param_shape, *axes),
        }
    }

    /// What belongs to the outputs of the parameter, (outputs, any), in the order of the exported ones.
    pub(super) fn reorder_outputs<T: Copy>(&self, values: &[T]) -> Vec<T> {
        match &self.transform {
            Transform::InterleaveHalves { heads } => {
                permute_halves(values, *heads, self.param_shape[0], |row, half| row % 2 * half + row / 2)
            }
            _ => values.to_vec(),
        }
    }

    /// The values of the parameter, or of the rows that the exported tensor has of it.
    pub(super) fn restore(&self, values: Vec<f32>) -> Vec<f32> {
        match &self.transform {
            Transform::Copy | Transform::Rows(_) => values,
            Transform::Transpose => transpose(&values, self.param_shape[0]),
            Transform::InterleaveHalves { heads } => {
                permute_halves(&values, *heads, self.param_shape[0], |row, half| row % half * 2 + row / half)
            }
            Transform::Permute(axes) => {
                let mut inverse = [0; 4];
                axes.iter().enumerate().for_each(|(i, axis)| inverse[*axis] = i);
                permute(&values, &self.shape, inverse)
            }
        }
    }
}

/// Moves dimension `axes[i]` of four to place `i`.
fn permute(values: &[f32], shape: &[usize], axes: [usize; 4]) -> Vec<f32> {
    let stride = |axis: usize| shape[axis + 1..].iter().product::<usize>();
    let ([a, b, c, d], strides) = (axes.map(|axis| shape[axis]), axes.map(stride));
    let mut permuted = Vec::with_capacity(values.len());
    for at in 0..a * b * c {
        let start = at / (b * c) * strides[0] + at / c % b * strides[1] + at % c * strides[2];
        permuted.extend((0..d).map(|i| values[start + i * strides[3]]));
    }
    permuted
}

/// The transpose of a matrix of `cols` columns.
fn transpose(values: &[f32], cols: usize) -> Vec<f32> {
    let rows = values.len() / cols.max(1);
    (0..values.len()).map(|i| values[i % rows * cols + i / rows]).collect()
}

/// Reorders the rows of each head: row `i` is taken from row `source(i, half the rows of a head)`.
fn permute_halves<T: Copy>(
    values: &[T],
    heads: usize,
    rows: usize,
    source: impl Fn(usize, usize) -> usize,
) -> Vec<T> {
    let (width, head) = (values.len() / rows.max(1), rows / heads);
    (0..rows)
        .flat_map(|row| {
            let from = row / head * head + source(row % head, head / 2);
            &values[from * width..(from + 1) * width]
        })
        .copied()
        .collect()
}

/// Every parameter and running statistic, under the names they have here.
pub(super) fn all_specs(layout: &ParamLayout) -> impl Iterator<Item = &TensorSpec> {
    layout.params.iter().chain(layout.stats.iter()).map(|(spec, _)| spec)
}

/// The mappings of each parameter, which follow each other.
pub(super) fn by_param(mappings: &[TensorMapping]) -> impl Iterator<Item = &[TensorMapping]> {
    mappings.chunk_by(|a, b| a.param == b.param)
}

/// The parameter that is exported as `parts`. `read` returns the values of an exported tensor.
pub(super) fn restore(
    parts: &[TensorMapping],
    mut read: impl FnMut(&TensorMapping) -> Result<Vec<f32>, ExportError>,
) -> Result<Vec<f32>, ExportError> {
    let mut values = Vec::new();
    for part in parts {
        let restored = part.restore(read(part)?);
        if values.is_empty() {
            values = restored;
        } else {
            values.extend(restored);
        }
    }
    Ok(values)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::params::{ParamInit, ParamRegistry};

    fn spec(shape: &[usize]) -> TensorSpec {
        let mut registry = ParamRegistry::default();
        registry.param("w", shape, ParamInit::Constant(0.0));
        registry.into_layout().unwrap().params.spec(0).clone()
    }

    #[test]
    fn a_transform_is_undone_when_it_is_read_back() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("w.safetensors");
        let values: Vec<f32> = (0..48).map(|v| v as f32).collect();
        candle_core::Tensor::from_vec(values.clone(), (8, 6), &candle_core::Device::Cpu)
            .unwrap()
            .save_safetensors("w", &path)
            .unwrap();
        let file = SavedWeights::open(&path, &path).unwrap();
        for transform in [Transform::Copy, Transform::Transpose, Transform::InterleaveHalves { heads: 2 }] {
            let mapping = TensorMapping::new("t", &spec(&[8, 6]), transform.clone());
            let exported = mapping.read(&file).unwrap();
            assert_eq!(exported != values, transform != Transform::Copy);
            assert_eq!(mapping.restore(exported), values, "{transform:?}");
        }
        for axes in [[0, 2, 3, 1], [1, 2, 3, 0]] {
            let mapping = TensorMapping::new("t", &spec(&[4, 3, 2, 2]), Transform::Permute(axes));
            let exported = mapping.apply(values.clone());
            // Value (1, 2, 0, 1) of the parameter.
            let at = [1, 2, 0, 1];
            let index =
                axes.iter().zip(&mapping.shape).fold(0, |index, (axis, size)| index * size + at[*axis]);
            assert_eq!(exported[index], values[21]);
            assert_eq!(mapping.restore(exported), values, "{axes:?}");
        }
        let parts = [0..2, 2..8].map(|rows| TensorMapping::new("t", &spec(&[8, 6]), Transform::Rows(rows)));
        assert_eq!(by_param(&parts).count(), 1);
        assert_eq!(restore(&parts, |part| part.read(&file)).unwrap(), values);
    }

    #[test]
    fn rows_of_a_head_alternate_between_its_halves() {
        // Two heads of four rows: 0 1 | 2 3 becomes 0 2 1 3.
        let rows: Vec<f32> = (0..8).map(|v| v as f32).collect();
        let interleaved = permute_halves(&rows, 2, 8, |row, half| row % 2 * half + row / 2);
        assert_eq!(interleaved, [0.0, 2.0, 1.0, 3.0, 4.0, 6.0, 5.0, 7.0]);
    }

    #[test]
    fn a_value_beyond_f16_is_refused_by_name() {
        let error = WeightDtype::F16.encode("w", &[1.0, 70_000.0]).unwrap_err().to_string();
        assert_eq!(error, "`w` has the value 70000, which f16 cannot hold");
        assert_eq!(WeightDtype::Bf16.encode("w", &[1.0]).unwrap(), [0x80, 0x3f]);
    }

    #[test]
    fn a_truncated_file_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("w.safetensors");
        let tensor = candle_core::Tensor::zeros(64, candle_core::DType::F32, &candle_core::Device::Cpu);
        tensor.unwrap().save_safetensors("w", &path).unwrap();
        let bytes = std::fs::read(&path).unwrap();
        std::fs::write(&path, &bytes[..bytes.len() - 4]).unwrap();
        let error = TensorFile::open(&path).err().unwrap().to_string();
        assert!(error.contains("its tensors need"), "{error}");
    }
}
