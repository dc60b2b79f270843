//! Numbers with a unit or a sign that no notation understands: `5 kg`, `1.5k`, `USD 5`, and bounds such as `<0.5`.

use super::notation::NotationEvidence;
use super::{CellPlace, hash};

/// Distinct numbers from which on a column is taken for measurements and not for codes.
pub const MANY_NUMBERS: u32 = 32;

/// What stands beside a number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum NumberMark<'a> {
    /// `<0.5`, `> 10`.
    Bound,
    /// The unit, and whether a space separates it.
    Unit { unit: &'a str, apart: bool },
}

impl<'a> NumberMark<'a> {
    /// `None` if the text is no number with a mark.
    fn parse(text: &'a [u8]) -> Option<Self> {
        const MAX_BYTES: usize = 24;
        const MAX_UNIT: usize = 4;
        let text = str::from_utf8(text).ok()?.trim();
        let is_number = |body: &str| NotationEvidence::default().observe(body.as_bytes());
        let first = text.find(|c: char| c.is_ascii_digit()).filter(|_| text.len() <= MAX_BYTES)?;
        let sign = text[..first].trim().trim_end_matches(['-', '+', '.']);
        match sign {
            "<" | ">" | "<=" | ">=" | "≤" | "≥" | "~" | "≈" => {
                return is_number(&text[first..]).then_some(Self::Bound);
            }
            "R$" | "kr" => {
                return is_number(&text[first..]).then_some(Self::Unit { unit: sign, apart: true });
            }
            _ => {}
        }
        // `USD 5`: a code of three capitals.
        if first > 0 && !sign.is_empty() {
            let is_code = sign.len() == 3 && sign.bytes().all(|byte| byte.is_ascii_uppercase());
            let found = is_code && text[..first].ends_with(' ') && is_number(&text[first..]);
            return found.then_some(Self::Unit { unit: sign, apart: true });
        }
        let end = text.rfind(|c: char| c.is_ascii_digit())? + 1;
        let (body, rest) = text.split_at(end);
        let unit = rest.trim();
        let is_unit = (1..=MAX_UNIT).contains(&unit.chars().count())
            && unit.chars().all(|c| c.is_alphabetic() || "°²³/µ‰".contains(c));
        (is_unit && is_number(body)).then_some(Self::Unit { unit, apart: rest.starts_with([' ', '\u{a0}']) })
    }
}

/// What the first rows show about numbers with marks in one column.
#[derive(Clone, Debug, Default)]
pub struct UnitEvidence {
    /// Numbers with a unit, and bits of hashes of them.
    pub with_unit: usize,
    hashes: u64,
    pub bounds: usize,
    /// The unit of the first, and whether all have it.
    unit: String,
    several: bool,
    /// Some unit may not be one: `1st`, `5G`.
    doubtful: bool,
    pub first_with_unit: Option<CellPlace>,
    pub first_bound: Option<CellPlace>,
}

impl UnitEvidence {
    /// Adds a text that is no number; `None` if it has no mark.
    pub fn observe(
        evidence: &mut Option<Box<Self>>,
        text: &[u8],
        place: impl FnOnce() -> CellPlace,
    ) -> Option<()> {
        let mark = NumberMark::parse(text)?;
        let evidence = evidence.get_or_insert_default();
        match mark {
            NumberMark::Bound => {
                evidence.bounds += 1;
                evidence.first_bound.get_or_insert_with(place);
            }
            NumberMark::Unit { unit, apart } => {
                evidence.with_unit += 1;
                evidence.hashes |= 1 << (hash(text) & 63);
                if evidence.unit.is_empty() {
                    evidence.unit = unit.to_owned();
                }
                evidence.several |= evidence.unit != unit;
                let is_ordinal = matches!(unit, "st" | "nd" | "rd" | "th");
                let is_capital = unit.len() == 1 && unit.bytes().all(|byte| byte.is_ascii_uppercase());
                evidence.doubtful |= !apart && (is_ordinal || is_capital);
                evidence.first_with_unit.get_or_insert_with(place);
            }
        }
        Some(())
    }

    /// Whether they are measurements: too many to be codes, or all in one unit. `number_hashes` are bits of hashes
    /// of the numbers without a unit.
    pub fn are_measurements(&self, number_hashes: u64) -> bool {
        let many = (self.hashes | number_hashes).count_ones() >= MANY_NUMBERS;
        // `5more` beside numbers is a code of its own.
        let one_unit = !self.several && !self.doubtful && self.hashes.count_ones() > 1;
        self.with_unit > 0 && (many || one_unit)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn marks_are_units_and_bounds() {
        let parse = |text: &'static str| NumberMark::parse(text.as_bytes());
        for text in ["<0.5", "> 10", "<=1e3", "≥2", "<-3", "~4"] {
            assert_eq!(parse(text), Some(NumberMark::Bound), "{text}");
        }
        for (text, unit, apart) in [
            ("5 kg", "kg", true),
            ("1.5k", "k", false),
            ("-3 °C", "°C", true),
            ("USD 5", "USD", true),
            ("1,5 m²", "m²", true),
        ] {
            assert_eq!(parse(text), Some(NumberMark::Unit { unit, apart }), "{text}");
        }
        for text in ["<=50K", "A5", "5-B", "kg", "5 kilos more", "12:30", "1/2 h/", "<", "18-30"] {
            assert_eq!(parse(text), None, "{text}");
        }
    }

    #[test]
    fn few_values_of_one_unit_are_measurements_and_codes_are_not() {
        let of = |texts: &[&str]| {
            let mut evidence = None;
            for text in texts {
                let place = || CellPlace { line: 1, value: text.to_string() };
                UnitEvidence::observe(&mut evidence, text.as_bytes(), place);
            }
            evidence.unwrap_or_default().are_measurements(0)
        };
        assert!(of(&["5 kg", "3 kg"]) && of(&["8GB", "16GB"]) && of(&["10k", "2k"]) && of(&["3 A", "5 A"]));
        assert!(!of(&["1st", "2nd"]) && !of(&["4G", "5G"]) && !of(&["5more"]) && !of(&["2a", "3b"]));
    }
}
