//! A sequence that is being generated, and what became of it.

/// Why a sequence ended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FinishReason {
    /// It has as many new tokens as it may have.
    #[default]
    MaxTokens,
    /// The model chose a token that ends a text.
    EndToken,
    /// The model's context is full.
    Context,
    /// The receiver of the tokens ended it, at a stop string for example.
    Stopped,
}

/// The continuation of a prompt.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Generation {
    /// New tokens, without the one that ended the sequence.
    pub tokens: Vec<u32>,
    pub reason: FinishReason,
}

/// A sequence in a slot.
pub(super) struct Sequence {
    /// Index of its prompt.
    pub(super) index: usize,
    /// Prompt and new tokens.
    pub(super) tokens: Vec<u32>,
    prompt_len: usize,
    /// How many of the tokens are in the cache.
    pub(super) cached: usize,
}

impl Sequence {
    pub(super) fn new(index: usize, prompt: &[u32], cached: usize) -> Self {
        Self { index, tokens: prompt.to_vec(), prompt_len: prompt.len(), cached }
    }

    /// Tokens that are not in the cache.
    pub(super) fn uncached(&self) -> usize {
        self.tokens.len() - self.cached
    }

    /// Whether all that is left to feed is the last token that it chose.
    pub(super) fn is_decoding(&self) -> bool {
        self.tokens.len() > self.prompt_len && self.uncached() == 1
    }

    /// Up to `most` tokens that follow those in the cache.
    pub(super) fn next_tokens(&self, most: usize) -> &[u32] {
        &self.tokens[self.cached..][..most.min(self.uncached())]
    }

    /// Adds a token and offers it to `on_token`. Returns why the sequence ends, if it does.
    pub(super) fn push(
        &mut self,
        token: u32,
        max_tokens: usize,
        capacity: usize,
        on_token: &mut dyn FnMut(usize, u32) -> bool,
    ) -> Option<FinishReason> {
        self.tokens.push(token);
        if !on_token(self.index, token) {
            Some(FinishReason::Stopped)
        } else if self.tokens.len() - self.prompt_len >= max_tokens {
            Some(FinishReason::MaxTokens)
        } else if self.tokens.len() > capacity {
            // The new token has no position to be fed at.
            Some(FinishReason::Context)
        } else {
            None
        }
    }

    pub(super) fn into_generation(mut self, reason: FinishReason) -> Generation {
        Generation { tokens: self.tokens.split_off(self.prompt_len), reason }
    }
}
