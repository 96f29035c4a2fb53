//! From an operation to the file system and back. Everything that a client says is checked here,
//! before the file system sees it.

use std::hash::Hasher;
use std::ops::Range;
use std::sync::Arc;

use ferry_fs::inprocess::FromReply;
use ferry_fs::{
    Answer, Attr, Complete, Cx, DirEntry, EarlyAck, Entry, Errno, FileLock, InProcess, Ino,
    Interrupt, Park, ROOT, Reply, SYMLINK_MAX, SessionStore, Stop, XATTR_SIZE_MAX,
};
use parking_lot::Mutex;
use siphasher::sip128::{Hasher128, SipHasher24};

use super::Core;
use super::keeping::Found;
use super::requests::Asked;
use super::session::{Applied, Open, Session};
use crate::codec::List;
use crate::message::{
    BATCH_MAX, Claim, IO_MAX, Info, Known, LEASED, LISTING_MAX, Made, Makes, Name, Naming, Numbers,
    Op, Outcome, Who, opens_for_writing,
};

/// The largest offset of a file, and of an entry in a directory.
const OFFSET_MAX: u64 = i64::MAX as u64;
/// The permission bits, with set-user-id, set-group-id and sticky.
const PERMISSIONS: u32 = 0o7777;

type Done = Result<Outcome, Errno>;
/// Takes an answer, now or later, and what the client may keep of it.
pub(super) type Told = Box<dyn FnOnce(Outcome, u8) + Send>;

/// Says that a client was given an inode, to a server that has forgotten it; and that it was found
/// in `dir`, which is 0 if it is a directory.
fn ticket(key: &[u8; 16], path: &[u8], ino: Ino, dir: Ino) -> u128 {
    let mut hasher = SipHasher24::new_with_key(key);
    hasher.write(b"ferry ticket\0");
    hasher.write_u64(ino);
    hasher.write_u64(dir);
    hasher.write(path);
    u128::from(dir) << 64 | u128::from(hasher.finish128().h1)
}

/// In which directory an inode was found, if the ticket is good.
fn found_in(key: &[u8; 16], path: &[u8], claim: &Claim) -> Option<Ino> {
    let dir = (claim.ticket >> 64) as Ino;
    (claim.ticket == ticket(key, path, claim.ino, dir)).then_some(dir)
}

/// An operation of one session, on its way.
pub(super) struct Applying<'a> {
    pub(super) core: &'a Arc<Core>,
    pub(super) session: &'a Session,
    pub(super) who: Who,
    /// What the client has shown of it already.
    pub(super) promise: Option<EarlyAck>,
    /// What it will be told when that is made, and keeps.
    pub(super) told: Option<EarlyAck>,
}

impl Core {
    /// An operation of this session.
    pub(super) fn applying<'a>(
        self: &'a Arc<Self>,
        session: &'a Session,
        who: Who,
        promise: Option<EarlyAck>,
    ) -> Applying<'a> {
        Applying { core: self, session, who, promise, told: None }
    }
}

/// Says that numbers were given to a client, to a server that has forgotten it.
fn numbers_ticket(key: &[u8; 16], path: &[u8], numbers: &Range<Ino>) -> u128 {
    let mut hasher = SipHasher24::new_with_key(key);
    hasher.write(b"ferry numbers\0");
    hasher.write_u64(numbers.start);
    hasher.write_u64(numbers.end);
    hasher.write(path);
    hasher.finish128().as_u128()
}

impl Applying<'_> {
    pub(super) fn fs(&self) -> &dyn SessionStore {
        &*self.core.fs
    }

    fn caller(&self) -> InProcess {
        let Who { uid, gid, umask, pid } = self.who;
        InProcess { uid, gid, umask: umask & 0o777, caller: pid, ack: self.promise.or(self.told) }
    }

    pub(super) fn call<T: FromReply>(
        &self,
        request: impl FnOnce(&Cx<'_>) -> Answer<T>,
    ) -> Result<T, Errno> {
        self.caller().call(request)
    }

    pub(super) fn ino(&self, ino: Ino) -> Result<Ino, Errno> {
        self.session.inward(ino).ok_or(Errno(libc::ESTALE))
    }

    fn open(&self, fh: u64) -> Result<Open, Errno> {
        let open = self.session.handle(fh).ok_or(Errno(libc::EBADF))?;
        if open.lost { Err(Errno(libc::EIO)) } else { Ok(open) }
    }

    fn optional(&self, fh: Option<u64>) -> Result<Option<u64>, Errno> {
        let known = fh.filter(|fh| self.session.is_open(*fh));
        known.map(|fh| self.open(fh).map(|open| open.fh)).transpose()
    }

    pub(super) fn attr(&self, attr: Attr) -> Attr {
        Attr { ino: self.session.outward(attr.ino), ..attr }
    }

    /// An entry of `dir` as the client gets it; it then knows the inode.
    pub(super) fn entry(&self, dir: Ino, entry: Entry) -> Outcome {
        let known = entry.attr.map(|attr| {
            let dir = if attr.mode & libc::S_IFMT == libc::S_IFDIR { 0 } else { dir };
            let stamp = self.session.learn(self.fs(), attr.ino, dir);
            let ticket = ticket(&self.core.key, &self.session.path, attr.ino, dir);
            Known { attr: self.attr(attr), stamp, ticket }
        });
        Outcome::Entry { known }
    }

    /// Makes a change whose turn on `inos` has come. It waits for no other client.
    pub(super) fn change(&self, op: Op, inos: &[Ino]) -> Applied {
        let mut op = op;
        let Info { needs_writable, makes, .. } = op.info();
        let writes = matches!(op, Op::Write { .. });
        if self.session.read_only && needs_writable {
            return Applied::failed(Errno(libc::EROFS));
        }
        let taken = self.names_taken(&op);
        let permitted = self
            .stay_inside(&op)
            .and_then(|()| self.permit(&mut op))
            .and_then(|()| self.promised(&op));
        let outcome = match permitted.and_then(|()| self.make(op)) {
            Ok(outcome) => outcome,
            Err(errno) => return Applied::failed(errno),
        };
        self.names_lost(inos, &taken);
        let file = inos.first().filter(|_| writes && self.told.is_some());
        let size = file.and_then(|ino| self.attr_now(*ino).ok()).map(|attr| attr.size);
        let made = match &outcome {
            Outcome::Entry { known: Some(known) } => self.session.inward(known.attr.ino),
            _ => None,
        };
        let made = made.filter(|made| !inos.contains(made));
        let after: Vec<Attr> =
            inos.iter().copied().chain(made).filter_map(|ino| self.leased(ino)).collect();
        let empty = makes == Makes::Directory
            && made.is_some_and(|made| {
                after.iter().any(|attr| attr.ino == made) && self.is_empty(made)
            });
        let made = self.told.map(|told| {
            let touched = inos.iter().map(|ino| self.session.outward(*ino)).collect();
            Made { at: told.at, size: size.unwrap_or(0), touched: List(touched) }
        });
        Applied { outcome, after, empty, made }
    }

    /// What is made under a promise is made under a number that was set aside for this client, and
    /// leased to it before anybody can find it.
    fn promised(&self, op: &Op) -> Result<(), Errno> {
        let Some(promise) = self.promise else { return Ok(()) };
        let makes = op.info().makes.is_inode();
        match promise.ino {
            None if !makes => Ok(()),
            Some(ino) if makes && self.session.provisions.use_number(ino) => {
                if self.core.leases.bear(self.session.number, ino) {
                    Ok(())
                } else {
                    Err(Errno(libc::ENOSPC))
                }
            }
            _ => Err(Errno(libc::EINVAL)),
        }
    }

    /// Makes a change again that was promised to a server that crashed: nobody else changes
    /// anything meanwhile, or sees it.
    pub(super) fn redo(&self, op: Op) -> Applied {
        let mut op = op;
        // Whoever may not promise makes again what the server has decided, and may no more than
        // then.
        let permitted = self.core.applying(self.session, self.who, None).permit(&mut op);
        let makes = op.info().makes.is_inode();
        let made = match self.promise.and_then(|promise| promise.ino) {
            _ if let Err(errno) = permitted => Err(errno),
            _ if self.session.read_only => Err(Errno(libc::EROFS)),
            Some(ino) if !makes || !self.session.provisions.is_old(ino) => Err(Errno(libc::EINVAL)),
            None if makes => Err(Errno(libc::EINVAL)),
            _ => self.stay_inside(&op).and_then(|()| self.make_again(op)),
        };
        let outcome = made.unwrap_or_else(|Errno(errno)| Outcome::Failed { errno });
        Applied::alone(outcome)
    }

    /// What is there already, for no mark says so of changes that came before the session had one,
    /// is made.
    fn make_again(&self, op: Op) -> Done {
        let info = op.info();
        let ino = match &op {
            Op::Link { ino, .. } => self.ino(*ino).ok(),
            _ => self.promise.and_then(|promise| promise.ino),
        };
        let named = info.names().next().filter(|_| info.naming == Naming::Adds);
        let named = named.map(|(parent, name)| (parent, name.to_vec(), ino));
        let removes = matches!(info.naming, Naming::Removes | Naming::RemovesDirectory);
        match (self.make_any(op), named) {
            (Err(Errno(libc::EEXIST)), Some((parent, name, ino))) => {
                let parent = self.ino(parent)?;
                let found = self.call(|cx| self.fs().lookup(cx, parent, &name))?;
                let outcome = self.entry(parent, found);
                match &outcome {
                    Outcome::Entry { known: Some(known) }
                        if self.session.inward(known.attr.ino) == ino =>
                    {
                        Ok(outcome)
                    }
                    _ => Err(Errno(libc::EEXIST)),
                }
            }
            (Err(Errno(libc::ENOENT)), _) if removes => Ok(Outcome::Done {}),
            (made, _) => made,
        }
    }

    fn make(&self, op: Op) -> Done {
        let promised = self.promise.and_then(|promise| promise.ino);
        let made = self.make_any(op);
        if let (Some(ino), Err(_)) = (promised, &made) {
            self.core.leases.unbear(self.session.number, ino);
        }
        made
    }

    fn make_any(&self, op: Op) -> Done {
        let fs = self.fs();
        match op {
            Op::Setattr { ino, fh, mut set } => {
                set.mode = set.mode.map(|mode| mode & PERMISSIONS);
                if set.size.is_some_and(|size| size > OFFSET_MAX) {
                    return Err(Errno(libc::EFBIG));
                }
                let (ino, fh) = (self.ino(ino)?, self.optional(fh)?);
                let (attr, _) = self.call(|cx| fs.setattr(cx, ino, fh, &set))?;
                Ok(Outcome::Attributes { attr: self.attr(attr) })
            }
            Op::Mknod { parent, name, mode, rdev } => {
                let parent = self.ino(parent)?;
                let mode = mode & (libc::S_IFMT | PERMISSIONS);
                Ok(self.entry(parent, self.call(|cx| fs.mknod(cx, parent, &name, mode, rdev))?))
            }
            Op::Mkdir { parent, name, mode } => {
                let parent = self.ino(parent)?;
                Ok(self.entry(
                    parent,
                    self.call(|cx| fs.mkdir(cx, parent, &name, mode & PERMISSIONS))?,
                ))
            }
            Op::Symlink { parent, name, target } => {
                if target.is_empty() || target.contains(&0) {
                    return Err(Errno(libc::EINVAL));
                }
                if target.len() > SYMLINK_MAX {
                    return Err(Errno(libc::ENAMETOOLONG));
                }
                let parent = self.ino(parent)?;
                Ok(self.entry(parent, self.call(|cx| fs.symlink(cx, parent, &name, &target))?))
            }
            Op::Link { ino, parent, name } => {
                let (ino, parent) = (self.ino(ino)?, self.ino(parent)?);
                let nameless = self.attr_now(ino)?.nlink == 0;
                let linked = self.call(|cx| fs.link(cx, ino, parent, &name))?;
                let outcome = self.entry(parent, linked);
                if nameless {
                    self.publish(ino)?;
                }
                Ok(outcome)
            }
            Op::Unlink { parent, name } => {
                let parent = self.ino(parent)?;
                self.done(|cx| fs.unlink(cx, parent, &name))
            }
            Op::Rmdir { parent, name } => {
                let parent = self.ino(parent)?;
                self.done(|cx| fs.rmdir(cx, parent, &name))
            }
            Op::Rename { parent, name, new_parent, new_name, flags } => {
                let (parent, new_parent) = (self.ino(parent)?, self.ino(new_parent)?);
                let renamed =
                    self.done(|cx| fs.rename(cx, parent, &name, new_parent, &new_name, flags));
                if parent != new_parent {
                    self.core.moved();
                }
                renamed
            }
            Op::Setxattr { ino, name, value, flags } => {
                if value.len() > XATTR_SIZE_MAX {
                    return Err(Errno(libc::E2BIG));
                }
                let ino = self.ino(ino)?;
                self.done(|cx| fs.setxattr(cx, ino, &name, &value, flags))
            }
            Op::Removexattr { ino, name } => {
                let ino = self.ino(ino)?;
                self.done(|cx| fs.removexattr(cx, ino, &name))
            }
            Op::Unlock { ino, lock } => {
                self.core.locks.give_back(self.session.id, self.ino(ino)?, &lock)?;
                Ok(Outcome::Done {})
            }
            Op::Reclaim { ino, lock } => {
                let ino = self.ino(ino)?;
                let before = self.session.had_locks();
                if before {
                    self.session.enter_locker(fs);
                }
                let _leave = self.session.may_lock(None).ok_or(Errno(libc::EIO))?;
                let reclaimed = self.core.locks.reclaim(self.session.id, before, (ino, &lock));
                // What its client has sent before it hears of that is not made either.
                reclaimed.inspect_err(|_| self.session.lose(ino))?;
                Ok(Outcome::Done {})
            }
            Op::Forget { inodes } => {
                for one in &inodes.0 {
                    self.session.forget(fs, one.ino, one.stamp);
                }
                Ok(Outcome::Done {})
            }
            Op::Claim { inodes } => self.claim(&inodes),
            Op::Numbered { numbers, made } => self.numbered(&numbers, &made),
            Op::Redone {} => self.redone(),
            Op::Spare { bytes, inodes } => {
                self.session.provisions.keep_only(bytes, inodes);
                Ok(Outcome::Done {})
            }
            Op::Nothing {} => Ok(Outcome::Done {}),
            op => self.make_on_file(op),
        }
    }

    /// A file that was made without a name has one: with that it is durable, for nothing of it
    /// outlives a crash before, and nobody could make it again.
    fn publish(&self, ino: Ino) -> Result<(), Errno> {
        match self.session.handle_of(ino) {
            Some(fh) => self.call(|cx| self.fs().fsync(cx, ino, fh, false)),
            None => self.core.sync(),
        }
    }

    /// Changes of open files.
    fn make_on_file(&self, op: Op) -> Done {
        let fs = self.fs();
        match op {
            Op::Open { ino, fh, flags, kill_suidgid } => {
                let ino = self.ino(ino)?;
                if self.session.is_open(fh) {
                    return Err(Errno(libc::EINVAL));
                }
                let opened = self.call(|cx| fs.open(cx, ino, flags, kill_suidgid))?;
                self.enter(fh, opened_as(ino, opened.fh, flags))?;
                Ok(Outcome::Done {})
            }
            Op::Create { parent, name, mode, flags, fh } => {
                let parent = self.ino(parent)?;
                // It was promised that this makes the file.
                let flags = if self.promise.is_some() { flags | libc::O_EXCL } else { flags };
                self.made(parent, fh, flags, |cx| {
                    fs.create(cx, parent, &name, mode & PERMISSIONS | libc::S_IFREG, flags)
                })
            }
            Op::Tmpfile { parent, mode, flags, fh } => {
                let parent = self.ino(parent)?;
                self.made(parent, fh, flags, |cx| {
                    fs.tmpfile(cx, parent, mode & PERMISSIONS | libc::S_IFREG, flags)
                })
            }
            Op::Write { fh, offset, data, append, kill_suidgid } => {
                let open = self.open_for_writing(fh)?;
                within(offset, data.len() as u64)?;
                let count = self.call(|cx| {
                    fs.write(cx, open.ino, open.fh, offset, &data, append, kill_suidgid)
                })?;
                Ok(Outcome::Count { count })
            }
            Op::Release { fh } => {
                if let Some(open) = self.session.release(fh) {
                    self.call(|cx| {
                        fs.release(cx, open.ino, open.fh);
                        Ok(())
                    })?;
                }
                Ok(Outcome::Done {})
            }
            Op::Fallocate { fh, mode, offset, len } => {
                let open = self.open_for_writing(fh)?;
                within(offset, len)?;
                self.done(|cx| fs.fallocate(cx, open.ino, open.fh, mode, offset, len))
            }
            Op::Copy { fh_in, off_in, fh_out, off_out, len } => {
                let (from, to) = (self.open(fh_in)?, self.open_for_writing(fh_out)?);
                within(off_in, len)?;
                within(off_out, len)?;
                let count = self.call(|cx| {
                    fs.copy_file_range(cx, from.ino, from.fh, off_in, to.ino, to.fh, off_out, len)
                })?;
                // Its client does not have what it would have to write again.
                self.done(|cx| fs.fsync(cx, to.ino, to.fh, false))?;
                Ok(Outcome::Count { count })
            }
            _ => Err(Errno(libc::EINVAL)),
        }
    }

    fn done(&self, request: impl FnOnce(&Cx<'_>) -> Answer<()>) -> Done {
        self.call(request).map(|()| Outcome::Done {})
    }

    fn open_for_writing(&self, fh: u64) -> Result<Open, Errno> {
        let open = self.open(fh)?;
        if open.writes { Ok(open) } else { Err(Errno(libc::EBADF)) }
    }

    fn made(
        &self,
        dir: Ino,
        fh: u64,
        flags: i32,
        request: impl FnOnce(&Cx<'_>) -> Answer<(Entry, ferry_fs::Opened)>,
    ) -> Done {
        if self.session.is_open(fh) {
            return Err(Errno(libc::EINVAL));
        }
        let (entry, opened) = self.call(request)?;
        let attr = entry.attr.ok_or(Errno(libc::EIO))?;
        let outcome = self.entry(dir, entry);
        self.enter(fh, opened_as(attr.ino, opened.fh, flags))?;
        Ok(outcome)
    }

    fn enter(&self, fh: u64, open: Open) -> Result<(), Errno> {
        self.session.open(fh, open).inspect_err(|_| {
            let _: Result<(), _> = self.call(|cx| {
                self.fs().release(cx, open.ino, open.fh);
                Ok(())
            });
        })
    }

    /// What the tickets prove is known again; what is not there any more stays unknown.
    fn claim(&self, inodes: &List<Claim>) -> Done {
        if inodes.0.len() > BATCH_MAX {
            return Err(Errno(libc::EINVAL));
        }
        let found_in = |claim: &Claim| {
            let dir =
                found_in(&self.core.key, &self.session.path, claim).ok_or(Errno(libc::EPERM))?;
            Ok((claim.ino, dir))
        };
        let claims = inodes.0.iter().filter(|claim| claim.ino != ROOT);
        let claims = claims.map(found_in).collect::<Result<Vec<(Ino, Ino)>, Errno>>()?;
        let mut found = Vec::with_capacity(claims.len());
        for (ino, dir) in claims {
            if let Ok(Some(attr)) =
                self.call(|cx| self.fs().lookup(cx, ino, b".")).map(|entry| entry.attr)
            {
                self.session.found_in(attr.ino, dir);
                if self.core.is_inside(self.session, attr.ino) {
                    found.push(attr.ino);
                } else {
                    let stamp = self.session.learn(self.fs(), attr.ino, dir);
                    self.session.forget(self.fs(), attr.ino, stamp);
                }
            } else if self.session.is_replaying() {
                self.session.provisions.add_missing(ino);
            }
        }
        // All with one stamp: none with the stamp of an answer to something else that is on its
        // way.
        let now = self.core.env.clock.monotonic();
        Ok(Outcome::Count { count: self.session.learn_again(self.fs(), &found, now) })
    }

    /// These numbers were given to the client before the server crashed. What it has made under
    /// them is its own.
    fn numbered(&self, numbers: &Numbers, made: &List<Ino>) -> Done {
        let range = numbers.first..numbers.first.saturating_add(numbers.count.into());
        if made.0.len() > BATCH_MAX || !self.session.is_replaying() {
            return Err(Errno(libc::EINVAL));
        }
        if numbers.ticket != numbers_ticket(&self.core.key, &self.session.path, &range) {
            return Err(Errno(libc::EPERM));
        }
        if !self.session.provisions.add_old(range.clone()) {
            return Err(Errno(libc::EINVAL));
        }
        let (mut claims, mut newest) = (Vec::new(), 0);
        for ino in made.0.iter().filter(|ino| range.contains(ino)) {
            if let Some(stamp) = self.find_again(*ino, 0) {
                newest = stamp;
                let ticket = ticket(&self.core.key, &self.session.path, *ino, 0);
                claims.push(Claim { ino: *ino, ticket });
            }
        }
        Ok(Outcome::Claimed { claims: List(claims), stamp: newest })
    }

    /// Everything is made again. It is durable before others may change it, and its client knows
    /// that before it says `Settled`: so nothing is made again a second time over what they have
    /// done.
    fn redone(&self) -> Done {
        self.session.replayed();
        match self.core.sync() {
            Ok(()) => Ok(Outcome::Count { count: self.session.durable() }),
            Err(errno) => {
                self.core.disown(self.session);
                Err(errno)
            }
        }
    }

    /// The client knows an inode again that it had found in `dir`, if it is there, within its
    /// walls; gives the stamp.
    fn find_again(&self, ino: Ino, dir: Ino) -> Option<u64> {
        let entry = self.call(|cx| self.fs().lookup(cx, ino, b".")).ok()?;
        let ino = entry.attr?.ino;
        let stamp = self.session.learn(self.fs(), ino, dir);
        if self.core.is_inside(self.session, ino) {
            return Some(stamp);
        }
        self.session.forget(self.fs(), ino, stamp);
        None
    }

    /// Answers a request, now or when what it waits for has come; unless others have promised
    /// something that it would not see.
    pub(super) fn request(&self, (epoch, id): (u64, u64), op: Op, told: Told) -> Asked {
        let mut op = op;
        let reads = self.reads(&op);
        let behind =
            reads.filter(|ino| !self.core.leases.is_readable(self.session.number, &[*ino]));
        let behind = behind.filter(|ino| !self.reads_nothing_promised(&op, *ino));
        if let Some(ino) = behind {
            return Asked::Behind(vec![ino], Box::new(op), told);
        }
        if let Err(Errno(errno)) = self.stay_inside(&op).and_then(|()| self.permit(&mut op)) {
            told(Outcome::Failed { errno }, 0);
            return Asked::Answered;
        }
        if op.info().parks {
            self.request_that_waits((epoch, id), op, told);
            return Asked::Answered;
        }
        let mut shown: Vec<Ino> = reads.into_iter().collect();
        let answer = match op {
            Op::Lookup { parent, name } => match self.look_up(parent, &name) {
                Ok(Found::Behind(inos)) => {
                    return Asked::Behind(inos, Box::new(Op::Lookup { parent, name }), told);
                }
                Ok(Found::Entry(outcome, leased)) => Ok((outcome, leased)),
                Err(errno) => Err(errno),
            },
            Op::Credit { bytes, inodes } => {
                self.credit(epoch, (bytes, inodes)).map(|outcome| (outcome, 0))
            }
            op => self.answer(op),
        };
        let (outcome, leased) =
            answer.unwrap_or_else(|Errno(errno)| (Outcome::Failed { errno }, 0));
        if let Outcome::Entry { known: Some(known) } = &outcome {
            shown.extend(self.session.inward(known.attr.ino));
        }
        self.core.show(self.session.number, &shown, move || told(outcome, leased));
        Asked::Answered
    }

    /// Sets space aside for what the client will promise.
    fn credit(&self, epoch: u64, amount: (u64, u64)) -> Done {
        if !self.session.may_promise() {
            return Err(Errno(libc::EPERM));
        }
        let fs = self.fs();
        self.session.enlist(fs, false)?;
        let totals = self.call(|cx| fs.statfs(cx))?;
        let free = totals.blocks_available * u64::from(totals.block_size);
        let asks = || self.session.is_at(epoch);
        let (bytes, inodes) = self.session.provisions.credit(fs, amount, free, asks);
        Ok(Outcome::Space { bytes, inodes })
    }

    /// An inode is synced: other clients need not take what they have changed of it for lost.
    fn tells_others(&self, ino: Ino, told: Told) -> Told {
        let noted = self.core.note_of(ino, self.session);
        if noted.is_empty() {
            return told;
        }
        Box::new(move |outcome, leased| {
            if !matches!(outcome, Outcome::Failed { .. }) {
                noted.iter().for_each(|(other, seq)| other.was_synced(ino, *seq));
            }
            told(outcome, leased);
        })
    }

    /// Answers a request that waits for nobody; and what may be kept of the answer.
    fn answer(&self, op: Op) -> Result<(Outcome, u8), Errno> {
        match op {
            Op::Getattr { ino } => {
                let ino = self.ino(ino)?;
                let leased =
                    if self.core.leases.grant(self.session.number, ino) { LEASED } else { 0 };
                Ok((Outcome::Attributes { attr: self.attr_now(ino)? }, leased))
            }
            op => self.answer_once(op).map(|outcome| (outcome, 0)),
        }
    }

    /// Answers of which nothing may be kept.
    fn answer_once(&self, op: Op) -> Done {
        let fs = self.fs();
        match op {
            Op::Readlink { ino } => {
                let ino = self.ino(ino)?;
                Ok(Outcome::Data { bytes: self.call(|cx| fs.readlink(cx, ino))? })
            }
            Op::Lseek { fh, offset, whence } => {
                let open = self.open(fh)?;
                // A position behind every end (or before the beginning, which the kernel sends as
                // such) is the file system's to refuse.
                let count = self.call(|cx| fs.lseek(cx, open.ino, open.fh, offset, whence))?;
                Ok(Outcome::Count { count })
            }
            Op::Readdir { ino, cookie } => self.list(self.ino(ino)?, cookie),
            Op::Statfs {} => {
                Ok(Outcome::Totals { totals: self.core.totals(self.call(|cx| fs.statfs(cx))?) })
            }
            Op::Getxattr { ino, name } => {
                let ino = self.ino(ino)?;
                Ok(Outcome::Data { bytes: self.call(|cx| fs.getxattr(cx, ino, &name))? })
            }
            Op::Listxattr { ino } => {
                let ino = self.ino(ino)?;
                Ok(Outcome::Data { bytes: self.call(|cx| fs.listxattr(cx, ino))? })
            }
            Op::Getlk { ino, lock } => {
                let lock = self.core.locks.test(self.session.id, self.ino(ino)?, &lock);
                Ok(Outcome::Blocker { lock })
            }
            Op::Settled {} if !self.session.settle() => Err(Errno(libc::EINVAL)),
            Op::Settled {} => {
                self.core.gate.done(self.session.id);
                Ok(Outcome::Done {})
            }
            Op::Numbers {} if !self.session.may_promise() => Err(Errno(libc::EPERM)),
            Op::Numbers {} => {
                self.session.enlist(fs, false)?;
                let range = self.session.provisions.add_numbers(fs)?;
                let (first, count) = (range.start, (range.end - range.start) as u32);
                let ticket = numbers_ticket(&self.core.key, &self.session.path, &range);
                Ok(Outcome::Numbers { numbers: Numbers { first, count, ticket } })
            }
            _ => Err(Errno(libc::EINVAL)),
        }
    }

    fn request_that_waits(&self, request: (u64, u64), op: Op, told: Told) {
        let fs = self.fs();
        let failed = |errno: Errno| Outcome::Failed { errno: errno.0 };
        match op {
            Op::Read { fh, offset, size } => match (self.open(fh), within(offset, u64::from(size)))
            {
                (Ok(open), Ok(())) if size as usize <= IO_MAX => {
                    let (core, number) = (Arc::clone(self.core), self.session.number);
                    let told: Told = Box::new(move |outcome, leased| {
                        core.show(number, &[open.ino], move || told(outcome, leased));
                    });
                    let mut out = vec![0; size as usize];
                    self.later(told, |cx| {
                        let len = fs.read(cx, open.ino, open.fh, offset, &mut out)?;
                        out.truncate(len);
                        Ok(std::mem::take(&mut out))
                    });
                }
                (Err(errno), _) => told(failed(errno), 0),
                _ => told(failed(Errno(libc::EINVAL)), 0),
            },
            Op::Fsync { fh, data_only } => match self.open(fh) {
                Ok(open) => {
                    let told = self.tells_others(open.ino, told);
                    self.later(told, |cx| fs.fsync(cx, open.ino, open.fh, data_only));
                }
                Err(errno) => told(failed(errno), 0),
            },
            Op::Fsyncdir { ino, data_only } => match self.ino(ino) {
                Ok(ino) => {
                    let told = self.tells_others(ino, told);
                    self.later(told, |cx| fs.fsyncdir(cx, ino, 0, data_only));
                }
                Err(errno) => told(failed(errno), 0),
            },
            Op::Sync {} => self.core.make_durable(Box::new(move |result| {
                let outcome = result.map_or_else(failed, |()| Outcome::Data { bytes: Vec::new() });
                told(outcome, 0);
            })),
            Op::Stats {} => {
                let most = ferry_fs::ioctl::STATS_LEN as usize;
                self.later(told, |cx| {
                    fs.ioctl(cx, self.session.root, ferry_fs::ioctl::STATS, &[], most)
                });
            }
            Op::Lock { ino, lock, wait } => match self.ino(ino) {
                Ok(ino) => self.lock(request, (ino, &lock, wait), told),
                Err(errno) => told(failed(errno), 0),
            },
            _ => told(failed(Errno(libc::EINVAL)), 0),
        }
    }

    fn lock(&self, (epoch, id): (u64, u64), what: (Ino, &FileLock, bool), told: Told) {
        self.session.enter_locker(self.fs());
        let Some(_leave) = self.session.may_lock(Some(epoch)) else {
            return told(Outcome::Failed { errno: libc::EINTR }, 0);
        };
        let granted = Box::new(move |result: Result<(), Errno>| {
            told(result.map_or_else(|e| Outcome::Failed { errno: e.0 }, |()| Outcome::Done {}), 0);
        });
        self.core.locks.take_or_wait((self.session.id, id), what, granted);
    }

    /// Entries behind `cookie`, as many as one answer holds.
    fn list(&self, ino: Ino, cookie: u64) -> Done {
        within(cookie, 0)?;
        let (mut names, mut bytes) = (Vec::new(), 0);
        self.call(|cx| {
            self.fs().readdir(cx, ino, 0, cookie, false, &mut |entry| {
                bytes += entry.name.len() + 24;
                if bytes > LISTING_MAX {
                    return false;
                }
                names.push(self.name(ino, entry));
                true
            })
        })?;
        Ok(Outcome::Listing { names: List(names) })
    }

    /// An entry of a directory as the client gets it. What is above the client's root is its root.
    pub(super) fn name(&self, dir: Ino, entry: &DirEntry) -> Name {
        let above = dir == self.session.root && *entry.name == *b"..";
        let ino = if above { ROOT } else { self.session.outward(entry.ino) };
        Name { name: entry.name.to_vec(), ino, kind: entry.kind, cookie: entry.cookie }
    }

    /// Makes a request that may park; no thread waits for it.
    fn later<T: Into<Reply>>(&self, told: Told, request: impl FnOnce(&Cx<'_>) -> Answer<T>) {
        let complete: Complete = Box::new(move |result| told(outcome(result), 0));
        let parking = Parking(Mutex::new(Some(complete)));
        let Who { uid, gid, umask, pid } = self.who;
        let cx = Cx { uid, gid, pid, umask, park: &parking };
        let result = match request(&cx) {
            Ok(answer) => Ok(answer.into()),
            Err(Stop::Errno(errno)) => Err(errno),
            Err(Stop::Parked) => return,
        };
        // Nothing is left if it was parked and dropped on the way to an error: that has answered.
        if let Some(complete) = parking.0.into_inner() {
            complete(result);
        }
    }
}

/// Hands the way to answer to who parks.
struct Parking(Mutex<Option<Complete>>);

impl Park for Parking {
    fn park(&self, _interrupt: Option<Interrupt>) -> Complete {
        self.0.lock().take().expect("a request is parked at most once")
    }
}

/// For requests that may park.
fn outcome(result: Result<Reply, Errno>) -> Outcome {
    match result {
        Ok(Reply::Empty) => Outcome::Done {},
        Ok(Reply::Count(count)) => Outcome::Count { count },
        Ok(Reply::Data(bytes)) => Outcome::Data { bytes },
        Ok(Reply::Shared(bytes)) => Outcome::Data { bytes: bytes.to_vec() },
        Ok(_) => Outcome::Failed { errno: libc::EPROTO },
        Err(Errno(errno)) => Outcome::Failed { errno },
    }
}

fn opened_as(ino: Ino, fh: u64, flags: i32) -> Open {
    let reads = flags & libc::O_ACCMODE != libc::O_WRONLY;
    Open { ino, fh, writes: opens_for_writing(flags), reads, lost: false }
}

fn within(offset: u64, len: u64) -> Result<(), Errno> {
    if offset.checked_add(len).is_some_and(|end| end <= OFFSET_MAX) {
        Ok(())
    } else {
        Err(Errno(libc::EFBIG))
    }
}
