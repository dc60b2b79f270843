//! Reads safetensors files a chunk at a time: however large its tensors are, a file takes the memory of one chunk.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

use candle_core::{DType, Tensor};
use half::{bf16, f16};
use safetensors::tensor::{Dtype, Metadata, TensorInfo};

use super::Failure;
use super::tensor_files::{FilterPermutation, permute_filter};
use crate::base::{file_format, regular_file};
use crate::kernels::host;
use crate::kernels::update::cast_into;
use crate::params::{MemoryFormat, TensorSpec};

const CHUNK_BYTES: usize = 256 << 10;
const MAX_HEADER_BYTES: u64 = 100 << 20;

/// An open safetensors file whose header was read.
pub struct TensorReader {
    path: PathBuf,
    file: File,
    /// Offset of the first tensor in the file.
    data_start: u64,
    metadata: Metadata,
}

impl TensorReader {
    /// Opens a file. One that is not a safetensors file, or is cut short, is [`io::ErrorKind::InvalidData`].
    pub fn open(path: &Path) -> io::Result<Self> {
        let mut file = regular_file::open(path)?;
        let refused = |reason: String| {
            io::Error::new(io::ErrorKind::InvalidData, format!("is not a safetensors file: {reason}"))
        };
        let file_bytes = file.metadata()?.len();
        let mut length = [0; size_of::<u64>()];
        file.read_exact(&mut length).map_err(|_| refused("it has no header".into()))?;
        if let Some(format) = file_format::name(&length) {
            return Err(refused(format!(
                "it is {format}; \
                 `safetensors.torch.save_file(torch.load(\"model.pt\"), \"model.safetensors\")` converts \
                 weights of PyTorch"
            )));
        }
        let header_bytes = u64::from_le_bytes(length);
        if header_bytes > MAX_HEADER_BYTES.min(file_bytes) {
            return Err(refused(format!("its header would have {header_bytes} bytes")));
        }
        let mut header = vec![0; header_bytes as usize];
        file.read_exact(&mut header).map_err(|_| refused("its header is cut short".into()))?;
        // Also checks that the tensors lie one after another and have the bytes of their shapes.
        let metadata: Metadata =
            serde_json::from_slice(&header).map_err(|error| refused(error.to_string()))?;
        let data_start = length.len() as u64 + header_bytes;
        let expected_bytes = data_start + metadata.data_len() as u64;
        if expected_bytes != file_bytes {
            return Err(refused(format!("it has {file_bytes} bytes, and its tensors need {expected_bytes}")));
        }
        Ok(Self { path: path.to_owned(), file, data_start, metadata })
    }

    /// As [`Self::open`], for a file of a checkpoint.
    pub fn open_checkpoint(path: &Path) -> Result<Self, Failure> {
        Self::open(path).map_err(|error| match error.kind() {
            io::ErrorKind::InvalidData => {
                Failure::UnusableExport { folder: path.to_owned(), problem: error.to_string() }
            }
            _ => Failure::io("open", path)(error),
        })
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    pub fn names(&self) -> Vec<String> {
        self.metadata.offset_keys()
    }

    pub fn info(&self, name: &str) -> Option<&TensorInfo> {
        self.metadata.info(name)
    }

    /// The tensor of this name, if it has this type and shape.
    pub fn checked(&self, name: &str, dtype: Dtype, shape: &[usize]) -> Result<&TensorInfo, Failure> {
        let info =
            self.info(name).ok_or_else(|| self.mismatch(format!("the file lacks the tensor `{name}`")))?;
        match info.shape == shape && info.dtype == dtype {
            true => Ok(info),
            false => Err(self.mismatch(format!(
                "`{name}` is {} {:?} in the file, and {dtype} {shape:?} in the model",
                info.dtype, info.shape
            ))),
        }
    }

    pub fn mismatch(&self, reason: String) -> Failure {
        Failure::ForeignCheckpoint { path: self.path.clone(), reason }
    }

    /// Reads a parameter of any float type into `to`, a flat tensor. Where `to` has another number of rows than the
    /// file, the common ones are read.
    pub fn read_param(&self, info: &TensorInfo, spec: &TensorSpec, to: &Tensor) -> Result<(), Failure> {
        let values = (info.shape.iter().product::<usize>()).min(to.elem_count());
        self.for_each_values(info, spec, values, 1, |start, values| {
            write_f32(&to.narrow(0, start, values.len())?, values)
        })
    }

    /// Calls `each` with the index of the first value and the values of every chunk of the first `values` of a
    /// parameter of any float type, in memory order. A chunk has a multiple of `unit` values.
    pub fn for_each_values(
        &self,
        info: &TensorInfo,
        spec: &TensorSpec,
        values: usize,
        unit: usize,
        mut each: impl FnMut(usize, &[f32]) -> candle_core::Result<()>,
    ) -> Result<(), Failure> {
        let row_len: usize = info.shape.iter().skip(1).product();
        // A filter is permuted whole: a chunk has only whole ones.
        let unit = match spec.memory_format {
            MemoryFormat::Contiguous => unit,
            MemoryFormat::ChannelsLast => row_len.max(1),
        };
        let mut decoded = Vec::new();
        let mut permuted = Vec::new();
        self.for_each_chunk(info, values, unit, |start, bytes| {
            decoded.clear();
            decode(info.dtype, bytes, &mut decoded);
            let values = match spec.memory_format {
                MemoryFormat::Contiguous => &decoded,
                MemoryFormat::ChannelsLast => {
                    permuted.resize(decoded.len(), 0.0);
                    let direction = FilterPermutation::FromFile;
                    permute_filter(&decoded, &mut permuted, &spec.shape, direction, |value: f32| value);
                    &permuted
                }
            };
            each(start, values)
        })
    }

    /// Reads a flat buffer of f32 or u8.
    pub fn read_buffer(&self, name: &str, to: &Tensor) -> Result<(), Failure> {
        let dtype = if to.dtype() == DType::U8 { Dtype::U8 } else { Dtype::F32 };
        let info = self.checked(name, dtype, to.dims())?;
        let to = to.flatten_all()?;
        let mut decoded = Vec::new();
        self.for_each_chunk(info, to.elem_count(), 1, |start, bytes| match dtype {
            Dtype::U8 => {
                host::write(&to.narrow(0, start, bytes.len())?, |to: &mut [u8]| to.copy_from_slice(bytes))
            }
            _ => {
                decoded.clear();
                decode(dtype, bytes, &mut decoded);
                write_f32(&to.narrow(0, start, decoded.len())?, &decoded)
            }
        })
    }

    /// Calls `each` with the index of the first value and the bytes of every chunk of the first `values` of a tensor. A
    /// chunk has a multiple of `unit` values.
    fn for_each_chunk(
        &self,
        info: &TensorInfo,
        values: usize,
        unit: usize,
        mut each: impl FnMut(usize, &[u8]) -> candle_core::Result<()>,
    ) -> Result<(), Failure> {
        let size = info.dtype.bitsize() / 8;
        let chunk = (CHUNK_BYTES / size / unit).max(1) * unit;
        let mut bytes = vec![0; chunk.min(values) * size];
        for start in (0..values).step_by(chunk) {
            let bytes = &mut bytes[..chunk.min(values - start) * size];
            self.read_bytes(info, start * size, bytes).map_err(Failure::io("read", &self.path))?;
            each(start, bytes)?;
        }
        Ok(())
    }

    /// All values of a tensor of a float type.
    pub fn values(&self, info: &TensorInfo) -> io::Result<Vec<f32>> {
        let len = info.shape.iter().product();
        let (mut values, mut bytes) = (Vec::with_capacity(len), vec![0; CHUNK_BYTES]);
        let tensor_bytes = info.data_offsets.1 - info.data_offsets.0;
        for start in (0..tensor_bytes).step_by(CHUNK_BYTES) {
            let bytes = &mut bytes[..CHUNK_BYTES.min(tensor_bytes - start)];
            self.read_bytes(info, start, bytes)?;
            decode(info.dtype, bytes, &mut values);
        }
        Ok(values)
    }

    /// Reads the bytes of a tensor from `offset` on.
    fn read_bytes(&self, info: &TensorInfo, offset: usize, into: &mut [u8]) -> io::Result<()> {
        let mut file = &self.file;
        file.seek(SeekFrom::Start(self.data_start + (info.data_offsets.0 + offset) as u64))?;
        file.read_exact(into)
    }
}

/// Whether a tensor of this type can be read as f32.
pub fn is_float(dtype: Dtype) -> bool {
    matches!(dtype, Dtype::F16 | Dtype::BF16 | Dtype::F32 | Dtype::F64)
}

/// Appends the values of these bytes.
fn decode(dtype: Dtype, bytes: &[u8], into: &mut Vec<f32>) {
    match dtype {
        Dtype::F16 => into.extend(bytes.as_chunks().0.iter().map(|b| f16::from_le_bytes(*b).to_f32())),
        Dtype::BF16 => into.extend(bytes.as_chunks().0.iter().map(|b| bf16::from_le_bytes(*b).to_f32())),
        Dtype::F64 => into.extend(bytes.as_chunks().0.iter().map(|b| f64::from_le_bytes(*b) as f32)),
        _ => into.extend(bytes.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b))),
    }
}

/// Writes values to a flat tensor of any float type.
pub(super) fn write_f32(to: &Tensor, values: &[f32]) -> candle_core::Result<()> {
    match to.dtype() {
        DType::F32 => host::write(to, |to: &mut [f32]| to.copy_from_slice(values)),
        _ => cast_into(&Tensor::from_slice(values, values.len(), to.device())?, to),
    }
}
