//! A conversation: renders messages with the run's chat template into the prompt of the next answer.

use super::prompt::{PromptLimits, PromptTooLong};
use crate::data::DataError;
use crate::data::language::jsonl::{ChatMessage, ChatTemplate, chat_template};
use crate::data::language::tokenizer::Tokenizer;

/// Why there is no prompt for the next answer.
#[derive(Debug, thiserror::Error)]
pub enum ChatError {
    #[error(transparent)]
    Template(#[from] DataError),
    #[error("the chat template cannot render this conversation: {0}")]
    Render(String),
    #[error("the tokenizer cannot encode the conversation: {0}")]
    Encode(String),
    #[error(transparent)]
    TooLong(#[from] PromptTooLong),
}

pub struct Conversation<'a> {
    template: ChatTemplate,
    tokenizer: &'a Tokenizer,
    limits: PromptLimits,
    /// Bytes that a rendering may take.
    max_bytes: u64,
    messages: Vec<ChatMessage>,
}

impl<'a> Conversation<'a> {
    /// `template` is the name of a built-in template, "auto" for the tokenizer's own, or the source of one.
    pub fn new(
        template: &str,
        tokenizer: &'a Tokenizer,
        system: Option<&str>,
        limits: PromptLimits,
        max_bytes: u64,
    ) -> Result<Self, ChatError> {
        let template = chat_template(template, Some(tokenizer))?;
        let messages = system.map(|content| message("system", content)).into_iter().collect();
        Ok(Self { template, tokenizer, limits, max_bytes, messages })
    }

    pub fn messages(&self) -> &[ChatMessage] {
        &self.messages
    }

    /// Adds what the user says and returns the tokens to continue. A conversation that exceeds the context loses its
    /// oldest turns if the limits allow it. A failure leaves the conversation as it was.
    pub fn ask(&mut self, content: &str) -> Result<Vec<u32>, ChatError> {
        let before = self.messages.clone();
        self.messages.push(message("user", content));
        let prompt = self.prompt();
        if prompt.is_err() {
            self.messages = before;
        }
        prompt
    }

    /// Adds the assistant's answer.
    pub fn answer(&mut self, content: &str) {
        self.messages.push(message("assistant", content));
    }

    fn prompt(&mut self) -> Result<Vec<u32>, ChatError> {
        loop {
            let text = self.render(&self.messages, true).map_err(ChatError::Render)?;
            let mut tokens = Vec::new();
            self.tokenizer.encode(&text, &mut tokens).map_err(ChatError::Encode)?;
            let whole = PromptLimits { truncate: false, ..self.limits };
            match whole.fit(&mut tokens) {
                Ok(()) => return Ok(tokens),
                Err(_) if self.limits.truncate && self.forget_oldest_turn() => {}
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Removes the first question and its answer; the last question stays. Returns whether there was one.
    fn forget_oldest_turn(&mut self) -> bool {
        let is_user = |m: &&ChatMessage| m.role == "user";
        if self.messages.iter().filter(is_user).count() < 2 {
            return false;
        }
        let first = self.messages.iter().position(|m| m.role == "user").unwrap_or(0);
        let next = self.messages[first + 1..].iter().position(|m| m.role == "user");
        self.messages.drain(first..next.map_or(first + 1, |next| first + 1 + next));
        true
    }

    fn render(&self, messages: &[ChatMessage], to_answer: bool) -> Result<String, String> {
        self.template.render_text(messages, to_answer, self.max_bytes)
    }

    /// The strings that end an answer, besides the end-of-text token: what the template writes after an answer.
    pub fn stop_strings(&self) -> Vec<String> {
        // Words that no template contains.
        const ANSWER: &str = "Zq7answer";
        const NEXT: &str = "Zq7next";
        let talk = [message("user", "Hi"), message("assistant", ANSWER), message("user", NEXT)];
        let after_answer = |messages: &[ChatMessage]| {
            let text = self.render(messages, false).unwrap_or_default();
            text.split_once(ANSWER).map_or(String::new(), |(_, after)| after.to_owned())
        };
        let (last, next) = (after_answer(&talk[..2]), after_answer(&talk));
        // Without a marker of the end, the beginning of the next turn is one.
        let next = next.split_once(NEXT).map_or("", |(between, _)| between.trim_end());
        let stop = if last.trim().is_empty() { next } else { last.trim() };
        if stop.is_empty() { Vec::new() } else { vec![stop.to_owned()] }
    }
}

fn message(role: &str, content: &str) -> ChatMessage {
    ChatMessage::new(role, content)
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: PromptLimits = PromptLimits { context: 400, max_tokens: 10, truncate: false };

    fn talk(template: &str, limits: PromptLimits) -> Conversation<'static> {
        Conversation::new(template, &Tokenizer::Bytes, Some("Be kind."), limits, u64::MAX).unwrap()
    }

    #[test]
    fn a_prompt_ends_where_the_answer_begins() {
        let mut talk = talk("chatml", LIMITS);
        let first = talk.ask("Hi").unwrap();
        let text = Tokenizer::Bytes.decode(&first);
        assert!(text.ends_with("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"), "{text}");
        talk.answer("Hello!");
        let second = talk.ask("Bye").unwrap();
        assert!(second.starts_with(&first), "the cache has the first turn");
        assert_eq!(talk.messages().len(), 4);
    }

    #[test]
    fn templates_end_answers_with_their_marker() {
        let stop = |template| talk(template, LIMITS).stop_strings();
        assert_eq!(stop("chatml"), ["<|im_end|>"]);
        assert_eq!(stop("llama3"), ["<|eot_id|>"]);
        assert_eq!(stop("gemma"), ["<end_of_turn>"]);
        assert_eq!(stop("plain"), ["\nuser:"]);
    }

    #[test]
    fn a_long_conversation_forgets_its_oldest_turns_or_is_refused() {
        let limits = PromptLimits { context: 200, ..LIMITS };
        let mut refused = talk("plain", limits);
        let mut forgets = talk("plain", PromptLimits { truncate: true, ..limits });
        let question = "x".repeat(60);
        for turn in 0..5 {
            let prompt = forgets.ask(&question).unwrap();
            assert!(prompt.len() <= limits.most());
            let text = Tokenizer::Bytes.decode(&prompt);
            assert!(text.starts_with("system: Be kind.\n") && text.ends_with("assistant:"), "{text}");
            forgets.answer("short");
            match refused.ask(&question) {
                Ok(_) => refused.answer("short"),
                Err(error) => {
                    assert!(turn > 0 && matches!(error, ChatError::TooLong(_)), "{error}");
                    assert_eq!(refused.messages().last().unwrap().role, "assistant", "as it was");
                }
            }
        }
        assert!(forgets.messages().len() < 11);
        assert!(matches!(refused.ask(&"x".repeat(999)), Err(ChatError::TooLong(_))));
    }
}
