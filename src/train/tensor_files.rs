//! Safetensors files under the names and shapes other tools read. Writes flat buffers as the parameters they hold,
//! and reads parameters by name.

use std::borrow::Cow;
use std::fs::File;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use candle_core::{DType, Tensor};
use half::{bf16, f16};
use safetensors::tensor::{self, Dtype, SafeTensors, serialize_to_file};

use super::Failure;
use crate::base::regular_file;
use crate::kernels::cpu::{self, View};
use crate::kernels::host;
use crate::kernels::update::cast_into;
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
                let values = tensor.to_dtype(DType::F32).and_then(|tensor| host::to_vec::<f32>(&tensor));
                let values = values.unwrap_or_default();
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
    params: impl Iterator<Item = (&'a TensorSpec, std::ops::Range<usize>)>,
    buffer: &Tensor,
) -> Result<(), Failure> {
    load_named_if(file, params, buffer, |_| true)
}

/// As [`load_named`], if `accept` returns true for the file.
pub(super) fn load_named_if<'a>(
    file: &Path,
    mut params: impl Iterator<Item = (&'a TensorSpec, std::ops::Range<usize>)>,
    buffer: &Tensor,
    accept: impl FnOnce(&SafeTensors) -> bool,
) -> Result<(), Failure> {
    let mismatch = |reason: String| Failure::ForeignCheckpoint { path: file.to_owned(), reason };
    let mapped = MappedFile::open(file)?;
    let tensors = SafeTensors::deserialize(&mapped.0).map_err(|e| mismatch(e.to_string()))?;
    if !accept(&tensors) {
        return Ok(());
    }
    params.try_for_each(|(spec, range)| {
        let bytes = checked_bytes(&tensors, &spec.name, Dtype::F32, &spec.shape).map_err(mismatch)?;
        let part = buffer.narrow(0, range.start, range.len())?;
        Ok(write_f32(&part, |into| mapped.read_param(bytes, &spec.shape, spec.memory_format, into))?)
    })
}

/// Writes f32 values to a contiguous tensor: in place, or through a copy if it has another float type.
pub(super) fn write_f32(to: &Tensor, fill: impl FnOnce(&mut [f32])) -> candle_core::Result<()> {
    if to.dtype() == DType::F32 {
        return host::write(to, fill);
    }
    let mut values = vec![0f32; to.elem_count()];
    fill(&mut values);
    let len = values.len();
    cast_into(&Tensor::from_vec(values, len, to.device())?, to)
}

/// Loads flat buffers that [`write_buffers`] wrote.
pub(super) fn load_buffers(file: &Path, buffers: &[(&'static str, Tensor)]) -> Result<(), Failure> {
    let mismatch = |reason: String| Failure::ForeignCheckpoint { path: file.to_owned(), reason };
    let mapped = MappedFile::open(file)?;
    let tensors = SafeTensors::deserialize(&mapped.0).map_err(|e| mismatch(e.to_string()))?;
    for (name, buffer) in buffers {
        let bytes = |dtype| checked_bytes(&tensors, name, dtype, buffer.dims()).map_err(mismatch);
        match buffer.dtype() {
            DType::U8 => {
                let bytes = bytes(Dtype::U8)?;
                host::write::<u8, _>(buffer, |all| mapped.copy_bytes(bytes, all))?;
            }
            _ => {
                let bytes = bytes(Dtype::F32)?;
                host::write::<f32, _>(buffer, |all| mapped.copy_bytes(bytes, bytemuck::cast_slice_mut(all)))?;
            }
        }
    }
    Ok(())
}

/// A memory-mapped file: loading copies each tensor once. Its pages count as resident memory of the process, so pages
/// already copied are released along the way.
struct MappedFile(memmap2::Mmap);

impl MappedFile {
    fn open(path: &Path) -> Result<Self, Failure> {
        let file = regular_file::open(path).map_err(Failure::io("open", path))?;
        // SAFETY: the run owns its directory. If another program truncates the file while it is mapped, the access
        // raises SIGBUS and ends the process, as for any reader of mapped files.
        unsafe { memmap2::Mmap::map(&file) }.map(Self).map_err(Failure::io("map", path))
    }

    /// Copies a parameter whose bytes in the file are `from`.
    fn read_param(&self, from: &[u8], shape: &[usize], memory_format: MemoryFormat, into: &mut [f32]) {
        match memory_format {
            MemoryFormat::Contiguous => self.copy_bytes(from, bytemuck::cast_slice_mut(into)),
            MemoryFormat::ChannelsLast => {
                permute_filter(
                    from.as_chunks().0,
                    into,
                    shape,
                    FilterPermutation::FromFile,
                    f32::from_le_bytes,
                );
                release_pages(&self.0, from);
            }
        }
    }

    /// Copies a parameter of any float type.
    fn read_floats(&self, tensors: &SafeTensors, spec: &TensorSpec, into: &mut [f32]) -> Result<(), String> {
        let name = spec.name.as_str();
        // A language model that was saved without its head has names without the prefix of the body.
        let bare = name.split_once('.').filter(|(prefix, _)| ["transformer", "model"].contains(prefix));
        let found = tensors.tensor(name).ok().or_else(|| tensors.tensor(bare?.1).ok());
        let tensor = found.ok_or_else(|| format!("it has no `{name}`"))?;
        if tensor.shape() != spec.shape {
            return Err(format!("`{name}` has shape {:?} there and {:?} here", tensor.shape(), spec.shape));
        }
        let data = tensor.data();
        match tensor.dtype() {
            Dtype::F32 => self.read_param(data, &spec.shape, spec.memory_format, into),
            Dtype::F16 => self.read_half(data, spec, into, |bytes| f16::from_le_bytes(bytes).to_f32()),
            Dtype::BF16 => self.read_half(data, spec, into, |bytes| bf16::from_le_bytes(bytes).to_f32()),
            other => {
                return Err(format!("`{name}` is {other:?} there, and not a float type of up to 32 bits"));
            }
        }
        Ok(())
    }

    /// Decodes a parameter of a half type.
    fn read_half(&self, from: &[u8], spec: &TensorSpec, into: &mut [f32], decode: impl Fn([u8; 2]) -> f32) {
        match spec.memory_format {
            MemoryFormat::Contiguous => {
                for (from, into) in from.chunks(COPY_CHUNK_BYTES).zip(into.chunks_mut(COPY_CHUNK_BYTES / 2)) {
                    into.iter_mut()
                        .zip(from.as_chunks().0)
                        .for_each(|(value, bytes)| *value = decode(*bytes));
                    release_pages(&self.0, from);
                }
            }
            MemoryFormat::ChannelsLast => {
                permute_filter(from.as_chunks().0, into, &spec.shape, FilterPermutation::FromFile, decode);
                release_pages(&self.0, from);
            }
        }
    }

    /// Copies bytes of the file chunk by chunk, releasing pages as it goes.
    fn copy_bytes(&self, from: &[u8], into: &mut [u8]) {
        for (from, into) in from.chunks(COPY_CHUNK_BYTES).zip(into.chunks_mut(COPY_CHUNK_BYTES)) {
            into.copy_from_slice(from);
            release_pages(&self.0, from);
        }
    }
}

/// Releases the pages of `bytes`, a range of the mapping.
pub(super) fn release_pages(map: &memmap2::Mmap, bytes: &[u8]) {
    #[cfg(unix)]
    {
        let start = bytes.as_ptr() as usize - map.as_ptr() as usize;
        let advice = memmap2::UncheckedAdvice::DontNeed;
        // SAFETY: the mapping is never written to, so a released page is read from the file again if touched. A system
        // that ignores the advice keeps the pages resident.
        let _ = unsafe { map.unchecked_advise_range(advice, start, bytes.len()) };
    }
    #[cfg(not(unix))]
    let _ = (map, bytes);
}

/// Bytes of a file that are resident at once during a copy.
pub(super) const COPY_CHUNK_BYTES: usize = 1 << 20;

/// The bytes of a tensor, after checking its dtype and shape.
fn checked_bytes<'a>(
    tensors: &SafeTensors<'a>,
    name: &str,
    dtype: Dtype,
    shape: &[usize],
) -> Result<&'a [u8], String> {
    let tensor = tensors.tensor(name).map_err(|_| format!("it has no `{name}`"))?;
    if tensor.shape() != shape || tensor.dtype() != dtype {
        return Err(format!(
            "`{name}` is {} {:?} there and {dtype} {shape:?} here",
            tensor.dtype(),
            tensor.shape()
        ));
    }
    Ok(tensor.data())
}

/// Loads the tensors of a file by name into views of any float dtype, one tensor at a time. The file may have another
/// float type than the views, as exports do.
pub fn load_views(file: &Path, flat: &FlatLayout, views: &[Tensor]) -> Result<(), Failure> {
    let mismatch = |reason: String| Failure::ForeignCheckpoint { path: file.to_owned(), reason };
    let mapped = MappedFile::open(file)?;
    let tensors = SafeTensors::deserialize(&mapped.0).map_err(|e| mismatch(e.to_string()))?;
    for ((spec, _), view) in flat.in_declaration_order().zip(views) {
        let mut values = vec![0f32; spec.len()];
        mapped.read_floats(&tensors, spec, &mut values).map_err(mismatch)?;
        let values = Tensor::from_vec(values, spec.len(), view.device())?;
        cast_into(&values, &view.flatten_all()?)?;
    }
    Ok(())
}
