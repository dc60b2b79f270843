//! Quantities that people read and write: [`Bytes`], [`MemorySize`] (bytes, a percentage or `auto`) and counts.
//!
//! Owns their parsing and printing. A byte count prints in the largest binary unit that leaves at least one digit
//! before the point (`1.50 GiB`); both decimal (`MB`) and binary (`MiB`) units parse.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// A number of bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Bytes(pub u64);

const UNITS: [(&str, u64); 9] = [
    ("TiB", 1 << 40),
    ("GiB", 1 << 30),
    ("MiB", 1 << 20),
    ("KiB", 1 << 10),
    ("TB", 1_000_000_000_000),
    ("GB", 1_000_000_000),
    ("MB", 1_000_000),
    ("KB", 1_000),
    ("B", 1),
];

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let text = match UNITS[..4].iter().find(|(_, unit)| self.0 >= *unit) {
            Some((name, unit)) => format!("{:.2} {name}", self.0 as f64 / *unit as f64),
            None => format!("{} B", self.0),
        };
        f.pad(&text)
    }
}

/// A quantity that did not parse.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{text}` is not {wanted}")]
pub struct ParseError {
    pub text: String,
    pub wanted: &'static str,
}

impl FromStr for Bytes {
    type Err = ParseError;

    fn from_str(text: &str) -> Result<Self, ParseError> {
        let parse_error =
            || ParseError { text: text.to_owned(), wanted: "a size such as \"8GiB\" or \"500MB\"" };
        let text = text.trim();
        let (name, unit) = UNITS
            .iter()
            .find(|(name, _)| {
                text.len() > name.len() && text.to_ascii_lowercase().ends_with(&name.to_ascii_lowercase())
            })
            .ok_or_else(parse_error)?;
        let number: f64 = text[..text.len() - name.len()].trim().parse().map_err(|_| parse_error())?;
        let bytes = number * *unit as f64;
        if !(bytes.is_finite() && (0.0..9.0e18).contains(&bytes)) {
            return Err(parse_error());
        }
        Ok(Bytes(bytes.round() as u64))
    }
}

impl std::ops::Add for Bytes {
    type Output = Bytes;
    fn add(self, other: Bytes) -> Bytes {
        Bytes(self.0 + other.0)
    }
}

impl std::iter::Sum for Bytes {
    fn sum<I: Iterator<Item = Bytes>>(iter: I) -> Bytes {
        Bytes(iter.map(|b| b.0).sum())
    }
}

/// An amount of memory as a job states it: `"auto"`, `"8GiB"` or `"80%"`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum MemorySize {
    Auto,
    Bytes(Bytes),
    Percent(f64),
}

impl MemorySize {
    /// Resolves to bytes, as a percentage of `total`; `Auto` is all of it.
    pub fn resolve(self, total: Bytes) -> Bytes {
        match self {
            MemorySize::Auto => total,
            MemorySize::Bytes(bytes) => bytes,
            MemorySize::Percent(percent) => Bytes((total.0 as f64 * percent / 100.0) as u64),
        }
    }
}

impl fmt::Display for MemorySize {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        match self {
            MemorySize::Auto => f.pad("auto"),
            MemorySize::Percent(percent) => f.pad(&format!("{percent}%")),
            MemorySize::Bytes(Bytes(n)) => {
                let (name, unit) =
                    UNITS.iter().find(|(_, unit)| *n >= *unit && n % unit == 0).unwrap_or(&("B", 1));
                f.pad(&format!("{}{name}", n / unit))
            }
        }
    }
}

impl FromStr for MemorySize {
    type Err = ParseError;

    fn from_str(text: &str) -> Result<Self, ParseError> {
        let parse_error = || ParseError {
            text: text.to_owned(),
            wanted: "\"auto\", a size such as \"8GiB\" or a share such as \"80%\"",
        };
        match text.trim() {
            "auto" => Ok(MemorySize::Auto),
            t if t.ends_with('%') => {
                let percent: f64 = t[..t.len() - 1].trim().parse().map_err(|_| parse_error())?;
                if (0.0..=100.0).contains(&percent) {
                    Ok(MemorySize::Percent(percent))
                } else {
                    Err(parse_error())
                }
            }
            t => t.parse().map(MemorySize::Bytes).map_err(|_| parse_error()),
        }
    }
}

impl Serialize for MemorySize {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for MemorySize {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
    }
}

/// A count with thousands separators: `1,234,567`.
pub fn format_count(n: u64) -> String {
    let digits = n.to_string();
    let mut out = String::with_capacity(digits.len() + digits.len() / 3);
    for (i, c) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            out.push(',');
        }
        out.push(c);
    }
    out
}

/// A count of things: `1 row`, `2 rows`, `1,234 bad batches`. `noun` is the singular.
pub fn counted(n: u64, noun: &str) -> String {
    let count = format_count(n);
    match noun.strip_suffix('y') {
        _ if n == 1 => format!("{count} {noun}"),
        Some(stem) if !stem.ends_with(['a', 'e', 'o', 'u']) => format!("{count} {stem}ies"),
        _ if ["s", "x", "tch", "nch", "sh"].iter().any(|end| noun.ends_with(end)) => {
            format!("{count} {noun}es")
        }
        _ => format!("{count} {noun}s"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn sizes_parse_in_binary_and_decimal_units() {
        assert_eq!("8GiB".parse(), Ok(MemorySize::Bytes(Bytes(8 << 30))));
        assert_eq!("500 MB".parse(), Ok(MemorySize::Bytes(Bytes(500_000_000))));
        assert_eq!("1.5kib".parse(), Ok(MemorySize::Bytes(Bytes(1536))));
        assert_eq!("80%".parse(), Ok(MemorySize::Percent(80.0)));
        assert_eq!("auto".parse(), Ok(MemorySize::Auto));
    }

    #[test]
    fn what_is_not_a_size_is_refused() {
        for text in ["", "8", "GiB", "-1GiB", "101%", "8GiBs", "1e30TiB", "nanMB", "%"] {
            assert!(text.parse::<MemorySize>().is_err(), "{text}");
        }
    }

    proptest! {
        #[test]
        fn a_printed_size_reads_back_as_itself(n in 0u64..(1 << 50)) {
            let size = MemorySize::Bytes(Bytes(n));
            prop_assert_eq!(size.to_string().parse(), Ok(size));
        }

        #[test]
        fn parsing_never_panics(text in "\\PC*") {
            let _ = text.parse::<MemorySize>();
        }
    }

    #[test]
    fn people_read_round_numbers() {
        assert_eq!(Bytes(1536 << 20).to_string(), "1.50 GiB");
        assert_eq!(Bytes(17).to_string(), "17 B");
        assert_eq!(format_count(1_234_567), "1,234,567");
        assert_eq!(
            ["bad row", "class", "batch", "category"].map(|noun| counted(1, noun)),
            ["1 bad row", "1 class", "1 batch", "1 category"]
        );
        assert_eq!(
            ["bad row", "class", "batch", "category", "day"].map(|noun| counted(2_000, noun)),
            ["2,000 bad rows", "2,000 classes", "2,000 batches", "2,000 categories", "2,000 days"]
        );
        assert_eq!(["epoch", "launch"].map(|noun| counted(0, noun)), ["0 epochs", "0 launches"]);
        assert_eq!(format_count(0), "0");
    }
}
