//! Records in a file that many append to: each says who wrote it and which of theirs it is.

use std::collections::BTreeMap;

pub(super) const LEN: u64 = 14;

pub(super) fn bytes(program: u64, number: u64) -> String {
    format!("<{program:03}-{number:08}>")
}

/// Those that are whole, in order: a crash may leave parts of others.
pub(super) fn all(bytes: &[u8]) -> Vec<(u64, u64)> {
    let one = |window: &[u8]| {
        let text = std::str::from_utf8(window).ok()?.strip_prefix('<')?.strip_suffix('>')?;
        let (program, number) = text.split_once('-')?;
        (program.len() == 3).then_some(())?;
        Some((program.parse().ok()?, number.parse().ok()?))
    };
    bytes.windows(LEN as usize).filter_map(one).collect()
}

/// How often each is there; and each one's are in the order in which they were written.
pub(super) fn count(bytes: &[u8], at: &str) -> BTreeMap<(u64, u64), u64> {
    let mut counts = BTreeMap::new();
    let mut newest = BTreeMap::new();
    for (program, number) in all(bytes) {
        *counts.entry((program, number)).or_default() += 1;
        if let Some(before) = newest.insert(program, number) {
            assert!(before < number, "{at}: {number} of {program} is there behind {before}");
        }
    }
    counts
}
