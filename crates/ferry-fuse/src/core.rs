//! One request: decode, call the file system, encode. The same for every transport.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use ferry_fs::{Answer, Complete, Cx, Errno, FileLock, Filesystem, Interrupt, Park, RenameFlags, Stop};

use crate::abi::{InHeader, op};
use crate::counters::Counters;
use crate::decode::{self, Args, Op};
use crate::encode::{self, Body, Listing, Want};
use crate::idle::IdlePoll;
use crate::park::{ParkTable, Port, Ticket};
use crate::synced::synced;

/// Success, and nothing more to say.
const EMPTY: Body = Body::Out(0);
/// The most that one answer to the old form of COPY_FILE_RANGE can count, in whole pages.
const COPY_MAX: u64 = 0xffff_f000;

/// What became of a request.
#[derive(Debug)]
pub(crate) enum Outcome {
    /// Answer it with this.
    Answer(Body),
    /// Answer it with this errno.
    Error(Errno),
    /// Nothing to answer now: it is parked, or of a kind that has no answer.
    Nothing,
}

/// What all threads of a mount share.
pub(crate) struct Core {
    pub(crate) fs: Arc<dyn Filesystem>,
    pub(crate) parked: Arc<ParkTable>,
    pub(crate) idle: Arc<IdlePoll>,
    /// `SETXATTR_EXT` was negotiated.
    pub(crate) setxattr_ext: bool,
    /// Others change the file system too.
    pub(crate) remote: bool,
}

/// Where a request came from.
pub(crate) struct Origin<'a> {
    pub(crate) port: &'a Arc<dyn Port>,
    pub(crate) slot: u32,
    pub(crate) counters: &'a Counters,
}

impl Core {
    /// Serves one request. `out` has room for the data of a READ or READDIR, in any case for a small answer.
    pub(crate) fn serve(
        &self,
        head: &InHeader,
        args: Args<'_>,
        out: &mut [u8],
        from: &Origin<'_>,
    ) -> Outcome {
        from.counters.request(head.opcode);
        self.idle.request(from.counters);
        let decoded = decode::decode(head, args, self.setxattr_ext);
        let outcome = match decoded {
            Ok(op) => self.run(head, op, out, from),
            Err(errno) => {
                if errno.0 == libc::EIO {
                    tracing::error!(opcode = head.opcode, len = head.len, "a malformed FUSE request");
                }
                Outcome::Error(errno)
            }
        };
        if matches!(head.opcode, op::FORGET | op::BATCH_FORGET | op::INTERRUPT | op::NOTIFY_REPLY) {
            return Outcome::Nothing;
        }
        if matches!(outcome, Outcome::Error(_)) {
            from.counters.error(head.opcode);
        }
        outcome
    }

    fn run(&self, head: &InHeader, op: Op<'_>, out: &mut [u8], from: &Origin<'_>) -> Outcome {
        let want = Want { opcode: head.opcode, size: wanted(&op) };
        let ticket = Ticket {
            table: &self.parked,
            port: from.port,
            unique: head.unique,
            slot: from.slot,
            want,
            pid: head.pid,
            parked: AtomicBool::new(false),
        };
        let answer = self.call(head, op, out, &ticket);
        let parked = ticket.parked.into_inner();
        if parked {
            self.parked.settled(head.unique);
        }
        match answer {
            Ok(body) => {
                assert!(!parked, "a parked request has no answer yet");
                Outcome::Answer(body)
            }
            Err(Stop::Errno(errno)) if !parked => Outcome::Error(errno),
            // Parked: the handle answers, also when it was dropped on the way to an error.
            Err(_) => {
                assert!(parked, "an operation that says it parked has parked");
                Outcome::Nothing
            }
        }
    }

    fn call(&self, head: &InHeader, op: Op<'_>, out: &mut [u8], ticket: &Ticket<'_>) -> Answer<Body> {
        let fs = &*self.fs;
        let ino = head.nodeid;
        let want = ticket.want;
        let mut cx =
            Cx { uid: head.uid, gid: head.gid, pid: head.pid, umask: 0, promise: None, park: ticket };
        let done = |(): ()| Ok(EMPTY);
        match op {
            Op::Lookup { name } => Ok(encode::entry(want, out, &fs.lookup(&cx, ino, name)?)?),
            Op::Forget { count } => {
                fs.forget(ino, count);
                Ok(EMPTY)
            }
            Op::BatchForget { all } => {
                all.iter().for_each(|one| fs.forget(one.nodeid, one.nlookup));
                Ok(EMPTY)
            }
            Op::Getattr { fh } => {
                let (attr, valid) = fs.getattr(&cx, ino, fh)?;
                Ok(encode::attributes(out, &attr, valid)?)
            }
            Op::Setattr { fh, set } => {
                let (attr, valid) = fs.setattr(&cx, ino, fh, &set)?;
                Ok(encode::attributes(out, &attr, valid)?)
            }
            Op::Readlink => Ok(encode::data(want, out, fs.readlink(&cx, ino)?)?),
            Op::Symlink { name, target } => {
                Ok(encode::entry(want, out, &fs.symlink(&cx, ino, name, target)?)?)
            }
            Op::Mknod { name, mode, rdev, umask } => {
                cx.umask = umask;
                Ok(encode::entry(want, out, &fs.mknod(&cx, ino, name, mode, rdev)?)?)
            }
            Op::Mkdir { name, mode, umask } => {
                cx.umask = umask;
                Ok(encode::entry(want, out, &fs.mkdir(&cx, ino, name, mode)?)?)
            }
            Op::Unlink { name } => done(fs.unlink(&cx, ino, name)?),
            Op::Rmdir { name } => done(fs.rmdir(&cx, ino, name)?),
            Op::Rename { name, new_parent, new_name, flags } => {
                done(fs.rename(&cx, ino, name, new_parent, new_name, rename_flags(flags)?)?)
            }
            Op::Link { ino: old, name } => Ok(encode::entry(want, out, &fs.link(&cx, old, ino, name)?)?),
            Op::Statfs => Ok(encode::statfs(out, &fs.statfs(&cx)?)?),
            Op::Create { name, mode, umask, flags } => {
                cx.umask = umask;
                let (entry, opened) = fs.create(&cx, ino, name, mode, flags)?;
                Ok(encode::created(want, out, &entry, opened)?)
            }
            Op::Tmpfile { mode, umask, flags } => {
                cx.umask = umask;
                let (entry, opened) = fs.tmpfile(&cx, ino, mode, flags)?;
                Ok(encode::created(want, out, &entry, opened)?)
            }
            Op::Setxattr { name, value, flags } => done(fs.setxattr(&cx, ino, name, value, flags)?),
            Op::Getxattr { name, .. } => Ok(encode::data(want, out, fs.getxattr(&cx, ino, name)?)?),
            Op::Listxattr { .. } => Ok(encode::data(want, out, fs.listxattr(&cx, ino)?)?),
            Op::Removexattr { name } => done(fs.removexattr(&cx, ino, name)?),
            Op::Ioctl { cmd, input, out_max } => {
                Ok(encode::data(want, out, fs.ioctl(&cx, ino, cmd, input, out_max)?)?)
            }
            Op::Interrupt { unique } => {
                self.parked.interrupt(unique);
                Ok(EMPTY)
            }
            Op::Destroy | Op::NotifyReply => Ok(EMPTY),
            Op::Unsupported => Err(Errno(libc::ENOSYS).into()),
            _ => self.on_handle(&cx, ino, op, out, want),
        }
    }

    /// Operations on an open file or directory.
    fn on_handle(&self, cx: &Cx<'_>, ino: u64, op: Op<'_>, out: &mut [u8], want: Want) -> Answer<Body> {
        let fs = &*self.fs;
        let done = |(): ()| Ok(EMPTY);
        match op {
            Op::Open { flags, kill_suidgid } => {
                Ok(encode::opened(out, fs.open(cx, ino, flags, kill_suidgid)?)?)
            }
            Op::Read { fh, offset, size, pages } => {
                let out = limited(out, size);
                let read = if pages {
                    fs.read_pages(cx, ino, fh, offset, out)
                } else {
                    fs.read(cx, ino, fh, offset, out)
                };
                Ok(Body::Out(read?))
            }
            Op::Write { fh, offset, data, append, kill_suidgid, sync } => {
                // Where this kernel alone makes every change, it has chosen the end of the file itself, under its lock; and the
                // requests of one long asynchronous write may come in any order.
                let append = append && self.remote;
                let write = |cx: &Cx<'_>| fs.write(cx, ino, fh, offset, data, append, kill_suidgid);
                let n = if sync {
                    let fs = Arc::clone(&self.fs);
                    synced(cx, write, move |cx| fs.fsync(cx, ino, fh, false))?
                } else {
                    write(cx)?
                };
                Ok(encode::count(want, out, n)?)
            }
            Op::Release { fh, flock_unlock } => {
                if let Some(owner) = flock_unlock {
                    let lock = FileLock {
                        end: u64::MAX,
                        kind: libc::F_UNLCK,
                        owner,
                        flock: true,
                        ..FileLock::default()
                    };
                    // Whatever comes of it, the handle goes, and close(2) has returned long ago.
                    let cx = Cx { park: &Unheard, ..*cx };
                    let _unlocked = fs.setlk(&cx, ino, fh, &lock, false);
                }
                fs.release(cx, ino, fh);
                Ok(EMPTY)
            }
            Op::Fsync { fh, data_only } => done(fs.fsync(cx, ino, fh, data_only)?),
            Op::Flush { fh, lock_owner } => done(fs.flush(cx, ino, fh, lock_owner)?),
            Op::Opendir => Ok(encode::opened(out, fs.opendir(cx, ino)?)?),
            Op::Readdir { fh, cookie, size, plus } => {
                let mut list = Listing::new(limited(out, size), plus);
                fs.readdir(cx, ino, fh, cookie, plus, &mut |entry| list.push(entry))?;
                Ok(Body::Out(list.used))
            }
            Op::Releasedir { fh } => {
                fs.releasedir(cx, ino, fh);
                Ok(EMPTY)
            }
            Op::Fsyncdir { fh, data_only } => done(fs.fsyncdir(cx, ino, fh, data_only)?),
            Op::Getlk { fh, lock } => Ok(encode::lock(out, &fs.getlk(cx, ino, fh, &lock)?)?),
            Op::Setlk { fh, lock, wait } => done(fs.setlk(cx, ino, fh, &lock, wait)?),
            Op::Fallocate { fh, mode, offset, len } => done(fs.fallocate(cx, ino, fh, mode, offset, len)?),
            Op::Lseek { fh, offset, whence } => {
                Ok(encode::count(want, out, fs.lseek(cx, ino, fh, offset, whence)?)?)
            }
            Op::CopyFileRange { fh_in, off_in, ino_out, fh_out, off_out, len, wide } => {
                let len = if wide { len } else { len.min(COPY_MAX) };
                let n = fs.copy_file_range(cx, ino, fh_in, off_in, ino_out, fh_out, off_out, len)?;
                Ok(encode::count(want, out, n)?)
            }
            _ => unreachable!("every other operation was served before"),
        }
    }
}

/// For what nobody waits for: parked, it is answered to nobody.
struct Unheard;

impl Park for Unheard {
    fn park(&self, _interrupt: Option<Interrupt>) -> Complete {
        Box::new(drop)
    }
}

/// The requester's buffer, where the form of the answer depends on it.
fn wanted(op: &Op<'_>) -> u32 {
    match *op {
        Op::Read { size, .. }
        | Op::Readdir { size, .. }
        | Op::Getxattr { size, .. }
        | Op::Listxattr { size } => size,
        Op::Ioctl { out_max, .. } => u32::try_from(out_max).unwrap_or(u32::MAX),
        _ => 0,
    }
}

fn limited(out: &mut [u8], size: u32) -> &mut [u8] {
    let len = usize::try_from(size).unwrap_or(usize::MAX).min(out.len());
    &mut out[..len]
}

fn rename_flags(flags: u32) -> Result<RenameFlags, Errno> {
    if flags & !(libc::RENAME_NOREPLACE | libc::RENAME_EXCHANGE) != 0 {
        return Err(Errno(libc::EINVAL));
    }
    Ok(RenameFlags {
        no_replace: flags & libc::RENAME_NOREPLACE != 0,
        exchange: flags & libc::RENAME_EXCHANGE != 0,
    })
}
