//! Tensors in safetensors files, under the names and in the shapes that other tools read: flat buffers are
//! written as the parameters they hold, and read by name.

use std::borrow::Cow;
use std::fs::File;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use candle_core::{DType, Tensor};
use safetensors::tensor::{self, Dtype, SafeTensors, serialize_to_file};

use super::Failure;
use crate::kernels::cpu::{self, View};
use crate::kernels::host;
use crate::params::{Flat, Lies, Spec};
use crate::regular;

/// A tensor as other tools see it.
pub(super) struct Named<'a> {
    shape: &'a [usize],
    data: Data<'a>,
    lies: Lies,
    /// Whether all values written so far are neither infinite nor `NaN`.
    finite: AtomicBool,
}

enum Data<'a> {
    F32(&'a [f32]),
    U8(&'a [u8]),
    /// On a card: copied when it is written, one after the other.
    There(Tensor),
}

/// The values of a flat buffer: borrowed, or still on a card.
pub(super) enum Buffer<'a> {
    Here(View<'a, f32>),
    There(&'a Tensor),
}

impl<'a> Buffer<'a> {
    pub(super) fn of(tensor: &'a Tensor) -> Result<Self, Failure> {
        Ok(if tensor.device().is_cpu() { Self::Here(cpu::view(tensor)?) } else { Self::There(tensor) })
    }
}

impl tensor::View for &Named<'_> {
    fn dtype(&self) -> Dtype {
        match &self.data {
            Data::F32(_) => Dtype::F32,
            Data::U8(_) => Dtype::U8,
            Data::There(tensor) if tensor.dtype() == DType::U8 => Dtype::U8,
            Data::There(_) => Dtype::F32,
        }
    }

    fn shape(&self) -> &[usize] {
        self.shape
    }

    fn data(&self) -> Cow<'_, [u8]> {
        match &self.data {
            Data::U8(data) => Cow::Borrowed(data),
            Data::F32(data) => {
                self.look(data);
                as_named(data, self.shape, self.lies)
            }
            // The format has no way to say that a copy failed: a tensor of no bytes is an error of its own.
            Data::There(tensor) if tensor.dtype() == DType::U8 => {
                Cow::Owned(host::copy::<u8>(tensor).unwrap_or_default())
            }
            Data::There(tensor) => {
                let values = host::copy::<f32>(tensor).unwrap_or_default();
                self.look(&values);
                Cow::Owned(as_named(&values, self.shape, self.lies).into_owned())
            }
        }
    }

    fn data_len(&self) -> usize {
        match &self.data {
            Data::F32(data) => std::mem::size_of_val(*data),
            Data::U8(data) => data.len(),
            Data::There(tensor) => tensor.elem_count() * tensor.dtype().size_in_bytes(),
        }
    }
}

impl<'a> Named<'a> {
    fn new(shape: &'a [usize], data: Data<'a>, lies: Lies) -> Self {
        Self { shape, data, lies, finite: AtomicBool::new(true) }
    }

    /// Looks for values that are not finite, as they are written: wherever the tensor is, they are here by then.
    fn look(&self, values: &[f32]) {
        // In parts, each without a branch.
        if values.chunks(4096).any(|part| part.iter().fold(false, |found, v| found | !v.is_finite())) {
            self.finite.store(false, Ordering::Relaxed);
        }
    }
}

/// The bytes of a parameter in the order other tools have.
fn as_named<'a>(data: &'a [f32], shape: &[usize], lies: Lies) -> Cow<'a, [u8]> {
    match lies {
        Lies::AsNamed => Cow::Borrowed(bytemuck::cast_slice(data)),
        Lies::ChannelsLast => {
            let mut bytes = vec![[0; 4]; data.len()];
            turn(data, &mut bytes, shape, Turn::Out, f32::to_le_bytes);
            Cow::Owned(bytes.into_flattened())
        }
    }
}

enum Turn {
    /// From (out, height, width, in) as kept to (out, in, height, width) as named.
    Out,
    In,
}

/// Copies the values of a filter in the other order. `shape` is as named: (out, in, height, width).
fn turn<A: Copy, B>(from: &[A], to: &mut [B], shape: &[usize], turn: Turn, cast: impl Fn(A) -> B) {
    let (rows, cols) = match (shape, turn) {
        (&[_, inputs, height, width], Turn::Out) => (height * width, inputs),
        (&[_, inputs, height, width], Turn::In) => (inputs, height * width),
        _ => (1, from.len()),
    };
    let size = (rows * cols).max(1);
    for (from, to) in from.chunks_exact(size).zip(to.chunks_exact_mut(size)) {
        for (i, row) in from.chunks_exact(cols).enumerate() {
            row.iter().enumerate().for_each(|(j, v)| to[j * rows + i] = cast(*v));
        }
    }
}

/// The parameters of a flat buffer, by name.
pub(super) fn named<'a>(flat: &'a Flat, all: &'a Buffer) -> Result<Vec<(&'a str, Named<'a>)>, Failure> {
    let one = |(spec, range): (&'a Spec, std::ops::Range<usize>)| {
        let data = match all {
            Buffer::Here(all) => Data::F32(&all[range]),
            Buffer::There(all) => Data::There(all.narrow(0, range.start, range.len())?),
        };
        Ok((spec.name.as_str(), Named::new(&spec.shape, data, spec.lies)))
    };
    flat.iter().map(one).collect()
}

/// Writes flat buffers, which may be of bytes; gives what [`put`] does.
pub(super) fn put_buffers(
    path: &Path,
    buffers: &[(&'static str, Tensor)],
) -> Result<Option<String>, Failure> {
    let lies = Lies::AsNamed;
    if buffers.iter().any(|(_, tensor)| !tensor.device().is_cpu()) {
        let there = buffers
            .iter()
            .map(|(name, tensor)| (*name, Named::new(tensor.dims(), Data::There(tensor.clone()), lies)));
        return put(path, &there.collect::<Vec<_>>());
    }
    let (mut floats, mut bytes) = (Vec::new(), Vec::new());
    for (name, tensor) in buffers {
        match tensor.dtype() {
            DType::U8 => bytes.push((*name, cpu::view::<u8>(tensor)?, tensor.dims())),
            _ => floats.push((*name, cpu::view::<f32>(tensor)?, tensor.dims())),
        }
    }
    let floats = floats.iter().map(|(name, data, shape)| (*name, Named::new(shape, Data::F32(data), lies)));
    let bytes = bytes.iter().map(|(name, data, shape)| (*name, Named::new(shape, Data::U8(data), lies)));
    put(path, &floats.chain(bytes).collect::<Vec<_>>())
}

/// Writes named tensors and waits until they are on the disk. Gives the name of one that has a value that is not
/// finite, if there is one.
pub(super) fn put(path: &Path, tensors: &[(&str, Named)]) -> Result<Option<String>, Failure> {
    let about = [("format".to_owned(), "pt".to_owned())].into();
    serialize_to_file(tensors.iter().map(|(name, tensor)| (*name, tensor)), Some(about), path)
        .map_err(|error| match error {
            safetensors::SafeTensorError::IoError(source) => source,
            other => std::io::Error::other(other),
        })
        .map_err(Failure::io("write", path))?;
    sync(path)?;
    let found = tensors.iter().find(|(_, tensor)| !tensor.finite.load(Ordering::Relaxed));
    Ok(found.map(|(name, _)| (*name).to_owned()))
}

/// Waits until what was written to a file, or a folder's entries, are on the disk.
pub(super) fn sync(path: &Path) -> Result<(), Failure> {
    File::open(path).and_then(|file| file.sync_all()).map_err(Failure::io("write", path))
}

/// Reads the tensors of a file into a flat buffer, by name; the file may have others too.
pub(super) fn load_named(file: &Path, flat: &Flat, buffer: &Tensor) -> Result<(), Failure> {
    load_named_if(file, flat, buffer, |_| true)
}

/// As [`load_named`], where the file is `wanted`.
pub(super) fn load_named_if(
    file: &Path,
    flat: &Flat,
    buffer: &Tensor,
    wanted: impl FnOnce(&SafeTensors) -> bool,
) -> Result<(), Failure> {
    let foreign = |reason: String| Failure::ForeignCheckpoint { path: file.to_owned(), reason };
    let mapped = Mapped::open(file)?;
    let tensors = SafeTensors::deserialize(&mapped.0).map_err(|e| foreign(e.to_string()))?;
    if !wanted(&tensors) {
        return Ok(());
    }
    flat.iter().try_for_each(|(spec, range)| {
        let part = buffer.narrow(0, range.start, range.len())?;
        host::write(&part, |into| {
            let bytes = found(&tensors, &spec.name, Dtype::F32, &spec.shape)?;
            mapped.fill(bytes, &spec.shape, spec.lies, into);
            Ok(())
        })?
        .map_err(foreign)
    })
}

/// Reads flat buffers that [`put_buffers`] wrote.
pub(super) fn load_buffers(file: &Path, buffers: &[(&'static str, Tensor)]) -> Result<(), Failure> {
    let foreign = |reason: String| Failure::ForeignCheckpoint { path: file.to_owned(), reason };
    let mapped = Mapped::open(file)?;
    let tensors = SafeTensors::deserialize(&mapped.0).map_err(|e| foreign(e.to_string()))?;
    for (name, buffer) in buffers {
        let bytes = |dtype| found(&tensors, name, dtype, buffer.dims()).map_err(foreign);
        match buffer.dtype() {
            DType::U8 => {
                let bytes = bytes(Dtype::U8)?;
                host::write::<u8, _>(buffer, |all| mapped.copy(bytes, all))?;
            }
            _ => {
                let bytes = bytes(Dtype::F32)?;
                host::write::<f32, _>(buffer, |all| mapped.copy(bytes, bytemuck::cast_slice_mut(all)))?;
            }
        }
    }
    Ok(())
}

/// A file mapped into memory: loading copies each tensor once. Its pages are resident memory of the process, so those
/// that were copied are given back on the way.
struct Mapped(memmap2::Mmap);

impl Mapped {
    fn open(path: &Path) -> Result<Self, Failure> {
        let file = regular::open(path).map_err(Failure::io("open", path))?;
        // SAFETY: the run owns its folder; a file that another program cuts short while it is read ends
        // the process, as it would for any reader of mapped files.
        unsafe { memmap2::Mmap::map(&file) }.map(Self).map_err(Failure::io("map", path))
    }

    /// Copies a parameter whose bytes in the file are `from`.
    fn fill(&self, from: &[u8], shape: &[usize], lies: Lies, into: &mut [f32]) {
        match lies {
            Lies::AsNamed => self.copy(from, bytemuck::cast_slice_mut(into)),
            Lies::ChannelsLast => {
                turn(from.as_chunks().0, into, shape, Turn::In, f32::from_le_bytes);
                self.give_back(from);
            }
        }
    }

    /// Copies bytes of the file, `from`, piece by piece.
    fn copy(&self, from: &[u8], into: &mut [u8]) {
        for (from, into) in from.chunks(PIECE).zip(into.chunks_mut(PIECE)) {
            into.copy_from_slice(from);
            self.give_back(from);
        }
    }

    /// The pages of `bytes`, a part of the file, are not needed any more.
    fn give_back(&self, bytes: &[u8]) {
        #[cfg(unix)]
        {
            let start = bytes.as_ptr() as usize - self.0.as_ptr() as usize;
            let advice = memmap2::UncheckedAdvice::DontNeed;
            // SAFETY: pages of a file that were not written to are read again if they are touched again. Where the
            // system does not take the advice they stay resident, as before.
            let _ = unsafe { self.0.unchecked_advise_range(advice, start, bytes.len()) };
        }
        #[cfg(not(unix))]
        let _ = bytes;
    }
}

/// Bytes of a file that are resident at once while it is copied.
const PIECE: usize = 1 << 20;

/// The bytes of a tensor that is what it should be.
fn found<'a>(
    tensors: &SafeTensors<'a>,
    name: &str,
    dtype: Dtype,
    shape: &[usize],
) -> Result<&'a [u8], String> {
    let tensor = tensors.tensor(name).map_err(|_| format!("it has no `{name}`"))?;
    if tensor.shape() != shape || tensor.dtype() != dtype {
        return Err(format!(
            "`{name}` is {:?} {:?} there and {dtype:?} {shape:?} here",
            tensor.dtype(),
            tensor.shape()
        ));
    }
    Ok(tensor.data())
}
