//! After a crash at any time, a session's last-applied sequence number and its directory agree: the
//! changes up to that number are there, and no others. No inode number that was reserved before the
//! crash is reserved again.
#![expect(clippy::disallowed_methods, reason = "tests may unwrap")]

mod grow_support;

use ferry_device::BlockDevice;
use ferry_env::planted::{Bug, plant};
use ferry_fs::volume::LOG_MIN;
use ferry_fs::{
    Cx, EarlyAck, Filesystem, InProcess, Ino, LocalFs, ROOT, RenameFlags, SessionSeq, SessionStore,
    SetAttr, Timestamp,
};
use ferry_sim::device::{SimDevice, SimRng};
use grow_support::{ME, assert_clean, format, open, sync};
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

const SESSIONS: [u128; 2] = [5, u128::MAX];
const CHANGES: u64 = 1000;

/// What a session has in its directory: the inode and the mode of each name.
type Names = BTreeMap<String, (Ino, u32)>;

/// Blocks of each session's file that are written.
const BLOCKS: u64 = 8;
const BLOCK: usize = 4096;

struct Session {
    id: u128,
    dir: Ino,
    /// Its file, and which change has written each block of it when.
    file: (Ino, u64),
    writes: Vec<(u64, u64)>,
    numbers: Range<Ino>,
    seq: u64,
    /// After each change.
    states: Vec<Names>,
}

impl Session {
    fn ack(&self, ino: Option<Ino>) -> EarlyAck {
        let seq = Some(SessionSeq { session: self.id, seq: self.seq });
        EarlyAck { at: Timestamp::new(self.seq as i64, 5), ino, seq, reservation: None }
    }

    /// Writes the number of the change into a block. That leaves no mark.
    fn write(&mut self, fs: &LocalFs, rng: &mut SimRng) {
        self.seq += 1;
        let block = rng.index(BLOCKS as usize) as u64;
        let contents = self.seq.to_le_bytes().repeat(BLOCK / 8);
        let caller = InProcess { ack: Some(self.ack(None)), ..ME };
        let (ino, fh) = self.file;
        caller
            .call(|cx| fs.write(cx, ino, fh, block * BLOCK as u64, &contents, false, false))
            .unwrap();
        self.writes.push((self.seq, block));
        self.states.push(self.states.last().unwrap().clone());
    }

    /// Which change has written each block last, of those that are there.
    fn written(&self, fs: &LocalFs) -> Vec<u64> {
        let fh = ME.call(|cx| fs.open(cx, self.file.0, libc::O_RDONLY, false)).unwrap().fh;
        let mut contents = vec![0; BLOCKS as usize * BLOCK];
        ME.call(|cx| fs.read(cx, self.file.0, fh, 0, &mut contents)).unwrap();
        ME.call(|cx| {
            fs.release(cx, self.file.0, fh);
            Ok(())
        })
        .unwrap();
        contents
            .chunks(BLOCK)
            .map(|block| u64::from_le_bytes(block[..8].try_into().unwrap()))
            .collect()
    }

    /// Makes the next change.
    fn change(&mut self, fs: &LocalFs, rng: &mut SimRng) {
        self.seq += 1;
        let mut names = self.states.last().unwrap().clone();
        let some = |names: &Names, rng: &mut SimRng| {
            names.keys().nth(rng.index(names.len())).cloned().unwrap()
        };
        let call = |ack, act: &dyn Fn(&Cx<'_>) -> ferry_fs::Answer<()>| {
            InProcess { ack: Some(ack), ..ME }.call(|cx| act(cx)).unwrap();
        };
        match rng.index(6) {
            0 if names.len() > 3 => {
                let (old, new) = (some(&names, rng), some(&names, rng));
                let (a, b) = (old.as_bytes(), new.as_bytes());
                call(self.ack(None), &|cx| {
                    fs.rename(cx, self.dir, a, self.dir, b, RenameFlags::default())
                });
                if old != new {
                    let moved = names.remove(&old).unwrap();
                    names.insert(new, moved);
                }
            }
            1 if names.len() > 3 => {
                let name = some(&names, rng);
                call(self.ack(None), &|cx| fs.unlink(cx, self.dir, name.as_bytes()));
                names.remove(&name);
            }
            2 if names.len() > 3 => {
                let name = some(&names, rng);
                let (ino, _) = names[&name];
                let mode = 0o600 + (self.seq as u32 & 0o77);
                let set = SetAttr { mode: Some(mode), ..SetAttr::default() };
                call(self.ack(None), &|cx| fs.setattr(cx, ino, None, &set).map(drop));
                names.insert(name, (ino, mode));
            }
            _ => {
                let ino = self.numbers.next().unwrap();
                let name = format!("made by {}", self.seq);
                call(self.ack(Some(ino)), &|cx| {
                    let made = fs.mknod(cx, self.dir, name.as_bytes(), libc::S_IFREG | 0o644, 0)?;
                    assert_eq!(made.attr.unwrap().ino, ino);
                    fs.forget(ino, 1);
                    Ok(())
                });
                names.insert(name, (ino, 0o644));
            }
        }
        self.states.push(names);
    }
}

fn listed(fs: &LocalFs, dir: Ino) -> Names {
    let mut names = Names::new();
    ME.call(|cx| {
        fs.readdir(cx, dir, 0, 2, true, &mut |entry| {
            let attr = entry.entry.unwrap().attr.unwrap();
            names.insert(
                String::from_utf8(entry.name.to_vec()).unwrap(),
                (attr.ino, attr.mode & 0o7777),
            );
            true
        })
    })
    .unwrap();
    names.values().for_each(|(ino, _)| fs.forget(*ino, 1));
    names
}

fn as_device(device: &Arc<SimDevice>) -> Arc<dyn BlockDevice> {
    device.clone()
}

#[test]
fn a_crash_leaves_both_a_change_and_its_number_or_neither() {
    let _no_bug = plant(Bug::None);
    crash_everywhere();
}

#[test]
fn each_planted_bug_is_found() {
    for bug in [Bug::EarlyLastApplied, Bug::EarlyWatermark, Bug::UnraisedLimit] {
        let _planted = plant(bug);
        assert!(std::panic::catch_unwind(crash_everywhere).is_err(), "{bug:?} is not found");
    }
}

fn crash_everywhere() {
    let device = Arc::new(SimDevice::new(64 << 20));
    format(&as_device(&device), LOG_MIN);
    let fs = open(device.clone(), false);
    let mut rng = SimRng::new(11);
    let mut sessions = SESSIONS.map(|id| {
        let made = ME.call(|cx| fs.mkdir(cx, ROOT, format!("{id:x}").as_bytes(), 0o755)).unwrap();
        let numbers = fs.reserve_numbers(CHANGES as u32).unwrap();
        let name = format!("written by {id:x}");
        let flags = libc::O_RDWR | libc::O_CREAT;
        let (file, opened) =
            ME.call(|cx| fs.create(cx, ROOT, name.as_bytes(), 0o644, flags)).unwrap();
        let file = (file.attr.unwrap().ino, opened.fh);
        let dir = made.attr.unwrap().ino;
        fs.add_session(id).unwrap();
        Session { id, dir, file, writes: Vec::new(), numbers, seq: 0, states: vec![Names::new()] }
    });
    sync(&fs);
    device.restart_trace();
    // What was handed out so far, and when.
    let mut handed = vec![(0, sessions[1].numbers.end)];
    // Changes that were made durable, of each session, and when.
    let mut durable = vec![(0, [0, 0])];
    for n in 0..2 * CHANGES {
        let session = &mut sessions[rng.index(2)];
        if rng.index(3) == 0 {
            session.write(&fs, &mut rng)
        } else {
            session.change(&fs, &mut rng)
        }
        if n % 97 == 0 {
            // More than the limit runs ahead, with no change between that would raise it.
            for _ in 0..10 {
                let range = fs.reserve_numbers(250_000).unwrap();
                handed.push((device.trace_len(), range.end));
            }
        }
        if n % 60 == 0 {
            fs.sync_sessions(
                &[0, 1].map(|n| SessionSeq { session: sessions[n].id, seq: sessions[n].seq }),
            )
            .unwrap();
            durable.push((device.trace_len(), [sessions[0].seq, sessions[1].seq]));
        }
    }
    let end = device.trace_len();
    let mut points = device.flush_points();
    points.extend((0..60).map(|_| rng.index(end + 1)));
    points.extend(handed.iter().map(|(at, _)| *at));
    let mut met = [0; 2];
    for point in points {
        let image = Arc::new(device.crash_image(point, &mut rng));
        assert_clean(&as_device(&image));
        let fs = open(image.clone(), false);
        let synced = durable.iter().rev().find(|(at, _)| *at <= point).unwrap().1;
        for (n, session) in sessions.iter().enumerate() {
            let applied = fs.last_applied(session.id).unwrap().unwrap_or(0);
            let said = fs.durable_watermark(session.id).unwrap();
            assert!((synced[n]..=session.seq).contains(&said), "{said} after a crash at {point}");
            for (block, found) in (0..).zip(session.written(&fs)) {
                let newest =
                    session.writes.iter().rev().find(|(seq, of)| *of == block && *seq <= said);
                let least = newest.map_or(0, |(seq, _)| *seq);
                assert!(
                    found >= least,
                    "{found} for {least} in block {block} after a crash at {point}"
                );
            }
            let names = session
                .states
                .iter()
                .rposition(|state| *state == listed(&fs, session.dir))
                .unwrap();
            assert!(names as u64 >= said, "what is durable is there after a crash at {point}");
            assert!(applied <= session.seq, "{applied} after a crash at {point}");
            assert_eq!(
                listed(&fs, session.dir),
                session.states[applied as usize],
                "a crash at {point}"
            );
            met[usize::from(applied > synced[n])] += 1;
        }
        let limit = handed.iter().rev().find(|(at, _)| *at <= point).unwrap().1;
        let again = fs.reserve_numbers(1000).unwrap();
        assert!(again.start >= limit, "{again:?} after a crash at {point}, {limit} was next");
        let made = ME.call(|cx| fs.mkdir(cx, ROOT, b"new", 0o755)).unwrap().attr.unwrap();
        assert!(made.ino >= limit && !again.contains(&made.ino));
        assert!(!fs.was_handed_over());
        fs.close().unwrap();
        drop(fs);
        assert_clean(&as_device(&image));
    }
    assert!(met[0] > 10 && met[1] > 10, "crashes right behind a sync and in between: {met:?}");
}

/// If a server takes over and crashes, whatever it did, the next one must not believe that the
/// volume was handed over to it.
#[test]
fn a_volume_counts_as_handed_over_only_until_its_next_mount() {
    let _no_bug = plant(Bug::None);
    let device = Arc::new(SimDevice::new(64 << 20));
    format(&as_device(&device), LOG_MIN);
    let fs = open(device.clone(), false);
    device.restart_trace();
    let (mut rng, mut met) = (SimRng::new(3), [0; 2]);
    fs.hand_over().unwrap();
    let handed = device.trace_len();
    fs.close().unwrap();
    drop(fs);
    let closed = device.trace_len();
    for point in 0..=closed {
        let fs = open(Arc::new(device.crash_image(point, &mut rng)), false);
        assert!(fs.was_handed_over() || point < handed, "a crash at {point}");
        met[usize::from(fs.was_handed_over())] += 1;
    }
    assert!(met[0] > 0 && met[1] > 0, "{met:?}");
    device.restart_trace();
    let fs = open(device.clone(), false);
    assert!(fs.was_handed_over());
    let opened = device.trace_len();
    for n in 0..20 {
        ME.call(|cx| fs.mkdir(cx, ROOT, format!("{n}").as_bytes(), 0o755)).unwrap();
    }
    sync(&fs);
    for point in opened..=device.trace_len() {
        let fs = open(Arc::new(device.crash_image(point, &mut rng)), false);
        assert!(!fs.was_handed_over(), "a crash at {point}");
    }
}

/// A server that has revoked a session lets other clients change what that session had. So no crash
/// brings the record back, even if another call had removed it just before.
#[test]
fn a_revoked_session_is_not_recorded_after_any_crash() {
    let _no_bug = plant(Bug::None);
    let device = Arc::new(SimDevice::new(64 << 20));
    format(&as_device(&device), LOG_MIN);
    let fs = open(device.clone(), false);
    let many: Vec<u128> = (1..=200).collect();
    many.iter().for_each(|session| fs.add_session(*session).unwrap());
    device.restart_trace();
    fs.remove_session(7);
    let removed = device.trace_len();
    fs.revoke_sessions(&[7]);
    let seven = device.trace_len();
    fs.revoke_sessions(&many);
    fs.revoke_sessions(&[]);
    let (all, mut rng) = (device.trace_len(), SimRng::new(4));
    let recorded = |point, rng: &mut SimRng| {
        open(Arc::new(device.crash_image(point, rng)), false).sessions().unwrap()
    };
    assert!(recorded(removed, &mut rng).contains(&7), "it is durable later");
    for point in seven..=all {
        assert!(!recorded(point, &mut rng).contains(&7), "a crash at {point}");
    }
    for _ in 0..10 {
        assert!(recorded(all, &mut rng).is_empty());
    }
}
