//! A damaged volume is repaired: that ends, a second repair has nothing left to do, what the damage
//! did not touch is still there, byte for byte, and what the repair calls clean is a volume to work
//! on.

use super::walk;
use crate::device::{SimRng, sim_env};
use ferry_check::{Code, FsckOptions, Report, fsck, repair};
use ferry_device::BlockDevice;
use ferry_fs::{Attr, CacheMode, Filesystem, FsOptions, InProcess, Ino, LocalFs, ROOT};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// Bytes of one read.
const READ_BYTES: usize = 256 << 10;

/// What an inode shows: its type, its size, and a checksum of its contents or its target.
pub type Snapshot = BTreeMap<Ino, (u32, u64, u32)>;

/// What can be read of the volume, as far as `known` says that it is there; of a volume that is
/// sound, everything.
pub fn snapshot(device: &Arc<dyn BlockDevice>, known: Option<&Snapshot>) -> Snapshot {
    let options = FsOptions {
        read_only: true,
        cache: CacheMode::Kernel,
        cache_bytes: 4 << 20,
        background: false,
        ..FsOptions::default()
    };
    let mut look = Look {
        me: InProcess::default(),
        known,
        snapshot: Snapshot::new(),
        strange: BTreeSet::new(),
    };
    let Ok(fs) = LocalFs::open(device.clone(), options, sim_env(0).0) else { return look.snapshot };
    look.everything(&fs);
    fs.detach();
    drop(fs.close());
    look.snapshot
}

struct Look<'k> {
    me: InProcess,
    known: Option<&'k Snapshot>,
    snapshot: Snapshot,
    /// Directories that are not known.
    strange: BTreeSet<Ino>,
}

impl Look<'_> {
    fn everything(&mut self, fs: &LocalFs) {
        let mut todo = vec![ROOT];
        while let Some(ino) = todo.pop() {
            let Ok((mut attr, _)) = self.me.call(|cx| fs.getattr(cx, ino, None)) else { continue };
            let kind = attr.mode & libc::S_IFMT;
            if self.snapshot.contains_key(&ino) {
                continue;
            }
            if let Some(known) = self.known {
                // What was not there before the damage, or was longer, is nobody's loss. A file may
                // grow: what stands behind its end is kept, and said.
                let Some(&(_, size, _)) = known.get(&ino).filter(|(k, size, _)| {
                    *k == kind
                        && (*size == attr.size
                            || kind == libc::S_IFDIR
                            || kind == libc::S_IFREG && *size < attr.size)
                }) else {
                    // A directory that came back may hold what was there.
                    if kind == libc::S_IFDIR && self.strange.insert(ino) {
                        self.names(fs, ino, &mut todo);
                    }
                    continue;
                };
                attr.size = size;
            }
            let size = attr.size;
            let sum = match kind {
                libc::S_IFREG => self.contents(fs, &attr),
                libc::S_IFLNK => {
                    self.me.call(|cx| fs.readlink(cx, ino)).ok().map(|to| crc32c::crc32c(&to))
                }
                libc::S_IFDIR => {
                    self.names(fs, ino, &mut todo);
                    Some(0)
                }
                _ => Some(0),
            };
            if let Some(sum) = sum {
                self.snapshot
                    .insert(ino, (kind, if kind == libc::S_IFDIR { 0 } else { size }, sum));
            }
        }
    }

    /// The checksum of a file that can be read to its end.
    fn contents(&self, fs: &LocalFs, attr: &Attr) -> Option<u32> {
        let fh = self.me.call(|cx| fs.open(cx, attr.ino, libc::O_RDONLY, false)).ok()?.fh;
        let mut sum = Some(0);
        let mut out = vec![0; READ_BYTES];
        for at in (0..attr.size).step_by(READ_BYTES) {
            let whole = (attr.size - at).min(READ_BYTES as u64) as usize;
            let read = self.me.call(|cx| fs.read(cx, attr.ino, fh, at, &mut out[..whole])).ok();
            sum = read
                .filter(|len| *len == whole)
                .and_then(|len| Some(crc32c::crc32c_append(sum?, &out[..len])));
        }
        let released = self.me.call(|cx| {
            fs.release(cx, attr.ino, fh);
            Ok(())
        });
        released.ok().and(sum)
    }

    /// Names lead further only where they can be looked up.
    fn names(&self, fs: &LocalFs, dir: Ino, todo: &mut Vec<Ino>) {
        let (mut from, mut more) = (2, true);
        while std::mem::take(&mut more) {
            let mut names = Vec::new();
            let listed = self.me.call(|cx| {
                fs.readdir(cx, dir, 0, from, false, &mut |entry| {
                    names.push(entry.name.clone());
                    (from, more) = (entry.cookie, true);
                    names.len() < 1000
                })
            });
            if listed.is_err() {
                return;
            }
            for name in names {
                let entry = self.me.call(|cx| fs.lookup(cx, dir, &name));
                todo.extend(entry.ok().and_then(|entry| entry.attr).map(|attr| attr.ino));
            }
        }
    }
}

/// What became of a damaged volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// It cannot be repaired, and says why.
    Refused,
    /// Damage is left, and listed.
    Left,
    /// Nothing had to be done.
    Sound,
    /// It was repaired.
    Repaired,
}

fn all() -> FsckOptions<'static> {
    FsckOptions { verify_data: true, ..FsckOptions::default() }
}

/// Repairs `device`, damaged from a volume that showed `sound`.
pub fn run(
    device: &Arc<dyn BlockDevice>,
    sound: &Snapshot,
    rng: &mut SimRng,
    step: &mut dyn FnMut(&str),
) -> Result<Outcome, String> {
    step("look at what is left");
    let mut left = snapshot(device, Some(sound));
    left.retain(|ino, what| sound.get(ino) == Some(what));
    step("repair");
    let Ok(first) = repair(device, all(), &sim_env(rng.next_u64()).0) else {
        return Ok(Outcome::Refused);
    };
    step("repair again");
    let second = repair(device, all(), &sim_env(rng.next_u64()).0);
    settled(&first, &second.map_err(|error| format!("a second repair refuses: {error}"))?)?;
    if !first.clean {
        return Ok(Outcome::Left);
    }
    step("look at what was repaired");
    let now = snapshot(device, Some(sound));
    // Where a block is claimed twice, with its checksum, one claim loses, and nothing says that it
    // is the wrong one. Where a record counts more blocks than there are, holes are taken for what
    // is gone. Where its size is impossible, a hole at the end is gone.
    let costs = [Code::BlockShared, Code::BlockCount, Code::InodeFields];
    left.retain(|ino, _| {
        !first
            .repairs
            .iter()
            .any(|r| costs.contains(&r.code) && r.lost.is_some() && r.location.ino == Some(*ino))
    });
    if let Some((ino, what)) = left.iter().find(|(ino, what)| now.get(ino) != Some(what)) {
        let repairs: Vec<_> = first.repairs.iter().map(|repair| format!("\n{repair}")).collect();
        return Err(format!(
            "inode {ino} was {what:?} before the repair, and is {:?} now:{}",
            now.get(ino),
            repairs.concat()
        ));
    }
    step("work on what was repaired");
    walk::read_write(device, false, rng);
    match fsck(device, all(), &sim_env(rng.next_u64()).0) {
        Ok(report) if report.clean => {
            Ok(if first.repaired > 0 { Outcome::Repaired } else { Outcome::Sound })
        }
        Ok(report) => Err(format!("after work on the repaired volume: {:#?}", report.findings)),
        Err(error) => Err(format!("after work on the repaired volume: {error}")),
    }
}

/// Nothing is left to do, and what is left of the damage is what the first repair said.
fn settled(first: &Report, second: &Report) -> Result<(), String> {
    let found =
        |report: &Report| report.findings.iter().map(|f| f.what.clone()).collect::<Vec<_>>();
    if second.repaired == 0 && found(first) == found(second) {
        return Ok(());
    }
    Err(format!(
        "a second repair repairs {:#?} and finds {:#?}; the first left {:#?}",
        second.repairs,
        found(second),
        found(first)
    ))
}
