//! Until when a certificate is good, and how that is said.

use std::time::Duration;

use x509_parser::time::ASN1Time;

const DAY: u64 = 24 * 60 * 60;
/// So long before its end one is warned.
const WARN_TIME: u64 = 30 * DAY;

/// The day of a second of Unix time.
pub(crate) fn date(secs: u64) -> String {
    let time = i64::try_from(secs).ok().and_then(|secs| ASN1Time::from_timestamp(secs).ok());
    time.map_or_else(
        || "a day that has no name".into(),
        |time| time.to_datetime().date().to_string(),
    )
}

/// What is to be said at this time of day of a certificate that ends at `until`; `None`: nothing
/// yet.
pub fn ends_soon(until: u64, wall: Duration) -> Option<String> {
    let now = wall.as_secs();
    if now > until {
        return Some(format!("has expired on {}", date(until)));
    }
    let left = until - now;
    (left < WARN_TIME).then(|| format!("expires on {}, in {} days", date(until), left / DAY))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn expiry_is_reported_thirty_days_ahead() {
        // 2027-01-15.
        const END: u64 = 1_800_000_000;
        let at = |days: u64| ends_soon(END, Duration::from_secs(END - days * DAY));
        assert_eq!(at(31), None);
        assert_eq!(at(30), None);
        assert_eq!(at(29).as_deref(), Some("expires on 2027-01-15, in 29 days"));
        assert_eq!(at(0).as_deref(), Some("expires on 2027-01-15, in 0 days"));
        let after = ends_soon(END, Duration::from_secs(END + 1));
        assert_eq!(after.as_deref(), Some("has expired on 2027-01-15"));
    }
}
