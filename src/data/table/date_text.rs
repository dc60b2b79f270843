//! Dates and times in text: year-month-day, day/month/year or month/day/year, with a month in digits or by its English
//! name, a time of day, or both; a month, a quarter or a week, which stand for their first day.
//!
//! An offset from UTC and the name of a zone are accepted and ignored: the parts are those of the time as it is
//! written.

use jiff::civil::{Date, ISOWeekDate, Weekday};
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
        if let Some(found) = parse_ctime(text) {
            return Some(found);
        }
        if let Some((date, rest)) = parse_named_date(text).or_else(|| parse_ideographs(text)) {
            // `02/Jan/2021:14:30:00 +0000` is how web servers write it.
            let time = rest.trim_start_matches([',', ' ', 'T', ':']);
            let hour = if time.is_empty() { None } else { Some(parse_time(time)?) };
            return Some(Self { date: Some(date), hour });
        }
        if let Some(date) = parse_period(text) {
            return Some(Self { date: Some(date), hour: None });
        }
        let (first, rest) = match text.find(['T', ' ']) {
            Some(at) => (&text[..at], Some(text[at + 1..].trim_start())),
            None => (text, None),
        };
        if first.contains(':') {
            return Some(Self { date: None, hour: Some(parse_time(text)?) });
        }
        // `20210304T050607`. A column of such dates without a time, or of months as `202103`, is one of numbers, unless
        // all of them are dates.
        let digits = first.bytes().all(|byte| byte.is_ascii_digit());
        let date = match first.len() {
            8 if digits => parse_date(&format!("{}-{}-{}", &first[..4], &first[4..6], &first[6..]), order),
            6 if digits => compact_month(first.parse().ok()?),
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

/// The first day of the month that a number such as `202101` stands for; other numbers of six digits are none.
pub fn compact_month(number: f64) -> Option<Date> {
    let is_month = number.fract() == 0.0 && (190_001.0..=210_012.0).contains(&number);
    let number = is_month.then_some(number as i32)?;
    Date::new((number / 100) as i16, (number % 100) as i8, 1).ok()
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

/// Names of each month: English, German, French, Spanish, Italian, Portuguese and Dutch.
const NAMED_MONTHS: [&str; 12] = [
    "jan january januar janvier enero gennaio janeiro januari",
    "feb february februar février febrero febbraio fevereiro februari",
    "mar march märz mars marzo março maart",
    "apr april avril abril aprile",
    "may mai mayo maggio maio mei",
    "jun june juni juin junio giugno junho",
    "jul july juli juillet julio luglio julho",
    "aug august août agosto augustus",
    "sep sept september septembre septiembre settembre setembro",
    "oct october oktober octobre octubre ottobre outubro",
    "nov november novembre noviembre novembro",
    "dec december dezember décembre diciembre dicembre dezembro",
];

/// The number of a month, from 1, by its name.
fn month_number(name: &str) -> Option<i8> {
    let lower = name.to_lowercase();
    NAMED_MONTHS.iter().position(|names| names.split(' ').any(|name| name == lower)).map(|at| at as i8 + 1)
}

/// The run of characters of one kind at the start of a text, after separators, and the rest.
fn word(text: &str, is_part: fn(&char) -> bool) -> (&str, &str) {
    let text = text.trim_start_matches([' ', '-', '/', ',', '.']);
    text.split_at(text.find(|c| !is_part(&c)).unwrap_or(text.len()))
}

fn letters(text: &str) -> (&str, &str) {
    word(text, |c| c.is_alphabetic())
}

fn digits(text: &str) -> (&str, &str) {
    word(text, char::is_ascii_digit)
}

/// The name of a month after what stands between it and the day: `2nd of January`, `2 de enero`.
fn after_filler<'a>(first: (&'a str, &'a str)) -> (&'a str, &'a str) {
    let mut found = first;
    while ["st", "nd", "rd", "th", "of", "de"].contains(&found.0) {
        found = letters(found.1);
    }
    found
}

/// `text` without the English name of a day in front.
fn after_weekday(text: &str) -> &str {
    const DAYS: [&str; 7] = ["mon", "tue", "wed", "thu", "fri", "sat", "sun"];
    let (first, rest) = letters(text);
    let is_day = first.get(..3).is_some_and(|start| DAYS.contains(&start.to_ascii_lowercase().as_str()));
    if is_day && month_number(first).is_none() { rest } else { text }
}

/// A date with the English name of its month at the start of a text, and the rest: `02 Jan 2021`, `02-JAN-21`,
/// `02Jan2021`, `Jan 2, 2021`, each after the name of a day or not, `2021-Jan-02`; and a month, `Jan 2021`.
fn parse_named_date(text: &str) -> Option<(Date, &str)> {
    if !text.bytes().any(|byte| byte.is_ascii_alphabetic()) {
        return None;
    }
    let text = after_weekday(text);
    let (day, month, year, rest) = match letters(text) {
        ("", _) => {
            let (first, rest) = digits(text);
            let (name, rest) = after_filler(letters(rest));
            let (last, rest) = digits(rest.trim_start().strip_prefix("de ").unwrap_or(rest));
            match first.len() {
                4 if last.is_empty() => ("1", name, first, rest),
                4 => (last, name, first, rest),
                _ => (first, name, last, rest),
            }
        }
        (name, rest) => match digits(rest) {
            (year, rest) if year.len() == 4 => ("1", name, year, rest),
            (day, rest) => {
                let rest =
                    ["st", "nd", "rd", "th"].iter().find_map(|end| rest.strip_prefix(end)).unwrap_or(rest);
                let (year, rest) = digits(rest);
                (day, name, year, rest)
            }
        },
    };
    if !(1..=2).contains(&day.len()) || !matches!(year.len(), 2 | 4) {
        return None;
    }
    Some((Date::new(parse_year(year)?, month_number(month)?, parse_digits(day)?).ok()?, rest))
}

/// A date and a time as `ctime` and `date` write them: `Sat Jan  2 14:30:00 2021`, with the name of a zone or not.
fn parse_ctime(text: &str) -> Option<DateTime> {
    let mut words = after_weekday(text).split_ascii_whitespace();
    let (month, day, time) = (words.next()?, words.next()?, words.next()?);
    let (zone, year) = match (words.next()?, words.next()) {
        (zone, Some(year)) => (zone, year),
        (year, None) => ("", year),
    };
    let is_zone =
        zone.len() <= 5 && zone.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"+-".contains(&byte));
    if words.next().is_some()
        || !is_zone
        || year.len() != 4
        || !(1..=2).contains(&day.len())
        || !time.contains(':')
    {
        return None;
    }
    let date = Date::new(parse_year(year)?, month_number(month)?, parse_digits(day)?).ok()?;
    Some(DateTime { date: Some(date), hour: Some(parse_time(time)?) })
}

/// A date as in China, Japan and Korea, `2021年01月02日` or `2021년 1월 2일`, and the rest.
fn parse_ideographs(text: &str) -> Option<(Date, &str)> {
    let (year, rest) = text.split_once(['年', '년'])?;
    let (month, rest) = rest.split_once(['月', '월'])?;
    let (day, rest) = rest.split_once(['日', '일']).unwrap_or(("1", rest));
    let number = |text: &str| parse_digits(text.trim());
    let date =
        Date::new(parse_year(year.trim()).filter(|year| *year > 0)?, number(month)?, number(day)?).ok()?;
    Some((date, rest))
}

/// The first day of a week as in ISO 8601, `2021-W05` or with a day `2021-W05-3`, or of a quarter, `2021Q3` or `Q3
/// 2021`.
fn parse_period(text: &str) -> Option<Date> {
    let year = |text: &str| (text.len() == 4).then(|| parse_digits::<i16>(text)).flatten();
    if let Some((before, after)) = text.split_once(['W', 'w']) {
        let (week, day) = after.split_once('-').unwrap_or((after, "1"));
        let day = Weekday::from_monday_one_offset(parse_digits(day)?).ok()?;
        let week = (week.len() == 2).then(|| parse_digits(week)).flatten()?;
        return ISOWeekDate::new(year(before.strip_suffix('-').unwrap_or(before))?, week, day)
            .ok()
            .map(|week| week.date());
    }
    let (before, after) = text.split_once(['Q', 'q'])?;
    let (quarter, of) = if before.is_empty() { after.split_at_checked(1)? } else { (after, before) };
    let quarter: i8 = (quarter.len() == 1)
        .then(|| parse_digits(quarter))
        .flatten()
        .filter(|quarter| (1..=4).contains(quarter))?;
    Date::new(year(of.trim_matches([' ', '-']))?, 3 * quarter - 2, 1).ok()
}

/// `text` without the name of a zone at its end: `UTC`, `CET`, `Europe/Berlin`, `[Europe/Berlin]`.
fn without_zone(text: &str) -> &str {
    let Some((time, zone)) = text.rsplit_once([' ', '[']) else {
        return ["UTC", "GMT"].iter().find_map(|zone| text.strip_suffix(zone)).unwrap_or(text).trim_end();
    };
    let zone = zone.trim_end_matches(']');
    let is_short = (3..=5).contains(&zone.len()) && zone.bytes().all(|byte| byte.is_ascii_uppercase());
    let is_long =
        zone.contains('/') && zone.bytes().all(|byte| byte.is_ascii_alphabetic() || b"/_-".contains(&byte));
    if is_short || is_long { time.trim_end_matches([' ', '[']) } else { text }
}

/// Hours from a time such as `13:45`, `13:45:10.5`, `1:45 PM` or `13:45:10Z`.
fn parse_time(text: &str) -> Option<f64> {
    let text = text.trim();
    let (text, afternoon) = match text.char_indices().rev().nth(1) {
        Some((at, _)) if text[at..].eq_ignore_ascii_case("am") => (text[..at].trim_end(), Some(false)),
        Some((at, _)) if text[at..].eq_ignore_ascii_case("pm") => (text[..at].trim_end(), Some(true)),
        _ => (text, None),
    };
    let text = without_zone(text);
    let time = match text.find(['Z', 'z', '+', '-']) {
        Some(at) if afternoon.is_none() && is_offset(&text[at..]) => text[..at].trim_end(),
        Some(_) => return None,
        None => text,
    };
    // `050607` and `0506`, as in `20210304T050607Z`.
    let is_basic = matches!(time.len(), 4 | 6) && time.bytes().all(|byte| byte.is_ascii_digit());
    let spaced = is_basic.then(|| format!("{}:{}:{:0<2}", &time[..2], &time[2..4], &time[4..]));
    let time = spaced.as_deref().unwrap_or(time);
    let mut parts = time.split(':');
    let (hour, minute, second) = (parts.next()?, parts.next()?, parts.next());
    if parts.next().is_some() || !(1..=2).contains(&hour.len()) || minute.len() != 2 {
        return None;
    }
    let digits = |text: &str| text.bytes().all(|byte| byte.is_ascii_digit()).then(|| text.parse::<u8>().ok());
    let (hour, minute) = (digits(hour)??, digits(minute)??);
    let second = match second {
        None => 0.0,
        // Python's `logging` writes a comma.
        Some(second) if second.bytes().all(|byte| byte.is_ascii_digit() || b".,".contains(&byte)) => {
            second.replacen(',', ".", 1).parse::<f64>().ok()?
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
            "20210304T000000Z",
            "20210304T0000+0100",
            "2021-03-04 00:00 UTC",
            "20210304",
            "2021-Mar-04",
            "4th of March 2021",
            "March 4th, 2021",
            "4. März 2021",
            "4 mars 2021",
            "4 de marzo de 2021",
            "2021-03-04 00:00:00 CET",
            "2021-03-04 00:00:00 Europe/Berlin",
            "2021-03-04T00:00:00+01:00[Europe/Berlin]",
            "2021-03-04 00:00:00,000",
            "2021年03月04日",
            "2021年3月4日 00:00",
            "2021년 3월 4일",
            "2021-W09-4",
            "Thu Mar  4 00:00:00 2021",
            "Thu Mar  4 00:00:00 CET 2021",
            "04/Mar/2021:00:00:00 +0100",
        ] {
            assert_eq!(parts(text, day).unwrap(), [2021.0, 3.0, 4.0, 3.0, 0.0], "{text}");
        }
        for text in [
            "2021-03",
            "202103",
            "Mar 2021",
            "March-2021",
            "märz 2021",
            "2021 Mar",
            "2021年3月",
            "2021-W09-1",
        ] {
            assert_eq!(parts(text, day).unwrap()[..3], [2021.0, 3.0, 1.0], "{text}");
        }
        for text in ["2021Q3", "2021-Q3", "Q3 2021", "2021 q3", "Q3-2021"] {
            assert_eq!(parts(text, day).unwrap()[..3], [2021.0, 7.0, 1.0], "{text}");
        }
        assert_eq!(parts("août 2021", day).unwrap()[..3], [2021.0, 8.0, 1.0]);
        assert_eq!(parts("2021-W05", day).unwrap()[..3], [2021.0, 2.0, 1.0]);
        assert_eq!(parts("Sat Jan  2 14:30:00 2021", day).unwrap(), [2021.0, 1.0, 2.0, 5.0, 14.5]);
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
            "Jan 21",
            "2021Q5",
            "2021-W54",
            "Q 2021",
            "20211301",
            "202113",
            "123456",
            "W05",
            "May",
            "mon 5",
            "10-20",
            "+1-2-2021",
        ] {
            assert_eq!(parts(text, day), None, "{text}");
        }
    }
}
