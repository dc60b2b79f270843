//! The messages of an ONNX file that are written here, with the field numbers of `onnx.proto`.

use prost::Message;

/// Element types of a tensor.
pub(super) const FLOAT: i32 = 1;
pub(super) const INT8: i32 = 3;
pub(super) const INT32: i32 = 6;
pub(super) const INT64: i32 = 7;
pub(super) const FLOAT16: i32 = 10;
pub(super) const BFLOAT16: i32 = 16;
pub(super) const INT4: i32 = 22;

#[derive(Clone, PartialEq, Message)]
pub(super) struct ModelProto {
    #[prost(int64, tag = "1")]
    pub ir_version: i64,
    #[prost(string, tag = "2")]
    pub producer_name: String,
    #[prost(string, tag = "3")]
    pub producer_version: String,
    #[prost(message, optional, tag = "7")]
    pub graph: Option<GraphProto>,
    #[prost(message, repeated, tag = "8")]
    pub opset_import: Vec<OperatorSet>,
    #[prost(message, repeated, tag = "14")]
    pub metadata_props: Vec<Entry>,
}

/// Field of a [`ModelProto`] that holds its graph.
pub(super) const MODEL_GRAPH: u64 = 7;

#[derive(Clone, PartialEq, Message)]
pub(super) struct OperatorSet {
    /// Empty for the operators of ONNX itself.
    #[prost(string, tag = "1")]
    pub domain: String,
    #[prost(int64, tag = "2")]
    pub version: i64,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct Entry {
    #[prost(string, tag = "1")]
    pub key: String,
    #[prost(string, tag = "2")]
    pub value: String,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct GraphProto {
    #[prost(message, repeated, tag = "1")]
    pub node: Vec<NodeProto>,
    #[prost(string, tag = "2")]
    pub name: String,
    #[prost(message, repeated, tag = "5")]
    pub initializer: Vec<TensorProto>,
    #[prost(message, repeated, tag = "11")]
    pub input: Vec<ValueInfoProto>,
    #[prost(message, repeated, tag = "12")]
    pub output: Vec<ValueInfoProto>,
}

/// Field of a [`GraphProto`] that holds an initializer.
pub(super) const GRAPH_INITIALIZER: u64 = 5;

#[derive(Clone, PartialEq, Message)]
pub(super) struct NodeProto {
    #[prost(string, repeated, tag = "1")]
    pub input: Vec<String>,
    #[prost(string, repeated, tag = "2")]
    pub output: Vec<String>,
    #[prost(string, tag = "3")]
    pub name: String,
    #[prost(string, tag = "4")]
    pub op_type: String,
    #[prost(message, repeated, tag = "5")]
    pub attribute: Vec<AttributeProto>,
}

/// A value of one of three types. Values are optional because a checker counts those that are present, zeros included.
#[derive(Clone, PartialEq, Message)]
pub(super) struct AttributeProto {
    #[prost(string, tag = "1")]
    pub name: String,
    #[prost(float, optional, tag = "2")]
    pub f: Option<f32>,
    #[prost(int64, optional, tag = "3")]
    pub i: Option<i64>,
    #[prost(int64, repeated, packed = "false", tag = "8")]
    pub ints: Vec<i64>,
    /// 1 for `f`, 2 for `i`, 7 for `ints`.
    #[prost(int32, tag = "20")]
    pub kind: i32,
}

impl AttributeProto {
    pub(super) fn int(name: &str, i: i64) -> Self {
        Self { name: name.into(), i: Some(i), kind: 2, ..Self::default() }
    }

    pub(super) fn float(name: &str, f: f32) -> Self {
        Self { name: name.into(), f: Some(f), kind: 1, ..Self::default() }
    }

    pub(super) fn ints(name: &str, ints: impl Into<Vec<i64>>) -> Self {
        Self { name: name.into(), ints: ints.into(), kind: 7, ..Self::default() }
    }
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct TensorProto {
    #[prost(int64, repeated, packed = "false", tag = "1")]
    pub dims: Vec<i64>,
    #[prost(int32, tag = "2")]
    pub data_type: i32,
    #[prost(string, tag = "8")]
    pub name: String,
    #[prost(bytes = "vec", optional, tag = "9")]
    pub raw_data: Option<Vec<u8>>,
    /// `location`, `offset` and `length` of values in another file.
    #[prost(message, repeated, tag = "13")]
    pub external_data: Vec<Entry>,
    /// 1 if the values are in another file.
    #[prost(int32, tag = "14")]
    pub data_location: i32,
}

/// Fields of a [`TensorProto`].
pub(super) const TENSOR_DATA_TYPE: u64 = 2;
pub(super) const TENSOR_NAME: u64 = 8;
pub(super) const TENSOR_RAW_DATA: u64 = 9;
pub(super) const TENSOR_EXTERNAL_DATA: u64 = 13;
pub(super) const EXTERNAL: i32 = 1;

#[derive(Clone, PartialEq, Message)]
pub(super) struct ValueInfoProto {
    #[prost(string, tag = "1")]
    pub name: String,
    #[prost(message, optional, tag = "2")]
    pub value_type: Option<ValueType>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct ValueType {
    #[prost(message, optional, tag = "1")]
    pub tensor: Option<TensorType>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct TensorType {
    #[prost(int32, tag = "1")]
    pub elem_type: i32,
    #[prost(message, optional, tag = "2")]
    pub shape: Option<Shape>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct Shape {
    #[prost(message, repeated, tag = "1")]
    pub dim: Vec<Dimension>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct Dimension {
    #[prost(int64, optional, tag = "1")]
    pub value: Option<i64>,
    /// The name of a dynamic dimension.
    #[prost(string, optional, tag = "2")]
    pub param: Option<String>,
}

/// A dimension of an input or output.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Dim {
    Fixed(usize),
    Dynamic(&'static str),
}

impl ValueInfoProto {
    pub(super) fn new(name: &str, elem_type: i32, dims: &[Dim]) -> Self {
        let dim = |dim: &Dim| match dim {
            Dim::Fixed(value) => Dimension { value: Some(*value as i64), param: None },
            Dim::Dynamic(name) => Dimension { value: None, param: Some((*name).into()) },
        };
        let shape = Some(Shape { dim: dims.iter().map(dim).collect() });
        Self {
            name: name.into(),
            value_type: Some(ValueType { tensor: Some(TensorType { elem_type, shape }) }),
        }
    }
}
