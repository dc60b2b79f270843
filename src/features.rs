//! What a sample looks like: the contract between the data that gives it and the model that takes it.

/// What every sample of a set looks like.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Features {
    pub input: Input,
    pub target: Target,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Input {
    /// f32 values, the last dimension contiguous. Pictures are (height, width, channels).
    Floats { shape: Vec<usize> },
    /// `length` u32 tokens, each below `vocab`.
    Tokens { length: usize, vocab: usize },
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Target {
    /// One u32 below `names.len()`.
    Class { names: Vec<String> },
    /// `len` f32 values.
    Values { len: usize },
    /// The next token, a u32 for each input position.
    Tokens,
}

impl Features {
    /// Values in one sample's input.
    pub fn input_len(&self) -> usize {
        match &self.input {
            Input::Floats { shape } => shape.iter().product(),
            Input::Tokens { length, .. } => *length,
        }
    }

    /// Values in one sample's target.
    pub fn target_len(&self) -> usize {
        match &self.target {
            Target::Class { .. } => 1,
            Target::Values { len } => *len,
            Target::Tokens => self.input_len(),
        }
    }

    /// Bytes one sample takes in a host batch: its input, its target and its id.
    pub fn sample_bytes(&self) -> u64 {
        4 * (self.input_len() as u64 + self.target_len() as u64) + 8
    }
}
