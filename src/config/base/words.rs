//! The words of an enumeration, as options of commands are written.

/// A word that names no option.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{word}` is none of {}", expected.join(", "))]
pub struct UnknownWord {
    word: String,
    expected: Vec<&'static str>,
}

/// The option called `word` among `all`.
pub fn by_name<T: Copy>(word: &str, all: &[T], name: impl Fn(T) -> &'static str) -> Result<T, UnknownWord> {
    let unknown =
        || UnknownWord { word: word.to_owned(), expected: all.iter().map(|one| name(*one)).collect() };
    all.iter().copied().find(|one| name(*one) == word).ok_or_else(unknown)
}
