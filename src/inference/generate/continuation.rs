//! Continues prompts as text: tokens become characters as they come.

use super::language_model::ModelText;
use super::text_stream::TextStream;
use super::{GenerateError, Generation, GenerationOptions, Generator};

/// The text that follows one prompt.
pub struct Continuation {
    pub text: String,
    pub generation: Generation,
}

/// Continues prompts and passes on their text as it comes: `show` gets the index of the prompt and says whether to go
/// on. A text ends before the first of `stops`.
pub fn continue_prompts(
    generator: &mut Generator,
    prompts: &[Vec<u32>],
    options: &GenerationOptions,
    text: &ModelText,
    stops: &[String],
    show: &mut (dyn FnMut(usize, &str) -> bool + Send),
) -> Result<Vec<Continuation>, GenerateError> {
    let mut streams: Vec<TextStream> =
        prompts.iter().map(|_| TextStream::new(&text.tokenizer, stops)).collect();
    let mut texts = vec![String::new(); prompts.len()];
    let mut on_token = |prompt: usize, token| {
        let part = streams[prompt].push(token);
        texts[prompt].push_str(&part);
        (part.is_empty() || show(prompt, &part)) && !streams[prompt].is_stopped()
    };
    // On a thread of the pool: a pass has hundreds of small parallel operations, and from outside each would wait for
    // the pool to wake.
    let done = rayon::scope(|_| generator.generate(prompts, options, &mut on_token))?;
    for (prompt, stream) in streams.iter_mut().enumerate() {
        let rest = stream.finish();
        show(prompt, &rest);
        texts[prompt].push_str(&rest);
    }
    Ok(texts.into_iter().zip(done).map(|(text, generation)| Continuation { text, generation }).collect())
}
