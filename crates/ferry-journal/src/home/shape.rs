//! The shape of redb's pages, as far as redb relies on it without a look.
//!
//! Its checksums say that a page is what somebody wrote, not that it makes sense. redb panics where
//! a page leads out of itself, and then destructors that look at the same page panic once more,
//! which ends the process. So a page that leads out of itself is damaged, and redb never sees it.

use super::tables::META_POINT;
use super::unit::header::REGION_PAGES;
use crate::bytes::{u16_at, u32_at, u64_at};
use ferry_device::BLOCK_SIZE;
use std::ops::Range;

pub const LEAF: u8 = 1;
pub const BRANCH: u8 = 2;
/// Whether a key can be one of a tree's.
type KeyShape = fn(&[u8]) -> bool;

/// Trees with keys of one length: its bytes, and what every key of them is like, so that another
/// tree's page is not taken for theirs. Values vary everywhere.
const TREES: [(usize, KeyShape); 3] = [
    // What the home store says of itself.
    (1, |key| key == [META_POINT]),
    // The allocator's state: a kind, a region.
    (5, |key| (3..=5).contains(&key[0])),
    // Pages that transactions freed: a transaction, a part of its list. Both are far from their
    // types' limits.
    (16, |key| key[6..8] == [0; 2] && key[12..] == [0; 4]),
];
/// Bytes of the keys of those trees.
pub const KEY_WIDTHS: [usize; 3] = [TREES[0].0, TREES[1].0, TREES[2].0];
/// Type, padding, number of entries.
pub const LEAF_HEADER: usize = 4;
/// The same, padded.
pub const BRANCH_HEADER: usize = 8;
/// A child's checksum and its number: all checksums come first.
pub const CHECKSUM: usize = 16;
pub const NUMBER: usize = 8;
pub const CHILD: usize = CHECKSUM + NUMBER;
/// Bytes of a key of those trees whose values are lists of pages: their number, in two bytes, and
/// their numbers.
const FREED: usize = 16;
const END: usize = 4;

/// Whether what the page says of itself lies within it, and the pages that it names within the
/// `file_len` bytes of the file. Which tree it belongs to is not known here: that of any will do.
pub fn is_sound(page: &[u8], file_len: u64) -> bool {
    let entries = usize::from(u16_at(page, 2));
    let ends = entries * END;
    // Where keys of one length begin; where the ends of varying ones stand, and where those begin.
    let (fixed, at, keys) = match page[0] {
        LEAF => (LEAF_HEADER + ends, LEAF_HEADER, LEAF_HEADER + 2 * ends),
        BRANCH => {
            let children = BRANCH_HEADER + (entries + 1) * CHILD;
            let numbers = page.get(children - (entries + 1) * NUMBER..children);
            if !numbers.is_some_and(|numbers| are_in_file(numbers, file_len)) {
                return false;
            }
            (children, children, children + ends)
        }
        _ => return false,
    };
    // Behind a leaf's keys are its values.
    let whole = |keys_end: usize, values: usize| {
        page[0] == BRANCH && keys_end <= page.len()
            || rising(page, values, entries, keys_end).is_some()
    };
    let of_tree = |(len, is_key): &(usize, fn(&[u8]) -> bool)| {
        let keys_end = fixed + entries * len;
        let keys = page.get(fixed..keys_end);
        keys.is_some_and(|keys| keys.chunks_exact(*len).all(is_key))
            && whole(keys_end, LEAF_HEADER)
            && (page[0] == BRANCH || *len != FREED || are_lists(page, entries, keys_end, file_len))
    };
    entries > 0
        && (rising(page, at, entries, keys).is_some_and(|end| whole(end, LEAF_HEADER + ends))
            || TREES.iter().any(of_tree))
}

/// The values of a leaf, the first of which begins at `from`, are lists of pages in the file.
fn are_lists(page: &[u8], entries: usize, from: usize, file_len: u64) -> bool {
    let mut from = from;
    (0..entries).all(|entry| {
        let end = u32_at(page, LEAF_HEADER + entry * END) as usize;
        let list = &page[from..end];
        from = end;
        let numbers =
            (list.len() >= 2).then(|| list.get(2..2 + usize::from(u16_at(list, 0)) * NUMBER));
        numbers.flatten().is_some_and(|numbers| are_in_file(numbers, file_len))
    })
}

/// Where the pages are in the file that a sound branch names; none for any other page.
pub fn children(page: &[u8]) -> impl Iterator<Item = Range<u64>> {
    let count = if page[0] == BRANCH { usize::from(u16_at(page, 2)) + 1 } else { 0 };
    let from = BRANCH_HEADER + count * CHECKSUM;
    page[from..from + count * NUMBER].chunks_exact(NUMBER).map(|number| page_at(u64_at(number, 0)))
}

fn are_in_file(numbers: &[u8], file_len: u64) -> bool {
    numbers
        .chunks_exact(NUMBER)
        .all(|number| page_at(u64_at(number, 0)).end - BLOCK_SIZE as u64 <= file_len)
}

/// A page's bytes in the file, whose first block is its header, by its number: an index in 20 bits,
/// in pages of its own size; a region in 20; that size, as a power of two blocks, in the upper 5.
pub fn page_at(number: u64) -> Range<u64> {
    let order = number >> 59;
    let (index, region) = (number & (0xf_ffff >> order), number >> 20 & 0xf_ffff);
    let at = |index: u64| (1 + region * REGION_PAGES + (index << order)) * BLOCK_SIZE as u64;
    at(index)..at(index + 1)
}

/// The last of `entries` ends that stand at `at`, if none is before the one in front of it, or
/// before `from`, or outside.
fn rising(page: &[u8], at: usize, entries: usize, from: usize) -> Option<usize> {
    let stored = page.get(at..at + entries * END)?;
    let mut last = from;
    for end in stored.chunks_exact(END) {
        let end = u32_at(end, 0) as usize;
        if end < last {
            return None;
        }
        last = end;
    }
    (last <= page.len()).then_some(last)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn page(kind: u8, entries: u16, numbers: &[u32], at: usize) -> Vec<u8> {
        let mut page = vec![0; 4096];
        page[0] = kind;
        page[2..4].copy_from_slice(&entries.to_le_bytes());
        for (into, number) in page[at..].chunks_exact_mut(4).zip(numbers) {
            into.copy_from_slice(&number.to_le_bytes());
        }
        page
    }

    #[test]
    fn a_page_that_leads_out_of_itself_is_not_sound() {
        assert!(is_sound(&page(1, 2, &[30, 40, 50, 4096], 4), 1 << 20));
        assert!(!is_sound(&page(1, 2, &[30, 40, 50, 4097], 4), 1 << 20));
        assert!(!is_sound(&page(1, 2, &[30, 29, 50, 60], 4), 1 << 20));
        assert!(!is_sound(&page(1, 0, &[], 4), 1 << 20));
        assert!(!is_sound(&page(1, 65_535, &[], 4), 1 << 20));
        // A page that is not in the file.
        let mut branch = page(2, 1, &[70], 8 + 48);
        branch[8 + 32..8 + 40].copy_from_slice(&(1_u64 << 20).to_le_bytes());
        assert!(!is_sound(&branch, 1 << 20));
        // A key of 16 bytes: transaction 7, part 1.
        assert!(is_sound(&page(1, 1, &[60, 7, 0, 1], 4), 1 << 20));
        assert!(!is_sound(&page(1, 1, &[23, 7, 0, 1], 4), 1 << 20));
        assert!(is_sound(&page(2, 1, &[70], 8 + 48), 1 << 20));
        assert!(!is_sound(&page(2, 200, &[], 4), 1 << 20));
        assert!(!is_sound(&page(3, 1, &[30, 40], 4), 1 << 20));
        assert!(!is_sound(&page(0, 1, &[30, 40], 4), 1 << 20));
    }
}
