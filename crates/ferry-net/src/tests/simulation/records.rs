//! Records in a file that many append to: each says who wrote it and which of theirs it is.

use std::collections::BTreeMap;

pub(super) const LEN: u64 = 14;

pub(super) fn bytes(who: u64, number: u64) -> String {
    format!("<{who:03}-{number:08}>")
}

/// Those that are whole, in order: a crash may leave parts of others.
pub(super) fn all(bytes: &[u8]) -> Vec<(u64, u64)> {
    let one = |window: &[u8]| {
        let text = std::str::from_utf8(window).ok()?.strip_prefix('<')?.strip_suffix('>')?;
        let (who, number) = text.split_once('-')?;
        (who.len() == 3).then_some(())?;
        Some((who.parse().ok()?, number.parse().ok()?))
    };
    bytes.windows(LEN as usize).filter_map(one).collect()
}

/// How often each is there; and each one's are in the order in which they were written.
pub(super) fn count(bytes: &[u8], at: &str) -> BTreeMap<(u64, u64), u64> {
    let mut counts = BTreeMap::new();
    let mut newest = BTreeMap::new();
    for (who, number) in all(bytes) {
        *counts.entry((who, number)).or_default() += 1;
        if let Some(before) = newest.insert(who, number) {
            assert!(before < number, "{at}: {number} of {who} is there behind {before}");
        }
    }
    counts
}
