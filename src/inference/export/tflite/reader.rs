//! Reads the tensors of a TFLite file again. Every offset is checked: a damaged file is an error, never a panic.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::{Path, PathBuf};

use super::super::error::ExportError;
use super::super::weights::{TensorMapping, WeightDtype};
use super::schema::{FLOAT32, INT8, INT32, TensorQuantization};
use crate::base::regular_file;
use crate::quantization::AffineQuantization;

/// A table, by its position in the file.
#[derive(Clone, Copy)]
struct FileTable<'a> {
    file: &'a [u8],
    at: usize,
}

fn u32_at(file: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_le_bytes(*file.get(at..)?.first_chunk()?))
}

fn u16_at(file: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_le_bytes(*file.get(at..)?.first_chunk()?))
}

/// Where the offset at `at` leads to.
fn follow(file: &[u8], at: usize) -> Option<usize> {
    at.checked_add(u32_at(file, at)? as usize)
}

impl<'a> FileTable<'a> {
    fn root(file: &'a [u8]) -> Option<Self> {
        Some(Self { file, at: follow(file, 0)? })
    }

    /// The position of a field; `Some(None)` if it has its default.
    fn field(self, number: usize) -> Option<Option<usize>> {
        let back = u32_at(self.file, self.at)? as i32;
        let fields = usize::try_from(i64::try_from(self.at).ok()? - i64::from(back)).ok()?;
        if 4 + 2 * number >= u16_at(self.file, fields)?.into() {
            return Some(None);
        }
        let offset = usize::from(u16_at(self.file, fields + 4 + 2 * number)?);
        Some((offset > 0).then(|| self.at + offset))
    }

    fn number(self, field: usize) -> Option<u32> {
        self.field(field)?.map_or(Some(0), |at| u32_at(self.file, at))
    }

    fn byte(self, field: usize) -> Option<i8> {
        self.field(field)?.map_or(Some(0), |at| Some(*self.file.get(at)? as i8))
    }

    fn table(self, field: usize) -> Option<Option<Self>> {
        let Some(at) = self.field(field)? else { return Some(None) };
        Some(Some(Self { at: follow(self.file, at)?, ..self }))
    }

    /// The bytes of a vector of elements of `size` bytes.
    fn vector(self, field: usize, size: usize) -> Option<Range<usize>> {
        let Some(at) = self.field(field)? else { return Some(0..0) };
        let at = follow(self.file, at)?;
        let (start, length) = (at + 4, u32_at(self.file, at)? as usize);
        let range = start..start.checked_add(length.checked_mul(size)?)?;
        (range.end <= self.file.len()).then_some(range)
    }

    fn tables(self, field: usize) -> Option<Vec<Self>> {
        let offsets = self.vector(field, 4)?.step_by(4);
        offsets.map(|at| Some(Self { at: follow(self.file, at)?, ..self })).collect()
    }

    fn text(self, field: usize) -> Option<String> {
        Some(String::from_utf8_lossy(&self.file[self.vector(field, 1)?]).into_owned())
    }
}

/// A tensor of a file.
struct Stored {
    element_type: i8,
    data: Range<usize>,
    quantization: Option<TensorQuantization>,
}

/// The tensors of a written file, which is in memory as a whole.
pub(in super::super) struct TfliteReader {
    path: PathBuf,
    file: Vec<u8>,
    tensors: BTreeMap<String, Stored>,
}

/// Largest file: offsets are 32 bits, and runtimes take them as signed.
pub(super) const MAX_BYTES: u64 = i32::MAX as u64;

impl TfliteReader {
    pub(in super::super) fn open(path: &Path) -> Result<Self, ExportError> {
        let file = regular_file::read(path, MAX_BYTES).map_err(ExportError::io("read", path))?;
        let tensors = tensors(&file).ok_or_else(|| ExportError::read_back(path, "its tables are damaged"))?;
        Ok(Self { path: path.to_owned(), file, tensors })
    }

    fn stored(&self, name: &str) -> Result<&Stored, ExportError> {
        let missing = || ExportError::read_back(&self.path, format!("it has no `{name}`"));
        self.tensors.get(name).ok_or_else(missing)
    }

    /// The values of a weight, dequantized.
    pub(in super::super) fn read(&self, mapping: &TensorMapping) -> Result<Vec<f32>, ExportError> {
        let stored = self.stored(&mapping.target)?;
        let bytes = &self.file[stored.data.clone()];
        let values: Vec<f32> = match stored.element_type {
            FLOAT32 => WeightDtype::F32.decode(bytes),
            INT8 => bytes.iter().map(|byte| f32::from(*byte as i8)).collect(),
            INT32 => bytes.as_chunks().0.iter().map(|bytes| i32::from_le_bytes(*bytes) as f32).collect(),
            other => {
                let reason = format!("`{}` has the element type {other}", mapping.target);
                return Err(ExportError::read_back(&self.path, reason));
            }
        };
        if values.len() != mapping.len() {
            let reason = format!("`{}` has {} values, not {}", mapping.target, values.len(), mapping.len());
            return Err(ExportError::read_back(&self.path, reason));
        }
        Ok(match &stored.quantization {
            Some(quantization) => dequantized(values, &mapping.shape, quantization),
            None => values,
        })
    }
}

impl TfliteReader {
    /// How the values of an activation are stored.
    pub(in super::super) fn activation(&self, name: &str) -> Result<AffineQuantization, ExportError> {
        let stored = self.stored(name)?;
        let found = stored.quantization.as_ref().and_then(|quantization| {
            let zero_point = i8::try_from(*quantization.zero_points.first()?).ok()?;
            Some(AffineQuantization { scale: *quantization.scales.first()?, zero_point })
        });
        found
            .filter(|found| found.scale.is_normal() && found.scale > 0.0)
            .ok_or_else(|| ExportError::read_back(&self.path, format!("`{name}` is not quantized")))
    }
}

/// `values` of this shape times the scale of their channel. Weights have a zero point of 0.
fn dequantized(mut values: Vec<f32>, shape: &[usize], quantization: &TensorQuantization) -> Vec<f32> {
    let (scales, dimension) = (&quantization.scales, quantization.dimension as usize);
    let inner: usize = shape.iter().skip(dimension + 1).product();
    for (at, value) in values.iter_mut().enumerate() {
        *value *= scales[at / inner % scales.len()];
    }
    values
}

/// The tensors by name; `None` if an offset leads out of the file.
fn tensors(file: &[u8]) -> Option<BTreeMap<String, Stored>> {
    let model = FileTable::root(file)?;
    let buffers = model.tables(4)?;
    let graph = *model.tables(2)?.first()?;
    let mut tensors = BTreeMap::new();
    for tensor in graph.tables(0)? {
        let quantization = match tensor.table(4)? {
            Some(table) => quantization(table)?,
            None => None,
        };
        let data = buffers.get(tensor.number(2)? as usize)?.vector(0, 1)?;
        let stored = Stored { element_type: tensor.byte(1)?, data, quantization };
        tensors.insert(tensor.text(3)?, stored);
    }
    Some(tensors)
}

fn quantization(table: FileTable) -> Option<Option<TensorQuantization>> {
    let scales = WeightDtype::F32.decode(&table.file[table.vector(2, 4)?]);
    let zero_points =
        table.file[table.vector(3, 8)?].as_chunks().0.iter().map(|b| i64::from_le_bytes(*b)).collect();
    let dimension = i32::try_from(table.number(6)?).ok()?;
    Some((!scales.is_empty()).then_some(TensorQuantization { scales, zero_points, dimension }))
}
