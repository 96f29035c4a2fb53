//! Changes that were answered before they came: times, numbers, marks and space as they were
//! ack.

use crate::keys::INO_END;
use crate::requests::session_records::Given;
use crate::requests::tests::*;

const SESSION: u128 = 7 << 100;

fn at(secs: i64) -> Timestamp {
    Timestamp::new(secs, 123_456_789)
}

fn ack_at(secs: i64) -> EarlyAck {
    EarlyAck { at: at(secs), ino: None, seq: None, reservation: None }
}

impl World {
    /// The same world, for who was ack this.
    fn with_ack<T>(&mut self, ack: EarlyAck, act: impl FnOnce(&Self) -> T) -> T {
        self.me.ack = Some(ack);
        let result = act(self);
        self.me.ack = None;
        result
    }

    fn times(&self, ino: Ino) -> (Timestamp, Timestamp) {
        let attr = self.attr(ino);
        (attr.mtime, attr.ctime)
    }
}

#[test]
fn an_early_acknowledged_change_keeps_its_time() {
    let mut world = World::new();
    let dir = world.with_ack(ack_at(1), |w| w.mkdir(ROOT, "dir").unwrap());
    assert_eq!((world.times(ROOT), world.times(dir)), ((at(1), at(1)), (at(1), at(1))));
    assert_eq!(world.attr(dir).atime, at(1));
    let (file, fh) = world.with_ack(ack_at(2), |w| w.create(dir, "file").unwrap());
    assert_eq!((world.times(dir), world.times(file)), ((at(2), at(2)), (at(2), at(2))));
    // The first write lets it grow, the others share the lock with everybody; less than a
    // millisecond is between two of them.
    for nanos in [0, 1, 999, 5] {
        let exactly = Timestamp(at(3).0 + nanos);
        let ack = EarlyAck { at: exactly, ..ack_at(3) };
        world.with_ack(ack, |w| w.write(file, fh, 0, &[7; 9000]).unwrap());
        assert_eq!(world.times(file), (exactly, exactly));
    }
    for before_the_epoch in [-5, 0] {
        let exactly = Timestamp(before_the_epoch);
        world.with_ack(EarlyAck { at: exactly, ..ack_at(3) }, |w| {
            w.write(file, fh, 0, &[7; 10]).unwrap()
        });
        assert_eq!(world.times(file), (exactly, exactly));
    }
    world.with_ack(ack_at(4), |w| w.link(file, ROOT, "other").unwrap());
    assert_eq!((world.times(ROOT), world.times(file).1), ((at(4), at(4)), at(4)));
    world.with_ack(ack_at(5), |w| w.rename((ROOT, "other"), (dir, "moved")).unwrap());
    assert_eq!(
        (world.times(ROOT), world.times(dir), world.times(file).1),
        ((at(5), at(5)), (at(5), at(5)), at(5))
    );
    world.with_ack(ack_at(6), |w| w.unlink(dir, "moved").unwrap());
    assert_eq!((world.times(dir), world.times(file).1), ((at(6), at(6)), at(6)));
    for (secs, size) in [(7, 100_000), (8, 10)] {
        let set = SetAttr { size: Some(size), ..SetAttr::default() };
        world.with_ack(ack_at(secs), |w| w.set(file, set).unwrap());
        assert_eq!(world.times(file), (at(secs), at(secs)));
    }
    let now = SetAttr { mode: Some(0o600), mtime: Some(SetTime::Now), ..SetAttr::default() };
    world.with_ack(ack_at(9), |w| w.set(file, now).unwrap());
    assert_eq!(world.times(file), (at(9), at(9)));
    world.with_ack(ack_at(10), |w| w.setxattr(file, "user.a", b"1").unwrap());
    assert_eq!(world.times(file), (at(9), at(10)));
    let link = world.with_ack(ack_at(11), |w| w.symlink(dir, "link", "target").unwrap());
    assert_eq!((world.times(dir), world.times(link)), ((at(11), at(11)), (at(11), at(11))));
    world.with_ack(ack_at(12), |w| w.unlink(dir, "file").unwrap());
    world.with_ack(ack_at(13), |w| w.unlink(dir, "link").unwrap());
    world.with_ack(ack_at(14), |w| w.rmdir(ROOT, "dir").unwrap());
    assert_eq!(world.times(ROOT), (at(14), at(14)));
    world.release(file, fh);
    world.check();
}

#[test]
fn a_number_is_used_once_and_by_nobody_else() {
    let mut world = World::new();
    let with = |ino| EarlyAck { ino: Some(ino), ..ack_at(1) };
    let numbers = world.fs.reserve_numbers(3).unwrap();
    assert_eq!(numbers.clone().count(), 3);
    let other = world.file(ROOT, "other").unwrap();
    assert!(!numbers.contains(&other), "they were reserved");
    let (first, last) = (numbers.start, numbers.end - 1);
    assert_eq!(world.with_ack(with(last), |w| w.file(ROOT, "last")), Ok(last));
    assert_eq!(world.with_ack(with(first), |w| w.mkdir(ROOT, "first")), Ok(first));
    for (ino, what) in [
        (last, "used"),
        (first, "used"),
        (other, "given to somebody else"),
        (ROOT, "the root's"),
        (0, "none"),
        (other + 1, "not reserved"),
        (1 << 50, "not reserved"),
        (INO_END, "none"),
        (Ino::MAX, "none"),
    ] {
        let made = world.with_ack(with(ino), |w| w.mkdir(ROOT, "second"));
        assert_eq!(code(made), libc::EEXIST, "{ino} is {what}");
        assert!(!world.exists(ROOT, "second"));
    }
    // Who was told that the name is new is not given what is there.
    let taken = world.with_ack(with(first + 1), |w| w.create(ROOT, "other"));
    assert_eq!(code(taken), libc::EEXIST);
    assert_eq!(world.with_ack(with(first + 1), |w| w.create(ROOT, "new")).unwrap().0, first + 1);
    world.check();
}

#[test]
fn numbers_are_never_handed_out_twice_whatever_was_used_of_them() {
    let mut world = World::new();
    let mut seen = BTreeMap::new();
    let note = |range: std::ops::Range<Ino>, seen: &mut BTreeMap<Ino, Ino>| {
        let before = seen.range(..range.end).next_back().map_or(0, |(_, end)| *end);
        assert!(before <= range.start, "{range:?} was handed out");
        seen.insert(range.start, range.end);
    };
    for round in 0..3 {
        // More than the limit runs ahead: it is raised on the way.
        for _ in 0..40 {
            let range = world.fs.reserve_numbers(u32::MAX).unwrap();
            assert_eq!(range.clone().count(), 1 << 16);
            note(range, &mut seen);
            let made = world.file(ROOT, &format!("{round} {}", seen.len())).unwrap();
            note(made..made + 1, &mut seen);
        }
        world.reopen();
    }
    // A number that an earlier mount reserved may still be used, once.
    let (&old, _) = seen.iter().find(|(start, end)| **end > **start + 1).unwrap();
    let ack = EarlyAck { ino: Some(old + 5), ..ack_at(1) };
    assert_eq!(world.with_ack(ack, |w| w.file(ROOT, "late")), Ok(old + 5));
    world.unlink(ROOT, "late").unwrap();
    assert_eq!(code(world.with_ack(ack, |w| w.file(ROOT, "late"))), libc::EEXIST);
    // But not one that it gave to somebody.
    let made = world.ino(ROOT, "1 81");
    let ack = EarlyAck { ino: Some(made), ..ack_at(1) };
    assert_eq!(code(world.with_ack(ack, |w| w.file(ROOT, "late"))), libc::EEXIST);
    world.check();
}

#[test]
fn the_last_applied_sequence_number_follows_each_change() {
    let mut world = World::new();
    let acked = |session, seq| EarlyAck { seq: Some(SessionSeq { session, seq }), ..ack_at(1) };
    let mark = |world: &World| world.fs.last_applied(SESSION).unwrap();
    assert_eq!(mark(&world), None);
    let (file, fh) = world.with_ack(acked(SESSION, 3), |w| w.create(ROOT, "a").unwrap());
    assert_eq!(mark(&world), Some(3));
    let failed = world.with_ack(acked(SESSION, 4), |w| w.mkdir(ROOT, "a"));
    assert_eq!((code(failed), mark(&world)), (libc::EEXIST, Some(3)));
    world.with_ack(acked(SESSION, 5), |w| w.rename((ROOT, "a"), (ROOT, "b")).unwrap());
    world.with_ack(acked(SESSION + 1, 1), |w| w.link(file, ROOT, "c").unwrap());
    assert_eq!((mark(&world), world.fs.last_applied(SESSION + 1)), (Some(5), Ok(Some(1))));
    // It can be replayed, so it needs none; and it must not say of what came before it that it is
    // durable.
    world.with_ack(acked(SESSION, 6), |w| w.write(file, fh, 0, b"contents").unwrap());
    assert_eq!(mark(&world), Some(5));
    world.with_ack(acked(SESSION, 7), |w| w.unlink(ROOT, "c").unwrap());
    assert_eq!(mark(&world), Some(7));
    let set = SetAttr { mode: Some(0o600), ..SetAttr::default() };
    world.with_ack(acked(SESSION, 8), |w| w.set(file, set).unwrap());
    assert_eq!(mark(&world), Some(8));
    world.with_ack(acked(SESSION, 9), |w| w.setxattr(file, "user.a", b"1").unwrap());
    assert_eq!(mark(&world), Some(9));
    world.release(file, fh);
    world.check();
    world.reopen();
    assert_eq!((mark(&world), world.fs.sessions()), (Some(9), Ok(vec![SESSION, SESSION + 1])));
    world.fs.remove_session(SESSION);
    world.fs.remove_session(SESSION);
    assert_eq!((mark(&world), world.fs.sessions()), (None, Ok(vec![SESSION + 1])));
    world.check();
}

#[test]
fn an_added_session_has_a_record_before_its_first_change() {
    let mut world = World::new();
    world.fs.add_session(SESSION).unwrap();
    assert_eq!(
        (world.fs.last_applied(SESSION), world.fs.sessions()),
        (Ok(Some(0)), Ok(vec![SESSION]))
    );
    let acked = EarlyAck { seq: Some(SessionSeq { session: SESSION, seq: 7 }), ..ack_at(1) };
    world.with_ack(acked, |w| w.mkdir(ROOT, "a").unwrap());
    world.fs.add_session(SESSION).unwrap();
    assert_eq!(world.fs.last_applied(SESSION), Ok(Some(7)), "what it has done counts");
    world.fs.remove_session(SESSION);
    assert_eq!(world.fs.sessions(), Ok(vec![]));
    world.check();
}

#[test]
fn a_sync_stores_the_durable_watermark_of_each_recorded_session() {
    let mut world = World::new();
    let upto = |session, seq| SessionSeq { session, seq };
    world.fs.add_session(SESSION).unwrap();
    world.fs.sync_sessions(&[upto(SESSION, 4), upto(SESSION + 1, 9)]).unwrap();
    assert_eq!(
        (world.fs.durable_watermark(SESSION), world.fs.durable_watermark(SESSION + 1)),
        (Ok(4), Ok(0))
    );
    let many: Vec<SessionSeq> = (1..200).map(|session| upto(session, session as u64)).collect();
    many.iter().for_each(|mark| world.fs.add_session(mark.session).unwrap());
    world.fs.sync_sessions(&many).unwrap();
    world.check();
    world.reopen();
    assert!(many.iter().all(|mark| world.fs.durable_watermark(mark.session) == Ok(mark.seq)));
    many.iter().for_each(|mark| world.fs.remove_session(mark.session));
    assert!(many.iter().all(|mark| world.fs.durable_watermark(mark.session) == Ok(0)));
    world.check();
}

/// A change that takes two transactions is made when the second one is.
#[test]
fn the_sequence_number_joins_the_last_step_of_its_change() {
    let mut world = World::new();
    let file = world.file(ROOT, "program").unwrap();
    world.setxattr(file, "security.capability", b"cap").unwrap();
    let kill = SetAttr { kill_suidgid: true, gid: Some(5), ..SetAttr::default() };
    let before = world.fs.newest.load(std::sync::atomic::Ordering::Relaxed);
    let acked = EarlyAck { seq: Some(SessionSeq { session: SESSION, seq: 1 }), ..ack_at(1) };
    world.with_ack(acked, |w| w.set(file, kill).unwrap());
    assert!(world.fs.newest.load(std::sync::atomic::Ordering::Relaxed) >= before);
    assert_eq!(world.fs.last_applied(SESSION), Ok(Some(1)));
    assert_eq!(code(world.getxattr(file, "security.capability")), libc::ENODATA);
    assert_eq!(world.attr(file).gid, 5);
}

#[test]
fn a_volume_is_handed_over_to_the_next_mount_alone() {
    let mut world = World::new();
    assert!(world.fs.was_handed_over(), "a new volume: no server had it");
    world.file(ROOT, "file").unwrap();
    world.reopen();
    assert!(!world.fs.was_handed_over(), "closed without a word");
    world.fs.hand_over().unwrap();
    assert_eq!(world.fs.sessions(), Ok(vec![]), "no session's");
    world.check();
    world.reopen();
    assert!(world.fs.was_handed_over());
    world.reopen();
    assert!(!world.fs.was_handed_over(), "somebody had it in between");
}

#[test]
fn a_new_timeline_has_no_sessions_no_locks_and_numbers_of_its_own() {
    let mut world = World::new();
    let given = world.file(ROOT, "file").unwrap() + (5 << 20);
    world.fs.add_session(SESSION).unwrap();
    world.fs.sync_sessions(&[SessionSeq { session: SESSION, seq: 7 }]).unwrap();
    world.fs.add_lock_holder(SESSION).unwrap();
    let key = world.fs.superblock().capability_key();
    let mut limit = 0;
    let (below, also) = (Given::Below(given), Given::Also(given + (1 << 40)));
    for given in [below, Given::Below(1), Given::Also(1), also, Given::Also(1)] {
        world.fs.hand_over().unwrap();
        world.fs.close().unwrap();
        LocalFs::begin_timeline(&world.dev, given, &Env::real()).unwrap();
        world.reopen();
        assert_eq!((world.fs.sessions(), world.fs.lock_holders()), (Ok(vec![]), Ok(vec![])));
        assert_eq!(world.fs.durable_watermark(SESSION), Ok(0));
        assert!(!world.fs.was_handed_over() && world.fs.superblock().capability_key() != key);
        let new = world.file(ROOT, &format!("{limit}")).unwrap();
        let least = match given {
            Given::Below(given) => limit.max(given),
            Given::Also(given) => given.max(limit + (1 << 32)),
        };
        // Few are left out.
        assert!((least..least + (1 << 24)).contains(&new), "{new} of {least}, {given:?}");
        limit = new;
    }
}

#[test]
fn lock_holders_are_known_to_the_next_mount_until_they_are_removed() {
    let mut world = World::new();
    assert_eq!(world.fs.lock_holders(), Ok(vec![]));
    for session in [SESSION, 5, 9] {
        world.fs.add_lock_holder(session).unwrap();
        world.fs.add_lock_holder(session).unwrap();
    }
    world.fs.remove_session(5);
    world.reopen();
    world.fs.remove_lock_holders(&[9, SESSION, 77]).unwrap();
    world.reopen();
    assert_eq!(world.fs.lock_holders(), Ok(vec![5]));
    assert_eq!(world.fs.sessions(), Ok(vec![]));
    world.check();
}

#[test]
fn evicted_sessions_are_recorded_until_they_are_forgotten() {
    let mut world = World::new();
    assert_eq!(world.fs.evicted(), Ok(vec![]));
    let marks = [(SESSION, 1), (3, 2), (9, 3)].map(|(session, seq)| SessionSeq { session, seq });
    world.fs.add_session(SESSION).unwrap();
    world.fs.add_session(4).unwrap();
    world.fs.evict(&marks[..2], &[]).unwrap();
    assert_eq!(world.fs.sessions(), Ok(vec![4]), "nobody waits for who was evicted");
    world.fs.evict(&marks[2..], &[3, 77]).unwrap();
    world.reopen();
    assert_eq!(world.fs.evicted(), Ok(vec![marks[0], marks[2]]), "the oldest first");
    world.check();
}

#[test]
fn an_inode_without_attributes_is_plain() {
    let world = World::new();
    let file = world.file(ROOT, "file").unwrap();
    assert_eq!((world.fs.is_plain(ROOT), world.fs.is_plain(file)), (Ok(true), Ok(true)));
    world.setxattr(file, "user.a", b"1").unwrap();
    assert_eq!((world.fs.is_plain(ROOT), world.fs.is_plain(file)), (Ok(true), Ok(false)));
    world.me.call(|cx| world.fs.removexattr(cx, file, b"user.a")).unwrap();
    assert_eq!(world.fs.is_plain(file), Ok(true));
    assert_eq!(world.fs.is_plain(99), Err(Errno(libc::ESTALE)));
}
