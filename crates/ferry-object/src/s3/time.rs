//! Times as the S3 protocol writes them, as seconds since the Unix epoch. All are UTC.

use ferry_env::Utc;

const MONTHS: [&str; 12] =
    ["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"];

/// `20130524T000000Z`, as signatures have it.
pub(super) fn stamp(secs: u64) -> String {
    let Utc { year, month, day, hour, minute, second } = Utc::from_secs(secs);
    format!("{year:04}{month:02}{day:02}T{hour:02}{minute:02}{second:02}Z")
}

/// `2013-05-24T00:00:00Z`, as the answers of credential services have it. Fractions of a second are
/// left out.
pub(super) fn from_iso(text: &str) -> Option<u64> {
    let (date, clock) = text.strip_suffix('Z')?.split_once('T')?;
    let mut date = date.split('-').map(|part| part.parse().ok());
    let (year, month, day) = (date.next()??, date.next()??, date.next()??);
    seconds(year, month, day, clock.split('.').next()?)
}

/// `Fri, 24 May 2013 00:00:00 GMT`, as the header `Date` has it.
pub(super) fn from_http(text: &str) -> Option<u64> {
    let mut parts = text.split_once(", ")?.1.split(' ');
    let (day, month, year) = (parts.next()?, parts.next()?, parts.next()?);
    let month = MONTHS.iter().position(|name| *name == month)? as u64 + 1;
    seconds(year.parse().ok()?, month, day.parse().ok()?, parts.next()?)
}

fn seconds(year: u64, month: u64, day: u64, clock: &str) -> Option<u64> {
    if !(1970..10_000).contains(&year) || !(1..=12).contains(&month) || !(1..=31).contains(&day) {
        return None;
    }
    let mut clock = clock.split(':').map(|part| part.parse::<u64>().ok().filter(|n| *n <= 60));
    let (hour, minute, second) = (clock.next()??, clock.next()??, clock.next()??);
    // The inverse of `Utc::from_secs`.
    let (year, month_from_march) =
        if month > 2 { (year, month - 3) } else { (year - 1, month + 9) };
    let (era, year_of_era) = (year / 400, year % 400);
    let day_of_year = (153 * month_from_march + 2) / 5 + day - 1;
    let day_of_era = year_of_era * 365 + year_of_era / 4 - year_of_era / 100 + day_of_year;
    let days = (era * 146_097 + day_of_era).checked_sub(719_468)?;
    Some(days * 86_400 + hour * 3600 + minute * 60 + second)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_read_as_they_are_written() {
        assert_eq!(stamp(0), "19700101T000000Z");
        assert_eq!(stamp(1_369_353_600), "20130524T000000Z");
        assert_eq!(from_iso("2013-05-24T00:00:00Z"), Some(1_369_353_600));
        assert_eq!(from_iso("2013-05-24T00:00:01.5Z"), Some(1_369_353_601));
        assert_eq!(from_http("Fri, 24 May 2013 00:00:00 GMT"), Some(1_369_353_600));
        for bad in ["", "2013-05-24", "2013-13-24T00:00:00Z", "2013-05-24T99:00:00Z", "xTyZ"] {
            assert_eq!(from_iso(bad), None, "{bad}");
        }
        for secs in (0..8_000_000_000_u64).step_by(86_400 * 37 + 3661) {
            let text = stamp(secs);
            let iso = format!(
                "{}-{}-{}T{}:{}:{}Z",
                &text[..4],
                &text[4..6],
                &text[6..8],
                &text[9..11],
                &text[11..13],
                &text[13..15]
            );
            assert_eq!(from_iso(&iso), Some(secs), "{iso}");
        }
    }
}
