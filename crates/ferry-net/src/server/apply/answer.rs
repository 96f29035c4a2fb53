//! A request: answered now, or when its answer is there.

use std::sync::Arc;

use ferry_env::activity::{self, Operation};
use ferry_fs::{Errno, FileLock, Ino};

use super::applying::{Applying, Done, Respond, within};
use super::caching::Found;
use crate::codec::List;
use crate::message::{IO_MAX, LEASED, LISTING_MAX, Numbers, Op, Outcome};
use crate::server::capability;

/// What became of a request.
pub(in crate::server) enum Asked {
    /// It is answered, or will be.
    Answered,
    /// Others have write leases on these.
    Behind(Vec<Ino>, Box<Op>, Respond),
}

impl Applying<'_> {
    /// Answers a request, now or later; unless others may have acknowledged something that it would
    /// not see.
    pub(in crate::server) fn request(
        &self,
        (connection, id): (u64, u64),
        op: Op,
        respond: Respond,
    ) -> Asked {
        let _doing = activity::begin(Operation::Requests);
        let mut op = op;
        let reads = self.reads(&op);
        let behind =
            reads.filter(|ino| !self.core.leases.is_readable(self.session.number, &[*ino]));
        let behind = behind.filter(|ino| !self.reads_nothing_leased(&op, *ino));
        if let Some(ino) = behind {
            return Asked::Behind(vec![ino], Box::new(op), respond);
        }
        if let Err(Errno(errno)) = self.stay_inside(&op).and_then(|()| self.permit(&mut op)) {
            respond(Outcome::Failed { errno }, 0);
            return Asked::Answered;
        }
        if op.info().parks {
            self.request_that_waits((connection, id), op, respond);
            return Asked::Answered;
        }
        let mut seen: Vec<Ino> = reads.into_iter().collect();
        let answer = match op {
            Op::Lookup { parent, name } => match self.look_up(parent, &name) {
                Ok(Found::Behind(inos)) => {
                    return Asked::Behind(inos, Box::new(Op::Lookup { parent, name }), respond);
                }
                Ok(Found::Entry(outcome, leased)) => Ok((outcome, leased)),
                Err(errno) => Err(errno),
            },
            Op::Reserve { bytes, inodes } => {
                self.reserve_space(connection, (bytes, inodes)).map(|outcome| (outcome, 0))
            }
            op => self.answer(op),
        };
        let (outcome, leased) =
            answer.unwrap_or_else(|Errno(errno)| (Outcome::Failed { errno }, 0));
        if let Outcome::Entry { known: Some(known) } = &outcome {
            seen.extend(self.session.volume_ino(known.attr.ino));
        }
        self.core.answer_when_durable(self.session.number, &seen, move || respond(outcome, leased));
        Asked::Answered
    }

    /// Reserves space for what the client will acknowledge early.
    fn reserve_space(&self, connection: u64, amount: (u64, u64)) -> Done {
        if !self.session.may_acknowledge_early() {
            return Err(Errno(libc::EPERM));
        }
        let fs = self.fs();
        self.session.register(fs, false)?;
        let totals = self.call(|cx| fs.statfs(cx))?;
        let free = totals.blocks_available * u64::from(totals.block_size);
        let asks = || self.session.is_at(connection);
        let (bytes, inodes) = self.session.reservations.grant(fs, amount, free, asks);
        Ok(Outcome::Space { bytes, inodes })
    }

    /// A client syncs an inode: other clients need not report their changes of it as lost.
    fn tells_others(&self, ino: Ino, respond: Respond) -> Respond {
        let noted = self.core.unstable_changes_of(ino, self.session);
        if noted.is_empty() {
            return respond;
        }
        Box::new(move |outcome, leased| {
            if !matches!(outcome, Outcome::Failed { .. }) {
                noted.iter().for_each(|(other, seq)| other.send_synced(ino, *seq));
            }
            respond(outcome, leased);
        })
    }

    /// Answers a request that waits for no client. Returns also what the client may cache.
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

    /// Answers of which the client may cache nothing.
    fn answer_once(&self, op: Op) -> Done {
        let fs = self.fs();
        match op {
            Op::Readlink { ino } => {
                let ino = self.ino(ino)?;
                Ok(Outcome::Data { bytes: self.call(|cx| fs.readlink(cx, ino))? })
            }
            Op::Lseek { fh, offset, whence } => {
                let open = self.open(fh)?;
                // The file system refuses an offset behind every end (or before the beginning,
                // which the kernel sends as such).
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
                self.core.barrier.release(self.session.id);
                Ok(Outcome::Done {})
            }
            Op::Numbers {} if !self.session.may_acknowledge_early() => Err(Errno(libc::EPERM)),
            Op::Numbers {} => {
                self.session.register(fs, false)?;
                let range = self.session.reservations.add_numbers(fs)?;
                let (first, count) = (range.start, (range.end - range.start) as u32);
                let capability = capability::of_numbers(&self.core.key, &self.session.path, &range);
                Ok(Outcome::Numbers { numbers: Numbers { first, count, capability } })
            }
            _ => Err(Errno(libc::EINVAL)),
        }
    }

    fn request_that_waits(&self, request: (u64, u64), op: Op, respond: Respond) {
        let fs = self.fs();
        let failed = |errno: Errno| Outcome::Failed { errno: errno.0 };
        match op {
            Op::Read { fh, offset, size } => match (self.open(fh), within(offset, u64::from(size)))
            {
                (Ok(open), Ok(())) if size as usize <= IO_MAX => {
                    let (core, number) = (Arc::clone(self.core), self.session.number);
                    let respond: Respond = Box::new(move |outcome, leased| {
                        core.answer_when_durable(number, &[open.ino], move || {
                            respond(outcome, leased)
                        });
                    });
                    let mut out = vec![0; size as usize];
                    self.later(respond, |cx| {
                        let len = fs.read(cx, open.ino, open.fh, offset, &mut out)?;
                        out.truncate(len);
                        Ok(std::mem::take(&mut out))
                    });
                }
                (Err(errno), _) => respond(failed(errno), 0),
                _ => respond(failed(Errno(libc::EINVAL)), 0),
            },
            Op::Fsync { fh, data_only } => match self.open(fh) {
                Ok(open) => {
                    let respond = self.tells_others(open.ino, respond);
                    self.later(respond, |cx| fs.fsync(cx, open.ino, open.fh, data_only));
                }
                Err(errno) => respond(failed(errno), 0),
            },
            Op::Fsyncdir { ino, data_only } => match self.ino(ino) {
                Ok(ino) => {
                    let respond = self.tells_others(ino, respond);
                    self.later(respond, |cx| fs.fsyncdir(cx, ino, 0, data_only));
                }
                Err(errno) => respond(failed(errno), 0),
            },
            Op::Sync {} => self.core.make_durable(Box::new(move |result| {
                let outcome = result.map_or_else(failed, |()| Outcome::Data { bytes: Vec::new() });
                respond(outcome, 0);
            })),
            Op::Stats {} => {
                let most = ferry_fs::ioctl::STATS_LEN as usize;
                self.later(respond, |cx| {
                    fs.ioctl(cx, self.session.root, ferry_fs::ioctl::STATS, &[], most)
                });
            }
            Op::Lock { ino, lock, wait } => match self.ino(ino) {
                Ok(ino) => self.lock(request, (ino, &lock, wait), respond),
                Err(errno) => respond(failed(errno), 0),
            },
            _ => respond(failed(Errno(libc::EINVAL)), 0),
        }
    }

    fn lock(&self, (connection, id): (u64, u64), what: (Ino, &FileLock, bool), respond: Respond) {
        self.session.record_lock_holder(self.fs());
        let Some(_leave) = self.session.locking_right(Some(connection)) else {
            return respond(Outcome::Failed { errno: libc::EINTR }, 0);
        };
        let granted = Box::new(move |result: Result<(), Errno>| {
            respond(
                result.map_or_else(|e| Outcome::Failed { errno: e.0 }, |()| Outcome::Done {}),
                0,
            );
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
}
