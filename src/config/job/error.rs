//! Errors in a job: structured values for programs, a rendered page for people.

use std::fmt;

use serde::Serialize;

use super::source_map::SourceLocation;

/// Everything wrong with a job, in the order of the file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(transparent)]
pub struct JobErrors(pub Vec<JobError>);

impl std::error::Error for JobErrors {}

impl fmt::Display for JobErrors {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        for (i, error) in self.0.iter().enumerate() {
            write!(f, "{}{error}", if i > 0 { "\n\n" } else { "" })?;
        }
        Ok(())
    }
}

/// One mistake in a job.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct JobError {
    pub code: ErrorCode,
    /// One lowercase sentence.
    pub message: String,
    #[serde(flatten)]
    pub location: Option<SourceLocation>,
    /// Dotted path of the key at fault.
    pub key: Option<String>,
    /// The value found; the message has it too.
    pub value: Option<String>,
    /// What is allowed.
    pub allowed: Option<String>,
    /// How to fix it.
    pub hint: Option<String>,
}

/// The kinds of mistakes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum ErrorCode {
    Unreadable,
    Syntax,
    UnknownKey,
    /// The key exists, but for another `kind`.
    OtherKind,
    MissingKey,
    WrongType,
    OutOfRange,
    NotAllowed,
    /// Keys that exclude or contradict each other.
    Contradiction,
    UnsetVariable,
    /// More mistakes than are shown.
    More,
}

impl JobError {
    pub(super) fn new(code: ErrorCode, message: impl Into<String>) -> Self {
        Self {
            code,
            message: message.into(),
            location: None,
            key: None,
            value: None,
            allowed: None,
            hint: None,
        }
    }

    pub(super) fn key(mut self, key: impl Into<String>) -> Self {
        self.key = Some(key.into());
        self
    }

    pub(super) fn value(mut self, value: impl Into<String>) -> Self {
        self.value = Some(value.into());
        self
    }

    pub(super) fn allowed(mut self, allowed: impl Into<String>) -> Self {
        self.allowed = Some(allowed.into());
        self
    }

    pub(super) fn hint(mut self, hint: impl Into<Option<String>>) -> Self {
        self.hint = hint.into();
        self
    }
}

impl From<JobError> for JobErrors {
    fn from(error: JobError) -> Self {
        JobErrors(vec![error])
    }
}

impl fmt::Display for JobError {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "error: {}", self.message)?;
        let mut gutter = String::from(" ");
        if let Some(SourceLocation { file, snippet: spot }) = &self.location {
            // A `--set` has a single line; only files have line numbers.
            let numbered = spot.as_ref().filter(|_| file != "--set");
            let line = numbered.map_or(String::new(), |spot| spot.line.to_string());
            gutter = " ".repeat(line.len().max(1));
            write!(f, "\n{gutter}--> {file}")?;
            if let Some(spot) = numbered {
                write!(f, ":{}:{}", spot.line, spot.column)?;
            }
            if let Some(spot) = spot {
                let (indent, mark) = (" ".repeat(spot.indent), "^".repeat(spot.width));
                write!(f, "\n{gutter} |\n{line:>0$} | {1}", gutter.len(), spot.excerpt)?;
                write!(f, "\n{gutter} | {indent}{mark}")?;
            }
        }
        if let Some(allowed) = &self.allowed {
            write!(f, "\n{gutter} = allowed: {allowed}")?;
        }
        match &self.hint {
            Some(hint) => write!(f, "\n{gutter} hint: {hint}"),
            None => Ok(()),
        }
    }
}

/// `did you mean ...?` if one of `names` is similar to `word`.
pub(super) fn did_you_mean<'a>(word: &str, names: impl IntoIterator<Item = &'a str>) -> Option<String> {
    let score = |name: &str| strsim::jaro_winkler(&word.to_lowercase(), name);
    let best = names.into_iter().map(|n| (score(n), n)).max_by(|a, b| a.0.total_cmp(&b.0))?;
    (best.0 > 0.8).then(|| format!("did you mean `{}`?", best.1))
}
