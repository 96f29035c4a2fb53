//! A process that is killed between any two stores leaves what was so before the call that it was
//! in, or what is so after it.

use super::*;
use ferry_sim::words::RecordedWords;
use proptest::collection::vec;
use proptest::prelude::*;
use std::collections::BTreeMap;

/// The newest context that the volume has after the kill.
const RECOVERED: u64 = 5;

#[derive(Clone, Copy, Debug)]
enum Call {
    Count(Ino, u32),
    Uncount(Ino, u64),
    Flags(Ino, u32, u32),
    Logged(Ino, u64),
    Opened(u64, Ino, u32),
    Closed(u64),
    Tree(u64),
    Joins(u32, u64, u64),
}

fn call() -> impl Strategy<Value = Call> {
    // Three blocks of numbers, of which pages come and go.
    let ino = || prop_oneof![Just(1_u64), Just(2), Just(255), Just(300), Just(1 << 40)];
    prop_oneof![
        4 => (ino(), 1..3_u32).prop_map(|(ino, count)| Call::Count(ino, count)),
        4 => (ino(), 1..4_u64).prop_map(|(ino, count)| Call::Uncount(ino, count)),
        2 => (ino(), 0..4_u32, 0..4_u32).prop_map(|(ino, clear, add)| Call::Flags(ino, clear, add)),
        2 => (ino(), 1..9_u64).prop_map(|(ino, seq)| Call::Logged(ino, seq)),
        2 => (1..4_u64, ino(), 0..3_u32).prop_map(|(fh, ino, uid)| Call::Opened(fh, ino, uid)),
        2 => (1..4_u64).prop_map(Call::Closed),
        1 => (1..9_u64).prop_map(Call::Tree),
        3 => (0..3_u32, 1..99_u64, 1..9_u64).prop_map(|(slot, id, seq)| Call::Joins(slot, id, seq)),
    ]
}

/// What is known: lookups, flags and newest context of each inode; open files; trees.
#[derive(Clone, Default)]
struct Model {
    inodes: BTreeMap<Ino, (u32, u32, u64)>,
    files: BTreeMap<u64, (Ino, u32)>,
    trees: Vec<u64>,
    changes: BTreeMap<u32, (u64, u64)>,
}

impl Model {
    fn make(&mut self, call: Call) {
        match call {
            Call::Count(ino, count) => self.inodes.entry(ino).or_default().0 += count,
            Call::Uncount(ino, count) => {
                if let Some(inode) = self.inodes.get_mut(&ino) {
                    inode.0 = u64::from(inode.0).saturating_sub(count) as u32;
                }
                let must_stay =
                    |flags: u32, newest| flags & inode_flag::KEEPS != 0 || newest > RECOVERED;
                let stays = self
                    .inodes
                    .get(&ino)
                    .is_some_and(|(_, flags, newest)| must_stay(*flags, *newest));
                if !stays && self.inodes.get(&ino).is_some_and(|inode| inode.0 == 0) {
                    self.inodes.remove(&ino);
                }
            }
            Call::Flags(ino, clear, add) => {
                if let Some((_, flags, _)) = self.inodes.get_mut(&ino) {
                    *flags = *flags & !clear | add;
                }
            }
            Call::Logged(ino, seq) => {
                if let Some((_, _, newest)) = self.inodes.get_mut(&ino) {
                    *newest = seq.max(*newest);
                }
            }
            Call::Opened(fh, ino, uid) => drop(self.files.insert(fh, (ino, uid))),
            Call::Closed(fh) => drop(self.files.remove(&fh)),
            Call::Tree(number) => self.trees.push(number),
            Call::Joins(slot, unique, seq) => drop(self.changes.insert(slot, (unique, seq))),
        }
    }

    fn left(&self) -> Left {
        let inode = |(ino, known): (&Ino, &(u32, u32, u64))| {
            let (lookups, flags, newest) = *known;
            let is_lost = flags & inode_flag::UNSAVED != 0 || newest > RECOVERED;
            let flags = flags | if is_lost { inode_flag::LOST } else { 0 };
            KnownInode { ino: *ino, lookups, flags, ..KnownInode::default() }
        };
        let file = |(fh, file): (&u64, &(Ino, u32))| KnownFile {
            fh: *fh,
            ino: file.0,
            uid: file.1,
            flags: 7,
        };
        let is_there = |it: &KnownInode| it.lookups > 0 || it.flags & inode_flag::LOST != 0;
        let is_made = |(_, (_, seq)): &(&u32, &(u64, u64))| *seq <= RECOVERED;
        let request =
            |(slot, (unique, _)): (&u32, &(u64, u64))| RequestId { slot: *slot, unique: *unique };
        Left {
            inodes: self.inodes.iter().map(inode).filter(is_there).collect(),
            files: self.files.iter().map(file).collect(),
            trees: (3, self.trees.clone()),
            made: self.changes.iter().filter(is_made).map(request).collect(),
            ..Left::default()
        }
    }
}

fn make(known: &Known<RecordedWords>, call: Call) {
    match call {
        Call::Count(ino, count) => known.count(ino, count),
        Call::Uncount(ino, count) => known.uncount(ino, count, RECOVERED),
        Call::Flags(ino, clear, add) => known.change_flags(ino, clear, add),
        Call::Logged(ino, seq) => known.logged(ino, seq),
        // A number is not given to another file before it is free.
        Call::Opened(fh, ino, uid) => {
            known.closed(fh);
            known.opened(&KnownFile { fh, ino, uid, flags: 7 });
        }
        Call::Closed(fh) => known.closed(fh),
        Call::Tree(number) => known.add_tree(number),
        Call::Joins(slot, unique, seq) => known.joins(RequestId { slot, unique }, seq),
    }
}

fn sorted(mut left: Left) -> Left {
    left.inodes.sort_unstable_by_key(|inode| inode.ino);
    left
}

proptest! {
    #[test]
    fn a_kill_between_any_two_stores_leaves_one_of_both_states(calls in vec(call(), 1..40)) {
        let known = Known::on(RecordedWords::default());
        known.trees_begin(3);
        let mut model = Model::default();
        for call in calls {
            let (before, first) = (model.left(), known.memory.stores());
            make(&known, call);
            model.make(call);
            let after = model.left();
            for stores in first..=known.memory.stores() {
                let found = left_in(&known.memory.after(stores), RECOVERED, RECOVERED, false).map(sorted);
                let found = found.expect("it has all of it");
                // A file that takes the place of another one: for a moment there is none. So it is
                // with requests.
                let mut without = before.clone();
                match call {
                    Call::Opened(number, ..) => without.files.retain(|file| file.fh != number),
                    Call::Joins(number, ..) => without.made.retain(|made| made.slot != number),
                    _ => {}
                }
                let is_fine = found == before || found == after || found == without;
                prop_assert!(is_fine, "{call:?} after {stores}: {found:?}, {before:?}, {after:?}");
            }
            let all = left_in(&known.memory.after(known.memory.stores()), RECOVERED, RECOVERED, false).map(sorted);
            prop_assert_eq!(all, Some(after));
        }
    }
}

#[test]
fn a_kill_while_a_version_is_noted_leaves_it_in_no_earlier_timeline() {
    let known = Known::on(RecordedWords::default());
    let version = |word| ReplicaVersion { timeline: word, says: [word; 2], root: word, log: word };
    known.shows(&version(1));
    let before = known.memory.stores();
    known.shows(&version(2));
    let after =
        |stores| left_in(&known.memory.after(stores), 0, 0, false).expect("all of it").version;
    assert_eq!(after(before), version(1));
    for stores in before + 1..=known.memory.stores() {
        assert_eq!(after(stores).timeline, 2);
    }
    assert_eq!(after(known.memory.stores()), version(2));
}

#[test]
fn what_has_no_room_is_not_gone_on_with() {
    let known = Known::on(RecordedWords::default());
    known.opened(&KnownFile { fh: FILES_MAX as u64, ..KnownFile::default() });
    assert_eq!(left_in(&*known.memory, RECOVERED, RECOVERED, false), None);
}

#[test]
fn pages_of_inodes_that_nobody_knows_any_more_are_used_again() {
    let known = Known::on(RecordedWords::default());
    for block in 0..1000 {
        known.count(block * BLOCK_INODES, 1);
        known.uncount(block * BLOCK_INODES, 1, 0);
    }
    assert_eq!(known.memory.get(PAGES_USED_AT), 1);
}

#[test]
fn a_second_kill_before_anything_is_noted_again_finds_the_same_losses() {
    let known = Known::on(RecordedWords::default());
    known.count(7, 1);
    known.logged(7, RECOVERED + 1);
    let lost = |recovered| {
        left_in(&*known.memory, recovered, recovered, false).expect("all of it").inodes[0].flags
    };
    assert_eq!(lost(RECOVERED), inode_flag::LOST);
    // The process between has written contexts with the numbers of those that were lost.
    assert_eq!(lost(RECOVERED + 3), inode_flag::LOST);
}

#[test]
fn another_process_finds_the_words_of_the_file() {
    let known = Known::new().expect("memory");
    known.count(9, 2);
    let file = known.file().expect("a descriptor");
    drop(known);
    let words = LeftWords::of(file).expect("the same form");
    let left = words.known(&Recovered::default(), false).expect("all of it");
    assert_eq!(left.inodes, [KnownInode { ino: 9, lookups: 2, ..KnownInode::default() }]);
}
