//! The reference page of the job, `docs/job.md`, written from its schema.

/// The page, in Markdown.
pub fn page() -> String {
    String::new()
}
