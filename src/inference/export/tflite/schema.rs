//! The tables of a TFLite file that are written here, with the field numbers of `schema.fbs`, version 3.

use std::collections::BTreeMap;

use flatbuffers::{
    FlatBufferBuilder, ForwardsUOffset, Push, PushAlignment, TableFinishedWIPOffset, VOffsetT, Vector,
    WIPOffset,
};

pub(super) const VERSION: u32 = 3;
pub(super) const IDENTIFIER: &str = "TFL3";

/// Element types of a tensor.
pub(super) const FLOAT32: i8 = 0;
pub(super) const INT32: i8 = 2;
pub(super) const INT8: i8 = 9;

/// An operator of the runtime, and the oldest version of it that takes what is written here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Builtin {
    pub code: i32,
    pub version: i32,
}

const fn builtin(code: i32, version: i32) -> Builtin {
    Builtin { code, version }
}

pub(super) const ADD: Builtin = builtin(0, 2);
pub(super) const CONCATENATION: Builtin = builtin(2, 1);
pub(super) const CONV_2D: Builtin = builtin(3, 3);
pub(super) const DEPTHWISE_CONV_2D: Builtin = builtin(4, 3);
pub(super) const DEQUANTIZE: Builtin = builtin(6, 2);
pub(super) const FULLY_CONNECTED: Builtin = builtin(9, 4);
pub(super) const LOGISTIC: Builtin = builtin(14, 1);
pub(super) const MAX_POOL_2D: Builtin = builtin(17, 2);
pub(super) const MUL: Builtin = builtin(18, 1);
pub(super) const RELU: Builtin = builtin(19, 1);
pub(super) const RELU6: Builtin = builtin(21, 1);
pub(super) const RESHAPE: Builtin = builtin(22, 1);
pub(super) const TANH: Builtin = builtin(28, 1);
pub(super) const PAD: Builtin = builtin(34, 2);
pub(super) const GATHER: Builtin = builtin(36, 1);
pub(super) const TRANSPOSE: Builtin = builtin(39, 2);
pub(super) const MEAN: Builtin = builtin(40, 2);
pub(super) const SUB: Builtin = builtin(41, 1);
pub(super) const CAST: Builtin = builtin(53, 1);
pub(super) const PADV2: Builtin = builtin(60, 2);
pub(super) const RSQRT: Builtin = builtin(76, 1);
pub(super) const SPLIT_V: Builtin = builtin(102, 1);
pub(super) const QUANTIZE: Builtin = builtin(114, 1);
pub(super) const GELU: Builtin = builtin(150, 1);

/// Codes up to this one are also in the field that came first.
const LAST_DEPRECATED_CODE: i32 = 127;

/// A field of an operator's options.
#[derive(Clone, Copy, Debug)]
pub(super) enum OptionValue {
    Byte(i8),
    Int(i32),
    Bool(bool),
}

/// The options of an operator: their number in the union, and the first fields in order.
#[derive(Clone, Debug, Default)]
pub(super) struct Options {
    pub kind: u8,
    pub fields: Vec<OptionValue>,
}

impl Options {
    pub(super) fn new(kind: u8, fields: &[OptionValue]) -> Self {
        Self { kind, fields: fields.to_vec() }
    }
}

/// `real = scale (stored - zero_point)`, per channel of `dimension` if there are several.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct TensorQuantization {
    pub scales: Vec<f32>,
    pub zero_points: Vec<i64>,
    pub dimension: i32,
}

/// A tensor of the graph.
#[derive(Clone, Debug)]
pub(super) struct TensorInfo {
    pub name: String,
    pub element_type: i8,
    /// With the batch as 1 if it is dynamic.
    pub shape: Vec<i32>,
    pub dynamic_batch: bool,
    pub quantization: Option<TensorQuantization>,
    /// 0 if it is computed.
    pub buffer: u32,
}

#[derive(Clone, Debug)]
pub(super) struct OperatorInfo {
    pub builtin: Builtin,
    pub inputs: Vec<i32>,
    pub outputs: Vec<i32>,
    pub options: Options,
}

type TableOffset = WIPOffset<TableFinishedWIPOffset>;
type TableOffsets<'a> = WIPOffset<Vector<'a, ForwardsUOffset<TableFinishedWIPOffset>>>;

/// Writes the tables of a file, from the leaves to the root.
pub(super) struct FileBuilder<'a> {
    builder: FlatBufferBuilder<'a>,
    buffers: Vec<TableOffset>,
    /// Zero points that tables share: those of weights are all 0, in 8 bytes each.
    zero_points: BTreeMap<Vec<i64>, WIPOffset<Vector<'a, i64>>>,
}

/// The place of field `number` in a table's list of fields.
const fn slot(number: VOffsetT) -> VOffsetT {
    4 + 2 * number
}

/// A byte of a vector that starts at a multiple of 16 bytes, as `Buffer.data` must.
struct AlignedByte;

impl Push for AlignedByte {
    type Output = u8;

    unsafe fn push(&self, dst: &mut [u8], _: usize) {
        dst[0] = 0;
    }

    fn alignment() -> PushAlignment {
        PushAlignment::new(16)
    }
}

impl<'a> FileBuilder<'a> {
    /// `bytes` is what the file takes, or a little more.
    pub(super) fn new(bytes: usize) -> Self {
        let mut this = Self {
            builder: FlatBufferBuilder::with_capacity(bytes),
            buffers: Vec::new(),
            zero_points: BTreeMap::new(),
        };
        // Buffer 0 is that of tensors without values.
        let table = this.builder.start_table();
        let empty = this.builder.end_table(table);
        this.buffers.push(empty);
        this
    }

    /// Adds values, and returns the number of their buffer.
    pub(super) fn buffer(&mut self, bytes: &[u8]) -> u32 {
        let builder = &mut self.builder;
        builder.start_vector::<AlignedByte>(bytes.len());
        // The file grows from its end to its start.
        let (words, rest) = bytes.as_chunks::<4>();
        for byte in rest.iter().rev() {
            builder.push(*byte);
        }
        for word in words.iter().rev() {
            builder.push(u32::from_le_bytes(*word));
        }
        let data = builder.end_vector::<u8>(bytes.len());
        let table = builder.start_table();
        builder.push_slot_always(slot(0), data);
        let table = builder.end_table(table);
        self.buffers.push(table);
        self.buffers.len() as u32 - 1
    }

    fn tensor(&mut self, tensor: &TensorInfo) -> TableOffset {
        let b = &mut self.builder;
        let (shape, name) = (b.create_vector(&tensor.shape), b.create_string(&tensor.name));
        let signature = tensor.dynamic_batch.then(|| {
            let dims: Vec<i32> = [-1].into_iter().chain(tensor.shape[1..].iter().copied()).collect();
            b.create_vector(&dims)
        });
        let quantization = tensor.quantization.as_ref().map(|quantization| {
            let scales = b.create_vector(&quantization.scales);
            let shared = self.zero_points.entry(quantization.zero_points.clone());
            let zero_points = *shared.or_insert_with_key(|values| b.create_vector(values));
            let table = b.start_table();
            b.push_slot_always(slot(2), scales);
            b.push_slot_always(slot(3), zero_points);
            b.push_slot(slot(6), quantization.dimension, 0);
            b.end_table(table)
        });
        let table = b.start_table();
        b.push_slot_always(slot(0), shape);
        b.push_slot(slot(1), tensor.element_type, FLOAT32);
        b.push_slot(slot(2), tensor.buffer, 0);
        b.push_slot_always(slot(3), name);
        if let Some(quantization) = quantization {
            b.push_slot_always(slot(4), quantization);
        }
        if let Some(signature) = signature {
            b.push_slot_always(slot(7), signature);
        }
        b.push_slot(slot(8), true, false);
        b.end_table(table)
    }

    fn operator(&mut self, operator: &OperatorInfo, code: u32) -> TableOffset {
        let b = &mut self.builder;
        let (inputs, outputs) = (b.create_vector(&operator.inputs), b.create_vector(&operator.outputs));
        let options = (operator.options.kind > 0).then(|| {
            let table = b.start_table();
            for (number, field) in operator.options.fields.iter().enumerate() {
                let at = slot(number as VOffsetT);
                match field {
                    OptionValue::Byte(value) => b.push_slot_always(at, *value),
                    OptionValue::Int(value) => b.push_slot_always(at, *value),
                    OptionValue::Bool(value) => b.push_slot_always(at, *value),
                }
            }
            b.end_table(table)
        });
        let table = b.start_table();
        b.push_slot(slot(0), code, 0);
        b.push_slot_always(slot(1), inputs);
        b.push_slot_always(slot(2), outputs);
        if let Some(options) = options {
            b.push_slot_always(slot(3), operator.options.kind);
            b.push_slot_always(slot(4), options);
        }
        b.end_table(table)
    }

    fn tables(&mut self, tables: &[TableOffset]) -> TableOffsets<'a> {
        self.builder.create_vector(tables)
    }

    /// A name and a number, in the first two fields.
    fn named_number(&mut self, name: &str, number: u32) -> TableOffset {
        let name = self.builder.create_string(name);
        let table = self.builder.start_table();
        self.builder.push_slot_always(slot(0), name);
        self.builder.push_slot(slot(1), number, 0);
        self.builder.end_table(table)
    }

    /// The file of a graph from tensor `input` to tensor `output`; `metadata` is a text under its name.
    pub(super) fn finish(
        mut self,
        name: &str,
        tensors: &[TensorInfo],
        operators: &[OperatorInfo],
        [input, output]: [(&str, u32); 2],
        metadata: (&str, &str),
    ) -> FlatBufferBuilder<'a> {
        let text = self.buffer(metadata.1.as_bytes());
        let metadata = self.named_number(metadata.0, text);
        let mut builtins: Vec<Builtin> = Vec::new();
        let mut code_of = |builtin: Builtin| match builtins.iter().position(|known| *known == builtin) {
            Some(at) => at as u32,
            None => {
                builtins.push(builtin);
                builtins.len() as u32 - 1
            }
        };
        let codes: Vec<u32> = operators.iter().map(|operator| code_of(operator.builtin)).collect();
        let tensors: Vec<TableOffset> = tensors.iter().map(|tensor| self.tensor(tensor)).collect();
        let operators: Vec<TableOffset> =
            operators.iter().zip(codes).map(|(operator, code)| self.operator(operator, code)).collect();
        let (tensors, operators) = (self.tables(&tensors), self.tables(&operators));
        let ends = [input, output].map(|(_, tensor)| self.builder.create_vector(&[tensor as i32]));
        let title = self.builder.create_string(name);
        let b = &mut self.builder;
        let table = b.start_table();
        b.push_slot_always(slot(0), tensors);
        b.push_slot_always(slot(1), ends[0]);
        b.push_slot_always(slot(2), ends[1]);
        b.push_slot_always(slot(3), operators);
        b.push_slot_always(slot(4), title);
        let subgraph = b.end_table(table);
        let signature = {
            let ends = [input, output].map(|(name, tensor)| self.named_number(name, tensor));
            let ends = ends.map(|end| self.tables(&[end]));
            let key = self.builder.create_string("serving_default");
            let table = self.builder.start_table();
            self.builder.push_slot_always(slot(0), ends[0]);
            self.builder.push_slot_always(slot(1), ends[1]);
            self.builder.push_slot_always(slot(2), key);
            self.builder.end_table(table)
        };
        let codes: Vec<TableOffset> = builtins
            .iter()
            .map(|builtin| {
                let table = self.builder.start_table();
                self.builder.push_slot(slot(0), builtin.code.min(LAST_DEPRECATED_CODE) as i8, 0);
                self.builder.push_slot(slot(2), builtin.version, 1);
                self.builder.push_slot(slot(3), builtin.code, 0);
                self.builder.end_table(table)
            })
            .collect();
        let buffers = std::mem::take(&mut self.buffers);
        let (codes, buffers) = (self.tables(&codes), self.tables(&buffers));
        let (subgraphs, metadata) = (self.tables(&[subgraph]), self.tables(&[metadata]));
        let signatures = self.tables(&[signature]);
        let description = self.builder.create_string(concat!("trainer ", env!("CARGO_PKG_VERSION")));
        let b = &mut self.builder;
        let table = b.start_table();
        b.push_slot_always(slot(0), VERSION);
        b.push_slot_always(slot(1), codes);
        b.push_slot_always(slot(2), subgraphs);
        b.push_slot_always(slot(3), description);
        b.push_slot_always(slot(4), buffers);
        b.push_slot_always(slot(6), metadata);
        b.push_slot_always(slot(7), signatures);
        let model = b.end_table(table);
        b.finish(model, Some(IDENTIFIER));
        self.builder
    }
}
