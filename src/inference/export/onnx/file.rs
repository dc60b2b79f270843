//! An ONNX file whose weights are written one at a time, and read again one at a time.
//!
//! The lengths of all messages are known before the first weight is read, so that the file is written front to back:
//! the graph without its weights, then each of them as an initializer. Above 2 GB, which no Protocol Buffers message
//! may exceed, the weights go to a file of their own.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, BufReader, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

use prost::Message;
use prost::encoding::{encode_varint, encoded_len_varint};

use super::super::ExportProgress;
use super::super::error::ExportError;
use super::super::folder::ExportFolder;
use super::super::weights::{TensorMapping, WeightDtype};
use super::proto::{
    self, BFLOAT16, EXTERNAL, Entry, FLOAT, FLOAT16, GRAPH_INITIALIZER, GraphProto, INT4, INT8, INT32,
    MODEL_GRAPH, ModelProto, TENSOR_DATA_TYPE, TENSOR_EXTERNAL_DATA, TENSOR_NAME, TENSOR_RAW_DATA,
};
use crate::base::regular_file;
use crate::quantization::{AffineQuantization, blocks};

pub(super) const MODEL: &str = "model.onnx";
const EXTERNAL_DATA: &str = "model.onnx.data";

/// Largest message that Protocol Buffers allow.
pub(super) const MAX_MESSAGE_BYTES: u64 = i32::MAX as u64;

/// Alignment of weights in their own file: that of pages, so that they can be mapped.
const ALIGNMENT: u64 = 4096;

/// What is written before the weights.
pub(super) struct ModelHead {
    /// Without its graph.
    pub model: ModelProto,
    /// Without the weights among its initializers.
    pub graph: GraphProto,
}

/// A weight as it is written.
pub(super) struct Initializer {
    pub name: String,
    pub shape: Vec<usize>,
    pub data_type: i32,
}

impl Initializer {
    pub(super) fn new(name: impl Into<String>, shape: &[usize], data_type: i32) -> Self {
        Self { name: name.into(), shape: shape.to_vec(), data_type }
    }

    fn bytes(&self) -> u64 {
        tensor_bytes(self.shape.iter().product(), self.data_type)
    }
}

/// Bytes of `len` values.
fn tensor_bytes(len: usize, data_type: i32) -> u64 {
    let bytes = match data_type {
        INT4 => len.div_ceil(2),
        INT8 => len,
        FLOAT16 | BFLOAT16 => 2 * len,
        _ => 4 * len,
    };
    bytes as u64
}

pub(super) fn element_type(dtype: WeightDtype) -> i32 {
    match dtype {
        WeightDtype::F32 => FLOAT,
        WeightDtype::F16 => FLOAT16,
        WeightDtype::Bf16 => BFLOAT16,
    }
}

/// The tag and the length of a field of bytes.
fn length_prefix(field: u64, length: u64) -> Vec<u8> {
    let mut prefix = Vec::new();
    encode_varint(field << 3 | 2, &mut prefix);
    encode_varint(length, &mut prefix);
    prefix
}

/// Writes `model.onnx`, with its weights in `model.onnx.data` if they take more than `inline_limit` bytes. `encode`
/// gives the bytes of a weight, by its index.
pub(super) fn write(
    head: ModelHead,
    weights: &[Initializer],
    encode: &mut dyn FnMut(usize) -> Result<Vec<u8>, ExportError>,
    inline_limit: u64,
    folder: &ExportFolder,
    progress: &mut dyn ExportProgress,
) -> Result<(), ExportError> {
    progress.started(weights.iter().map(Initializer::bytes).sum());
    let tensor = |weight: &Initializer| proto::TensorProto {
        dims: weight.shape.iter().map(|dim| *dim as i64).collect(),
        data_type: weight.data_type,
        name: weight.name.clone(),
        ..proto::TensorProto::default()
    };
    let (model, graph) = (head.model.encode_to_vec(), head.graph.encode_to_vec());
    // Of each weight: everything before its values, and the length of the message.
    let prefixes: Vec<(Vec<u8>, u64)> = weights
        .iter()
        .map(|weight| {
            let mut prefix = tensor(weight).encode_to_vec();
            prefix.extend(length_prefix(TENSOR_RAW_DATA, weight.bytes()));
            let length = prefix.len() as u64 + weight.bytes();
            (prefix, length)
        })
        .collect();
    let initializers: u64 =
        prefixes.iter().map(|(_, length)| 1 + encoded_len_varint(*length) as u64 + length).sum();
    let graph_bytes = graph.len() as u64 + initializers;
    let mut file = folder.file(MODEL)?;
    if model.len() as u64 + graph_bytes + 16 <= inline_limit {
        file.write(&model)?;
        file.write(&length_prefix(MODEL_GRAPH, graph_bytes))?;
        file.write(&graph)?;
        for (at, (prefix, length)) in prefixes.iter().enumerate() {
            file.write(&length_prefix(GRAPH_INITIALIZER, *length))?;
            file.write(prefix)?;
            file.write(&encode(at)?)?;
            progress.tensor_written(&weights[at].name, weights[at].bytes());
        }
        return file.finish();
    }
    let mut data = folder.file(EXTERNAL_DATA)?;
    let mut graph = head.graph;
    for (at, weight) in weights.iter().enumerate() {
        let end = data.position();
        data.write(&vec![0; (end.next_multiple_of(ALIGNMENT) - end) as usize])?;
        let entry = |key: &str, value: String| Entry { key: key.into(), value };
        let external_data = vec![
            entry("location", EXTERNAL_DATA.into()),
            entry("offset", data.position().to_string()),
            entry("length", weight.bytes().to_string()),
        ];
        graph.initializer.push(proto::TensorProto {
            external_data,
            data_location: EXTERNAL,
            ..tensor(weight)
        });
        data.write(&encode(at)?)?;
        progress.tensor_written(&weight.name, weight.bytes());
    }
    data.finish()?;
    file.write(&ModelProto { graph: Some(graph), ..head.model }.encode_to_vec())?;
    file.finish()
}

/// Where the values of an initializer are.
struct Location {
    external: bool,
    offset: u64,
    length: u64,
    data_type: i32,
}

/// The initializers of a written file.
pub(in super::super) struct OnnxReader {
    folder: PathBuf,
    initializers: BTreeMap<String, Location>,
}

impl OnnxReader {
    pub(in super::super) fn open(folder: &Path) -> Result<Self, ExportError> {
        let path = folder.join(MODEL);
        let file = regular_file::open(&path).map_err(ExportError::io("open", &path))?;
        let length = file.metadata().map_err(ExportError::io("read", &path))?.len();
        let mut scanner = Scanner { file: BufReader::new(file), position: 0 };
        let initializers =
            scanner.initializers(length).map_err(|error| ExportError::read_back(&path, error.to_string()))?;
        Ok(Self { folder: folder.to_owned(), initializers })
    }

    /// The values of a weight, dequantized by the scale of their block or row.
    pub(in super::super) fn read(&mut self, mapping: &TensorMapping) -> Result<Vec<f32>, ExportError> {
        let mut values = self.values(&mapping.target, mapping.len())?;
        if let Some(layout) = mapping.blocks() {
            let scales = self.values(&scale_name(&mapping.target), layout.scale_shape().iter().product())?;
            return Ok(blocks::dequantize(values, &scales, layout));
        }
        if self.initializers.get(&mapping.target).is_some_and(|found| matches!(found.data_type, INT8 | INT32))
        {
            let rows = mapping.shape[0];
            let scales = self.values(&scale_name(&mapping.target), rows)?;
            for (row, scale) in values.chunks_exact_mut((mapping.len() / rows).max(1)).zip(&scales) {
                row.iter_mut().for_each(|value| *value *= scale);
            }
        }
        Ok(values)
    }

    /// How the values of an activation are stored.
    pub(in super::super) fn activation(&mut self, name: &str) -> Result<AffineQuantization, ExportError> {
        let scale = self.values(&scale_name(name), 1)?[0];
        let zero_point = self.values(&zero_point_name(name), 1)?[0] as i8;
        match scale.is_normal() && scale > 0.0 {
            true => Ok(AffineQuantization { scale, zero_point }),
            false => {
                let reason = format!("the scale of `{name}` is {scale}");
                Err(ExportError::read_back(&self.folder.join(MODEL), reason))
            }
        }
    }

    /// The `len` numbers of an initializer.
    fn values(&self, name: &str, len: usize) -> Result<Vec<f32>, ExportError> {
        let model = self.folder.join(MODEL);
        let Some(location) = self.initializers.get(name) else {
            return Err(ExportError::read_back(&model, format!("it has no `{name}`")));
        };
        if location.length != tensor_bytes(len, location.data_type) {
            let reason = format!("`{name}` has {} bytes", location.length);
            return Err(ExportError::read_back(&model, reason));
        }
        let path = if location.external { self.folder.join(EXTERNAL_DATA) } else { model };
        let mut bytes = vec![0; location.length as usize];
        regular_file::open(&path)
            .and_then(|mut file| {
                file.seek(SeekFrom::Start(location.offset))?;
                file.read_exact(&mut bytes)
            })
            .map_err(ExportError::io("read", &path))?;
        Ok(match location.data_type {
            INT4 => blocks::unpack(&bytes, len).into_iter().map(f32::from).collect(),
            INT8 => bytes.iter().map(|byte| f32::from(*byte as i8)).collect(),
            INT32 => bytes.as_chunks().0.iter().map(|bytes| i32::from_le_bytes(*bytes) as f32).collect(),
            FLOAT16 => WeightDtype::F16.decode(&bytes),
            BFLOAT16 => WeightDtype::Bf16.decode(&bytes),
            _ => WeightDtype::F32.decode(&bytes),
        })
    }
}

/// The initializers of a quantized tensor's scale and zero point.
pub(super) fn scale_name(tensor: &str) -> String {
    format!("{tensor}/scale")
}

pub(super) fn zero_point_name(tensor: &str) -> String {
    format!("{tensor}/zero_point")
}

/// Walks over a message without reading the values of its tensors.
struct Scanner {
    file: BufReader<File>,
    position: u64,
}

/// What follows the number of a field.
enum Payload {
    Number(u64),
    /// So many bytes, which are not read yet.
    Bytes(u64),
}

impl Scanner {
    /// The initializers of a model of `length` bytes.
    fn initializers(&mut self, length: u64) -> io::Result<BTreeMap<String, Location>> {
        let mut found = BTreeMap::new();
        while self.position < length {
            match self.field()? {
                (MODEL_GRAPH, Payload::Bytes(size)) => {
                    let end = self.position + size;
                    while self.position < end {
                        match self.field()? {
                            (GRAPH_INITIALIZER, Payload::Bytes(size)) => {
                                let (name, location) = self.initializer(size)?;
                                found.insert(name, location);
                            }
                            (_, payload) => self.skip(payload)?,
                        }
                    }
                }
                (_, payload) => self.skip(payload)?,
            }
        }
        Ok(found)
    }

    fn initializer(&mut self, size: u64) -> io::Result<(String, Location)> {
        let end = self.position + size;
        let mut name = String::new();
        let mut location = Location { external: false, offset: 0, length: 0, data_type: 0 };
        while self.position < end {
            match self.field()? {
                (TENSOR_DATA_TYPE, Payload::Number(value)) => location.data_type = value as i32,
                (TENSOR_NAME, Payload::Bytes(size)) => {
                    name = String::from_utf8_lossy(&self.bytes(size)?).into_owned();
                }
                (TENSOR_RAW_DATA, Payload::Bytes(size)) => {
                    (location.offset, location.length) = (self.position, size);
                    self.skip(Payload::Bytes(size))?;
                }
                (TENSOR_EXTERNAL_DATA, Payload::Bytes(size)) => {
                    let entry = Entry::decode(self.bytes(size)?.as_slice()).map_err(io::Error::other)?;
                    location.external = true;
                    match entry.key.as_str() {
                        "offset" => location.offset = entry.value.parse().map_err(io::Error::other)?,
                        "length" => location.length = entry.value.parse().map_err(io::Error::other)?,
                        _ => {}
                    }
                }
                (_, payload) => self.skip(payload)?,
            }
        }
        Ok((name, location))
    }

    /// The number of the next field, and its payload.
    fn field(&mut self) -> io::Result<(u64, Payload)> {
        let tag = self.varint()?;
        let payload = match tag & 7 {
            0 => Payload::Number(self.varint()?),
            1 => Payload::Bytes(8),
            2 => Payload::Bytes(self.varint()?),
            5 => Payload::Bytes(4),
            other => return Err(io::Error::other(format!("a field has the unknown wire type {other}"))),
        };
        Ok((tag >> 3, payload))
    }

    fn varint(&mut self) -> io::Result<u64> {
        let mut value = 0;
        for shift in (0..64).step_by(7) {
            let byte = self.bytes(1)?[0];
            value |= u64::from(byte & 0x7f) << shift;
            if byte < 0x80 {
                return Ok(value);
            }
        }
        Err(io::Error::other("a number has more than ten bytes"))
    }

    /// The next bytes, which are a name or less.
    fn bytes(&mut self, size: u64) -> io::Result<Vec<u8>> {
        const MAX_BYTES: u64 = 1 << 20;
        if size > MAX_BYTES {
            return Err(io::Error::other(format!("a name has {size} bytes")));
        }
        let mut bytes = vec![0; size as usize];
        self.file.read_exact(&mut bytes)?;
        self.position += size;
        Ok(bytes)
    }

    fn skip(&mut self, payload: Payload) -> io::Result<()> {
        if let Payload::Bytes(size) = payload {
            let distance = i64::try_from(size).map_err(io::Error::other)?;
            self.file.seek_relative(distance)?;
            self.position += size;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use candle_core::{Device, Tensor};

    use super::super::super::NoExportProgress;
    use super::super::super::weights::{SavedWeights, Transform};
    use super::*;
    use crate::params::{MemoryFormat, ParamInit, TensorSpec, TensorUse};

    #[test]
    fn weights_are_read_back_from_the_model_or_from_their_own_file() {
        let root = tempfile::tempdir().unwrap();
        let (source, target) = (root.path().join("w.safetensors"), root.path().join("out"));
        let values: Vec<f32> = (0..600).map(|v| v as f32 / 7.0).collect();
        let tensor = Tensor::from_vec(values.clone(), (20, 30), &Device::Cpu).unwrap();
        tensor.save_safetensors("w", &source).unwrap();
        let spec = TensorSpec {
            usage: TensorUse::Weight,
            name: "w".into(),
            shape: vec![20, 30],
            init: ParamInit::Constant(0.0),
            memory_format: MemoryFormat::Contiguous,
        };
        let mapping = TensorMapping::new("w", &spec, Transform::Transpose);
        for (limit, external) in [(MAX_MESSAGE_BYTES, false), (1000, true)] {
            let head = ModelHead { model: ModelProto::default(), graph: GraphProto::default() };
            let folder = ExportFolder::create(&target, true).unwrap();
            let files = SavedWeights::open(&source, &source).unwrap();
            let weights = [Initializer::new("w", &mapping.shape, FLOAT)];
            let mut encode = |_| WeightDtype::F32.encode("w", &mapping.read(&files)?);
            write(head, &weights, &mut encode, limit, &folder, &mut NoExportProgress).unwrap();
            folder.commit().unwrap();
            assert_eq!(target.join(EXTERNAL_DATA).exists(), external);
            let parsed = ModelProto::decode(std::fs::read(target.join(MODEL)).unwrap().as_slice()).unwrap();
            let tensor = &parsed.graph.unwrap().initializer[0];
            assert_eq!((tensor.dims.as_slice(), tensor.data_location), (&[30, 20][..], external as i32));
            let mut reader = OnnxReader::open(&target).unwrap();
            assert_eq!(mapping.restore(reader.read(&mapping).unwrap()), values);
        }
    }
}
