//! What a sample looks like: the contract between the data that gives it and the model that takes it.

use std::sync::Arc;

/// What every sample of a set looks like.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Features {
    pub input: InputSpec,
    pub target: TargetSpec,
    /// Where samples are padded: the lengths, ascending, that a batch may be cut to, the last one being the
    /// input's whole length. Empty where every sample is whole.
    pub buckets: Vec<usize>,
    /// Where samples come as bytes: what these stand for. The model takes the values.
    pub pixel_lut: Option<Arc<PixelLut>>,
}

/// What the bytes of a picture stand for, the last dimension being its channels: 256 values a channel, none a NaN.
#[derive(Clone, Debug, PartialEq)]
pub struct PixelLut {
    pub tables: Vec<[f32; 256]>,
}

impl Eq for PixelLut {}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum InputSpec {
    /// f32 values, the last dimension contiguous. Pictures are (height, width, channels).
    Floats { shape: Vec<usize> },
    /// A row of a table: f32 values, of which the first `num_numeric` are numbers, and each of the others is the place of a
    /// category among so many as `cardinalities` says; the place behind the last stands for one that is unknown.
    Tabular { num_numeric: usize, cardinalities: Vec<usize> },
    /// `length` u32 tokens, each below `vocab`.
    Tokens { length: usize, vocab: usize },
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TargetSpec {
    /// One u32 below `names.len()`.
    Class { names: Vec<String> },
    /// Two classes below `names.len()` and the share of the first, the bits of an f32 of 0 to 1: three u32.
    MixedClass { names: Vec<String> },
    /// `len` f32 values.
    Values { len: usize },
    /// The next token, a u32 for each input position.
    Tokens,
}

impl Features {
    /// Features of samples that are all whole.
    pub fn new(input: InputSpec, target: TargetSpec) -> Self {
        Self { input, target, buckets: Vec::new(), pixel_lut: None }
    }

    pub fn is_padded(&self) -> bool {
        !self.buckets.is_empty()
    }

    /// The features of padded samples cut to each bucket but the last, the shortest first.
    pub fn shorter_buckets(&self) -> impl Iterator<Item = Self> {
        let (cut, _) = self.buckets.split_at(self.buckets.len().saturating_sub(1));
        cut.iter().filter_map(|&length| match self.input {
            InputSpec::Tokens { vocab, .. } => Some(Self {
                input: InputSpec::Tokens { length, vocab },
                target: self.target.clone(),
                buckets: vec![length],
                pixel_lut: None,
            }),
            InputSpec::Floats { .. } | InputSpec::Tabular { .. } => None,
        })
    }

    /// Values in one sample's input.
    pub fn input_len(&self) -> usize {
        match &self.input {
            InputSpec::Floats { shape } => shape.iter().product(),
            InputSpec::Tabular { num_numeric, cardinalities } => num_numeric + cardinalities.len(),
            InputSpec::Tokens { length, .. } => *length,
        }
    }

    /// Values in one sample's target.
    pub fn target_len(&self) -> usize {
        match &self.target {
            TargetSpec::Class { .. } => 1,
            TargetSpec::MixedClass { .. } => 3,
            TargetSpec::Values { len } => *len,
            TargetSpec::Tokens => self.input_len(),
        }
    }

    /// Targets of one sample that count in a mean: its class, its values, or its positions.
    pub fn targets_per_sample(&self) -> usize {
        if let TargetSpec::MixedClass { .. } = self.target { 1 } else { self.target_len() }
    }

    /// Bytes of one sample's input and target in a host batch.
    pub fn value_bytes(&self) -> usize {
        let input = if self.pixel_lut.is_some() { 1 } else { 4 };
        input * self.input_len() + 4 * self.target_len()
    }

    /// Bytes one sample takes in a host batch: its input, its target, its id, and its length where it is padded.
    pub fn sample_bytes(&self) -> u64 {
        self.value_bytes() as u64 + if self.buckets.is_empty() { 8 } else { 12 }
    }
}
