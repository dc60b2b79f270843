//! Safetensors files under the names and shapes other tools read. Writes flat buffers as the parameters they hold,
//! and reads parameters by name.

use std::borrow::Cow;
use std::fs::File;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use candle_core::{DType, Tensor};
use half::{bf16, f16};
use safetensors::tensor::{self, Dtype, TensorInfo, serialize_to_file};

use super::Failure;
use super::tensor_reader::{TensorReader, is_float};
use crate::kernels::cpu::{self, View};
use crate::kernels::{host, int8_weight};
use crate::param_store::{Int8Scales, ParamStore};
use crate::params::{FlatLayout, MemoryFormat, TensorSpec};

/// A tensor in the shape other tools expect.
pub(super) struct NamedTensor<'a> {
    shape: &'a [usize],
    data: TensorData<'a>,
    memory_format: MemoryFormat,
    /// Whether all values written so far are finite.
    finite: AtomicBool,
}

enum TensorData<'a> {
    F32(&'a [f32]),
    U8(&'a [u8]),
    /// On a GPU, or of another float type. Copied to the host as f32 or u8 when written, one tensor at a time.
    Copied(Tensor),
}

/// A flat buffer: borrowed on the host, or on a GPU or of another float type.
pub(super) enum FlatBuffer<'a> {
    Host(View<'a, f32>),
    Other(&'a Tensor),
}

impl<'a> FlatBuffer<'a> {
    pub(super) fn from_tensor(tensor: &'a Tensor) -> Result<Self, Failure> {
        Ok(match tensor.device().is_cpu() && tensor.dtype() == DType::F32 {
            true => Self::Host(cpu::view(tensor)?),
            false => Self::Other(tensor),
        })
    }
}

impl tensor::View for &NamedTensor<'_> {
    fn dtype(&self) -> Dtype {
        match &self.data {
            TensorData::F32(_) => Dtype::F32,
            TensorData::U8(_) => Dtype::U8,
            TensorData::Copied(tensor) if tensor.dtype() == DType::U8 => Dtype::U8,
            TensorData::Copied(_) => Dtype::F32,
        }
    }

    fn shape(&self) -> &[usize] {
        self.shape
    }

    fn data(&self) -> Cow<'_, [u8]> {
        match &self.data {
            TensorData::U8(data) => Cow::Borrowed(data),
            TensorData::F32(data) => {
                self.check_finite(data);
                to_file_order(data, self.shape, self.memory_format)
            }
            // `safetensors` cannot report that a copy failed; a tensor without bytes makes it fail with an error of
            // its own.
            TensorData::Copied(tensor) if tensor.dtype() == DType::U8 => {
                Cow::Owned(host::to_vec::<u8>(tensor).unwrap_or_default())
            }
            TensorData::Copied(tensor) => {
                let values = to_f32(tensor).unwrap_or_default();
                self.check_finite(&values);
                Cow::Owned(to_file_order(&values, self.shape, self.memory_format).into_owned())
            }
        }
    }

    fn data_len(&self) -> usize {
        match &self.data {
            TensorData::F32(data) => std::mem::size_of_val(*data),
            TensorData::U8(data) => data.len(),
            TensorData::Copied(tensor) if tensor.dtype() == DType::U8 => tensor.elem_count(),
            TensorData::Copied(tensor) => tensor.elem_count() * size_of::<f32>(),
        }
    }
}

impl<'a> NamedTensor<'a> {
    fn new(shape: &'a [usize], data: TensorData<'a>, memory_format: MemoryFormat) -> Self {
        Self { shape, data, memory_format, finite: AtomicBool::new(true) }
    }

    /// Checks values as they are written: wherever the tensor lives, its values are on the host by then.
    fn check_finite(&self, values: &[f32]) {
        // In chunks, each without a branch.
        if values.chunks(4096).any(|part| part.iter().fold(false, |found, v| found | !v.is_finite())) {
            self.finite.store(false, Ordering::Relaxed);
        }
    }
}

/// Values on the host. 16-bit types are converted there: a GPU may have no room for the converted tensor.
fn to_f32(tensor: &Tensor) -> candle_core::Result<Vec<f32>> {
    match tensor.dtype() {
        DType::BF16 => Ok(host::to_vec::<bf16>(tensor)?.into_iter().map(bf16::to_f32).collect()),
        DType::F16 => Ok(host::to_vec::<f16>(tensor)?.into_iter().map(f16::to_f32).collect()),
        _ => host::to_vec(&tensor.to_dtype(DType::F32)?),
    }
}

/// Bytes of a parameter in file order.
fn to_file_order<'a>(data: &'a [f32], shape: &[usize], memory_format: MemoryFormat) -> Cow<'a, [u8]> {
    match memory_format {
        MemoryFormat::Contiguous => Cow::Borrowed(bytemuck::cast_slice(data)),
        MemoryFormat::ChannelsLast => {
            let mut bytes = vec![[0; 4]; data.len()];
            permute_filter(data, &mut bytes, shape, FilterPermutation::ToFile, f32::to_le_bytes);
            Cow::Owned(bytes.into_flattened())
        }
    }
}

pub(super) enum FilterPermutation {
    /// From (out, height, width, in) in memory to (out, in, height, width) in the file.
    ToFile,
    FromFile,
}

/// Copies a filter between the two layouts. `shape` is that of the file: (out, in, height, width).
pub(super) fn permute_filter<A: Copy, B>(
    from: &[A],
    to: &mut [B],
    shape: &[usize],
    direction: FilterPermutation,
    cast: impl Fn(A) -> B,
) {
    let (rows, cols) = match (shape, direction) {
        (&[_, inputs, height, width], FilterPermutation::ToFile) => (height * width, inputs),
        (&[_, inputs, height, width], FilterPermutation::FromFile) => (inputs, height * width),
        _ => (1, from.len()),
    };
    let size = (rows * cols).max(1);
    for (from, to) in from.chunks_exact(size).zip(to.chunks_exact_mut(size)) {
        for (i, row) in from.chunks_exact(cols).enumerate() {
            row.iter().enumerate().for_each(|(j, v)| to[j * rows + i] = cast(*v));
        }
    }
}

/// The parameters in these ranges of a flat buffer, by name.
pub(super) fn named_tensors<'a>(
    params: impl Iterator<Item = (&'a TensorSpec, std::ops::Range<usize>)>,
    all: &'a FlatBuffer,
) -> Result<Vec<(&'a str, NamedTensor<'a>)>, Failure> {
    let to_named = |(spec, range): (&'a TensorSpec, std::ops::Range<usize>)| {
        let data = match all {
            FlatBuffer::Host(all) => TensorData::F32(&all[range]),
            FlatBuffer::Other(all) => TensorData::Copied(all.narrow(0, range.start, range.len())?),
        };
        Ok((spec.name.as_str(), NamedTensor::new(&spec.shape, data, spec.memory_format)))
    };
    params.map(to_named).collect()
}

/// Writes flat buffers of f32 or u8; returns what [`write_tensors`] does.
pub(super) fn write_buffers(
    path: &Path,
    buffers: &[(&'static str, Tensor)],
) -> Result<Option<String>, Failure> {
    let memory_format = MemoryFormat::Contiguous;
    if buffers.iter().any(|(_, tensor)| !tensor.device().is_cpu()) {
        let device_tensors = buffers.iter().map(|(name, tensor)| {
            (*name, NamedTensor::new(tensor.dims(), TensorData::Copied(tensor.clone()), memory_format))
        });
        return write_tensors(path, &device_tensors.collect::<Vec<_>>());
    }
    let (mut floats, mut bytes) = (Vec::new(), Vec::new());
    for (name, tensor) in buffers {
        match tensor.dtype() {
            DType::U8 => bytes.push((*name, cpu::view::<u8>(tensor)?, tensor.dims())),
            _ => floats.push((*name, cpu::view::<f32>(tensor)?, tensor.dims())),
        }
    }
    let floats = floats
        .iter()
        .map(|(name, data, shape)| (*name, NamedTensor::new(shape, TensorData::F32(data), memory_format)));
    let bytes = bytes
        .iter()
        .map(|(name, data, shape)| (*name, NamedTensor::new(shape, TensorData::U8(data), memory_format)));
    write_tensors(path, &floats.chain(bytes).collect::<Vec<_>>())
}

/// Writes named tensors and syncs the file to disk. Returns the name of a tensor with a non-finite value, if any.
pub(super) fn write_tensors(path: &Path, tensors: &[(&str, NamedTensor)]) -> Result<Option<String>, Failure> {
    let metadata = [("format".to_owned(), "pt".to_owned())].into();
    serialize_to_file(tensors.iter().map(|(name, tensor)| (*name, tensor)), Some(metadata), path)
        .map_err(|error| match error {
            safetensors::SafeTensorError::IoError(source) => source,
            other => std::io::Error::other(other),
        })
        .map_err(Failure::io("write", path))?;
    sync(path)?;
    let found = tensors.iter().find(|(_, tensor)| !tensor.finite.load(Ordering::Relaxed));
    Ok(found.map(|(name, _)| (*name).to_owned()))
}

/// Syncs a file, or the entries of a folder, to disk.
pub(super) fn sync(path: &Path) -> Result<(), Failure> {
    File::open(path).and_then(|file| file.sync_all()).map_err(Failure::io("write", path))
}

/// Loads the tensors of a file into these ranges of a flat buffer, by name; ignores any others.
pub(super) fn load_named<'a>(
    file: &Path,
    mut params: impl Iterator<Item = (&'a TensorSpec, std::ops::Range<usize>)>,
    buffer: &Tensor,
) -> Result<(), Failure> {
    let reader = TensorReader::open_checkpoint(file)?;
    params.try_for_each(|(spec, range)| {
        let info = reader.checked(&spec.name, Dtype::F32, &spec.shape)?;
        reader.read_param(info, spec, &buffer.narrow(0, range.start, range.len())?)
    })
}

/// Loads flat buffers that [`write_buffers`] wrote.
pub(super) fn load_buffers(file: &Path, buffers: &[(&'static str, Tensor)]) -> Result<(), Failure> {
    let reader = TensorReader::open_checkpoint(file)?;
    buffers.iter().try_for_each(|(name, buffer)| reader.read_buffer(name, buffer))
}

/// Loads the tensors of a file by name into views of any float dtype, one tensor at a time. The file may have another
/// float type than the views, as exports do.
pub fn load_views(file: &Path, flat: &FlatLayout, views: &[Tensor]) -> Result<(), Failure> {
    let reader = TensorReader::open_checkpoint(file)?;
    for ((spec, _), view) in flat.in_declaration_order().zip(views) {
        reader.read_param(float_tensor(&reader, spec)?, spec, &view.flatten_all()?)?;
    }
    Ok(())
}

/// As [`load_views`], all weights of a store, which may be 8-bit integers.
pub fn load_weights(file: &Path, store: &ParamStore) -> Result<(), Failure> {
    if store.all_int8_scales().is_empty() {
        return load_views(file, &store.layout.params, store.weight_views());
    }
    let reader = TensorReader::open_checkpoint(file)?;
    let params = store.layout.params.in_declaration_order().map(|(spec, _)| spec);
    for ((spec, view), int8) in params.zip(store.weight_views()).zip(store.all_int8_scales()) {
        let (info, view) = (float_tensor(&reader, spec)?, view.flatten_all()?);
        match int8 {
            Some(int8) => load_int8(&reader, info, spec, &view, int8)?,
            None => reader.read_param(info, spec, &view)?,
        }
    }
    Ok(())
}

/// Rounds a parameter to 8-bit integers as it is read: once for the scales, then for the values.
fn load_int8(
    reader: &TensorReader,
    info: &TensorInfo,
    spec: &TensorSpec,
    stored: &Tensor,
    Int8Scales { scales, grid }: &Int8Scales,
) -> Result<(), Failure> {
    let (len, columns) = (stored.elem_count(), grid.columns.max(1));
    let mut largest = vec![0.0; grid.num_scales()];
    reader.for_each_values(info, spec, len, columns, |start, values| {
        int8_weight::raise_largest(*grid, start / columns, values, &mut largest);
        Ok(())
    })?;
    largest.iter_mut().for_each(|value| *value = int8_weight::scale(*value));
    host::write(scales, |into: &mut [f32]| into.copy_from_slice(&largest))?;
    reader.for_each_values(info, spec, len, columns, |start, values| {
        host::write(&stored.narrow(0, start, values.len())?, |into: &mut [u8]| {
            int8_weight::quantize(*grid, start / columns, values, &largest, into);
        })
    })
}

/// The tensor of a parameter in a file, if it has the shape and a float type.
fn float_tensor<'a>(reader: &'a TensorReader, spec: &TensorSpec) -> Result<&'a TensorInfo, Failure> {
    let name = spec.name.as_str();
    // A language model that was saved without its head has names without the prefix of the body.
    let bare = name.split_once('.').filter(|(prefix, _)| ["transformer", "model"].contains(prefix));
    let found = reader.info(name).or_else(|| reader.info(bare?.1));
    let info = found.ok_or_else(|| reader.mismatch(format!("the file lacks the tensor `{name}`")))?;
    if info.shape != spec.shape {
        let reason =
            format!("`{name}` has shape {:?} in the file, and {:?} in the model", info.shape, spec.shape);
        return Err(reader.mismatch(reason));
    }
    match is_float(info.dtype) {
        true => Ok(info),
        false => Err(reader.mismatch(format!("`{name}` is {} in the file, and not a float", info.dtype))),
    }
}
