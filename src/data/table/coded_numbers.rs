//! Numbers of a column that may stand for something else: `-999` for a missing value, seconds since 1970 for a point in
//! time. Both may be plain numbers, so they are read as such, with a warning.

use super::date_text::DatePart;
use super::dates::stamp_part;

/// Numbers that files have where a value is missing.
const SENTINEL_VALUES: [f64; 14] = [
    -1.0,
    -9.0,
    -99.0,
    -999.0,
    -999.25,
    -9999.0,
    -99_999.0,
    -32_768.0,
    -2_147_483_648.0,
    99.0,
    999.0,
    9999.0,
    99_999.0,
    999_999.0,
];
/// Units of time in a second.
const UNITS: [(f64, &str); 4] =
    [(1.0, "seconds"), (1e3, "milliseconds"), (1e6, "microseconds"), (1e9, "nanoseconds")];
/// From 1990 to 2100, in seconds since 1970.
const TIMES: std::ops::RangeInclusive<f64> = 631_152_000.0..=4_102_444_800.0;
/// Values from which on they are not a coincidence.
const MIN_VALUES: usize = 10;
const MIN_SENTINELS: u32 = 2;

/// What the first rows show about the numbers of one column.
#[derive(Clone, Debug, Default)]
pub struct CodedNumbers {
    sentinels: [u32; SENTINEL_VALUES.len()],
    /// Of the numbers that are no sentinels.
    others: usize,
    range: Option<[f64; 2]>,
    /// Numbers that are points in time, for each of the units.
    times: [usize; UNITS.len()],
}

impl CodedNumbers {
    pub fn observe(&mut self, number: f64) {
        if let Some(at) = SENTINEL_VALUES.iter().position(|sentinel| *sentinel == number) {
            self.sentinels[at] += 1;
        } else if number.is_finite() {
            let [smallest, largest] = self.range.unwrap_or([number; 2]);
            self.range = Some([smallest.min(number), largest.max(number)]);
            self.others += 1;
            for (count, (unit, _)) in self.times.iter_mut().zip(UNITS) {
                *count += usize::from(TIMES.contains(&(number / unit)));
            }
        }
    }

    /// What is suspicious about the numbers of a column of this name.
    pub fn warning(&self, name: &str) -> Option<String> {
        let [smallest, largest] = self.range.filter(|_| self.others >= MIN_VALUES)?;
        let is_far = |sentinel: f64| match sentinel {
            // Also a change of one.
            -1.0 => smallest >= 0.0 && largest >= 20.0,
            _ if sentinel < 0.0 && smallest >= 0.0 => true,
            _ => (smallest - sentinel).max(sentinel - largest) > largest - smallest,
        };
        let sentinels = SENTINEL_VALUES.iter().zip(self.sentinels);
        if let Some((sentinel, count)) =
            sentinels.filter(|(sentinel, n)| *n >= MIN_SENTINELS && is_far(**sentinel)).max_by_key(|x| x.1)
        {
            return Some(format!(
                "column `{name}` has `{sentinel}` {count} times in the first rows, and otherwise {smallest} to \
                 {largest}: if it stands for a missing value, add it to `missing`, as in \
                 `missing = [\"\", \"{sentinel}\"]`"
            ));
        }
        let at = self.times.iter().position(|count| *count == self.others && smallest < largest)?;
        let (unit, unit_name) = UNITS[at];
        let year = |number: f64| stamp_part(number / unit, DatePart::Year);
        Some(format!(
            "column `{name}` looks like {unit_name} since 1970, from {} to {}, and is one number: write dates such as \
             2021-03-04 13:30 for year, month, weekday and hour as inputs, or add it to `ignore`; `numeric` says that \
             a number is meant",
            year(smallest)?,
            year(largest)?
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn warning(numbers: impl IntoIterator<Item = f64>) -> Option<String> {
        let mut found = CodedNumbers::default();
        numbers.into_iter().for_each(|number| found.observe(number));
        found.warning("x")
    }

    #[test]
    fn marks_of_missing_values_are_far_from_the_others() {
        let with = |sentinel: f64, other: fn(f64) -> f64| {
            warning((0..40).map(|i| if i % 10 == 0 { sentinel } else { other(f64::from(i)) }))
        };
        for (sentinel, other) in [
            (-999.0, (|i| i / 4.0 - 3.0) as fn(f64) -> f64),
            (-1.0, |i| i),
            (-9.0, |i| i % 5.0),
            (9999.0, |i| i * 100.0),
            (999.0, |i| i % 28.0),
        ] {
            let text = with(sentinel, other).unwrap();
            assert!(
                text.contains(&format!("has `{sentinel}` 4 times")) && text.contains("`missing = "),
                "{text}"
            );
        }
        for (sentinel, other) in [
            (-1.0, (|i| i % 2.0) as fn(f64) -> f64),
            (-9.0, |i| i - 20.0),
            (99.0, |i| i * 3.0),
            (-999.0, |i| i * 100.0 - 2000.0),
        ] {
            assert_eq!(with(sentinel, other), None, "{sentinel}");
        }
        // Once is no sentinel.
        assert_eq!(warning((0..40).map(|i| if i == 7 { -999.0 } else { f64::from(i) })), None);
    }

    #[test]
    fn points_in_time_are_recognized_in_every_unit() {
        for (unit, name) in UNITS {
            let text = warning((0..40).map(|i| (1.6e9 + 86_400.0 * f64::from(i)) * unit)).unwrap();
            assert!(text.contains(&format!("looks like {name} since 1970, from 2020 to 2020")), "{text}");
        }
        assert_eq!(warning((0..40).map(|i| 1e8 * f64::from(i))), None);
        assert_eq!(warning((0..40).map(|_| 1.6e9)), None);
    }
}
