//! How a client gets into a session: one that it goes on with, one of a server that crashed, or a
//! new one.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use ferry_fs::{Attr, InProcess, Ino, ROOT};

use super::apply::may_search;
use super::core::{Core, EVICTED, random};
use super::exports::{self, Access, Bounds, normal};
use super::session::{Line, Mounted, Session};
use crate::limits::{Export, Limits, Peer};
use crate::refusal::{Cause, Refusal};
use crate::tls::ends_soon;

/// Sessions at the same time, connected or not.
const SESSIONS_MAX: usize = 1024;
/// Of these with one certificate.
pub(crate) const SESSIONS_OF_CERTIFICATE_MAX: usize = 128;

impl Core {
    /// Finds the session that a client wants to go on with, or makes one.
    pub(super) fn enter(
        &self,
        (id, newest): (u128, u64),
        (peer, from): (Peer, Option<SocketAddr>),
        path: &[u8],
        name: String,
        line: &Line,
    ) -> Result<(Arc<Session>, u64), Refusal> {
        let path = normal(path);
        let _entering = self.entering.lock();
        self.check_standing(id, &peer, from)?;
        if let Some(resumed) = self.resume((id, newest), (&peer, from), &path, line) {
            return Ok(resumed);
        }
        let mounted = self.mounted(&peer, path.clone())?;
        self.check_room(&peer)?;
        let last_applied = self.last_applied_of(id, newest);
        let had_locks = self.locks.may_reclaim(id);
        let is_new = id == 0 || last_applied.is_some();
        let former = if is_new { None } else { self.formers.lock().find(id, &peer, &path) };
        let id = if last_applied.is_some() { id } else { random(&self.env) };
        let number = self.numbers.fetch_add(1, Ordering::Relaxed) + 1;
        let session = Arc::new(Session::new((id, number), name, peer, mounted));
        if had_locks {
            session.set_had_locks(last_applied.is_some());
        }
        if let Some(last_applied) = last_applied {
            session.begin_restoring(last_applied, self.env.clock.monotonic());
        }
        self.sessions.lock().insert(session.id, Arc::clone(&session));
        let both = (&self.locks, &*self.leases);
        let connection =
            session.connect((line, from), &self.greeting, (false, newest, former), both);
        let connection =
            connection.ok_or_else(|| Refusal::new(Cause::Server, "the server stops"))?;
        session.log_arrival(if last_applied.is_some() {
            "connected again, to another server"
        } else {
            "connected"
        });
        Ok((session, connection))
    }

    /// Refuses a client whose session was evicted, or whose certificate was revoked or has expired.
    fn check_standing(
        &self,
        id: u128,
        peer: &Peer,
        from: Option<SocketAddr>,
    ) -> Result<(), Refusal> {
        // The time is now, and not when the connection was made: the client may have waited before
        // its greeting.
        let now = self.env.clock.wall();
        let standing = self.revocations.standing(peer, now);
        if self.evicted.lock().iter().any(|evicted| evicted.session == id) {
            let why = standing.err().map_or_else(|| EVICTED.to_owned(), |refusal| refusal.reason);
            return Err(Refusal::new(Cause::Evicted, why));
        }
        standing?;
        if let Some(ending) = peer.until.and_then(|until| ends_soon(until, now)) {
            tracing::warn!(
                certificate = peer.name,
                from = from.map(|from| from.to_string()),
                "the client's certificate {ending}"
            );
        }
        Ok(())
    }

    /// The session with this number, if it is this client's and goes on.
    fn resume(
        &self,
        (id, newest): (u128, u64),
        (peer, from): (&Peer, Option<SocketAddr>),
        path: &[u8],
        line: &Line,
    ) -> Option<(Arc<Session>, u64)> {
        let same = |session: &&Arc<Session>| session.peer == *peer && session.path == path;
        let session = self.sessions.lock().get(&id).filter(same).cloned()?;
        let both = (&self.locks, &*self.leases);
        let connection =
            session.connect((line, from), &self.greeting, (true, newest, None), both)?;
        session.log_arrival("connected again");
        Some((session, connection))
    }

    /// What a client mounts at `path`, and what it may do there.
    fn mounted(&self, peer: &Peer, path: Vec<u8>) -> Result<Mounted, Refusal> {
        let text = String::from_utf8_lossy(&path).into_owned();
        let not_there = |reason: String| Refusal::new(Cause::Path, reason);
        let of_server = exports::access(&[&self.exports], &path);
        of_server.ok_or_else(|| not_there(format!("the server does not export {text}")))?;
        let lists = [&self.exports[..], &peer.exports].into_iter().filter(|list| !list.is_empty());
        let access = exports::access(&lists.collect::<Vec<_>>(), &path).ok_or_else(|| {
            let exports: Vec<String> = peer.exports.iter().map(Export::to_string).collect();
            not_there(format!(
                "the client's certificate is not for {text}, but for {}",
                exports.join(",")
            ))
        })?;
        let root = self.resolve(&path, peer.limits.as_ref()).map_err(not_there)?;
        let bounds = self.bounds_of(&path, root, &access).map_err(not_there)?;
        Ok(Mounted { path, root, read_only: access.read_only, bounds })
    }

    /// Refuses a client if there are too many sessions, of all clients or with its certificate.
    fn check_room(&self, peer: &Peer) -> Result<(), Refusal> {
        let sessions = self.sessions.lock();
        if sessions.len() >= SESSIONS_MAX {
            return Err(Refusal::new(Cause::Full, "the server has as many clients as it can take"));
        }
        let same = |session: &&Arc<Session>| session.peer.certificate == peer.certificate;
        let of_certificate = sessions.values().filter(same).count();
        if !peer.certificate.is_empty() && of_certificate >= SESSIONS_OF_CERTIFICATE_MAX {
            let reason = format!(
                "there are {of_certificate} mounts with this client's certificate, and no more are \
                 taken: unmount some, or `ferry evict` those that are not in use any more"
            );
            return Err(Refusal::new(Cause::Full, reason));
        }
        Ok(())
    }

    /// The last-applied sequence number and the durable watermark of a session of the crashed
    /// server, if that session may replay.
    fn last_applied_of(&self, id: u128, newest: u64) -> Option<(u64, u64)> {
        if id == 0 || !self.barrier.is_closed() {
            return None;
        }
        let last_applied = self
            .fs
            .last_applied(id)
            .ok()
            .flatten()
            .filter(|last_applied| *last_applied <= newest)?;
        let durable = self.fs.durable_watermark(id).ok().filter(|durable| *durable <= newest)?;
        self.barrier.arrive(id).then_some((last_applied, durable))
    }

    /// The directory at `path`, for a client with this certificate: one of its users has to be
    /// allowed to search each directory on the way. Symbolic links are not followed.
    pub(super) fn resolve(&self, path: &[u8], limits: Option<&Limits>) -> Result<Ino, String> {
        let text = |path: &[u8]| String::from_utf8_lossy(path).into_owned();
        let missing = || format!("{}: no such directory on the server", text(path));
        let attr = |ino| {
            InProcess::default().call(|cx| self.fs.getattr(cx, ino, None)).map(|(attr, _)| attr)
        };
        let is_dir = |attr: &Attr| attr.mode & libc::S_IFMT == libc::S_IFDIR;
        let (mut at, mut way) = (attr(ROOT).map_err(|_| missing())?, Vec::new());
        for name in path.split(|b| *b == b'/').filter(|name| !name.is_empty()) {
            if limits.is_some_and(|limits| is_dir(&at) && !may_search(&*self.fs, limits, &at)) {
                let dir = text(&normal(&way));
                return Err(format!(
                    "the users of the client's certificate may not search {dir}: a certificate for others is needed (`ferry cert issue`), or \
                     another mode of that directory"
                ));
            }
            at = self.named(at.ino, name).ok_or_else(missing)?;
            way.push(b'/');
            way.extend_from_slice(name);
        }
        if is_dir(&at) { Ok(at.ino) } else { Err(missing()) }
    }

    /// The bounds of a session that mounts `path`, which is the directory `root`; `None`: it needs
    /// none.
    fn bounds_of(&self, path: &[u8], root: Ino, access: &Access) -> Result<Option<Bounds>, String> {
        let (mut held, mut pinned) = (Vec::new(), Vec::new());
        for base in access.held.iter().filter(|_| !access.read_only) {
            let text = String::from_utf8_lossy(base);
            let missing = || {
                format!(
                    "{text} is exported read-only and is no directory of the volume: make it first, or take it out of the exports"
                )
            };
            let mut at = root;
            for name in base[path.len()..].split(|b| *b == b'/').filter(|name| !name.is_empty()) {
                at = self.named(at, name).ok_or_else(missing)?.ino;
                pinned.push(at);
            }
            held.push(at);
        }
        let needed = root != ROOT || !held.is_empty();
        Ok(needed.then(|| Bounds::new(root, held, pinned)))
    }
}
