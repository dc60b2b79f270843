//! Columns of dates and times: which parts of them are numbers, and how the first rows say they are written.

use jiff::civil::Date;

use super::date_text::{DateOrder, DatePart, DateTime, compact_month};

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

/// The date that a number such as `20210102` stands for; other numbers of eight digits are none.
pub fn compact_date(number: f64) -> Option<Date> {
    if number.fract() != 0.0 || !(19_000_101.0..=21_001_231.0).contains(&number) {
        return None;
    }
    let number = number as i32;
    Date::new((number / 10_000) as i16, (number / 100 % 100) as i8, (number % 100) as i8).ok()
}

/// Whether a number such as `2012021` is a date with the year at the end, in either order of day and month.
pub fn is_year_last_date(number: f64) -> bool {
    if number.fract() != 0.0 || !(1_011_900.0..=31_312_100.0).contains(&number) {
        return false;
    }
    let (date, year) = (number as i32 / 10_000, (number as i32 % 10_000) as i16);
    let is_date = |month, day| Date::new(year, month as i8, day as i8).is_ok();
    (1900..=2100).contains(&year) && (is_date(date % 100, date / 100) || is_date(date / 100, date % 100))
}

/// The part of a number such as `20210102` or `202101`.
pub fn compact_part(number: f64, part: DatePart) -> Option<f64> {
    let date = compact_date(number).or_else(|| compact_month(number));
    DateTime { date: Some(date?), hour: None }.part(part)
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

    /// With as many more values that are dates of eight digits.
    pub fn with_compact(self, count: usize) -> Self {
        Self { count: self.count + count, dates: self.dates + count, ..self }
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
