//! Dates and times in text: year-month-day, day/month/year or month/day/year, with a month in digits or by its English
//! name, a time of day, or both.
//!
//! A column of dates becomes numeric columns, one per [`DatePart`]. An offset from UTC is accepted and ignored: the
//! parts are those of the time as it is written.

use jiff::civil::Date;
use serde::{Deserialize, Serialize};

/// Which number of a date such as `03/04/2021` is the day.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum DateOrder {
    DayFirst,
    MonthFirst,
}

/// A number that is derived from a date or a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum DatePart {
    Year,
    Month,
    Day,
    /// From 0, Monday.
    Weekday,
    /// From 0 to 24, with minutes and seconds as a fraction.
    Hour,
}

impl DatePart {
    pub fn name(self) -> &'static str {
        match self {
            Self::Year => "year",
            Self::Month => "month",
            Self::Day => "day",
            Self::Weekday => "weekday",
            Self::Hour => "hour",
        }
    }
}

/// What a column of seconds declares them to be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StampKind {
    /// Since 1970, at midnight.
    Date,
    /// Since 1970.
    DateTime,
    /// Since midnight.
    Time,
}

impl StampKind {
    pub fn parts(self) -> &'static [DatePart] {
        use DatePart::*;
        match self {
            Self::Date => &[Year, Month, Day, Weekday],
            Self::DateTime => &[Year, Month, Day, Weekday, Hour],
            Self::Time => &[Hour],
        }
    }
}

/// The part of a point in time, in seconds since 1970; `None` if the calendar does not reach it.
pub fn stamp_part(seconds: f64, part: DatePart) -> Option<f64> {
    if !seconds.is_finite() {
        return Some(seconds);
    }
    let days = (seconds / 86_400.0).floor();
    let hour = (seconds - days * 86_400.0) / 3600.0;
    let span = jiff::Span::new().try_days(days as i64).ok()?;
    let date = Date::constant(1970, 1, 1).checked_add(span).ok()?;
    DateTime { date: Some(date), hour: Some(hour) }.part(part)
}

/// A date, a time of day, or both.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DateTime {
    pub date: Option<Date>,
    pub hour: Option<f64>,
}

impl DateTime {
    /// Parses a whole field.
    pub fn parse(text: &[u8], order: DateOrder) -> Option<Self> {
        // The longest form, `2021-03-04T05:06:07.123456789+01:00`, and `AM`.
        const MAX_BYTES: usize = 40;
        if !(4..=MAX_BYTES).contains(&text.len()) || !text.iter().any(u8::is_ascii_digit) {
            return None;
        }
        let text = str::from_utf8(text).ok()?.trim();
        if let Some((date, rest)) = parse_named_date(text) {
            let time = rest.trim_start_matches([',', ' ', 'T']);
            let hour = if time.is_empty() { None } else { Some(parse_time(time)?) };
            return Some(Self { date: Some(date), hour });
        }
        let (first, rest) = match text.find(['T', ' ']) {
            Some(at) => (&text[..at], Some(text[at + 1..].trim_start())),
            None => (text, None),
        };
        if first.contains(':') {
            return Some(Self { date: None, hour: Some(parse_time(text)?) });
        }
        let date = match rest {
            // `20210304T050607`; without a time it is a number.
            Some(_) if first.len() == 8 && first.bytes().all(|byte| byte.is_ascii_digit()) => {
                parse_date(&format!("{}-{}-{}", &first[..4], &first[4..6], &first[6..]), order)
            }
            _ => parse_date(first, order),
        };
        let date = Some(date?);
        let hour = match rest {
            Some(time) => Some(parse_time(time)?),
            None => None,
        };
        Some(Self { date, hour })
    }

    /// `None` if there is no such part; a date without a time is at midnight.
    pub fn part(&self, part: DatePart) -> Option<f64> {
        Some(match (part, self.date) {
            (DatePart::Hour, _) => self.hour.unwrap_or(0.0),
            (DatePart::Year, date) => date?.year().into(),
            (DatePart::Month, date) => date?.month().into(),
            (DatePart::Day, date) => date?.day().into(),
            (DatePart::Weekday, date) => date?.weekday().to_monday_zero_offset().into(),
        })
    }
}

fn parse_date(text: &str, order: DateOrder) -> Option<Date> {
    let separator = text.find(['-', '/', '.']).map(|at| text.as_bytes()[at] as char)?;
    let parts: Vec<&str> = text.split(separator).collect();
    let (year, month, day) = match parts[..] {
        // A month: its first day.
        [year, month] if (year.len(), month.len(), separator) == (4, 2, '-') => (year, month, "1"),
        [a, b, c] => match (a.len(), b.len(), c.len()) {
            (4, 1..=2, 1..=2) => (a, b, c),
            // Dates with points are written day first wherever they are in use.
            (1..=2, 1..=2, 2 | 4) if separator == '.' && order == DateOrder::MonthFirst => return None,
            // `1.2.21` may be a version.
            (1, 1, 2) if separator == '.' => return None,
            (1..=2, 1..=2, 2 | 4) if order == DateOrder::MonthFirst => (c, a, b),
            (1..=2, 1..=2, 2 | 4) => (c, b, a),
            _ => return None,
        },
        _ => return None,
    };
    Date::new(parse_year(year)?, parse_digits(month)?, parse_digits(day)?).ok()
}

fn parse_digits<T: std::str::FromStr>(text: &str) -> Option<T> {
    text.bytes().all(|byte| byte.is_ascii_digit()).then(|| text.parse().ok()).flatten()
}

/// A year in two or four digits: 69 is 1969 and 68 is 2068, as in POSIX.
fn parse_year(text: &str) -> Option<i16> {
    let year: i16 = parse_digits(text)?;
    Some(match text.len() {
        2 if year < 69 => 2000 + year,
        2 => 1900 + year,
        _ => year,
    })
}

/// A date with the English name of its month at the start of a text, and the rest: `02 Jan 2021`, `02-JAN-21`,
/// `02Jan2021`, `Jan 2, 2021`, each after the name of a day or not.
fn parse_named_date(text: &str) -> Option<(Date, &str)> {
    const MONTHS: [&str; 12] =
        ["jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec"];
    const LONG: [&str; 12] = [
        "january",
        "february",
        "march",
        "april",
        "may",
        "june",
        "july",
        "august",
        "september",
        "october",
        "november",
        "december",
    ];
    const DAYS: [&str; 7] = ["mon", "tue", "wed", "thu", "fri", "sat", "sun"];
    const SEPARATORS: [char; 5] = [' ', '-', '/', ',', '.'];
    /// The run of characters of one kind at the start of a text, and the rest.
    fn word(text: &str, is_part: fn(&char) -> bool) -> (&str, &str) {
        let text = text.trim_start_matches(SEPARATORS);
        text.split_at(text.find(|c| !is_part(&c)).unwrap_or(text.len()))
    }
    let letters = |text| word(text, char::is_ascii_alphabetic);
    let digits = |text| word(text, char::is_ascii_digit);
    let month = |text: &str| {
        let lower = text.to_ascii_lowercase();
        let at = MONTHS.iter().zip(&LONG).position(|(short, long)| lower == *short || lower == *long);
        at.map(|at| at as i8 + 1).or((lower == "sept").then_some(9))
    };
    if !text.bytes().any(|byte| byte.is_ascii_alphabetic()) {
        return None;
    }
    let (first, rest) = letters(text);
    let named_day = first.len() >= 3 && DAYS.contains(&first[..3].to_ascii_lowercase().as_str());
    let text = if named_day && month(first).is_none() { rest } else { text };
    let (day, month, rest) = match letters(text) {
        ("", _) => {
            let (day, rest) = digits(text);
            let (name, rest) = letters(rest);
            (day, month(name)?, rest)
        }
        (name, rest) => {
            let (day, rest) = digits(rest);
            (day, month(name)?, rest)
        }
    };
    let (year, rest) = digits(rest);
    if !(1..=2).contains(&day.len()) || !matches!(year.len(), 2 | 4) {
        return None;
    }
    Some((Date::new(parse_year(year)?, month, parse_digits(day)?).ok()?, rest))
}

/// Hours from a time such as `13:45`, `13:45:10.5`, `1:45 PM` or `13:45:10Z`.
fn parse_time(text: &str) -> Option<f64> {
    let text = text.trim();
    let (text, afternoon) = match text.char_indices().rev().nth(1) {
        Some((at, _)) if text[at..].eq_ignore_ascii_case("am") => (text[..at].trim_end(), Some(false)),
        Some((at, _)) if text[at..].eq_ignore_ascii_case("pm") => (text[..at].trim_end(), Some(true)),
        _ => (text, None),
    };
    let text = ["UTC", "GMT"].iter().find_map(|zone| text.strip_suffix(zone)).unwrap_or(text).trim_end();
    // `050607`, as in `20210304T050607`.
    let basic = text.len() == 6 && text.bytes().all(|byte| byte.is_ascii_digit());
    let spaced = basic.then(|| format!("{}:{}:{}", &text[..2], &text[2..4], &text[4..]));
    let text = spaced.as_deref().unwrap_or(text);
    let time = match text.find(['Z', 'z', '+', '-']) {
        Some(at) if afternoon.is_none() && is_offset(&text[at..]) => text[..at].trim_end(),
        Some(_) => return None,
        None => text,
    };
    let mut parts = time.split(':');
    let (hour, minute, second) = (parts.next()?, parts.next()?, parts.next());
    if parts.next().is_some() || !(1..=2).contains(&hour.len()) || minute.len() != 2 {
        return None;
    }
    let digits = |text: &str| text.bytes().all(|byte| byte.is_ascii_digit()).then(|| text.parse::<u8>().ok());
    let (hour, minute) = (digits(hour)??, digits(minute)??);
    let second = match second {
        None => 0.0,
        Some(second) if second.bytes().all(|byte| byte.is_ascii_digit() || byte == b'.') => {
            second.parse::<f64>().ok()?
        }
        Some(_) => return None,
    };
    let hour = match afternoon {
        None => hour,
        Some(_) if !(1..=12).contains(&hour) => return None,
        Some(afternoon) => hour % 12 + if afternoon { 12 } else { 0 },
    };
    if hour > 23 || minute > 59 || second >= 61.0 {
        return None;
    }
    Some(f64::from(hour) + f64::from(minute) / 60.0 + second / 3600.0)
}

/// Whether it is `Z`, `+01:00`, `+0100` or `+01`.
fn is_offset(text: &str) -> bool {
    match text.as_bytes() {
        [b'Z' | b'z'] => true,
        [b'+' | b'-', digits @ ..] => {
            matches!(digits.len(), 2 | 4 | 5)
                && digits.iter().enumerate().all(|(i, byte)| match (digits.len(), i) {
                    (5, 2) => *byte == b':',
                    _ => byte.is_ascii_digit(),
                })
        }
        _ => false,
    }
}

/// Whether a date has its day and its month in front, both in digits.
fn has_open_order(text: &[u8]) -> bool {
    let mut parts = text.trim_ascii_start().split(|byte| matches!(byte, b'/' | b'-' | b'.'));
    let mut is_small = || {
        parts.next().is_some_and(|part| matches!(part.len(), 1 | 2) && part.iter().all(u8::is_ascii_digit))
    };
    is_small() && is_small()
}

/// What the first rows show about dates in one column.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DateEvidence {
    /// Values that are dates or times.
    pub count: usize,
    /// Values with a date, and with a time.
    dates: usize,
    times: usize,
    not_day_first: bool,
    not_month_first: bool,
    /// Some value has the day and the month in an order that its form does not show.
    needs_order: bool,
}

/// How the dates of a column are written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DateColumn {
    Parts {
        order: DateOrder,
        parts: Vec<DatePart>,
    },
    /// Stored in seconds.
    Stamps(StampKind),
    /// Both orders are possible.
    Ambiguous,
    /// Neither order reads all values.
    Mixed,
}

impl DateEvidence {
    /// Returns whether the value is a date or a time.
    pub fn observe(&mut self, text: &[u8]) -> bool {
        let [day, month] =
            [DateOrder::DayFirst, DateOrder::MonthFirst].map(|order| DateTime::parse(text, order));
        let Some(any) = day.or(month) else { return false };
        self.count += 1;
        self.dates += usize::from(any.date.is_some());
        self.times += usize::from(any.hour.is_some());
        self.not_day_first |= day.is_none();
        self.not_month_first |= month.is_none();
        // The order of `05/05/2021` matters for the rows after the first ones.
        self.needs_order |= has_open_order(text);
        true
    }

    /// Whether both orders read all values, and the order matters.
    pub fn is_ambiguous(&self) -> bool {
        self.needs_order && !self.not_day_first && !self.not_month_first
    }

    /// How a column of `values` values is read, if all of them are dates or all are times. `stated` decides between
    /// the orders.
    pub fn column(&self, values: usize, stated: Option<DateOrder>) -> Option<DateColumn> {
        let only_times = self.dates == 0;
        if values == 0 || self.count != values || (self.dates != values && !only_times) {
            return None;
        }
        let order = match (stated, self.not_day_first, self.not_month_first) {
            (Some(order), ..) => order,
            (None, true, true) => return Some(DateColumn::Mixed),
            (None, true, false) => DateOrder::MonthFirst,
            (None, false, true) => DateOrder::DayFirst,
            (None, false, false) if self.needs_order => return Some(DateColumn::Ambiguous),
            (None, false, false) => DateOrder::DayFirst,
        };
        let date = [DatePart::Year, DatePart::Month, DatePart::Day, DatePart::Weekday];
        let parts = date.into_iter().filter(|_| !only_times);
        let hour = (self.times > 0).then_some(DatePart::Hour);
        Some(DateColumn::Parts { order, parts: parts.chain(hour).collect() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parts(text: &str, order: DateOrder) -> Option<Vec<f64>> {
        let parsed = DateTime::parse(text.as_bytes(), order)?;
        let all = [DatePart::Year, DatePart::Month, DatePart::Day, DatePart::Weekday, DatePart::Hour];
        Some(all.iter().filter_map(|part| parsed.part(*part)).collect())
    }

    #[test]
    fn dates_and_times_have_parts() {
        let day = DateOrder::DayFirst;
        for text in ["2021-03-04", "2021/3/4", "04.03.2021", "4/3/2021", "2021-03-04 00:00:00"] {
            assert_eq!(parts(text, day).unwrap(), [2021.0, 3.0, 4.0, 3.0, 0.0], "{text}");
        }
        assert_eq!(parts("3/4/2021", DateOrder::MonthFirst).unwrap(), [2021.0, 3.0, 4.0, 3.0, 0.0]);
        for text in
            ["2021-03-04T13:30:00Z", "2021-03-04 13:30:00.0+01:00", "4/3/2021 1:30 PM", "4-3-2021 13:30"]
        {
            assert_eq!(parts(text, day).unwrap()[4], 13.5, "{text}");
        }
        for text in [
            "4/3/21",
            "04.03.21",
            "04-MAR-21",
            "04Mar2021",
            "4 March 2021",
            "March 4, 2021",
            "Mar 04, 2021",
            "Thu, 04 Mar 2021 00:00:00 +0000",
            "Thursday 4 March 2021",
            "20210304T000000",
            "2021-03-04 00:00 UTC",
        ] {
            assert_eq!(parts(text, day).unwrap(), [2021.0, 3.0, 4.0, 3.0, 0.0], "{text}");
        }
        assert_eq!(parts("2021-03", day).unwrap()[..3], [2021.0, 3.0, 1.0]);
        assert_eq!(parts("4/3/69", day).unwrap()[0], 1969.0);
        assert_eq!(parts("Sat, 02 Jan 2021 14:30:00 GMT", day).unwrap()[4], 14.5);
        assert_eq!(parts("13:30", day).unwrap(), [13.5]);
        assert_eq!(parts("12:00 AM", day).unwrap(), [0.0]);
        for text in [
            "2021-02-30",
            "2021",
            "13/13/2021",
            "1.2.3",
            "25:00",
            "2021-03-04x",
            "1.2.21",
            "2021-13",
            "32 Jan 2021",
            "Jan 2021",
            "May",
            "mon 5",
            "10-20",
            "+1-2-2021",
        ] {
            assert_eq!(parts(text, day), None, "{text}");
        }
    }

    #[test]
    fn seconds_have_the_same_parts() {
        let parts = StampKind::DateTime.parts();
        let found: Vec<f64> = parts.iter().filter_map(|part| stamp_part(1_614_864_600.0, *part)).collect();
        assert_eq!(found, [2021.0, 3.0, 4.0, 3.0, 13.5]);
        assert_eq!(stamp_part(-1.0, DatePart::Year), Some(1969.0));
        assert_eq!(stamp_part(1e300, DatePart::Year), None);
    }

    #[test]
    fn the_whole_column_decides_the_order() {
        let column = |texts: &[&str], stated| {
            let mut evidence = DateEvidence::default();
            texts.iter().for_each(|text| assert!(evidence.observe(text.as_bytes()) || *text == "x"));
            evidence.column(texts.len(), stated)
        };
        let date = vec![DatePart::Year, DatePart::Month, DatePart::Day, DatePart::Weekday];
        let day_first = Some(DateColumn::Parts { order: DateOrder::DayFirst, parts: date.clone() });
        let month_first = Some(DateColumn::Parts { order: DateOrder::MonthFirst, parts: date });
        assert_eq!(column(&["01/02/2020", "13/02/2020"], None), day_first);
        assert_eq!(column(&["01/02/2020", "02/13/2020"], None), month_first);
        assert_eq!(column(&["01/02/2020", "05/05/2020"], None), Some(DateColumn::Ambiguous));
        assert_eq!(column(&["05/05/2020"], None), Some(DateColumn::Ambiguous), "the next rows may differ");
        assert_eq!(column(&["2020-05-05", "5 May 2020"], None), day_first);
        assert_eq!(column(&["01/02/2020"], Some(DateOrder::MonthFirst)), month_first);
        assert_eq!(column(&["13/02/2020", "02/13/2020"], None), Some(DateColumn::Mixed));
        assert_eq!(column(&["2020-01-02", "x"], None), None);
        assert_eq!(column(&["2020-01-02", "10:00"], None), None);
    }
}
