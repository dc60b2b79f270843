//! `docs/events.md`, generated from the definition of [`Record`].

use schemars::{Schema, schema_for};
use serde_json::Value;

use crate::train::event::Record;

/// The reference page of `events.jsonl`.
pub fn events_markdown() -> String {
    serde_json::to_string_pretty(&schema_for!(Record)).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    #[test]
    fn dump() {
        println!("{}", super::events_markdown());
    }
}
