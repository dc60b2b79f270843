//! How the numbers of a text column are written: decimal point or comma, groups of three digits, a currency, percent.
//!
//! A value such as `1,234` is a different number with a decimal comma than with groups of digits. The values of the
//! column decide, then the other columns of the file, then the key `decimal`; what remains open is refused.

use super::date_text::{DateOrder, DatePart, DateTime};
use super::dates::{compact_part, stamp_part};
use super::decimal::parse_decimal;
use serde::{Deserialize, Serialize};

/// The character before the fraction.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum DecimalMark {
    Point,
    Comma,
}

/// How the cells of a numeric column are written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Notation {
    /// As programs write numbers: `-1234.5`, `1e3`.
    #[default]
    Plain,
    /// As people and spreadsheets do: `1,234.50`, `$5`, `57.00%`. A percentage is the number before the sign. Another
    /// currency than that of the first rows is another number.
    Written {
        mark: DecimalMark,
        percent: bool,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        currency: Option<char>,
    },
    /// One number of a date or a time.
    Date { order: DateOrder, part: DatePart },
    /// One number of a point in time, which is stored in seconds.
    Stamp { part: DatePart },
}

impl Notation {
    /// The number in a cell, which may not be finite.
    #[inline]
    pub fn parse(self, text: &[u8]) -> Option<f64> {
        match self {
            Self::Plain => {
                parse_decimal(text).or_else(|| parse_plain(text)).or_else(|| parse_with_currency(text))
            }
            // Digits alone are the same with either mark.
            Self::Written { mark, percent: false, .. }
                if mark == DecimalMark::Point || !text.contains(&b'.') =>
            {
                parse_decimal(text).or_else(|| self.parse_written(text))
            }
            Self::Written { .. } => self.parse_written(text),
            Self::Date { order, part } => DateTime::parse(text, order)?.part(part),
            Self::Stamp { .. } => None,
        }
    }

    /// The number that a stored number stands for.
    #[inline]
    pub fn of_number(self, number: f64) -> Option<f64> {
        match self {
            Self::Stamp { part } => stamp_part(number, part),
            // A column of numbers such as `20210102`.
            Self::Date { part, .. } => compact_part(number, part),
            Self::Plain | Self::Written { .. } => Some(number),
        }
    }

    #[cold]
    fn parse_written(self, text: &[u8]) -> Option<f64> {
        let Self::Written { mark, percent, currency } = self else { return None };
        let written = WrittenNumber::parse(text)?;
        if written.percent != percent
            || currency.is_some() && written.currency.is_some_and(|found| Some(found) != currency)
        {
            return None;
        }
        match mark {
            DecimalMark::Point => written.point,
            DecimalMark::Comma => written.comma,
        }
    }

    /// What is expected of a cell.
    pub fn expected(self) -> &'static str {
        match self {
            Self::Plain => {
                "a finite number as programs write it; `decimal` and `missing` say what else is read"
            }
            Self::Written { currency: Some(_), percent: false, .. } => {
                "a finite number in the currency and with the decimal mark of the first rows"
            }
            Self::Written { mark: DecimalMark::Point, percent: false, .. } => "a finite number",
            Self::Written { mark: DecimalMark::Comma, percent: false, .. } => {
                "a finite number with a decimal comma"
            }
            Self::Written { percent: true, .. } => "a finite number followed by `%`, as in the first rows",
            Self::Date { part: DatePart::Hour, .. } => "a time, or a date with a time, as in the first rows",
            Self::Stamp { .. } => "a date of the calendar",
            Self::Date { order: DateOrder::DayFirst, .. } => "a date: year-month-day or day/month/year",
            Self::Date { order: DateOrder::MonthFirst, .. } => "a date: year-month-day or month/day/year",
        }
    }

    /// For the description of a column; empty for plain numbers.
    pub fn describe(self) -> &'static str {
        match self {
            Self::Plain | Self::Written { mark: DecimalMark::Point, percent: false, .. } => "",
            Self::Written { mark: DecimalMark::Comma, percent: false, .. } => ", decimal comma",
            Self::Written { percent: true, .. } => ", in percent",
            Self::Date { part: DatePart::Hour, .. } => ", from a time",
            Self::Date { order: DateOrder::DayFirst, .. } | Self::Stamp { .. } => ", from a date",
            Self::Date { order: DateOrder::MonthFirst, .. } => ", from a date, month first",
        }
    }
}

/// Parses a number in any notation of programs, surrounded by any whitespace.
#[cold]
pub fn parse_plain(text: &[u8]) -> Option<f64> {
    str::from_utf8(text).ok()?.trim().parse().ok()
}

/// A number with the symbol of a currency, in a file or behind rows whose numbers have none. `$1,234` may have
/// groups of digits or a decimal comma, and is none.
#[cold]
fn parse_with_currency(text: &[u8]) -> Option<f64> {
    let written =
        WrittenNumber::parse(text).filter(|written| written.currency.is_some() && !written.percent)?;
    // A point is decimal, as without the symbol.
    let is_plain = |point: &f64| !text.contains(&b',') || written.comma.is_none_or(|comma| comma == *point);
    written.point.filter(is_plain)
}

/// A number as it may be meant.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct WrittenNumber {
    /// Its value if the decimal mark is a point, and if it is a comma.
    pub point: Option<f64>,
    pub comma: Option<f64>,
    pub percent: bool,
    pub currency: Option<char>,
}

impl WrittenNumber {
    /// `None` if it is a number in no notation.
    pub fn parse(text: &[u8]) -> Option<Self> {
        const MAX_BYTES: usize = 48;
        const CURRENCIES: [char; 6] = ['$', '€', '£', '¥', '₹', '₩'];
        if text.len() > MAX_BYTES || !text.iter().any(u8::is_ascii_digit) {
            // `inf` and `nan` have no digits.
            let number = parse_plain(text).filter(|_| text.len() <= MAX_BYTES)?;
            return Some(Self { point: Some(number), comma: Some(number), percent: false, currency: None });
        }
        let decoded = decode_latin1_currency(text);
        let mut body = str::from_utf8(decoded.as_deref().unwrap_or(text)).ok()?.trim();
        let percent = body.strip_suffix('%').inspect(|rest| body = rest.trim_end()).is_some();
        let mut sign = strip_sign(&mut body);
        // As accountants write negative numbers, `(1,234.50)`, and as some programs do, `12.5-`.
        let negated =
            body.strip_prefix('(').and_then(|rest| rest.strip_suffix(')')).or(body.strip_suffix('-'));
        if let (None, Some(rest)) = (sign, negated) {
            (body, sign) = (rest.trim(), Some('-'));
        }
        let mut currency = body.chars().next().filter(|c| CURRENCIES.contains(c));
        if let Some(symbol) = currency {
            body = body[symbol.len_utf8()..].trim_start();
            if sign.is_none() {
                sign = strip_sign(&mut body);
            }
        } else {
            currency = body.chars().next_back().filter(|c| CURRENCIES.contains(c));
            if let Some(symbol) = currency {
                body = body[..body.len() - symbol.len_utf8()].trim_end();
            }
        }
        if percent && currency.is_some() {
            return None;
        }
        let value = |mark| parse_grouped(body, mark).map(|x| if sign == Some('-') { -x } else { x });
        let (point, comma) = (value(DecimalMark::Point), value(DecimalMark::Comma));
        (point.is_some() || comma.is_some()).then_some(Self { point, comma, percent, currency })
    }
}

/// Windows-1252 has the euro sign, the pound and the yen in one byte, which is not UTF-8.
fn decode_latin1_currency(text: &[u8]) -> Option<Vec<u8>> {
    if text.is_ascii() || str::from_utf8(text).is_ok() {
        return None;
    }
    super::text_encoding::TextEncoding::Latin1.decode(text).map(|text| text.into_owned().into_bytes())
}

fn strip_sign(body: &mut &str) -> Option<char> {
    let sign = body.chars().next().filter(|c| ['-', '+', '\u{2212}'].contains(c))?;
    *body = body[sign.len_utf8()..].trim_start();
    Some(if sign == '+' { '+' } else { '-' })
}

/// Parses unsigned digits with an optional fraction and exponent, and with groups of three digits or none.
fn parse_grouped(body: &str, mark: DecimalMark) -> Option<f64> {
    let (decimal, other) = match mark {
        DecimalMark::Point => ('.', ','),
        DecimalMark::Comma => (',', '.'),
    };
    let (mantissa, exponent) = body.find(['e', 'E']).map_or((body, ""), |at| body.split_at(at));
    let (whole, fraction) = mantissa.split_once(decimal).unwrap_or((mantissa, ""));
    if !fraction.bytes().all(|byte| byte.is_ascii_digit()) || (whole.is_empty() && fraction.is_empty()) {
        return None;
    }
    let separator = whole.chars().find(|c| !c.is_ascii_digit());
    let mut digits = String::with_capacity(body.len() + 1);
    match separator {
        None => digits.push_str(whole),
        Some(separator) => {
            if separator != other && ![' ', '\'', '\u{a0}', '\u{202f}', '\u{2019}'].contains(&separator) {
                return None;
            }
            // As in India: `12,34,567`.
            let in_pairs = separator == ','
                && whole
                    .split(',')
                    .rev()
                    .nth(1)
                    .is_some_and(|group| whole.matches(',').count() > 1 && group.len() == 2);
            let last = whole.matches(separator).count();
            for (i, group) in whole.split(separator).enumerate() {
                // The first group has no leading zero: `0,123` is a fraction.
                let sized = match i {
                    0 if group.starts_with('0') => false,
                    0 => (1..=if in_pairs { 2 } else { 3 }).contains(&group.len()),
                    _ if in_pairs && i < last => group.len() == 2,
                    _ => group.len() == 3,
                };
                if !sized || !group.bytes().all(|byte| byte.is_ascii_digit()) {
                    return None;
                }
                digits.push_str(group);
            }
        }
    }
    digits.push('.');
    digits.push_str(fraction);
    digits.push_str(exponent);
    digits.parse().ok()
}

/// What the first rows show about the notation of one column. All values so far are numbers.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct NotationEvidence {
    not_point: bool,
    not_comma: bool,
    /// Some value is another number with the other mark, and whether such a value has a comma.
    differs: bool,
    differs_with_comma: bool,
    /// Some value is not plain.
    written: bool,
    with_percent: bool,
    without_percent: bool,
    currency: Option<char>,
    currencies: bool,
}

/// What speaks against reading a column as numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NotationProblem {
    /// `1,234` may be 1234 or 1.234.
    AmbiguousComma,
    MixedMarks,
    MixedPercent,
    MixedCurrencies,
}

impl NotationEvidence {
    /// Adds a value that [`parse_plain`] reads.
    pub fn observe_plain(&mut self, text: &[u8]) {
        self.without_percent = true;
        let Some(at) = memchr::memchr(b'.', text) else { return };
        // Only `1.234` may be a group of digits in another notation.
        let grouped =
            || text.len() == at + 4 && WrittenNumber::parse(text).is_some_and(|x| x.comma.is_some());
        if grouped() {
            self.differs = true;
        } else {
            self.not_comma = true;
        }
    }

    /// Adds a value that is not plain; returns whether it is a number.
    pub fn observe(&mut self, text: &[u8]) -> bool {
        let Some(number) = WrittenNumber::parse(text) else { return false };
        self.written = true;
        self.not_point |= number.point.is_none();
        self.not_comma |= number.comma.is_none();
        if let (Some(point), Some(comma)) = (number.point, number.comma)
            && point.to_bits() != comma.to_bits()
        {
            self.differs = true;
            self.differs_with_comma |= text.contains(&b',');
        }
        self.with_percent |= number.percent;
        self.without_percent |= !number.percent;
        self.currencies |=
            self.currency.is_some() && number.currency.is_some() && self.currency != number.currency;
        self.currency = self.currency.or(number.currency);
        true
    }

    /// The mark that the values of this column alone require.
    pub fn required_mark(&self) -> Option<DecimalMark> {
        match (self.not_point, self.not_comma) {
            (true, false) => Some(DecimalMark::Comma),
            (false, true) => Some(DecimalMark::Point),
            _ => None,
        }
    }

    /// What is wrong already.
    pub fn conflict(&self) -> Option<NotationProblem> {
        if self.not_point && self.not_comma {
            Some(NotationProblem::MixedMarks)
        } else if self.with_percent && self.without_percent {
            Some(NotationProblem::MixedPercent)
        } else {
            self.currencies.then_some(NotationProblem::MixedCurrencies)
        }
    }

    /// Whether the last value made the column ambiguous on its own.
    pub fn is_ambiguous(&self) -> bool {
        self.differs_with_comma && self.required_mark().is_none()
    }

    /// How the column is read. `stated` is the key `decimal`; `file` is the mark that other columns require.
    pub fn notation(
        &self,
        stated: Option<DecimalMark>,
        file: Option<DecimalMark>,
    ) -> Result<Notation, NotationProblem> {
        if let Some(mark) = stated {
            // A value that the stated mark does not allow is a bad record.
            return match self.conflict() {
                Some(problem) if problem != NotationProblem::MixedMarks => Err(problem),
                _ => Ok(Notation::Written { mark, percent: self.with_percent, currency: self.currency }),
            };
        }
        if let Some(problem) = self.conflict() {
            return Err(problem);
        }
        let mark = match (self.required_mark(), file) {
            (Some(mark), _) => mark,
            (None, Some(mark)) => mark,
            (None, _) if self.differs_with_comma => return Err(NotationProblem::AmbiguousComma),
            (None, _) => DecimalMark::Point,
        };
        match mark {
            DecimalMark::Point if !self.written => Ok(Notation::Plain),
            _ => Ok(Notation::Written { mark, percent: self.with_percent, currency: self.currency }),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn evidence(values: &[&str]) -> Option<NotationEvidence> {
        let mut evidence = NotationEvidence::default();
        let all = values.iter().all(|text| match parse_plain(text.as_bytes()) {
            Some(_) => {
                evidence.observe_plain(text.as_bytes());
                true
            }
            None => evidence.observe(text.as_bytes()),
        });
        all.then_some(evidence)
    }

    fn numbers(values: &[&str]) -> Result<Vec<f64>, NotationProblem> {
        let notation = evidence(values).unwrap().notation(None, None)?;
        Ok(values.iter().map(|text| notation.parse(text.as_bytes()).unwrap()).collect())
    }

    #[test]
    fn the_whole_column_decides_the_mark() {
        assert_eq!(numbers(&["1,5", "2,25", "3"]).unwrap(), [1.5, 2.25, 3.0]);
        assert_eq!(numbers(&["1,234", "0,5"]).unwrap(), [1.234, 0.5]);
        assert_eq!(numbers(&["1,234", "0,125"]).unwrap(), [1.234, 0.125]);
        assert_eq!(numbers(&["1,234", "1,234,567"]).unwrap(), [1234.0, 1_234_567.0]);
        assert_eq!(numbers(&["1,234", "2.5"]).unwrap(), [1234.0, 2.5]);
        assert_eq!(numbers(&["$1,234.50", "-$3", "$4"]).unwrap(), [1234.5, -3.0, 4.0]);
        assert_eq!(numbers(&["1.234,50 €", "3 €"]).unwrap(), [1234.5, 3.0]);
        assert_eq!(numbers(&["57.00%", "3 %"]).unwrap(), [57.0, 3.0]);
        assert_eq!(numbers(&["1 234,5", "1'234,5", "12\u{a0}345,0"]).unwrap(), [1234.5, 1234.5, 12345.0]);
        assert_eq!(numbers(&["1.234", "5.678"]).unwrap(), [1.234, 5.678]);
        assert_eq!(numbers(&["1,234", "5,678"]), Err(NotationProblem::AmbiguousComma));
        assert_eq!(numbers(&["1,5", "1.5"]), Err(NotationProblem::MixedMarks));
        assert_eq!(numbers(&["5%", "0.05"]), Err(NotationProblem::MixedPercent));
        assert_eq!(numbers(&["$5", "€5"]), Err(NotationProblem::MixedCurrencies));
        assert_eq!(numbers(&["(1,234.50)", "2.5"]).unwrap(), [-1234.5, 2.5]);
        assert_eq!(numbers(&["12.5-", "3"]).unwrap(), [-12.5, 3.0]);
        assert_eq!(numbers(&["12,34,567.50", "1,23,456"]).unwrap(), [1_234_567.5, 123_456.0]);
        for text in [
            "1,2,3456",
            "1,23,45",
            "(5",
            "5)",
            "(-5)",
            "a1",
            "1,5,",
            "12,3456,789",
            "",
            "1-2",
            "--1",
            "$",
            "$5%",
        ] {
            assert!(evidence(&[text]).is_none(), "{text}");
        }
    }

    #[test]
    fn the_file_and_the_key_decide_what_the_column_leaves_open() {
        let open = evidence(&["1,234", "5,678"]).unwrap();
        let parsed = |notation: Notation| notation.parse(b"1,234").unwrap();
        assert_eq!(parsed(open.notation(None, Some(DecimalMark::Comma)).unwrap()), 1.234);
        assert_eq!(parsed(open.notation(None, Some(DecimalMark::Point)).unwrap()), 1234.0);
        assert_eq!(parsed(open.notation(Some(DecimalMark::Comma), Some(DecimalMark::Point)).unwrap()), 1.234);
        // Thousands with points, in a file whose other columns have decimal commas.
        let points = evidence(&["1.234", "5.678"]).unwrap();
        assert_eq!(points.notation(None, Some(DecimalMark::Comma)).unwrap().parse(b"1.234"), Some(1234.0));
        assert_eq!(points.notation(None, None).unwrap(), Notation::Plain);
        // The first rows of a column may have no fraction.
        let whole = evidence(&["1", "2"]).unwrap().notation(None, Some(DecimalMark::Comma)).unwrap();
        assert_eq!(
            ["7", "1.234", "1,5"].map(|text| whole.parse(text.as_bytes())),
            [Some(7.0), Some(1234.0), Some(1.5)]
        );
        assert_eq!(
            evidence(&["1", "2"]).unwrap().notation(None, Some(DecimalMark::Point)).unwrap(),
            Notation::Plain
        );
    }

    #[test]
    fn a_currency_may_appear_later_and_another_one_may_not() {
        let parse = |notation: Notation, text: &str| notation.parse(text.as_bytes());
        let plain = evidence(&["1.5", "2"]).unwrap().notation(None, None).unwrap();
        assert_eq!(
            ["$5", "€5.125", "£1,234.50"].map(|text| parse(plain, text)),
            [Some(5.0), Some(5.125), Some(1234.5)]
        );
        assert_eq!(["$1,234", "1,5", "5%", "$5%"].map(|text| parse(plain, text)), [None; 4]);
        let dollars = evidence(&["$1.5", "$2"]).unwrap().notation(None, None).unwrap();
        assert_eq!(["$5", "5", "€5"].map(|text| parse(dollars, text)), [Some(5.0), Some(5.0), None]);
    }

    proptest! {
        /// A number printed with groups and either mark is read back.
        #[test]
        fn printed_numbers_are_read_back(
            whole in 0u64..10_000_000_000,
            cents in 0u8..100,
            comma: bool,
            negative: bool,
        ) {
            let (mark, group) = if comma { (',', ".") } else { ('.', ",") };
            let digits = whole.to_string();
            let groups: Vec<&str> = digits.as_bytes().rchunks(3).rev().map(|g| str::from_utf8(g).unwrap()).collect();
            let sign = if negative { "-" } else { "" };
            let text = format!("{sign}{}{mark}{cents:02}", groups.join(group));
            let expected: f64 = format!("{sign}{whole}.{cents:02}").parse().unwrap();
            let mark = if comma { DecimalMark::Comma } else { DecimalMark::Point };
            let notation = Notation::Written { mark, percent: false, currency: None };
            prop_assert_eq!(notation.parse(text.as_bytes()), Some(expected), "{}", text);
        }
    }
}
