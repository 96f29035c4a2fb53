//! One operation of a session, on its way to the file system and back.

use std::sync::Arc;

use crate::rt::Mutex;
use ferry_fs::inprocess::FromReply;
use ferry_fs::{
    Answer, Attr, Complete, Cx, DirEntry, EarlyAck, Entry, Errno, InProcess, Ino, Interrupt, Park,
    ROOT, Reply, SessionStore, Stop,
};

use crate::message::{Caller, Known, Name, OFFSET_MAX, Outcome};
use crate::server::capability;
use crate::server::core::Core;
use crate::server::session::{Open, Session};

pub(super) type Done = Result<Outcome, Errno>;

/// Sends an answer, now or later, and what the client may cache of it.
pub(in crate::server) type Respond = Box<dyn FnOnce(Outcome, u8) + Send>;

/// An operation of one session, while the server carries it out.
pub(in crate::server) struct Applying<'a> {
    pub(in crate::server) core: &'a Arc<Core>,
    pub(in crate::server) session: &'a Session,
    pub(in crate::server) caller: Caller,
    /// What the client has acknowledged to programs already.
    pub(in crate::server) early: Option<EarlyAck>,
    /// What the client learns with the answer, and puts into its replay log.
    pub(in crate::server) decided: Option<EarlyAck>,
}

impl Core {
    /// An operation of this session.
    pub(in crate::server) fn applying<'a>(
        self: &'a Arc<Self>,
        session: &'a Session,
        caller: Caller,
        early: Option<EarlyAck>,
    ) -> Applying<'a> {
        Applying { core: self, session, caller, early, decided: None }
    }
}

impl Applying<'_> {
    pub(in crate::server) fn fs(&self) -> &dyn SessionStore {
        &*self.core.fs
    }

    fn in_process(&self) -> InProcess {
        let Caller { uid, gid, umask, pid } = self.caller;
        InProcess {
            uid,
            gid,
            umask: umask & 0o777,
            caller: pid,
            ack: self.early.or(self.decided),
            request: None,
        }
    }

    pub(in crate::server) fn call<T: FromReply>(
        &self,
        request: impl FnOnce(&Cx<'_>) -> Answer<T>,
    ) -> Result<T, Errno> {
        self.in_process().call(request)
    }

    pub(super) fn ino(&self, ino: Ino) -> Result<Ino, Errno> {
        self.session.volume_ino(ino).ok_or(Errno(libc::ESTALE))
    }

    pub(super) fn open(&self, fh: u64) -> Result<Open, Errno> {
        let open = self.session.handle(fh).ok_or(Errno(libc::EBADF))?;
        if open.lost { Err(Errno(libc::EIO)) } else { Ok(open) }
    }

    pub(super) fn optional(&self, fh: Option<u64>) -> Result<Option<u64>, Errno> {
        let known = fh.filter(|fh| self.session.is_open(*fh));
        known.map(|fh| self.open(fh).map(|open| open.fh)).transpose()
    }

    pub(super) fn attr(&self, attr: Attr) -> Attr {
        Attr { ino: self.session.client_ino(attr.ino), ..attr }
    }

    pub(in crate::server) fn attr_now(&self, ino: Ino) -> Result<Attr, Errno> {
        let (attr, _) = self.call(|cx| self.fs().getattr(cx, ino, None))?;
        Ok(self.attr(attr))
    }

    /// An entry of `dir` as the client gets it; the session then knows the inode.
    pub(in crate::server) fn entry(&self, dir: Ino, entry: Entry) -> Outcome {
        let known = entry.attr.map(|attr| {
            let dir = if attr.mode & libc::S_IFMT == libc::S_IFDIR { 0 } else { dir };
            let stamp = self.session.learn(self.fs(), attr.ino, dir);
            let capability =
                capability::of_inode(&self.core.key, &self.session.path, attr.ino, dir);
            Known { attr: self.attr(attr), stamp, capability }
        });
        Outcome::Entry { known }
    }

    /// An entry of a directory as the client gets it. What is above the client's root is its root.
    pub(in crate::server) fn name(&self, dir: Ino, entry: &DirEntry) -> Name {
        let above = dir == self.session.root && *entry.name == *b"..";
        let ino = if above { ROOT } else { self.session.client_ino(entry.ino) };
        Name { name: entry.name.to_vec(), ino, kind: entry.kind, cookie: entry.cookie }
    }

    pub(super) fn done(&self, request: impl FnOnce(&Cx<'_>) -> Answer<()>) -> Done {
        self.call(request).map(|()| Outcome::Done {})
    }

    /// Makes a request that may park; no thread waits for it.
    pub(super) fn later<T: Into<Reply>>(
        &self,
        respond: Respond,
        request: impl FnOnce(&Cx<'_>) -> Answer<T>,
    ) {
        let complete: Complete = Box::new(move |result| respond(outcome(result), 0));
        let parking = Parking(Mutex::new(Some(complete)));
        let Caller { uid, gid, umask, pid } = self.caller;
        let cx = Cx { uid, gid, pid, umask, park: &parking };
        let result = match request(&cx) {
            Ok(answer) => Ok(answer.into()),
            Err(Stop::Errno(errno)) => Err(errno),
            Err(Stop::Parked) => return,
        };
        // If the file system parked it and dropped that on the way to an error, it is answered.
        if let Some(complete) = parking.0.into_inner() {
            complete(result);
        }
    }
}

/// Gives the completion to a request that parks.
struct Parking(Mutex<Option<Complete>>);

impl Park for Parking {
    fn park(&self, _interrupt: Option<Interrupt>) -> Complete {
        self.0.lock().take().expect("a request is parked at most once")
    }

    fn request(&self) -> Option<ferry_fs::RequestId> {
        None
    }
}

/// The outcome of a request that may park.
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

pub(super) fn within(offset: u64, len: u64) -> Result<(), Errno> {
    if offset.checked_add(len).is_some_and(|end| end <= OFFSET_MAX) {
        Ok(())
    } else {
        Err(Errno(libc::EFBIG))
    }
}
