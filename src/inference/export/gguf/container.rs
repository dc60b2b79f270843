//! The GGUF container, version 3: metadata and a table of tensors, then the tensors, aligned. candle's writer takes
//! all tensors at once; this one takes them one by one.

use candle_core::quantized::GgmlDType;

use super::super::error::ExportError;
use super::super::folder::ExportFile;

const MAGIC: &[u8; 4] = b"GGUF";
const VERSION: u32 = 3;
/// The default of `general.alignment`.
const ALIGNMENT: u64 = 32;

/// A value of the metadata.
#[derive(Clone, Debug, PartialEq)]
pub(in super::super) enum MetadataValue {
    U32(u32),
    F32(f32),
    Bool(bool),
    Text(String),
    Texts(Vec<String>),
    I32s(Vec<i32>),
    F32s(Vec<f32>),
}

impl From<&str> for MetadataValue {
    fn from(text: &str) -> Self {
        Self::Text(text.to_owned())
    }
}

/// Codes of the value types.
const TYPE_U32: u32 = 4;
const TYPE_I32: u32 = 5;
const TYPE_F32: u32 = 6;
const TYPE_BOOL: u32 = 7;
const TYPE_TEXT: u32 = 8;
const TYPE_ARRAY: u32 = 9;

impl MetadataValue {
    /// Appends its type and its value.
    fn encode(&self, into: &mut Vec<u8>) {
        match self {
            Self::U32(value) => put_u32(put_u32(into, TYPE_U32), *value),
            Self::F32(value) => put(put_u32(into, TYPE_F32), &value.to_le_bytes()),
            Self::Bool(value) => put(put_u32(into, TYPE_BOOL), &[u8::from(*value)]),
            Self::Text(value) => put_text(put_u32(into, TYPE_TEXT), value),
            Self::Texts(values) => {
                let into = put_array(into, TYPE_TEXT, values.len());
                values.iter().fold(into, |into, value| put_text(into, value))
            }
            Self::I32s(values) => {
                let into = put_array(into, TYPE_I32, values.len());
                values.iter().fold(into, |into, value| put(into, &value.to_le_bytes()))
            }
            Self::F32s(values) => {
                let into = put_array(into, TYPE_F32, values.len());
                values.iter().fold(into, |into, value| put(into, &value.to_le_bytes()))
            }
        };
    }
}

fn put<'a>(into: &'a mut Vec<u8>, bytes: &[u8]) -> &'a mut Vec<u8> {
    into.extend_from_slice(bytes);
    into
}

fn put_u32(into: &mut Vec<u8>, value: u32) -> &mut Vec<u8> {
    put(into, &value.to_le_bytes())
}

fn put_u64(into: &mut Vec<u8>, value: u64) -> &mut Vec<u8> {
    put(into, &value.to_le_bytes())
}

fn put_text<'a>(into: &'a mut Vec<u8>, text: &str) -> &'a mut Vec<u8> {
    put(put_u64(into, text.len() as u64), text.as_bytes())
}

fn put_array(into: &mut Vec<u8>, kind: u32, len: usize) -> &mut Vec<u8> {
    put_u64(put_u32(put_u32(into, TYPE_ARRAY), kind), len as u64)
}

/// A tensor of the file.
#[derive(Clone, Debug)]
pub(super) struct TensorEntry {
    pub name: String,
    /// Outermost dimension first; the file has them in the opposite order.
    pub shape: Vec<usize>,
    pub dtype: GgmlDType,
}

impl TensorEntry {
    pub(super) fn bytes(&self) -> u64 {
        (self.shape.iter().product::<usize>() / self.dtype.block_size() * self.dtype.type_size()) as u64
    }
}

/// Code of a tensor type.
fn type_code(dtype: GgmlDType) -> u32 {
    match dtype {
        GgmlDType::F32 => 0,
        GgmlDType::F16 => 1,
        GgmlDType::Q4_0 => 2,
        GgmlDType::Q4_1 => 3,
        GgmlDType::Q5_0 => 6,
        GgmlDType::Q5_1 => 7,
        GgmlDType::Q8_0 => 8,
        GgmlDType::Q8_1 => 9,
        GgmlDType::Q2K => 10,
        GgmlDType::Q3K => 11,
        GgmlDType::Q4K => 12,
        GgmlDType::Q5K => 13,
        GgmlDType::Q6K => 14,
        GgmlDType::Q8K => 15,
        GgmlDType::BF16 => 30,
    }
}

/// A file whose header is written.
pub(super) struct GgufWriter {
    file: ExportFile,
}

impl GgufWriter {
    pub(super) fn start(
        mut file: ExportFile,
        metadata: &[(String, MetadataValue)],
        tensors: &[TensorEntry],
    ) -> Result<Self, ExportError> {
        let mut header = Vec::new();
        put_u32(put(&mut header, MAGIC), VERSION);
        put_u64(put_u64(&mut header, tensors.len() as u64), metadata.len() as u64);
        for (key, value) in metadata {
            put_text(&mut header, key);
            value.encode(&mut header);
        }
        let mut offset = 0;
        for tensor in tensors {
            put_text(&mut header, &tensor.name);
            put_u32(&mut header, tensor.shape.len() as u32);
            for dim in tensor.shape.iter().rev() {
                put_u64(&mut header, *dim as u64);
            }
            put_u64(put_u32(&mut header, type_code(tensor.dtype)), offset);
            offset += tensor.bytes().next_multiple_of(ALIGNMENT);
        }
        header.resize(header.len().next_multiple_of(ALIGNMENT as usize), 0);
        file.write(&header)?;
        Ok(Self { file })
    }

    /// Writes the next tensor; they come in the order of the header.
    pub(super) fn tensor(&mut self, entry: &TensorEntry, blocks: &[u8]) -> Result<(), ExportError> {
        debug_assert_eq!(entry.bytes(), blocks.len() as u64, "{}", entry.name);
        self.file.write(blocks)?;
        let end = self.file.position();
        self.file.write(&[0; ALIGNMENT as usize][..(end.next_multiple_of(ALIGNMENT) - end) as usize])
    }

    pub(super) fn finish(self) -> Result<(), ExportError> {
        self.file.finish()
    }
}
