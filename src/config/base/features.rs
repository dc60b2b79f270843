//! The shape of a sample: the contract between the dataset that produces samples and the model that consumes them.

use std::sync::Arc;

use serde::{Deserialize, Serialize};

/// Targets with this value contribute to neither the loss nor the metrics.
pub const IGNORE_INDEX: u32 = u32::MAX;

/// Describes every sample of a dataset.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Features {
    pub input: InputSpec,
    pub target: TargetSpec,
    /// Bucket lengths of padded samples, ascending: a batch may be truncated to any of them. The last one is the full
    /// input length. Empty if no sample is padded.
    pub buckets: Vec<usize>,
    /// A sample weight follows the target: one more f32, or its bits behind a class.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub weighted: bool,
    /// Set if inputs are stored as bytes: maps each byte to the value that the model takes.
    #[serde(skip)]
    pub pixel_lut: Option<Arc<PixelLut>>,
}

/// Lookup tables for image bytes: 256 values per channel, none of them NaN. The last dimension of the image is its
/// channels.
#[derive(Clone, Debug, PartialEq)]
pub struct PixelLut {
    pub tables: Vec<[f32; 256]>,
}

impl Eq for PixelLut {}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum InputSpec {
    /// f32 values, the last dimension contiguous. Images are (height, width, channels).
    Floats { shape: Vec<usize> },
    /// A table row of f32 values: `num_numeric` numeric columns, then one category index per categorical column.
    /// `cardinalities` gives the number of categories per column; an index equal to the cardinality means an unknown
    /// category.
    Tabular { num_numeric: usize, cardinalities: Vec<usize> },
    /// `length` u32 tokens, each below `vocab`.
    Tokens { length: usize, vocab: usize },
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum TargetSpec {
    /// One u32 below `names.len()`.
    Class { names: Vec<String> },
    /// Two class indices below `names.len()` and the fraction of the first, an f32 in [0, 1] stored as its bits: three
    /// u32.
    MixedClass { names: Vec<String> },
    /// Any number of these labels: one f32 per label, 1 or 0.
    MultiLabel { names: Vec<String> },
    /// `len` f32 values.
    Values { len: usize },
    /// The next token: one u32 per input position.
    Tokens,
}

impl TargetSpec {
    /// The names of classes or labels; empty if the target has none.
    pub fn names(&self) -> &[String] {
        match self {
            Self::Class { names } | Self::MixedClass { names } | Self::MultiLabel { names } => names,
            Self::Values { .. } | Self::Tokens => &[],
        }
    }
}

impl Features {
    /// Features of samples without padding.
    pub fn new(input: InputSpec, target: TargetSpec) -> Self {
        Self { input, target, buckets: Vec::new(), weighted: false, pixel_lut: None }
    }

    pub fn is_padded(&self) -> bool {
        !self.buckets.is_empty()
    }

    /// The features of padded samples, truncated to each bucket except the last, shortest first.
    pub fn shorter_buckets(&self) -> impl Iterator<Item = Self> {
        let (cut, _) = self.buckets.split_at(self.buckets.len().saturating_sub(1));
        cut.iter().filter_map(|&length| match self.input {
            InputSpec::Tokens { vocab, .. } => Some(Self {
                input: InputSpec::Tokens { length, vocab },
                target: self.target.clone(),
                buckets: vec![length],
                weighted: self.weighted,
                pixel_lut: None,
            }),
            InputSpec::Floats { .. } | InputSpec::Tabular { .. } => None,
        })
    }

    /// Shape of one sample's input.
    pub fn input_shape(&self) -> Vec<usize> {
        match &self.input {
            InputSpec::Floats { shape } => shape.clone(),
            InputSpec::Tabular { .. } | InputSpec::Tokens { .. } => vec![self.input_len()],
        }
    }

    /// Values in one sample's input.
    pub fn input_len(&self) -> usize {
        match &self.input {
            InputSpec::Floats { shape } => shape.iter().product(),
            InputSpec::Tabular { num_numeric, cardinalities } => num_numeric + cardinalities.len(),
            InputSpec::Tokens { length, .. } => *length,
        }
    }

    /// Values in one sample's target, with its weight.
    pub fn target_len(&self) -> usize {
        self.unweighted_target_len() + usize::from(self.weighted)
    }

    /// Values in one sample's target, without its weight.
    pub fn unweighted_target_len(&self) -> usize {
        match &self.target {
            TargetSpec::Class { .. } => 1,
            TargetSpec::MixedClass { .. } => 3,
            TargetSpec::MultiLabel { names } => names.len(),
            TargetSpec::Values { len } => *len,
            TargetSpec::Tokens => self.input_len(),
        }
    }

    /// Targets per sample that count in a mean: its class, its values, or its positions.
    pub fn targets_per_sample(&self) -> usize {
        match self.target {
            TargetSpec::MixedClass { .. } | TargetSpec::MultiLabel { .. } => 1,
            _ => self.unweighted_target_len(),
        }
    }

    /// Bytes of one sample's input and target in a host batch.
    pub fn value_bytes(&self) -> usize {
        let input = if self.pixel_lut.is_some() { 1 } else { 4 };
        input * self.input_len() + 4 * self.target_len()
    }

    /// Bytes per sample in a host batch: input, target, id and, if padded, length.
    pub fn sample_bytes(&self) -> u64 {
        self.value_bytes() as u64 + if self.buckets.is_empty() { 8 } else { 12 }
    }
}
