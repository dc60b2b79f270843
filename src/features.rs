//! What a sample looks like: the contract between the data that gives it and the model that takes it.

use std::sync::Arc;

/// What every sample of a set looks like.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Features {
    pub input: Input,
    pub target: Target,
    /// Where samples are padded: the lengths, ascending, that a batch may be cut to, the last one being the
    /// input's whole length. Empty where every sample is whole.
    pub buckets: Vec<usize>,
    /// Where samples come as bytes: what these stand for. The model takes the values.
    pub palette: Option<Arc<Palette>>,
}

/// What the bytes of a picture stand for, the last dimension being its channels: 256 values a channel, none a NaN.
#[derive(Clone, Debug, PartialEq)]
pub struct Palette {
    pub tables: Vec<[f32; 256]>,
}

impl Eq for Palette {}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Input {
    /// f32 values, the last dimension contiguous. Pictures are (height, width, channels).
    Floats { shape: Vec<usize> },
    /// A row of a table: f32 values, of which the first `numbers` are numbers, and each of the others is the place of a
    /// category among so many as `categories` says; the place behind the last stands for one that is unknown.
    Row { numbers: usize, categories: Vec<usize> },
    /// `length` u32 tokens, each below `vocab`.
    Tokens { length: usize, vocab: usize },
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Target {
    /// One u32 below `names.len()`.
    Class { names: Vec<String> },
    /// Two classes below `names.len()` and the share of the first, the bits of an f32 of 0 to 1: three u32.
    Mixed { names: Vec<String> },
    /// `len` f32 values.
    Values { len: usize },
    /// The next token, a u32 for each input position.
    Tokens,
}

impl Features {
    /// Features of samples that are all whole.
    pub fn new(input: Input, target: Target) -> Self {
        Self { input, target, buckets: Vec::new(), palette: None }
    }

    pub fn is_padded(&self) -> bool {
        !self.buckets.is_empty()
    }

    /// The features of padded samples cut to each bucket but the last, the shortest first.
    pub fn shorter(&self) -> impl Iterator<Item = Self> {
        let (cut, _) = self.buckets.split_at(self.buckets.len().saturating_sub(1));
        cut.iter().filter_map(|&length| match self.input {
            Input::Tokens { vocab, .. } => Some(Self {
                input: Input::Tokens { length, vocab },
                target: self.target.clone(),
                buckets: vec![length],
                palette: None,
            }),
            Input::Floats { .. } | Input::Row { .. } => None,
        })
    }

    /// Values in one sample's input.
    pub fn input_len(&self) -> usize {
        match &self.input {
            Input::Floats { shape } => shape.iter().product(),
            Input::Row { numbers, categories } => numbers + categories.len(),
            Input::Tokens { length, .. } => *length,
        }
    }

    /// Values in one sample's target.
    pub fn target_len(&self) -> usize {
        match &self.target {
            Target::Class { .. } => 1,
            Target::Mixed { .. } => 3,
            Target::Values { len } => *len,
            Target::Tokens => self.input_len(),
        }
    }

    /// Targets of one sample that count in a mean: its class, its values, or its positions.
    pub fn targets(&self) -> usize {
        if let Target::Mixed { .. } = self.target { 1 } else { self.target_len() }
    }

    /// Bytes of one sample's input and target in a host batch.
    pub fn value_bytes(&self) -> usize {
        let input = if self.palette.is_some() { 1 } else { 4 };
        input * self.input_len() + 4 * self.target_len()
    }

    /// Bytes one sample takes in a host batch: its input, its target, its id, and its length where it is padded.
    pub fn sample_bytes(&self) -> u64 {
        self.value_bytes() as u64 + if self.buckets.is_empty() { 8 } else { 12 }
    }
}
