//! What is cached, and when it is dropped.
#![expect(clippy::disallowed_methods, reason = "tests may unwrap")]

use std::sync::Arc;
use std::time::Duration;

use crate::rt::Mutex;
use ferry_env::Clock;
use ferry_fs::{Attr, Ino, ROOT, ToForget};

use super::state::ENTRIES_MAX;
use super::*;
use crate::client::names::Names;
use crate::message::{Known, Op, Outcome};

/// A clock that stands still until it is set.
#[derive(Default)]
struct Hands(Mutex<Times>);

#[derive(Clone, Copy, Default)]
struct Times {
    monotonic: u64,
    wall: u64,
}

impl Clock for Hands {
    fn monotonic(&self) -> Duration {
        Duration::from_secs(self.0.lock().monotonic)
    }
    fn wall(&self) -> Duration {
        Duration::from_secs(self.0.lock().wall)
    }
}

fn attr(ino: Ino, size: u64) -> Attr {
    let time = ferry_fs::Timestamp(0);
    let (mode, nlink, uid, gid, rdev, blocks) = (0o100_644, 1, 0, 0, 0, 0);
    Attr { ino, mode, nlink, uid, gid, rdev, size, blocks, atime: time, mtime: time, ctime: time }
}

fn dir(ino: Ino) -> Attr {
    Attr { mode: libc::S_IFDIR | 0o755, nlink: 2, ..attr(ino, 0) }
}

fn known(ino: Ino) -> Known {
    Known { attr: attr(ino, 0), stamp: 1, capability: 1 }
}

fn cache() -> (Arc<Cache>, Arc<Hands>) {
    let hands = Arc::new(Hands::default());
    let cache = Arc::new(Cache::new(hands.clone()));
    cache.drop_all();
    cache.welcomed(Duration::from_secs(6), ferry_fs::Timestamp(0));
    (cache, hands)
}

fn no_file(_: u64) -> Option<Ino> {
    None
}

fn begin(cache: &Arc<Cache>, op: &Op, file: impl Fn(u64) -> Option<Ino>) -> Option<PendingEffect> {
    cache.begin(&mut cache.lock(), op, file)
}

fn attr_of(cache: &Cache, ino: Ino) -> Option<Attr> {
    cache.attr(ino).map(|(attr, _)| attr)
}

fn recall(cache: &Cache, inos: &[Ino]) {
    cache.lock().recall(inos, true, cache.now());
}

fn unlink(name: &str) -> Op {
    Op::Unlink { parent: 5, name: name.into() }
}

#[test]
fn answers_requested_before_a_lease_return_are_not_cached() {
    let (cache, _) = cache();
    let (before, answer) = (cache.version(), attr(7, 1));
    cache.learn_attr(before, &answer);
    assert_eq!(attr_of(&cache, 7), Some(answer));
    recall(&cache, &[7]);
    let between = cache.version();
    assert_eq!(cache.attr(7), None);
    cache.lock().given_back();
    for version in [before, between] {
        cache.learn_attr(version, &answer);
        assert_eq!(cache.attr(7), None, "the server may have answered before it was told");
    }
    cache.learn_attr(cache.version(), &answer);
    assert_eq!(attr_of(&cache, 7), Some(answer));
    cache.drop_all();
    assert_eq!(cache.attr(7), None, "the connection is gone");
}

#[test]
fn nothing_cached_is_used_after_the_term() {
    let (cache, hands) = cache();
    let keep = || drop(cache.learn_attr(cache.version(), &attr(7, 1)));
    keep();
    hands.0.lock().monotonic = 3;
    let sent = cache.now();
    hands.0.lock().monotonic = 5;
    cache.ponged(sent, true, ferry_fs::Timestamp(0));
    hands.0.lock().monotonic = 8;
    assert!(cache.attr(7).is_some(), "from when the ping was sent");
    let sent = cache.now();
    hands.0.lock().monotonic = 9;
    assert_eq!(cache.attr(7), None);
    cache.ponged(sent, true, ferry_fs::Timestamp(0));
    assert_eq!(cache.attr(7), None, "the server may have given it away meanwhile");
    keep();
    assert!(cache.attr(7).is_some());
    cache.ponged(cache.now(), false, ferry_fs::Timestamp(0));
    hands.0.lock().monotonic = 13;
    assert!(cache.attr(7).is_some());
    hands.0.lock().wall = 6;
    assert_eq!(cache.attr(7), None, "the machine has slept");
}

#[test]
fn answers_that_overlap_an_own_change_are_not_cached() {
    let (cache, _) = cache();
    let before = cache.version();
    let write = Op::Write { fh: 1, offset: 0, data: vec![1], append: false, kill_suidgid: false };
    let first = begin(&cache, &write, |_| Some(7)).unwrap();
    let second = begin(&cache, &write, |_| Some(7)).unwrap();
    let during = cache.version();
    cache.learn_attr(during, &attr(7, 0));
    assert_eq!(cache.attr(7), None);
    let done = Outcome::Count { count: 1 };
    cache.end(first, &done, &[attr(7, 1)], false);
    assert_eq!(cache.attr(7), None, "another change is under way");
    cache.end(second, &done, &[attr(7, 2)], false);
    assert_eq!(attr_of(&cache, 7), Some(attr(7, 2)));
    for version in [before, during] {
        cache.learn_attr(version, &attr(7, 0));
        assert_eq!(attr_of(&cache, 7), Some(attr(7, 2)));
    }
    // One that is never answered.
    drop(begin(&cache, &write, |_| Some(7)));
    assert_eq!(cache.attr(7), None);
    cache.learn_attr(cache.version(), &attr(7, 3));
    assert_eq!(attr_of(&cache, 7), Some(attr(7, 3)));
}

#[test]
fn cached_names_follow_own_changes() {
    let (cache, _) = cache();
    let mkdir = Op::Mkdir { parent: 1, name: "d".into(), mode: 0o755 };
    let effect = begin(&cache, &mkdir, no_file).unwrap();
    let made = Outcome::Entry { known: Some(known(5)) };
    cache.end(effect, &made, &[attr(1, 0), attr(5, 0)], true);
    assert_eq!(cache.lookup(1, b"d"), Some(Some(attr(5, 0))));
    assert_eq!(cache.lookup(5, b"a"), Some(None), "it is known to be empty");
    assert_eq!(cache.lookup(5, b".."), None);
    let create = Op::Create { parent: 5, name: "a".into(), mode: 0, flags: 0, fh: 1 };
    let effect = begin(&cache, &create, no_file).unwrap();
    assert_eq!(cache.lookup(5, b"a"), None);
    cache.end(effect, &Outcome::Entry { known: Some(known(7)) }, &[attr(5, 0), attr(7, 0)], false);
    assert_eq!(cache.lookup(5, b"a"), Some(Some(attr(7, 0))));
    let flags = ferry_fs::RenameFlags::default();
    let rename =
        Op::Rename { parent: 5, name: "a".into(), new_parent: 5, new_name: "b".into(), flags };
    let effect = begin(&cache, &rename, no_file).unwrap();
    cache.end(effect, &Outcome::Done {}, &[attr(5, 0), attr(7, 0)], false);
    assert_eq!(cache.lookup(5, b"a"), Some(None));
    assert_eq!(cache.lookup(5, b"b"), Some(Some(attr(7, 0))));
    let effect = begin(&cache, &unlink("b"), no_file).unwrap();
    cache.end(effect, &Outcome::Failed { errno: libc::EIO }, &[], false);
    assert_eq!(cache.lookup(5, b"b"), None, "it may have been removed or not");
    cache.learn_name(cache.version(), 5, b"b", Some(&known(7)));
    let effect = begin(&cache, &unlink("b"), no_file).unwrap();
    cache.end(effect, &Outcome::Done {}, &[attr(5, 0)], false);
    assert_eq!(cache.lookup(5, b"b"), Some(None));
    let effect = begin(&cache, &create, no_file).unwrap();
    cache.end(effect, &Outcome::Entry { known: Some(known(8)) }, &[], false);
    assert_eq!(cache.lookup(5, b"a"), None, "there is no lease for it");
}

#[test]
fn a_change_of_an_unknown_inode_invalidates_all_attributes() {
    let (cache, _) = cache();
    cache.learn_attr(cache.version(), &attr(7, 1));
    let before = cache.version();
    let effect = begin(&cache, &unlink("unknown"), no_file).unwrap();
    assert_eq!(cache.attr(7), None, "it may be that one");
    cache.end(effect, &Outcome::Done {}, &[attr(5, 0)], false);
    assert_eq!(cache.attr(7), None);
    cache.learn_attr(before, &attr(7, 1));
    assert_eq!(cache.attr(7), None);
    cache.learn_attr(cache.version(), &attr(7, 2));
    assert!(cache.attr(7).is_some());
}

#[test]
fn the_cache_is_bounded() {
    let (cache, _) = cache();
    let mut given = 0;
    for ino in 0..2 * ENTRIES_MAX as u64 {
        given += cache.learn_attr(cache.version(), &attr(ino, 0)).len();
        cache.lock().given_back();
    }
    let state = cache.state.lock();
    assert!(state.nodes.len() <= ENTRIES_MAX);
    assert_eq!(state.nodes.len() + given, 2 * ENTRIES_MAX, "the server hears of each");
}

#[test]
fn kernel_cached_attributes_expire_after_a_second_and_with_the_term() {
    let (cache, hands) = cache();
    assert!(cache.show(7, None).is_none(), "nothing is known of it");
    assert!(cache.learn_attr(cache.version(), &attr(7, 1)).is_empty());
    let view = cache.show(7, Some((5, b"name"))).expect("it is leased");
    assert_eq!((view.attr, view.valid), (attr(7, 1), ATTR_VALID_MAX));
    assert_eq!(view.name_valid, Duration::ZERO, "it is no directory");
    assert!(cache.learn_attr(cache.version(), &dir(8)).is_empty());
    assert_eq!(cache.show(8, Some((5, b"sub"))).map(|view| view.name_valid), Some(NAME_VALID_MAX));
    hands.0.lock().monotonic = 5;
    let view = cache.show(7, None).expect("the term lasts 6 s");
    assert_eq!(view.valid, Duration::from_millis(250), "with an eighth to spare");
    hands.0.lock().monotonic = 6;
    assert!(cache.show(7, None).is_none());
}

#[test]
fn a_kernel_cached_inode_is_withdrawn_before_it_is_cached_again() {
    let (cache, hands) = cache();
    let learn = |ino| cache.learn_attr(cache.version(), &dir(ino));
    assert!(learn(7).is_empty() && learn(8).is_empty());
    cache.show(7, Some((5, b"sub"))).expect("it is leased");
    recall(&cache, &[7, 8]);
    let to_forget = cache.lock().take_to_forget();
    assert_eq!(to_forget.inodes, [7], "the other is not kernel-cached");
    assert_eq!(to_forget.names, [(5, (*b"sub").into())]);
    cache.lock().withdraw(&[7]);
    assert!(learn(7).is_empty());
    assert!(
        cache.attr(7).is_none() && cache.show(7, None).is_none(),
        "the server does not know it yet"
    );
    let question = cache.lock().ask(&[7]);
    let held = [crate::message::Held { attr: dir(7), plain: true }];
    assert_eq!(
        cache.lock().granted(question, &held, cache.now()),
        [7],
        "nor is a write lease taken"
    );
    cache.lock().withdrawn(&[7]);
    assert!(learn(7).is_empty());
    let view = cache.show(7, Some((5, b"sub"))).expect("it is leased");
    assert_eq!(view.name_valid, Duration::ZERO, "others want it");
    assert!(learn(9).is_empty());
    let inside = |now: u64, dir| {
        hands.0.lock().monotonic = now;
        assert!(learn(9).is_empty());
        cache.show(9, Some((dir, b"inside"))).expect("it is leased").name_valid
    };
    assert_eq!(
        (inside(0, 7), inside(0, 6)),
        (Duration::ZERO, NAME_VALID_MAX),
        "nor is what is in it"
    );
    recall(&cache, &[ROOT]);
    assert_eq!(inside(0, ROOT), Duration::ZERO);
    // Kernel-cached entries expire by themselves.
    hands.0.lock().monotonic = 2;
    recall(&cache, &[7]);
    assert_eq!(cache.lock().take_to_forget(), ToForget::default());
}

#[test]
fn contents_for_a_mapping_are_kept_under_a_lease_and_forgotten_with_it() {
    let (cache, hands) = cache();
    let contents = || cache.lock().take_to_forget().contents;
    assert!(!cache.map(7), "there is no lease");
    for ino in [7, 8, 9] {
        assert!(cache.learn_attr(cache.version(), &attr(ino, 1)).is_empty());
        assert!(cache.map(ino) && cache.map(ino));
    }
    recall(&cache, &[7]);
    assert_eq!(contents(), [7]);
    cache.lock().withdraw(&[7]);
    assert!(!cache.map(7));
    recall(&cache, &[7]);
    assert_eq!(contents(), [0; 0], "once");
    cache.lock().unsee(8);
    recall(&cache, &[8]);
    assert_eq!(contents(), [0; 0], "the kernel does not know it any more");
    assert_eq!(cache.over(), ToForget::default());
    hands.0.lock().monotonic = 6;
    assert_eq!(cache.over().contents, [9], "its term is over");
    assert!(!cache.map(9));
}

#[test]
fn a_directory_that_was_renamed_here_is_forgotten_under_its_new_name() {
    let (cache, _hands) = cache();
    for (ino, name) in [(7, b"old"), (8, b"two")] {
        assert!(cache.learn_attr(cache.version(), &dir(ino)).is_empty());
        assert!(cache.show(ino, Some((5, name))).is_some());
    }
    let name = |dir, name: &[u8]| -> FullName { (dir, name.into()) };
    let rename = |from: FullName, to: FullName, flags| {
        cache.lock().moves(from.clone(), to.clone());
        assert!(cache.lock().moved(&from, &to, Some(flags)).is_empty());
    };
    let exchange = ferry_fs::RenameFlags { exchange: true, ..Default::default() };
    rename(name(5, b"old"), name(6, b"new"), Default::default());
    rename(name(6, b"new"), name(5, b"two"), exchange);
    recall(&cache, &[7, 8]);
    let mut names = cache.lock().take_to_forget().names;
    names.sort_unstable();
    assert_eq!(names, [name(5, b"two"), name(6, b"new")]);
}

#[test]
fn a_directory_that_the_kernel_renames_while_its_lease_is_given_back_is_forgotten_afterwards() {
    let (cache, _hands) = cache();
    assert!(cache.learn_attr(cache.version(), &dir(7)).is_empty());
    assert!(cache.show(7, Some((5, b"old"))).is_some());
    let (old, new): (FullName, FullName) = ((5, (*b"old").into()), (5, (*b"new").into()));
    cache.lock().moves(old.clone(), new.clone());
    recall(&cache, &[7]);
    let to_forget = cache.lock().take_to_forget();
    assert_eq!(
        (to_forget.inodes, to_forget.names),
        (vec![7], vec![]),
        "the kernel has the directory locked"
    );
    let names = cache.lock().moved(&old, &new, Some(Default::default()));
    assert_eq!(names, [old, new], "whichever it has now");
}

/// What is cached of the contents of inode 7.
fn contents_of(cache: &Cache, offset: u64) -> Option<Vec<u8>> {
    let mut out = [0; 100];
    cache.read(7, offset, &mut out, false).map(|len| out[..len].to_vec())
}

#[test]
fn contents_are_cached_only_of_leased_unchanged_files() {
    let (cache, hands) = cache();
    let write = Op::Write { fh: 1, offset: 0, data: vec![1], append: false, kill_suidgid: false };
    let file = |_| Some(7);
    assert!(cache.before_reading(7).is_none(), "there is no lease");
    cache.learn_attr(cache.version(), &attr(7, 5));
    let (size, before) = cache.before_reading(7).unwrap();
    cache.learn_contents(before, 7, b"inod");
    assert_eq!((size, contents_of(&cache, 0)), (5, None), "it is not the whole file");
    cache.learn_contents(before, 7, b"inode");
    assert_eq!(contents_of(&cache, 0).as_deref(), Some(&b"inode"[..]));
    cache.was_read(7);
    assert_eq!(
        contents_of(&cache, 3).as_deref(),
        Some(&b"de"[..]),
        "only the access time has moved"
    );
    recall(&cache, &[7]);
    assert_eq!(contents_of(&cache, 0), None);
    cache.lock().given_back();
    cache.learn_attr(cache.version(), &attr(7, 5));
    cache.learn_contents(before, 7, b"older");
    assert_eq!(contents_of(&cache, 0), None, "the lease is another one");
    let (_, before) = cache.before_reading(7).unwrap();
    cache.learn_contents(before, 7, b"inode");
    let effect = begin(&cache, &write, file);
    assert!(contents_of(&cache, 0).is_none() && cache.before_reading(7).is_none());
    drop(effect);
    cache.learn_attr(cache.version(), &attr(7, 5));
    cache.learn_contents(before, 7, b"inode");
    assert_eq!(contents_of(&cache, 0), None, "it was changed here since that was asked for");
    let (_, before) = cache.before_reading(7).unwrap();
    cache.learn_contents(before, 7, b"new 1");
    assert!(contents_of(&cache, 0).is_some());
    hands.0.lock().monotonic += 6;
    assert!(
        contents_of(&cache, 0).is_none() && cache.before_reading(7).is_none(),
        "the term is over"
    );
}

#[test]
fn a_change_of_an_unknown_inode_invalidates_contents() {
    let (cache, _) = cache();
    cache.learn_attr(cache.version(), &attr(7, 5));
    let (_, before) = cache.before_reading(7).unwrap();
    cache.learn_contents(before, 7, b"inode");
    let blind = begin(&cache, &unlink("unknown"), no_file);
    assert!(blind.as_ref().is_some_and(PendingEffect::is_blind));
    assert_eq!(contents_of(&cache, 0), None);
    cache.learn_contents(before, 7, b"inode");
    assert_eq!(contents_of(&cache, 0), None);
    drop(blind);
    assert_eq!(contents_of(&cache, 0), None);
}

#[test]
fn contents_that_are_read_under_a_write_lease_are_kept_unless_they_are_changed_meanwhile() {
    let (cache, _) = cache();
    cache.learn_attr(cache.version(), &attr(7, 5));
    let (_, earlier) = cache.before_reading(7).unwrap();
    cache.lock().model.enter(attr(7, 5), true, Names::default());
    cache.learn_contents(earlier, 7, b"older");
    assert_eq!(contents_of(&cache, 0), None, "it was asked for under another lease");
    let (_, before) = cache.before_reading(7).unwrap();
    cache.lock().decided(&[7]);
    cache.learn_contents(before, 7, b"older");
    assert_eq!(contents_of(&cache, 0), None, "it was changed here since");
    let (_, before) = cache.before_reading(7).unwrap();
    recall(&cache, &[8]);
    cache.learn_contents(before, 7, b"inode");
    assert_eq!(
        contents_of(&cache, 0).as_deref(),
        Some(&b"inode"[..]),
        "what others want is no matter"
    );
    recall(&cache, &[7]);
    assert_eq!(contents_of(&cache, 0), None);
}

/// The name was that of a listing; meanwhile somebody has moved it, and a walk comes to it where it
/// is now.
#[test]
fn walked_inodes_get_the_names_that_the_server_found() {
    use crate::message::{DirName, Found, Listed, Purpose, Seen};
    let (cache, _hands) = cache();
    assert!(cache.learn_attr(cache.version(), &dir(5)).is_empty());
    let names = [b"x", b"b"].map(|name| DirName { parent: 5, name: name.to_vec() });
    let walk = cache.lock().begin_walk(&names);
    let seen = [7, 8].map(|ino| {
        let known = Known { attr: dir(ino), stamp: 1, capability: 0 };
        Seen { known, writes: false, plain: false }
    });
    let y = crate::message::Name { name: b"y".to_vec(), ino: 7, kind: libc::S_IFDIR, cookie: 1 };
    let listed = [Listed { ino: 8, names: crate::codec::List(vec![y]) }];
    let found = [Found { index: 1, ino: 8 }];
    let (fresh, _) =
        cache.lock().learn_walk((walk, Purpose::List {}), (&seen, &listed, &found), cache.now());
    assert_eq!(fresh, [true, true]);
    assert_eq!(cache.lookup(5, b"x"), None, "nobody has found it there");
    assert_eq!(cache.lookup(5, b"b").flatten().map(|attr| attr.ino), Some(8));
    // Whatever a server says of what was not asked for.
    let walk = cache.lock().begin_walk(&names[..1]);
    let found = [Found { index: 1, ino: 7 }];
    cache.lock().learn_walk((walk, Purpose::List {}), (&seen, &[], &found), cache.now());
    assert_eq!(cache.lookup(5, b"x"), None);
}
