//! Parses and formats sizes and durations: `64M`, `1T`, `500ms`.

use std::time::Duration;

const UNITS: [(char, u32); 6] = [('K', 10), ('M', 20), ('G', 30), ('T', 40), ('P', 50), ('E', 60)];

/// Parses bytes from `123`, `64K`, `64M`, `64MiB`, `1.5G`: units are powers of 1024, in upper or
/// lower case.
pub fn parse_bytes(text: &str) -> Result<u64, String> {
    let wrong = || {
        format!(
            "{text:?} is not a size: write a number with K, M, G or T behind it, for example 64G"
        )
    };
    let body = text.trim().trim_end_matches(['b', 'B']).trim_end_matches(['i', 'I']);
    let (number, shift) = match body.chars().last() {
        Some(last) if last.is_ascii_alphabetic() => {
            let unit = last.to_ascii_uppercase();
            let shift = UNITS.iter().find(|(name, _)| *name == unit).ok_or_else(wrong)?.1;
            (&body[..body.len() - 1], shift)
        }
        _ => (body, 0),
    };
    // A number may have a sign; a size has none. +1G might mean so much more.
    if number.starts_with('+') {
        return Err(wrong());
    }
    if let Ok(whole) = number.parse::<u64>() {
        return whole
            .checked_mul(1 << shift)
            .ok_or_else(|| format!("{text:?} is more than 16 EiB"));
    }
    // A fraction: at most three digits, so that the arithmetic stays whole.
    let (whole, fraction) = number.split_once('.').ok_or_else(wrong)?;
    if shift == 0
        || fraction.is_empty()
        || fraction.len() > 3
        || !fraction.bytes().all(|b| b.is_ascii_digit())
    {
        return Err(wrong());
    }
    let whole: u64 = whole.parse().map_err(|_| wrong())?;
    let thousandths: u64 = format!("{fraction:0<3}").parse().map_err(|_| wrong())?;
    let bytes = (u128::from(whole) * 1000 + u128::from(thousandths)) * (1u128 << shift) / 1000;
    u64::try_from(bytes).map_err(|_| format!("{text:?} is more than 16 EiB"))
}

/// Formats bytes with a unit, in three or four digits.
pub fn format_bytes(bytes: u64) -> String {
    let unit = UNITS.iter().rev().find(|(_, shift)| bytes >> shift > 0);
    match unit {
        None => format!("{bytes} B"),
        Some((name, shift)) => {
            let tenths = (u128::from(bytes) * 10) >> shift;
            if tenths >= 1000 {
                format!("{} {name}iB", tenths / 10)
            } else {
                format!("{}.{} {name}iB", tenths / 10, tenths % 10)
            }
        }
    }
}

/// Parses a duration that is not zero.
pub fn parse_time(text: &str) -> Result<Duration, String> {
    let time = parse_duration(text)?;
    if time.is_zero() { Err("nothing happens in no time".into()) } else { Ok(time) }
}

/// Parses a duration from `5`, `5s` (seconds), `500ms`, `50us`, `2m` or `1h`.
pub fn parse_duration(text: &str) -> Result<Duration, String> {
    let wrong = || format!("{text:?} is not a duration: write for example 500ms, 5s, 2m or 1h");
    let text = text.trim();
    let split = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let number: u64 = text[..split].parse().map_err(|_| wrong())?;
    match &text[split..] {
        "us" | "µs" => Ok(Duration::from_micros(number)),
        "ms" => Ok(Duration::from_millis(number)),
        "" | "s" => Ok(Duration::from_secs(number)),
        "m" | "min" => number.checked_mul(60).map(Duration::from_secs).ok_or_else(wrong),
        "h" => number.checked_mul(3600).map(Duration::from_secs).ok_or_else(wrong),
        _ => Err(wrong()),
    }
}

/// Formats a duration with a unit.
pub fn format_nanos(nanos: u64) -> String {
    match nanos {
        0..1_000 => format!("{nanos} ns"),
        1_000..1_000_000 => format!("{}.{} µs", nanos / 1_000, nanos / 100 % 10),
        1_000_000..1_000_000_000 => format!("{}.{:02} ms", nanos / 1_000_000, nanos / 10_000 % 100),
        _ => format!("{}.{:02} s", nanos / 1_000_000_000, nanos / 10_000_000 % 100),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_in_every_usual_spelling() {
        for (text, bytes) in [
            ("0", 0),
            ("4096", 4096),
            ("64K", 64 << 10),
            ("64m", 64 << 20),
            ("64G", 64 << 30),
            ("64GiB", 64 << 30),
            ("64GB", 64 << 30),
            ("1T", 1 << 40),
            ("1.5G", 3 << 29),
            ("0.125M", 1 << 17),
        ] {
            assert_eq!(parse_bytes(text), Ok(bytes), "{text}");
        }
    }

    #[test]
    fn text_that_is_not_a_size_is_refused() {
        for text in ["", "G", "1.5", "1.2345G", "-1", "12X", "99999999999G", "1.G", "big"] {
            assert!(parse_bytes(text).is_err(), "{text}");
        }
    }

    #[test]
    fn bytes_are_shown_with_a_unit_that_fits() {
        for (bytes, text) in [
            (0, "0 B"),
            (1023, "1023 B"),
            (1024, "1.0 KiB"),
            (1536 << 20, "1.5 GiB"),
            (512 << 30, "512 GiB"),
        ] {
            assert_eq!(format_bytes(bytes), text);
        }
    }

    #[test]
    fn durations_are_read_and_shown() {
        assert_eq!(parse_duration("500ms"), Ok(Duration::from_millis(500)));
        assert_eq!(parse_duration("50us"), Ok(Duration::from_micros(50)));
        assert_eq!(parse_duration("5"), Ok(Duration::from_secs(5)));
        assert_eq!(parse_duration("2m"), Ok(Duration::from_secs(120)));
        assert_eq!(parse_duration("1h"), Ok(Duration::from_secs(3600)));
        assert!(parse_duration("soon").is_err());
        assert_eq!(format_nanos(130_000), "130.0 µs");
        assert_eq!(format_nanos(1_250_000_000), "1.25 s");
    }
}
