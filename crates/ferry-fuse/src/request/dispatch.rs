//! Serves one request: decodes it, calls the file system, encodes the answer. The same for every
//! transport.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Instant;

use ferry_device::ReadRing;
use ferry_env::activity::{self, Layer};
use ferry_fs::{
    Answer, Complete, Cx, Errno, FileLock, Filesystem, Host, Ino, Interrupt, Park, RenameFlags,
    Reply, RequestId, Stop, ToForget, ioctl,
};

use crate::abi::{self, InHeader};
use crate::decode::{self, FuseOp, RequestArgs, WriteSource};
use crate::encode::{self, AnswerBody, AnswerForm, DirListing};
use crate::request::chain::{behind, chain};
use crate::request::counters::ThreadCounters;
use crate::request::direct_write::{DirectWriteArgs, DirectWrites};
use crate::request::idle_poll::{IdlePoll, now};
use crate::request::parked::{AnswerPort, ParkTable, RequestParker};
use crate::request::realtime::RealTime;
use crate::request::security_label;
use crate::request::trace::{Answered, Tracer};

/// The answer of an operation that returns nothing but success.
const EMPTY: AnswerBody = AnswerBody::Out(0);
/// Bytes, in whole pages, that one answer to the old form of COPY_FILE_RANGE can count at most.
const COPY_MAX: u64 = 0xffff_f000;

/// Makes the kernel hand over what it alone has.
pub(crate) trait WriteBack: Send + Sync {
    /// Another thread calls `done` when the kernel has written back and dropped its pages of the
    /// files. Calls that wait may be served together.
    fn write_back(&self, files: Vec<Ino>, done: Box<dyn FnOnce() + Send>);
}

/// What the transport is to do after a request was served.
#[derive(Debug)]
pub(crate) enum ServeResult {
    /// Send this body.
    Answer(AnswerBody),
    /// Send this errno.
    Error(Errno),
    /// Send nothing now: the request is parked, or its kind has no answer.
    Nothing,
}

/// Serves the requests of one mount; all of its threads share it.
pub(crate) struct Dispatcher {
    pub(crate) fs: Arc<dyn Filesystem>,
    pub(crate) parked: Arc<ParkTable>,
    pub(crate) idle: Arc<IdlePoll>,
    pub(crate) realtime: Arc<RealTime>,
    pub(crate) tracer: Arc<Tracer>,
    /// `SETXATTR_EXT` was negotiated.
    pub(crate) setxattr_ext: bool,
    /// Directories are opened and closed. If not, the kernel lists them with handle 0: it makes
    /// every change itself, so its cached listings stay valid from one open to the next.
    pub(crate) directory_handles: bool,
    /// Other clients change the file system, too.
    pub(crate) remote: bool,
    pub(crate) direct_writes: Arc<DirectWrites>,
    pub(crate) host: Arc<dyn Host>,
    pub(crate) kernel: Arc<dyn WriteBack>,
}

/// The transport that a request came from.
pub(crate) struct Origin<'a> {
    pub(crate) port: &'a Arc<dyn AnswerPort>,
    pub(crate) slot: u32,
    /// Its number, if it is replayed when this process is killed.
    pub(crate) replayed: Option<RequestId>,
    pub(crate) counters: &'a ThreadCounters,
    /// The thread's ring, if it reads devices.
    pub(crate) reads: Option<&'a dyn ReadRing>,
}

impl Dispatcher {
    /// Serves one request. `out` has room for the data of a READ or READDIR, and always for a small
    /// answer.
    pub(crate) fn serve(
        &self,
        head: &InHeader,
        args: RequestArgs<'_>,
        out: &mut [u8],
        from: &Origin<'_>,
    ) -> ServeResult {
        let begun = now();
        from.counters.request(head.opcode);
        self.idle.request(from.counters);
        let decoded = decode::decode(head, args, self.setxattr_ext);
        let outcome = match decoded {
            Ok(op) => {
                self.tracer.begins(head, &op, begun);
                self.run(head, op, out, from, begun)
            }
            Err(errno) => {
                if errno.0 == libc::EIO {
                    tracing::error!(
                        opcode = head.opcode,
                        len = head.len,
                        "a malformed FUSE request"
                    );
                }
                ServeResult::Error(errno)
            }
        };
        if !abi::has_answer(head.opcode) {
            return ServeResult::Nothing;
        }
        let answered = match &outcome {
            // Who completes it notes its time.
            ServeResult::Nothing => return outcome,
            ServeResult::Error(errno) => {
                from.counters.error(head.opcode);
                Answered::Errno(errno.0)
            }
            ServeResult::Answer(AnswerBody::Out(len)) => Answered::Body(&out[..*len]),
            ServeResult::Answer(AnswerBody::Bytes(_)) => Answered::Body(&[]),
        };
        let took = begun.elapsed();
        from.counters.answered(head.opcode, took);
        self.tracer.ends(head.unique, took, answered);
        outcome
    }

    fn run(
        &self,
        head: &InHeader,
        op: FuseOp<'_>,
        out: &mut [u8],
        from: &Origin<'_>,
        begun: Instant,
    ) -> ServeResult {
        let form = AnswerForm { opcode: head.opcode, size: answer_len_max(&op) };
        let parker = RequestParker {
            table: &self.parked,
            port: from.port,
            unique: head.unique,
            slot: from.slot,
            replayed: from.replayed,
            form,
            pid: head.pid,
            begun,
            reads: from.reads,
            parked: AtomicBool::new(false),
        };
        let answer = {
            let _inside = activity::enter(Layer::FileSystem);
            self.call(head, op, out, &parker)
        };
        let parked = parker.parked.into_inner();
        if parked {
            self.parked.settled(head.unique);
        }
        match answer {
            Ok(body) => {
                assert!(!parked, "a parked request has no answer yet");
                ServeResult::Answer(body)
            }
            Err(Stop::Errno(errno)) if !parked => ServeResult::Error(errno),
            // Parked: the handle answers, also when it was dropped on the way to an error.
            Err(_) => {
                assert!(parked, "an operation that says it parked has parked");
                ServeResult::Nothing
            }
        }
    }

    fn call(
        &self,
        head: &InHeader,
        op: FuseOp<'_>,
        out: &mut [u8],
        parker: &RequestParker<'_>,
    ) -> Answer<AnswerBody> {
        let fs = &*self.fs;
        let ino = head.nodeid;
        let form = parker.form;
        let mut cx = Cx { uid: head.uid, gid: head.gid, pid: head.pid, umask: 0, park: parker };
        let done = |(): ()| Ok(EMPTY);
        match op {
            FuseOp::Lookup { name } => Ok(encode::entry(form, out, &fs.lookup(&cx, ino, name)?)?),
            FuseOp::Forget { count } => {
                fs.forget(ino, count);
                Ok(EMPTY)
            }
            FuseOp::BatchForget { all } => {
                all.iter().for_each(|one| fs.forget(one.nodeid, one.nlookup));
                Ok(EMPTY)
            }
            FuseOp::Getattr { fh } => {
                let (attr, valid) = fs.getattr(&cx, ino, fh)?;
                Ok(encode::attributes(out, &attr, valid)?)
            }
            FuseOp::Statx => {
                let (attr, valid, born) = fs.statx(&cx, ino)?;
                Ok(encode::statx(out, &attr, valid, born)?)
            }
            FuseOp::Setattr { fh, set } => {
                let (attr, valid) = fs.setattr(&cx, ino, fh, &set)?;
                Ok(encode::attributes(out, &attr, valid)?)
            }
            FuseOp::Readlink => Ok(encode::data(form, out, fs.readlink(&cx, ino)?)?),
            FuseOp::Symlink { name, target } => {
                Ok(encode::entry(form, out, &fs.symlink(&cx, ino, name, target)?)?)
            }
            FuseOp::Mknod { name, mode, rdev, umask } => {
                cx.umask = umask;
                Ok(encode::entry(form, out, &fs.mknod(&cx, ino, name, mode, rdev)?)?)
            }
            FuseOp::Mkdir { name, mode, umask } => {
                cx.umask = umask;
                Ok(encode::entry(form, out, &fs.mkdir(&cx, ino, name, mode)?)?)
            }
            FuseOp::Unlink { name } => done(fs.unlink(&cx, ino, name)?),
            FuseOp::Rmdir { name } => done(fs.rmdir(&cx, ino, name)?),
            FuseOp::Rename { name, new_parent, new_name, flags } => {
                done(fs.rename(&cx, ino, name, new_parent, new_name, rename_flags(flags)?)?)
            }
            FuseOp::Link { ino: old, name } => {
                Ok(encode::entry(form, out, &fs.link(&cx, old, ino, name)?)?)
            }
            FuseOp::Statfs => Ok(encode::statfs(out, &fs.statfs(&cx)?)?),
            FuseOp::Create { name, mode, umask, flags } => {
                cx.umask = umask;
                let (entry, opened) = fs.create(&cx, ino, name, mode, flags)?;
                Ok(encode::created(form, out, &entry, opened)?)
            }
            FuseOp::Tmpfile { mode, umask, flags } => {
                cx.umask = umask;
                let (entry, opened) = fs.tmpfile(&cx, ino, mode, flags)?;
                Ok(encode::created(form, out, &entry, opened)?)
            }
            FuseOp::Setxattr { name, value, flags } => {
                done(fs.setxattr(&cx, ino, name, value, flags)?)
            }
            FuseOp::Getxattr { name, .. } => {
                let value = if name == security_label::NAME {
                    security_label::get(fs, &cx, ino)
                } else {
                    fs.getxattr(&cx, ino, name)
                };
                Ok(encode::data(form, out, value?)?)
            }
            FuseOp::Listxattr { .. } => Ok(encode::data(form, out, fs.listxattr(&cx, ino)?)?),
            FuseOp::Removexattr { name } => done(fs.removexattr(&cx, ino, name)?),
            FuseOp::Ioctl { cmd, input, out_max } => {
                let answer = match cmd {
                    ioctl::SYNC => self.sync(&cx, ino),
                    _ => fs.ioctl(&cx, ino, cmd, input, out_max),
                };
                Ok(encode::data(form, out, answer?)?)
            }
            FuseOp::Interrupt { unique } => {
                self.parked.interrupt(unique);
                Ok(EMPTY)
            }
            FuseOp::Destroy | FuseOp::NotifyReply => Ok(EMPTY),
            FuseOp::Unsupported => Err(Errno(libc::ENOSYS).into()),
            _ => self.on_handle(&cx, ino, op, out, form),
        }
    }

    /// Makes everything durable, also what only the kernel has: it writes that back first.
    /// syncfs(2) may start this but, on FUSE, does not wait for it.
    fn sync(&self, cx: &Cx<'_>, ino: u64) -> Answer<Vec<u8>> {
        let open = self.fs.open_for_writing();
        if open.is_empty() {
            return self.fs.ioctl(cx, ino, ioctl::SYNC, &[], 0);
        }
        let fs = Arc::clone(&self.fs);
        let write_back = |done| self.kernel.write_back(open, done);
        behind(cx, write_back, move |cx| fs.ioctl(cx, ino, ioctl::SYNC, &[], 0))
    }

    /// Operations on an open file or directory.
    fn on_handle(
        &self,
        cx: &Cx<'_>,
        ino: u64,
        op: FuseOp<'_>,
        out: &mut [u8],
        form: AnswerForm,
    ) -> Answer<AnswerBody> {
        let fs = &*self.fs;
        let done = |(): ()| Ok(EMPTY);
        match op {
            FuseOp::Open { flags, kill_suidgid } => {
                Ok(encode::opened(out, fs.open(cx, ino, flags, kill_suidgid)?)?)
            }
            FuseOp::Read { fh, offset, size, pages } => {
                let out = limited(out, size);
                let read = if pages {
                    self.direct_writes.reads(ino, offset, out.len() as u64);
                    fs.read_pages(cx, ino, fh, offset, out)
                } else {
                    fs.read(cx, ino, fh, offset, out)
                };
                Ok(AnswerBody::Out(read?))
            }
            op @ FuseOp::Write { .. } => self.write(cx, ino, op, out, form),
            FuseOp::Release { fh, flock_unlock } => {
                self.release(cx, ino, fh, flock_unlock);
                Ok(EMPTY)
            }
            FuseOp::Fsync { fh, data_only } => done(fs.fsync(cx, ino, fh, data_only)?),
            FuseOp::Flush { fh, lock_owner } => done(fs.flush(cx, ino, fh, lock_owner)?),
            FuseOp::Opendir if !self.directory_handles => Err(Errno(libc::ENOSYS).into()),
            FuseOp::Opendir => Ok(encode::opened(out, fs.opendir(cx, ino)?)?),
            FuseOp::Readdir { fh, cookie, size, plus } => {
                let mut list = DirListing::new(limited(out, size), plus);
                fs.readdir(cx, ino, fh, cookie, plus, &mut |entry| list.push(entry))?;
                Ok(AnswerBody::Out(list.used))
            }
            FuseOp::Releasedir { fh } => {
                fs.releasedir(cx, ino, fh);
                Ok(EMPTY)
            }
            FuseOp::Fsyncdir { fh, data_only } => done(fs.fsyncdir(cx, ino, fh, data_only)?),
            FuseOp::Getlk { fh, lock } => Ok(encode::lock(out, &fs.getlk(cx, ino, fh, &lock)?)?),
            FuseOp::Setlk { fh, lock, wait } => done(fs.setlk(cx, ino, fh, &lock, wait)?),
            FuseOp::Fallocate { fh, mode, offset, len } => {
                let change = |cx: &Cx<'_>| fs.fallocate(cx, ino, fh, mode, offset, len);
                let clears_set_id = cx.uid != 0 && fs.loses_privileges(ino);
                done(if clears_set_id { self.clear_set_id(cx, ino, change) } else { change(cx) }?)
            }
            FuseOp::Lseek { fh, offset, whence } => {
                Ok(encode::count(form, out, fs.lseek(cx, ino, fh, offset, whence)?)?)
            }
            FuseOp::CopyFileRange { fh_in, off_in, ino_out, fh_out, off_out, len, wide } => {
                let len = if wide { len } else { len.min(COPY_MAX) };
                let copy = |cx: &Cx<'_>| {
                    fs.copy_file_range(cx, ino, fh_in, off_in, ino_out, fh_out, off_out, len)
                };
                let clears_set_id = cx.uid != 0 && fs.loses_privileges(ino_out);
                let n =
                    if clears_set_id { self.clear_set_id(cx, ino_out, copy) } else { copy(cx) }?;
                Ok(encode::count(form, out, n)?)
            }
            _ => unreachable!("every other operation was served before"),
        }
    }

    fn write(
        &self,
        cx: &Cx<'_>,
        ino: u64,
        op: FuseOp<'_>,
        out: &mut [u8],
        form: AnswerForm,
    ) -> Answer<AnswerBody> {
        let FuseOp::Write { fh, offset, data, append, kill_suidgid, sync, from } = op else {
            unreachable!("only a write comes here");
        };
        let fs = &*self.fs;
        // If this kernel alone changes the file system, it has chosen the offset itself,
        // under the inode's lock; and the requests of one long asynchronous write may
        // arrive in any order. Only with other clients must the file system find the end of
        // the file, and where the kernel takes it for longer than it is.
        let append = append && (self.remote || fs.finds_end(ino));
        let write = |cx: &Cx<'_>| match from {
            WriteSource::Direct => {
                let write = DirectWriteArgs { ino, fh, offset, append, kill_suidgid };
                self.direct_writes.write(cx, write, data)
            }
            WriteSource::WriteBack => {
                let data = self.direct_writes.written_back(ino, offset, data);
                fs.write(cx, ino, fh, offset, &data, append, kill_suidgid)
            }
            WriteSource::Through => fs.write(cx, ino, fh, offset, data, append, kill_suidgid),
        };
        let clears_set_id = kill_suidgid && fs.loses_privileges(ino);
        let write = |cx: &Cx<'_>| {
            if clears_set_id { self.clear_set_id(cx, ino, write) } else { write(cx) }
        };
        let n = if sync {
            let fs = Arc::clone(&self.fs);
            chain(cx, write, move |cx| fs.fsync(cx, ino, fh, false))?
        } else {
            write(cx)?
        };
        Ok(encode::count(form, out, n)?)
    }

    /// Releases a handle, and the `flock` of this owner.
    fn release(&self, cx: &Cx<'_>, ino: u64, fh: u64, flock_unlock: Option<u64>) {
        let fs = &*self.fs;
        if let Some(owner) = flock_unlock {
            let lock = FileLock {
                end: u64::MAX,
                kind: libc::F_UNLCK,
                owner,
                flock: true,
                ..FileLock::default()
            };
            // Whether it succeeds or not, the handle is released, and close(2) has
            // returned.
            let cx = Cx { park: &NoReply, ..*cx };
            let _unlocked = fs.setlk(&cx, ino, fh, &lock, false);
        }
        fs.release(cx, ino, fh);
    }
}

impl Dispatcher {
    /// Makes a change that may clear set-id bits. The kernel does not know that, and would use the
    /// mode that it has cached. So it drops the inode's attributes before the change is answered.
    fn clear_set_id<T: Into<Reply> + Copy>(
        &self,
        cx: &Cx<'_>,
        ino: u64,
        change: impl FnOnce(&Cx<'_>) -> Answer<T>,
    ) -> Answer<T> {
        let host = Arc::clone(&self.host);
        chain(cx, change, move |cx| {
            let parked = cx.park::<()>(None);
            let what = ToForget { inodes: vec![ino], ..ToForget::default() };
            host.forget(what, Box::new(move || parked.complete(Ok(()))));
            Err(Stop::Parked)
        })
    }
}

/// For an operation whose answer nobody waits for: its completion is dropped.
struct NoReply;

impl Park for NoReply {
    fn park(&self, _interrupt: Option<Interrupt>) -> Complete {
        Box::new(drop)
    }

    fn request(&self) -> Option<ferry_fs::RequestId> {
        None
    }
}

/// Bytes of the requester's buffer, if the form of the answer depends on them; else 0.
fn answer_len_max(op: &FuseOp<'_>) -> u32 {
    match *op {
        FuseOp::Read { size, .. }
        | FuseOp::Readdir { size, .. }
        | FuseOp::Getxattr { size, .. }
        | FuseOp::Listxattr { size } => size,
        FuseOp::Ioctl { out_max, .. } => u32::try_from(out_max).unwrap_or(u32::MAX),
        _ => 0,
    }
}

fn limited(out: &mut [u8], size: u32) -> &mut [u8] {
    let len = usize::try_from(size).unwrap_or(usize::MAX).min(out.len());
    &mut out[..len]
}

fn rename_flags(flags: u32) -> Result<RenameFlags, Errno> {
    if flags & !(libc::RENAME_NOREPLACE | libc::RENAME_EXCHANGE | libc::RENAME_WHITEOUT) != 0 {
        return Err(Errno(libc::EINVAL));
    }
    Ok(RenameFlags {
        no_replace: flags & libc::RENAME_NOREPLACE != 0,
        exchange: flags & libc::RENAME_EXCHANGE != 0,
        whiteout: flags & libc::RENAME_WHITEOUT != 0,
    })
}
