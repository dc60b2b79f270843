//! Time zones of stored points in time, which are read as the clock of their zone shows them, as text files show them.

use jiff::Timestamp;
use jiff::tz::{Offset, TimeZone};

/// The zone of a name such as `Europe/Berlin` or `+01:00`; `None` if it is not known.
pub fn find(name: &str) -> Option<TimeZone> {
    match name.as_bytes() {
        [sign @ (b'+' | b'-'), offset @ ..] => {
            let (hours, minutes) = str::from_utf8(offset).ok()?.split_once(':').or_else(|| {
                let text = str::from_utf8(offset).ok()?;
                text.split_at_checked(2)
            })?;
            let seconds = 3600 * hours.parse::<i32>().ok()? + 60 * minutes.parse::<i32>().ok()?;
            Offset::from_seconds(if *sign == b'-' { -seconds } else { seconds }).ok().map(TimeZone::fixed)
        }
        _ => TimeZone::get(name).ok(),
    }
}

/// Seconds that the clock of a zone is ahead of UTC at a point in time; 0 if the calendar does not reach it.
pub fn offset_seconds(zone: &TimeZone, seconds: i64) -> i64 {
    Timestamp::from_second(seconds).map_or(0, |at| zone.to_offset(at).seconds().into())
}

/// What to do about a zone that is not known.
pub const UNKNOWN_HINT: &str = "convert the column: `df[c] = df[c].dt.tz_convert(\"UTC\")`, or keep the clock and drop the \
     zone: `.dt.tz_localize(None)`";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clocks_are_ahead_of_utc() {
        let (winter, summer) = (1_609_597_800, 1_625_322_600);
        let offset = |name: &str, at| offset_seconds(&find(name).unwrap(), at);
        assert_eq!((offset("Europe/Berlin", winter), offset("Europe/Berlin", summer)), (3600, 7200));
        assert_eq!(
            (offset("UTC", winter), offset("+05:30", winter), offset("-0800", winter)),
            (0, 19_800, -28_800)
        );
        assert_eq!(offset("America/New_York", winter), -18_000);
        assert!(find("Mars/Base").is_none() && find("+x").is_none());
    }
}
