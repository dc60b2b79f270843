//! Texts that stand for quantities which no column of numbers can hold as they are written: durations, lists,
//! fractions, ranges, pairs, numbers with marks.

use super::units::MANY_NUMBERS;
use super::{CellPlace, hash};

/// Distinct values from which on such texts are taken for measurements and not for names of sizes or ratings.
const MIN_DISTINCT: u32 = 8;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum QuantityForm {
    /// `36:15:00`, `2h30m`, `3 days 04:15:00`.
    Duration,
    /// `[1, 2]`.
    List,
    /// `3/4`, `1 1/2`.
    Fraction,
    /// `10-20`, `1.5 to 2`. A few are names of groups.
    Range,
    /// `45.5, 7.2`, `(1, 2)`.
    Pair,
    /// `="12"`, `0.5*`, `0.5±0.1`, `1.5x10^3`, `1_000`, `45°30'`, `0.5 (3)`, digits of other scripts.
    Marked,
}

impl QuantityForm {
    fn of(text: &[u8]) -> Option<Self> {
        const MAX_BYTES: usize = 64;
        let is_list = text.starts_with(b"[") && text.ends_with(b"]");
        let text = str::from_utf8(text).ok()?.trim();
        match () {
            () if is_list => Some(Self::List),
            () if text.len() > MAX_BYTES || !text.chars().any(char::is_numeric) => None,
            () if is_clock(text) || has_units_of_time(text) => Some(Self::Duration),
            () if is_fraction(text) => Some(Self::Fraction),
            () if is_range(text) => Some(Self::Range),
            () if is_pair(text) => Some(Self::Pair),
            () if is_marked(text) => Some(Self::Marked),
            () => None,
        }
    }

    fn name(self) -> &'static str {
        match self {
            Self::Duration => "durations",
            Self::List => "lists",
            Self::Fraction => "fractions",
            Self::Range => "ranges",
            Self::Pair => "pairs of numbers",
            Self::Marked => "numbers with marks",
        }
    }
}

fn is_digits(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit())
}

/// Hours, minutes and seconds, after a number of days or not.
fn is_clock(text: &str) -> bool {
    let (days, clock) = text.rsplit_once(' ').unwrap_or(("0 days", text));
    let is_days = days.split_once(' ').is_some_and(|(n, word)| {
        is_digits(n.trim_start_matches('-')) && matches!(word, "day" | "days" | "day," | "days,")
    });
    let parts: Vec<&str> = clock.trim_start_matches(['-', '+']).split(':').collect();
    let (last, first) = match &parts[..] {
        [first @ .., last] => (last.split('.').next().unwrap_or_default(), first),
        [] => return false,
    };
    is_days && (2..=3).contains(&parts.len()) && first.iter().all(|part| is_digits(part)) && is_digits(last)
}

/// At least two numbers, each with a unit of time: `2h30m`, `1 h 5 min`, `PT2H30M`.
fn has_units_of_time(text: &str) -> bool {
    const UNITS: [&str; 16] = [
        "d", "day", "days", "h", "hr", "hrs", "hour", "hours", "m", "min", "mins", "minutes", "s", "sec",
        "secs", "seconds",
    ];
    let lower = text.to_ascii_lowercase();
    let mut rest = lower.strip_prefix('p').unwrap_or(&lower).trim_start();
    let mut count = 0;
    while !rest.is_empty() {
        rest = rest.strip_prefix('t').unwrap_or(rest).trim_start();
        let after_number = rest.trim_start_matches(|c: char| c.is_ascii_digit() || c == '.');
        let unit = after_number.trim_start();
        let end = unit.find(|c: char| !c.is_ascii_alphabetic()).unwrap_or(unit.len());
        // `PT2H`: the mark of the time follows a unit of days.
        let name = unit[..end].strip_suffix('t').unwrap_or(&unit[..end]);
        if after_number.len() == rest.len() || !UNITS.contains(&name) {
            return false;
        }
        (rest, count) = (unit[end..].trim_start(), count + 1);
    }
    count > 1
}

fn is_fraction(text: &str) -> bool {
    let (whole, fraction) = text.rsplit_once(' ').unwrap_or(("0", text));
    let both = fraction.split_once('/').is_some_and(|(a, b)| is_digits(a) && is_digits(b));
    both && is_digits(whole.trim_start_matches('-'))
}

fn is_number(text: &str) -> bool {
    text.trim().parse::<f64>().is_ok_and(f64::is_finite)
}

/// Whether `between` stands between two numbers.
fn joins_numbers(text: &str, between: &str) -> bool {
    text.split_once(between).is_some_and(|(a, b)| is_number(a) && is_number(b))
}

fn is_pair(text: &str) -> bool {
    let text = text.strip_prefix('(').and_then(|rest| rest.strip_suffix(')')).unwrap_or(text);
    [",", ";"].iter().any(|between| joins_numbers(text, between))
}

fn is_marked(text: &str) -> bool {
    let bare = text.trim_matches(['=', '"', '\'', '*', '^', '†', '‡', '’']);
    let mut groups = text.split('_');
    let is_grouped = groups.next().is_some_and(is_digits)
        && text.contains('_')
        && groups.all(|group| group.len() == 3 && is_digits(group));
    let in_brackets = text.strip_suffix(')').is_some_and(|rest| joins_numbers(rest, " ("));
    let is_angle =
        text.contains('°') && text.chars().all(|c| c.is_ascii_digit() || " .-°'\"′″NSEW".contains(c));
    let foreign = |c: char| c.is_numeric() && !c.is_ascii_digit();
    let is_foreign = text.chars().any(foreign) && text.chars().all(|c| foreign(c) || "-.,٫٬".contains(c));
    bare.len() < text.len() && is_number(bare)
        || is_grouped
        || in_brackets
        || is_angle
        || is_foreign
        || ["±", "+/-", "x10^", "×10^", "*10^"].iter().any(|between| joins_numbers(text, between))
}

/// Two numbers, the smaller one first.
fn is_range(text: &str) -> bool {
    let number =
        |text: &str| text.trim().trim_start_matches(['$', '€', '£']).replace(',', "").parse::<f64>().ok();
    let is_ordered =
        |(low, high): (&str, &str)| number(low).zip(number(high)).is_some_and(|(low, high)| low < high);
    ["-", "–", "—", " to ", ".."].iter().any(|between| text.split_once(between).is_some_and(is_ordered))
}

/// What the first rows show about such texts in one column.
#[derive(Clone, Debug)]
pub struct FormEvidence {
    form: QuantityForm,
    count: usize,
    hashes: u64,
    first: CellPlace,
}

impl FormEvidence {
    /// Adds a text that is no number.
    pub fn observe(evidence: &mut Option<Box<Self>>, text: &[u8], place: impl FnOnce() -> CellPlace) {
        let Some(form) = QuantityForm::of(text) else { return };
        let evidence =
            evidence.get_or_insert_with(|| Box::new(Self { form, count: 0, hashes: 0, first: place() }));
        if evidence.form == form {
            evidence.count += 1;
            evidence.hashes |= 1 << (hash(text) & 63);
        }
    }

    /// What the texts are, and the first of them, if they are `least` at least.
    pub fn found(&self, least: f64) -> Option<(&'static str, &CellPlace)> {
        let least_distinct = match self.form {
            QuantityForm::Fraction | QuantityForm::Pair | QuantityForm::Marked => MIN_DISTINCT,
            QuantityForm::Range => MANY_NUMBERS,
            QuantityForm::Duration | QuantityForm::List => 1,
        };
        let enough = self.hashes.count_ones() >= least_distinct;
        (enough && self.count as f64 >= least).then_some((self.form.name(), &self.first))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn forms_are_told_from_other_texts() {
        let of = |text: &str| QuantityForm::of(text.as_bytes());
        for text in [
            "36:15:00",
            "90:30",
            "3 days 04:15:00",
            "1 day, 2:03:04.5",
            "2h30m",
            "1 h 5 min",
            "PT2H30M",
            "P1DT2H",
        ] {
            assert_eq!(of(text), Some(QuantityForm::Duration), "{text}");
        }
        for text in ["3/4", "1 1/2", "120/80"] {
            assert_eq!(of(text), Some(QuantityForm::Fraction), "{text}");
        }
        for text in ["10-20", "1.5 – 2", "$1,000-$2,000", "5 to 10", "1..3"] {
            assert_eq!(of(text), Some(QuantityForm::Range), "{text}");
        }
        for text in ["45.5, 7.2", "(1, 2)", "1;2"] {
            assert_eq!(of(text), Some(QuantityForm::Pair), "{text}");
        }
        for text in [
            "=\"12\"", "'12", "0.5*", "0.5±0.1", "1.5x10^3", "1_000", "45°30'", "12.5° N", "0.5 (3)", "１２",
            "٤٢",
        ] {
            assert_eq!(of(text), Some(QuantityForm::Marked), "{text}");
        }
        assert_eq!(of("[1, 2]"), Some(QuantityForm::List));
        for text in [
            "5 kg",
            "2h",
            "a:b",
            "1/2/2021",
            "A1/2",
            "20-10",
            "1-2-3",
            "a-b",
            "1_2",
            "A12",
            "(555) 123-4567",
            "10.0.0.1",
            "cat",
            "1:2:3:4",
            "1 2",
            "",
        ] {
            assert_eq!(of(text), None, "{text}");
        }
    }
}
