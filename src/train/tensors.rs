//! Tensors in safetensors files, under the names and in the shapes that other tools read: flat buffers are
//! written as the parameters they hold, and read by name.

use std::borrow::Cow;
use std::fs::File;
use std::path::Path;

use candle_core::{DType, Tensor};
use safetensors::tensor::{Dtype, SafeTensors, View, serialize_to_file};

use super::Failure;
use crate::kernels::cpu;
use crate::params::{Flat, Lies, Spec};

/// A tensor as other tools see it.
pub(super) struct Named<'a> {
    shape: &'a [usize],
    data: Data<'a>,
    lies: Lies,
}

#[derive(Clone, Copy)]
enum Data<'a> {
    F32(&'a [f32]),
    U8(&'a [u8]),
}

impl View for &Named<'_> {
    fn dtype(&self) -> Dtype {
        match self.data {
            Data::F32(_) => Dtype::F32,
            Data::U8(_) => Dtype::U8,
        }
    }

    fn shape(&self) -> &[usize] {
        self.shape
    }

    fn data(&self) -> Cow<'_, [u8]> {
        match (self.data, self.lies) {
            (Data::U8(data), _) => Cow::Borrowed(data),
            (Data::F32(data), Lies::AsNamed) => Cow::Borrowed(bytemuck::cast_slice(data)),
            (Data::F32(data), Lies::ChannelsLast) => {
                let mut bytes = vec![[0; 4]; data.len()];
                turn(data, &mut bytes, self.shape, Turn::Out, f32::to_le_bytes);
                Cow::Owned(bytes.into_flattened())
            }
        }
    }

    fn data_len(&self) -> usize {
        match self.data {
            Data::F32(data) => std::mem::size_of_val(data),
            Data::U8(data) => data.len(),
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
pub(super) fn named<'a>(flat: &'a Flat, all: &'a [f32]) -> Vec<(&'a str, Named<'a>)> {
    let one = |(spec, range): (&'a Spec, std::ops::Range<usize>)| {
        (spec.name.as_str(), Named { shape: &spec.shape, data: Data::F32(&all[range]), lies: spec.lies })
    };
    flat.iter().map(one).collect()
}

/// Writes flat buffers, which may be of bytes.
pub(super) fn put_buffers(path: &Path, buffers: &[(&'static str, Tensor)]) -> Result<(), Failure> {
    let (mut floats, mut bytes) = (Vec::new(), Vec::new());
    for (name, tensor) in buffers {
        match tensor.dtype() {
            DType::U8 => bytes.push((*name, cpu::view::<u8>(tensor)?, tensor.dims())),
            _ => floats.push((*name, cpu::view::<f32>(tensor)?, tensor.dims())),
        }
    }
    let lies = Lies::AsNamed;
    let floats =
        floats.iter().map(|(name, data, shape)| (*name, Named { shape, data: Data::F32(data), lies }));
    let bytes = bytes.iter().map(|(name, data, shape)| (*name, Named { shape, data: Data::U8(data), lies }));
    put(path, &floats.chain(bytes).collect::<Vec<_>>())
}

/// Writes named tensors and waits until they are on the disk.
pub(super) fn put(path: &Path, tensors: &[(&str, Named)]) -> Result<(), Failure> {
    let about = [("format".to_owned(), "pt".to_owned())].into();
    serialize_to_file(tensors.iter().map(|(name, tensor)| (*name, tensor)), Some(about), path)
        .map_err(|error| match error {
            safetensors::SafeTensorError::IoError(source) => source,
            other => std::io::Error::other(other),
        })
        .map_err(Failure::io("write", path))?;
    sync(path)
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
    let fill_all = |all: &mut [f32]| {
        flat.iter()
            .try_for_each(|(spec, range)| fill(&tensors, &spec.name, &spec.shape, spec.lies, &mut all[range]))
    };
    cpu::update::<f32, _>(buffer, fill_all)?.map_err(foreign)
}

/// Reads flat buffers that [`put_buffers`] wrote.
pub(super) fn load_buffers(file: &Path, buffers: &[(&'static str, Tensor)]) -> Result<(), Failure> {
    let foreign = |reason: String| Failure::ForeignCheckpoint { path: file.to_owned(), reason };
    let mapped = Mapped::open(file)?;
    let tensors = SafeTensors::deserialize(&mapped.0).map_err(|e| foreign(e.to_string()))?;
    for (name, buffer) in buffers {
        match buffer.dtype() {
            DType::U8 => cpu::update::<u8, _>(buffer, |all| fill_bytes(&tensors, name, buffer.dims(), all)),
            _ => cpu::update::<f32, _>(buffer, |all| fill(&tensors, name, buffer.dims(), Lies::AsNamed, all)),
        }?
        .map_err(foreign)?;
    }
    Ok(())
}

/// A file mapped into memory: loading copies each tensor once.
struct Mapped(memmap2::Mmap);

impl Mapped {
    fn open(path: &Path) -> Result<Self, Failure> {
        let file = File::open(path).map_err(Failure::io("open", path))?;
        // SAFETY: the run owns its folder; a file that another program cuts short while it is read ends
        // the process, as it would for any reader of mapped files.
        unsafe { memmap2::Mmap::map(&file) }.map(Self).map_err(Failure::io("map", path))
    }
}

fn fill(
    tensors: &SafeTensors,
    name: &str,
    shape: &[usize],
    lies: Lies,
    into: &mut [f32],
) -> Result<(), String> {
    let bytes = found(tensors, name, Dtype::F32, shape)?;
    match lies {
        Lies::AsNamed => bytemuck::cast_slice_mut(into).copy_from_slice(bytes),
        Lies::ChannelsLast => turn(bytes.as_chunks().0, into, shape, Turn::In, f32::from_le_bytes),
    }
    Ok(())
}

fn fill_bytes(tensors: &SafeTensors, name: &str, shape: &[usize], into: &mut [u8]) -> Result<(), String> {
    into.copy_from_slice(found(tensors, name, Dtype::U8, shape)?);
    Ok(())
}

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
