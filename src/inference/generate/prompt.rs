//! Makes prompts fit in the model's context beside the tokens that are to follow.

use crate::base::units::counted;

/// What fits beside what.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PromptLimits {
    /// Positions of the model.
    pub context: usize,
    /// New tokens to make room for; at least one.
    pub max_tokens: usize,
    /// Keep the end of a prompt that is too long, instead of refusing it.
    pub truncate: bool,
}

/// A prompt that leaves no room for the new tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "the prompt has {} and {max_tokens} are to follow; the model's context is {context}, so at most \
     {} fit",
    counted(*tokens as u64, "token"),
    context.saturating_sub(*max_tokens)
)]
pub struct PromptTooLong {
    pub tokens: usize,
    pub max_tokens: usize,
    pub context: usize,
}

impl PromptTooLong {
    pub fn hint(&self) -> String {
        let fewer = match self.context.saturating_sub(self.tokens) {
            0 => String::new(),
            left => {
                format!(", or generate at most {} (`--max-tokens {left}`)", counted(left as u64, "token"))
            }
        };
        let or = if fewer.is_empty() { "or " } else { "" };
        format!("shorten the prompt, {or}keep only its end with `--truncate-prompt`{fewer}")
    }
}

impl PromptLimits {
    /// Tokens that a prompt may have.
    pub fn most(&self) -> usize {
        self.context.saturating_sub(self.max_tokens.max(1))
    }

    /// Checks a prompt, or cuts its beginning off.
    pub fn fit(&self, tokens: &mut Vec<u32>) -> Result<(), PromptTooLong> {
        let (len, most) = (tokens.len(), self.most());
        if len <= most {
            return Ok(());
        }
        if self.truncate && most > 0 {
            tokens.drain(..len - most);
            return Ok(());
        }
        Err(PromptTooLong { tokens: len, max_tokens: self.max_tokens, context: self.context })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_prompt_fits_is_cut_or_is_refused_with_what_to_do() {
        let limits = PromptLimits { context: 10, max_tokens: 4, truncate: false };
        let mut prompt: Vec<u32> = (0..7).collect();
        assert_eq!(limits.fit(&mut prompt.clone().split_off(1)), Ok(()));
        let error = limits.fit(&mut prompt).unwrap_err();
        assert_eq!(
            error.to_string(),
            "the prompt has 7 tokens and 4 are to follow; the model's context is 10, so at most 6 fit"
        );
        assert_eq!(
            error.hint(),
            "shorten the prompt, keep only its end with `--truncate-prompt`, or generate at most 3 tokens \
             (`--max-tokens 3`)"
        );
        PromptLimits { truncate: true, ..limits }.fit(&mut prompt).unwrap();
        assert_eq!(prompt, [1, 2, 3, 4, 5, 6]);
        let nothing = PromptLimits { max_tokens: 10, truncate: true, ..limits };
        assert!(nothing.fit(&mut vec![1]).is_err(), "not even the end fits");
    }
}
