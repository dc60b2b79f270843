//! Several labels in one text: separated by a character or a word, or written as a list, as JSON and Python print one.

use std::collections::{BTreeMap, BTreeSet};

/// Separators that a column of labels may show, the least ambiguous first.
const SEPARATORS: [&str; 6] = ["|", ";", ",", "/", "+", " "];

/// The labels of a text, trimmed; empty ones do not count. Without a separator a text that is no list is one label.
pub fn split(text: &str, separator: Option<&str>) -> Vec<String> {
    let text = text.trim();
    if let Some(inner) = text.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')) {
        return list(text, inner);
    }
    let parts: Vec<&str> = match separator {
        Some(separator) if !separator.is_empty() => text.split(separator).collect(),
        _ => vec![text],
    };
    parts.into_iter().map(str::trim).filter(|label| !label.is_empty()).map(str::to_owned).collect()
}

/// The values of a list: JSON, or what is between the commas, with or without quotes.
fn list(text: &str, inner: &str) -> Vec<String> {
    if let Ok(serde_json::Value::Array(values)) = serde_json::from_str(text) {
        let label = |value: serde_json::Value| match value {
            serde_json::Value::Null => None,
            serde_json::Value::String(text) => Some(text.trim().to_owned()),
            other => Some(other.to_string()),
        };
        return values.into_iter().filter_map(label).filter(|label| !label.is_empty()).collect();
    }
    let (mut labels, mut label, mut quote) = (Vec::new(), String::new(), None);
    for c in inner.chars() {
        match (c, quote) {
            (c, Some(open)) if c == open => quote = None,
            (c, Some(_)) => label.push(c),
            ('\'' | '"', None) if label.trim().is_empty() => quote = Some(c),
            (',', None) => labels.push(std::mem::take(&mut label)),
            (c, None) => label.push(c),
        }
    }
    labels.push(label);
    labels.iter().map(|label| label.trim().to_owned()).filter(|label| !label.is_empty()).collect()
}

/// How the values of a column show that each holds several labels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LabelLists {
    /// Separated by this.
    Separated(&'static str),
    /// Written as `[...]`.
    Bracketed,
}

/// Whether the distinct values of a column are lists of labels. `|` and `;` do not occur in names, so one value such as
/// `a|b` is enough. Names may contain the other separators: then most parts of the values with a separator must occur
/// in at least two values, as in `a,b`, `b,c`, `a`, `c`. With spaces all parts must, and the values must be
/// combinations of few parts.
pub fn detect<'a>(values: impl Iterator<Item = &'a str> + Clone) -> Option<LabelLists> {
    let bracketed = |value: &str| value.starts_with('[') && value.ends_with(']');
    let filled = values.clone().filter(|value| !value.trim().is_empty());
    if filled.clone().count() > 1 && filled.clone().all(|value| bracketed(value.trim())) {
        return Some(LabelLists::Bracketed);
    }
    SEPARATORS
        .into_iter()
        .find(|separator| match *separator {
            "|" | ";" => filled.clone().any(|value| is_list(value, separator)),
            _ => repeats_parts(filled.clone(), separator),
        })
        .map(LabelLists::Separated)
}

/// Whether a text has several parts, none of them empty.
fn is_list(text: &str, separator: &str) -> bool {
    text.contains(separator) && text.split(separator).all(|part| part.chars().any(char::is_alphanumeric))
}

fn repeats_parts<'a>(values: impl Iterator<Item = &'a str> + Clone, separator: &str) -> bool {
    const MIN_WORDS: usize = 5;
    let mut seen_in: BTreeMap<&str, u32> = BTreeMap::new();
    let mut of_lists: BTreeSet<&str> = BTreeSet::new();
    let mut count = 0;
    for value in values {
        count += 1;
        let parts: BTreeSet<&str> = value.split(separator).map(str::trim).collect();
        parts.iter().for_each(|part| *seen_in.entry(part).or_default() += 1);
        if is_list(value, separator) {
            of_lists.extend(parts);
        }
    }
    let repeated = of_lists.iter().filter(|part| seen_in[*part] > 1).count();
    match separator {
        " " => of_lists.len() >= MIN_WORDS && repeated == of_lists.len() && count > 2 * of_lists.len(),
        _ => repeated > 1 && 3 * repeated >= 2 * of_lists.len(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_and_lists_are_split() {
        for (text, separator, expected) in [
            ("a|b c| d ", Some("|"), &["a", "b c", "d"][..]),
            ("a, b", Some(","), &["a", "b"]),
            ("", Some("|"), &[]),
            ("|a||", Some("|"), &["a"]),
            ("a|b", None, &["a|b"]),
            (r#"["a, b", "c", 3, null]"#, None, &["a, b", "c", "3"]),
            ("['a, b', \"it's\", c]", Some("|"), &["a, b", "it's", "c"]),
            ("[]", None, &[]),
        ] {
            assert_eq!(split(text, separator), expected, "{text}");
        }
    }

    #[test]
    fn lists_are_recognized_by_separators_that_no_name_has() {
        let found = |values: &[&'static str]| detect(values.iter().copied());
        assert_eq!(found(&["a|b", "b|c", "a", "c"]), Some(LabelLists::Separated("|")));
        assert_eq!(found(&["red", "red|round", "round"]), Some(LabelLists::Separated("|")));
        assert_eq!(found(&["red; round", "red", "round; small", "small"]), Some(LabelLists::Separated(";")));
        // No label stands alone.
        assert_eq!(found(&["cat|pet", "dog|farm"]), Some(LabelLists::Separated("|")));
        assert_eq!(found(&["cat;pet", "dog", "cow"]), Some(LabelLists::Separated(";")));
        assert_eq!(found(&["['a']", "['a', 'b']"]), Some(LabelLists::Bracketed));
        // One label stands in one value only.
        assert_eq!(found(&["x, z", "x", "z", "x, w, z"]), Some(LabelLists::Separated(",")));
        assert_eq!(found(&["Action/Comedy", "Comedy", "Action"]), Some(LabelLists::Separated("/")));
        let words = ["haze", "clear", "water", "road", "primary"];
        let pairs = words.iter().flat_map(|a| words.iter().map(move |b| format!("{a} {b}")));
        let pairs: Vec<String> = pairs.collect();
        assert_eq!(detect(pairs.iter().map(String::as_str)), Some(LabelLists::Separated(" ")));
        for values in [
            &["Paris, France", "Lyon, France", "Rome, Italy"][..],
            &["cat", "dog"],
            &["a|", "|b", ";", "x ;-)"],
            &["<=50K", ">50K"],
            &["very good", "good", "very bad", "bad", "not very good", "not very bad"],
            &["Iris setosa", "Iris versicolor", "Iris virginica"],
            &["A+", "A", "B+", "B", "n/a"],
        ] {
            assert_eq!(found(values), None, "{values:?}");
        }
    }
}
