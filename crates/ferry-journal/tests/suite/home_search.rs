//! A home store whose beginning is lost, or is not what it seems: what is found, and what is not
//! believed.

use crate::common::home::{
    APART, BLOCK, LOG, Model, PAGES, Setup, free_of, header_of, leaves_with, lose_both, offsets,
    open_on, reader, rebuild, setup, wipe_log,
};
use crate::common::{Volume, assert_same, device_len, geometry, options, put};
use ferry_device::{AlignedBuf, BlockDevice, HookedDevice};
use ferry_journal::inspect::home_map;
use ferry_journal::*;
use ferry_sim::device::{SimDevice, sim_env};
use std::sync::Arc;

/// Neither the header nor any of the log is left, and the newest state has one gap: an older state,
/// which is whole, has far fewer keys.
#[test]
fn one_gap_does_not_lose_the_newest_state() {
    let mut setup = setup(3000, 9);
    let (journal, _) = setup.volume.open();
    for i in 0..1500_u32 {
        put(&journal, format!("late {i:06}").as_bytes(), &[i as u8; 100]);
    }
    journal.close().unwrap();
    drop(journal);
    setup.home = setup.volume.open_with(reader()).unwrap().1.home_segments;
    wipe_log(&setup);
    let free: Vec<u32> = (0..64).rev().filter(|s| !setup.home.contains(s)).take(26).collect();
    for leaf in leaves_with(&setup, b"late 00").into_iter().take(3) {
        let keys = [false, true].map(|header| {
            let fork = setup.fork();
            lose_both(&fork, leaf);
            if header {
                lose_both(&fork, header_of(&setup));
            }
            let rebuilt = rebuild(&fork, &fork.device, &free).unwrap();
            assert!(
                !header || rebuilt.found == Some(FoundState { complete: false }),
                "{rebuilt:?}"
            );
            rebuilt.keys
        });
        assert!(keys[1] + 100 > keys[0], "{keys:?}");
    }
}

/// A store that was copied in several transactions has states in it that are whole and have a part
/// of the keys only.
#[test]
fn an_unfinished_copy_of_the_home_store_does_not_count() {
    let geo = geometry(LOG, 600);
    let (env, _) = sim_env(7);
    let device = Arc::new(SimDevice::new(device_len(&geo)));
    let bad = Arc::new(HookedDevice::new(device.clone()));
    let volume = Volume::on(bad.clone(), geo, env);
    let (journal, _) = volume.open();
    for i in 0..14_000_u32 {
        put(&journal, format!("key {i:06}").as_bytes(), &[i as u8; 1500]);
        if i % 100 == 99 {
            journal.checkpoint().unwrap();
        }
    }
    journal.close().unwrap();
    drop(journal);
    let home = volume.open_with(reader()).unwrap().1.home_segments;
    let mut setup = Setup { volume, device, bad, model: Model::new(), home };
    wipe_log(&setup);
    setup.home = rebuild(&setup, &setup.device, &free_of(&setup, 250)).unwrap().new_segments;
    lose_both(&setup, leaves_with(&setup, b"key 013900")[0]);
    lose_both(&setup, header_of(&setup));
    let rebuilt = rebuild(&setup, &setup.device, &free_of(&setup, 280)).unwrap();
    assert!(rebuilt.keys + 10 > 14_000 && !rebuilt.lost.is_empty(), "{rebuilt:?}");
}

/// redb's checksum of what a page uses.
fn sum_of(bytes: &[u8]) -> [u8; 16] {
    twox_hash::XxHash3_128::oneshot(bytes).to_le_bytes()
}

/// A leaf with these entries; `wide`: the lengths of its keys vary.
fn leaf_of(entries: &[(&[u8], &[u8])], wide: bool) -> Vec<u8> {
    let mut out = vec![1, 0];
    out.extend((entries.len() as u16).to_le_bytes());
    let mut end = 4 + 4 * entries.len() * if wide { 2 } else { 1 };
    for (key, _) in entries {
        end += key.len();
        if wide {
            out.extend((end as u32).to_le_bytes());
        }
    }
    for (_, value) in entries {
        end += value.len();
        out.extend((end as u32).to_le_bytes());
    }
    entries.iter().for_each(|(key, _)| out.extend(*key));
    entries.iter().for_each(|(_, value)| out.extend(*value));
    out
}

/// A branch with these children, by number and checksum; its keys are one byte long.
fn branch_of(children: &[(u64, [u8; 16])]) -> Vec<u8> {
    let keys = children.len() as u8 - 1;
    let mut out = vec![2, 0, keys, 0, 0, 0, 0, 0];
    children.iter().for_each(|(_, sum)| out.extend(sum));
    children.iter().for_each(|(number, _)| out.extend(number.to_le_bytes()));
    let keys_at = out.len() as u32 + 4 * u32::from(keys);
    (1..=u32::from(keys)).for_each(|end| out.extend((keys_at + end).to_le_bytes()));
    out.extend(0..keys);
    out
}

/// A tree as the table of tables describes it.
fn tree_of(number: u64, sum: [u8; 16], key_width: Option<u32>) -> Vec<u8> {
    let mut out = vec![3];
    out.extend(1_u64.to_le_bytes());
    out.push(1);
    out.extend(number.to_le_bytes());
    out.extend(sum);
    out.extend(1_u64.to_le_bytes());
    out.push(u8::from(key_width.is_some()));
    out.extend(key_width.unwrap_or(0).to_le_bytes());
    // Values vary; alignments and the names of types would follow.
    out.extend([0; 21]);
    out
}

fn whole_block(page: &[u8]) -> AlignedBuf {
    let mut block = AlignedBuf::zeroed(BLOCK as usize);
    block[..page.len()].copy_from_slice(page);
    block
}

/// A value that has whole blocks of the file to itself.
struct Large {
    setup: Setup,
    /// The first of them: its page's number, were it a page; where it begins in the value.
    number: u64,
    at: usize,
    /// Device offsets of their first copies.
    blocks: Vec<u64>,
}

const LARGE: &[u8] = b"key 000150 user.x";
const LARGE_LEN: usize = 60_000;

/// The same each time, with this value.
fn with_large(value: &[u8]) -> Setup {
    let mut setup = setup(300, 5);
    let (journal, _) = setup.volume.open();
    put(&journal, LARGE, value);
    journal.close().unwrap();
    drop(journal);
    setup.model.insert(LARGE.to_vec(), value.to_vec());
    setup.home = setup.volume.open_with(reader()).unwrap().1.home_segments;
    setup.device.restart_trace();
    setup
}

fn large() -> Large {
    let setup = with_large(&[0xa7; LARGE_LEN]);
    let dev: Arc<dyn BlockDevice> = setup.device.clone();
    let units = home_map(&dev, &setup.volume.geo)[0].as_ref().unwrap().units.clone();
    let each = |(unit, segment): (u64, u32)| (0..PAGES).map(move |block| (unit, segment, block));
    let offsets =
        (0..).zip(units).filter_map(|(unit, segment)| Some((unit, segment?))).flat_map(each);
    let offsets: Vec<_> =
        offsets.map(|(u, s, block)| (u * PAGES + block, setup.offset(s, block))).collect();
    let full = |offset: u64| setup.block(offset).iter().all(|byte| *byte == 0xa7);
    let first = offsets.iter().position(|(_, offset)| full(*offset)).unwrap();
    let before = setup.block(offsets[first - 1].1);
    let at = BLOCK as usize - before.iter().position(|byte| *byte == 0xa7).unwrap();
    let blocks: Vec<u64> =
        offsets[first..].iter().map(|(_, offset)| *offset).take_while(|p| full(*p)).collect();
    assert!(blocks.len() >= 13, "{blocks:?}");
    Large { number: offsets[first].0 - 1, setup, at, blocks }
}

impl Large {
    /// The same volume with these pages in the value, from that block on.
    fn with_pages(&self, pages: &[Vec<u8>]) -> Setup {
        let mut value = vec![0xa7; LARGE_LEN];
        for (page, block) in pages.iter().zip(value[self.at..].chunks_exact_mut(BLOCK as usize)) {
            block[..page.len()].copy_from_slice(page);
        }
        assert!(pages.len() <= self.blocks.len());
        with_large(&value)
    }
}

fn is_table_of_tables(block: &[u8]) -> bool {
    block[..4] == [1, 0, 2, 0] && block.windows(8).any(|bytes| bytes == b"keysmeta")
}

/// The header is lost, and the value of one key, which any user may set as an attribute, looks like
/// a newer state of the store.
#[test]
fn a_value_is_not_taken_for_the_newest_state() {
    let large = large();
    let number = large.number;
    let keys = leaf_of(&[(b"forged", b"root:rwsr-xr-x")], true);
    let mut state = Vec::new();
    [1_u64 << 40, 0, 7, 0].iter().for_each(|field| state.extend(field.to_le_bytes()));
    state.extend([1; 9]);
    let meta = leaf_of(&[(&[0], &state)], false);
    let trees = [tree_of(number, sum_of(&keys), None), tree_of(number + 1, sum_of(&meta), Some(1))];
    let tables = leaf_of(&[(b"keys", &trees[0]), (b"meta", &trees[1])], true);
    assert!(is_table_of_tables(&whole_block(&tables)));
    let setup = large.with_pages(&[keys, meta, tables]);
    setup.forget_old_log();
    lose_both(&setup, header_of(&setup));
    let rebuilt = rebuild(&setup, &setup.device, &free_of(&setup, 24)).unwrap();
    let (journal, _) = open_on(&setup, &setup.device);
    assert_same(&journal, &setup.model);
    assert!(rebuilt.found.is_some(), "{rebuilt:?}");
    // It goes on from there, not from where the value said.
    drop(journal);
    let (journal, recovered) = setup.volume.open();
    assert!(recovered.last < Seq(1 << 40), "{recovered:?}");
    drop(journal);
}

/// Nor, if no state is left, for the largest tree.
#[test]
fn a_value_is_not_taken_for_the_largest_tree() {
    let large = large();
    let names: Vec<[u8; 4]> = (0..300_u32).map(u32::to_be_bytes).collect();
    let entries: Vec<(&[u8], &[u8])> = names.iter().map(|name| (&name[..], &b""[..])).collect();
    let leaf = leaf_of(&entries, true);
    let link = |n: u64| (large.number + 1 + n, sum_of(&leaf));
    let root = branch_of(&(0..12).map(link).collect::<Vec<_>>());
    let mut pages = vec![root];
    pages.extend(std::iter::repeat_n(leaf, 12));
    let setup = large.with_pages(&pages);
    let last = setup.volume.open_with(reader()).unwrap().1.last;
    wipe_log(&setup);
    lose_both(&setup, header_of(&setup));
    let tables =
        offsets(&setup).into_iter().filter(|offset| is_table_of_tables(&setup.block(*offset)));
    let lost = tables.inspect(|offset| lose_both(&setup, *offset)).count();
    assert!(lost > 0);
    let rebuilt = rebuild(&setup, &setup.device, &free_of(&setup, 24)).unwrap();
    assert_eq!(rebuilt.found, Some(FoundState { complete: false }));
    let (journal, recovered) = open_on(&setup, &setup.device);
    assert_same(&journal, &setup.model);
    assert!(recovered.last >= last, "no number of a context is given twice");
}

fn set_sums_of_header(header: &mut [u8]) {
    for slot in [64, 192] {
        let sum = sum_of(&header[slot..slot + 112]);
        header[slot + 112..slot + 128].copy_from_slice(&sum);
    }
    let sum = crc32c::crc32c(&header[..508]);
    header[508..512].copy_from_slice(&sum.to_le_bytes());
}

/// One copy of the header is an old one, whole: a write that the device lost.
#[test]
fn an_old_copy_of_the_header_does_not_count() {
    let mut setup = setup(300, 5);
    let header = header_of(&setup);
    let old = setup.block(header);
    let (journal, _) = setup.volume.open();
    for i in 0..3000_u32 {
        let (key, value) = (format!("new {i:06}").into_bytes(), vec![i as u8; 300]);
        put(&journal, &key, &value);
        setup.model.insert(key, value);
        if i % 500 == 499 {
            journal.checkpoint().unwrap();
        }
    }
    journal.close().unwrap();
    drop(journal);
    setup.device.restart_trace();
    for copy in [header, header + APART * BLOCK] {
        let fork = setup.fork();
        let new = fork.block(copy);
        fork.write(copy, &old);
        let (journal, recovered) = fork.volume.open_with(reader()).unwrap();
        assert!(
            recovered.at_rest && journal.home_bad_copies() == [copy],
            "{:?}",
            journal.home_bad_copies()
        );
        assert_same(&journal, &fork.model);
        drop(journal);
        fork.check(options(false));
        assert_ne!(fork.block(copy)[..], old[..]);
        assert_eq!(new[..320], setup.block(header)[..320]);
    }
}

/// Nor does one that an earlier use of the block left, whatever number its commit has.
#[test]
fn a_header_that_leads_to_no_commit_does_not_count() {
    let setup = setup(300, 5);
    let offset = header_of(&setup);
    let mut strange = setup.block(offset);
    for slot in [64, 192] {
        strange[slot + 104..slot + 112].copy_from_slice(&(1_u64 << 40).to_le_bytes());
        strange[slot + 16] ^= 1;
    }
    set_sums_of_header(&mut strange);
    let second = offset + APART * BLOCK;
    setup.write(second, &strange);
    let (journal, _) = setup.volume.open_with(reader()).unwrap();
    assert_eq!(journal.home_bad_copies(), [second]);
    assert_same(&journal, &setup.model);
}

/// Pages of a tree whose branches lead to one and the same page a hundred times each, on `levels`
/// levels above one leaf; the root is last.
fn knotted(first: u64, levels: u64) -> Vec<Vec<u8>> {
    let mut pages = vec![leaf_of(&[(b"\0", b"value")], true)];
    for level in 0..levels {
        let child = (first + level, sum_of(&pages[level as usize]));
        pages.push(branch_of(&[child; 101]));
    }
    pages
}

/// Somebody made a tree of few pages and more ways through it than there are atoms.
#[test]
fn a_tree_that_leads_to_the_same_pages_again_ends() {
    let large = large();
    let pages = knotted(large.number, 12);
    let setup = &large.setup;
    for (page, offset) in pages.iter().zip(&large.blocks) {
        setup.forge(*offset, &whole_block(page));
    }
    let root = (large.number + 12, sum_of(&pages[12]));
    // The table of tables names it instead of the tree that it named.
    let header_at = header_of(setup);
    let mut header = setup.block(header_at);
    let slot = 64 + 128 * usize::from(header[9] & 1);
    let ends = |block: &[u8]| {
        (8..=block.len()).find(|len| sum_of(&block[..*len]) == header[slot + 16..slot + 32])
    };
    let mut tables =
        offsets(setup).into_iter().filter(|offset| is_table_of_tables(&setup.block(*offset)));
    let (table, len) =
        tables.find_map(|offset| Some((offset, ends(&setup.block(offset))?))).unwrap();
    let mut tables = setup.block(table);
    let value = tables.windows(8).position(|bytes| bytes == b"keysmeta").unwrap() + 8;
    tables[value + 10..value + 18].copy_from_slice(&root.0.to_le_bytes());
    tables[value + 18..value + 34].copy_from_slice(&root.1);
    setup.forge(table, &tables);
    header[slot + 16..slot + 32].copy_from_slice(&sum_of(&tables[..len]));
    set_sums_of_header(&mut header);
    [header_at, header_at + APART * BLOCK]
        .into_iter()
        .for_each(|offset| setup.write(offset, &header));

    let (journal, _) = setup.volume.open_with(reader()).unwrap();
    let mut bad = Vec::new();
    journal.verify_pages(&mut |offset| bad.push(offset.detail), &mut |_| true);
    assert_eq!(bad.len(), 1200, "each page is met once, and refused a hundred times");
    let (found, gaps) = setup.readable(&journal);
    assert!(found.len() == 1 && !gaps.is_empty(), "{found:?}");
    drop(journal);
    // So does a search for what is left.
    wipe_log(setup);
    lose_both(setup, header_at);
    lose_both(setup, table);
    rebuild(setup, &setup.device, &free_of(setup, 24)).unwrap();
}
