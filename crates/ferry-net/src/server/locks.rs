//! File locks of all clients: `fcntl` ranges and `flock`, which do not see each other.
//!
//! A lock belongs to a session and, within it, to what the client's kernel calls the owner.
//! Requests that must wait stand in a queue for each file. Each change of a file's locks looks
//! through its queue once, oldest first.
//!
//! A session reclaims what it held at the previous server, in the grace period: no other session
//! has had it since. The server records a session on the volume before it grants it the first lock,
//! and removes the record before its locks are free for others. So the next server knows which
//! sessions may reclaim: those that the previous one has not ended, and no older ones.

use crate::rt::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicBool, Ordering};

use crate::rt::Mutex;
use ferry_fs::{Errno, FileLock, Ino};

use crate::lock_range::set_range;

/// The secret number of a session.
type SessionId = u128;
/// The most locks held or waited for on one file. What makes more of them, also by cutting one into
/// two, fails with `ENOLCK`.
const LOCKS_MAX: usize = 4096;

/// Called with the result of a wait.
pub(super) type Granted = Box<dyn FnOnce(Result<(), Errno>) + Send>;

#[derive(Clone, Copy, Debug)]
struct Held {
    session: SessionId,
    lock: FileLock,
}

impl Held {
    fn same_owner(&self, session: SessionId, lock: &FileLock) -> bool {
        self.session == session && self.lock.owner == lock.owner && self.lock.flock == lock.flock
    }

    fn conflicts(&self, session: SessionId, lock: &FileLock) -> bool {
        self.lock.flock == lock.flock
            && !self.same_owner(session, lock)
            && (self.lock.kind == libc::F_WRLCK || lock.kind == libc::F_WRLCK)
            && self.overlaps(lock)
    }

    fn overlaps(&self, lock: &FileLock) -> bool {
        self.lock.start <= lock.end && lock.start <= self.lock.end
    }
}

struct Waiting {
    session: SessionId,
    request: u64,
    lock: FileLock,
    /// It waits for others; if not, only for the end of the grace period.
    patient: bool,
    granted: Granted,
}

#[derive(Default)]
struct File {
    held: Vec<Held>,
    queue: Vec<Waiting>,
}

impl File {
    fn blocker(&self, session: SessionId, lock: &FileLock) -> Option<FileLock> {
        self.held.iter().find(|h| h.conflicts(session, lock)).map(|h| h.lock)
    }

    /// Whether the owner has all of the range, by locks of either kind.
    fn has_range(&self, session: SessionId, lock: &FileLock) -> bool {
        let own = self.held.iter().filter(|h| h.same_owner(session, lock));
        let mut ranges: Vec<(u64, u64)> = own.map(|h| (h.lock.start, h.lock.end)).collect();
        ranges.sort_unstable();
        let mut next = lock.start;
        for (start, end) in ranges {
            if start > next || end >= lock.end {
                return start <= next;
            }
            next = next.max(end + 1);
        }
        false
    }

    /// Takes a lock if it is free.
    fn take(&mut self, session: SessionId, lock: &FileLock) -> Result<(), Errno> {
        if self.blocker(session, lock).is_some() {
            return Err(Errno(libc::EAGAIN));
        }
        self.set(session, lock)
    }

    /// Gives the range to the owner as `lock` says; no other lock is in the way. If there would be
    /// too many locks then, nothing changes.
    fn set(&mut self, session: SessionId, lock: &FileLock) -> Result<(), Errno> {
        let (own, mut others): (Vec<Held>, Vec<Held>) =
            self.held.iter().copied().partition(|h| h.session == session);
        let mut own: Vec<FileLock> = own.into_iter().map(|h| h.lock).collect();
        set_range(&mut own, lock);
        let all = others.len() + own.len();
        if all > LOCKS_MAX && all > self.held.len() {
            return Err(Errno(libc::ENOLCK));
        }
        others.extend(own.into_iter().map(|lock| Held { session, lock }));
        self.held = others;
        Ok(())
    }

    /// Grants what can be granted now in the queue, and refuses what does not want to wait.
    fn wake(&mut self, out: &mut Vec<(Granted, Result<(), Errno>)>) {
        for waiting in std::mem::take(&mut self.queue) {
            if self.blocker(waiting.session, &waiting.lock).is_none() {
                let taken = self.set(waiting.session, &waiting.lock);
                out.push((waiting.granted, taken));
            } else if waiting.patient {
                self.queue.push(waiting);
            } else {
                out.push((waiting.granted, Err(Errno(libc::EAGAIN))));
            }
        }
    }

    fn is_idle(&self) -> bool {
        self.held.is_empty() && self.queue.is_empty()
    }
}

/// The file locks of a server.
#[derive(Default)]
pub(super) struct Locks {
    files: Mutex<HashMap<Ino, File>>,
    /// Only locks that were held before the server's restart are granted.
    grace: AtomicBool,
    /// Sessions that may have held locks at the previous server.
    former: Mutex<HashSet<SessionId>>,
    /// The server stops: sessions keep their locks for the next one.
    closed: AtomicBool,
}

impl Locks {
    /// Waiters are answered after the table's lock is free, because that sends.
    fn with_file<T>(&self, ino: Ino, change: impl FnOnce(&mut File) -> T) -> T {
        let mut woken = Vec::new();
        let result = {
            let mut files = self.files.lock();
            let file = files.entry(ino).or_default();
            let result = change(file);
            if !self.in_grace() {
                file.wake(&mut woken);
            }
            if file.is_idle() {
                files.remove(&ino);
            }
            result
        };
        woken.into_iter().for_each(|(granted, how)| granted(how));
        result
    }

    /// From now on no session gets a new lock; these sessions may reclaim theirs.
    pub(super) fn begin_grace(&self, former: Vec<SessionId>) {
        self.former.lock().extend(former);
        self.grace.store(true, Ordering::SeqCst);
    }

    /// Sessions that may have held locks at the previous server.
    pub(super) fn former(&self) -> Vec<SessionId> {
        self.former.lock().iter().copied().collect()
    }

    /// Whether a session may have held locks at the previous server, and this one is in its grace
    /// period.
    pub(super) fn may_reclaim(&self, session: SessionId) -> bool {
        self.in_grace() && self.former.lock().contains(&session)
    }

    /// The server stops: no session gets a lock any more, even if another returns one.
    pub(super) fn close(&self) {
        self.closed.store(true, Ordering::SeqCst);
        let _files = self.files.lock();
        self.grace.store(true, Ordering::SeqCst);
    }

    /// Whether the server stops.
    pub(super) fn is_closed(&self) -> bool {
        self.closed.load(Ordering::SeqCst)
    }

    /// Requests that came meanwhile are answered.
    pub(super) fn end_grace(&self) {
        let mut woken = Vec::new();
        {
            let mut files = self.files.lock();
            if self.is_closed() {
                return;
            }
            self.grace.store(false, Ordering::SeqCst);
            files.values_mut().for_each(|file| file.wake(&mut woken));
        }
        woken.into_iter().for_each(|(granted, how)| granted(how));
    }

    fn in_grace(&self) -> bool {
        self.grace.load(Ordering::SeqCst)
    }

    /// The lock that is in the way, or one of kind `F_UNLCK`.
    pub(super) fn test(&self, session: SessionId, ino: Ino, lock: &FileLock) -> FileLock {
        let blocker = self.files.lock().get(&ino).and_then(|file| file.blocker(session, lock));
        blocker.unwrap_or(FileLock { kind: libc::F_UNLCK, ..*lock })
    }

    /// Takes a lock now or fails with `EAGAIN`.
    pub(super) fn take(&self, session: SessionId, ino: Ino, lock: &FileLock) -> Result<(), Errno> {
        check(lock)?;
        self.with_file(ino, |file| file.take(session, lock))
    }

    /// A session has a lock again. In the grace period that is one that it may have held at the
    /// previous server (`held_before`); later only a range that its owner has, perhaps of the other
    /// kind. If the session cannot have it, it has lost all of its locks on the file.
    pub(super) fn reclaim(
        &self,
        session: SessionId,
        held_before: bool,
        (ino, lock): (Ino, &FileLock),
    ) -> Result<(), Errno> {
        check(lock)?;
        self.with_file(ino, |file| {
            // Read under the table's lock: a lock that is granted when the grace period ends comes
            // before this, or after.
            let may = held_before && self.in_grace() || file.has_range(session, lock);
            let taken = if may { file.take(session, lock) } else { Err(Errno(libc::EIO)) };
            taken.inspect_err(|_| file.held.retain(|h| h.session != session))
        })
    }

    /// Takes a lock when it is free: after the grace period and, if `wait` says so, after its
    /// holders have returned it.
    pub(super) fn take_or_wait(
        &self,
        (session, request): (SessionId, u64),
        (ino, lock, wait): (Ino, &FileLock, bool),
        granted: Granted,
    ) {
        if !self.in_grace() {
            let taken = self.take(session, ino, lock);
            if taken != Err(Errno(libc::EAGAIN)) || !wait {
                return granted(taken);
            }
        } else if let Err(errno) = check(lock) {
            return granted(Err(errno));
        }
        let refused = self.with_file(ino, |file| {
            if file.queue.len() >= LOCKS_MAX {
                return Some(granted);
            }
            file.queue.push(Waiting { session, request, lock: *lock, patient: wait, granted });
            None
        });
        if let Some(granted) = refused {
            granted(Err(Errno(libc::ENOLCK)));
        }
    }

    /// Returns a range; not a part of one if there would be too many locks then.
    pub(super) fn give_back(
        &self,
        session: SessionId,
        ino: Ino,
        lock: &FileLock,
    ) -> Result<(), Errno> {
        let lock = FileLock { kind: libc::F_UNLCK, ..*lock };
        if lock.start > lock.end || !self.files.lock().contains_key(&ino) {
            return Ok(());
        }
        self.with_file(ino, |file| file.set(session, &lock))
    }

    /// Cancels waits: of one request of a session, or all of them.
    pub(super) fn cancel(&self, session: SessionId, which: Option<u64>) {
        let mut cancelled = Vec::new();
        self.files.lock().retain(|_, file| {
            let is_cancelled =
                |w: &mut Waiting| w.session == session && which.is_none_or(|id| id == w.request);
            cancelled.extend(file.queue.extract_if(.., is_cancelled));
            !file.is_idle()
        });
        for waiting in cancelled {
            (waiting.granted)(Err(Errno(libc::EINTR)));
        }
    }

    /// The session has ended, and with it all of its locks.
    pub(super) fn end(&self, session: SessionId) {
        self.cancel(session, None);
        let mut woken = Vec::new();
        self.files.lock().retain(|_, file| {
            file.held.retain(|h| h.session != session);
            if !self.in_grace() {
                file.wake(&mut woken);
            }
            !file.is_idle()
        });
        woken.into_iter().for_each(|(granted, how)| granted(how));
    }

    /// The number of locks that a session holds.
    pub(super) fn held_by(&self, session: SessionId) -> usize {
        self.files.lock().values().flat_map(|f| &f.held).filter(|h| h.session == session).count()
    }
}

fn check(lock: &FileLock) -> Result<(), Errno> {
    let known = matches!(lock.kind, libc::F_RDLCK | libc::F_WRLCK);
    if known && lock.start <= lock.end { Ok(()) } else { Err(Errno(libc::EINVAL)) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;

    fn lock(kind: i32, owner: u64, start: u64, end: u64) -> FileLock {
        FileLock { start, end, kind, pid: 1, owner, flock: false }
    }

    #[test]
    fn lock_ranges_are_cut_and_joined_per_owner_and_session() {
        let locks = Locks::default();
        let write = |owner, start, end| lock(libc::F_WRLCK, owner, start, end);
        assert_eq!(locks.take(1, 5, &write(7, 0, 99)), Ok(()));
        assert_eq!(
            locks.take(2, 5, &write(7, 50, 60)),
            Err(Errno(libc::EAGAIN)),
            "another client's owner 7"
        );
        assert_eq!(locks.take(1, 5, &write(8, 50, 60)), Err(Errno(libc::EAGAIN)));
        assert_eq!(locks.give_back(1, 5, &write(7, 40, 69)), Ok(()));
        assert_eq!(locks.take(2, 5, &write(7, 40, 69)), Ok(()));
        assert_eq!(locks.test(2, 5, &write(7, 70, 70)).start, 70);
        assert_eq!(locks.test(2, 5, &write(7, 39, 39)).end, 39);
        assert_eq!(locks.test(1, 6, &write(7, 0, 9)).kind, libc::F_UNLCK);
        let flock = FileLock { flock: true, ..write(9, 0, u64::MAX) };
        assert_eq!(locks.take(3, 5, &flock), Ok(()), "flock and fcntl do not see each other");
        locks.end(1);
        locks.end(2);
        assert_eq!(locks.take(3, 5, &write(1, 0, u64::MAX)), Ok(()));
    }

    #[test]
    fn a_waiter_gets_the_lock_when_the_holder_ends_and_not_after_a_cancel() {
        let locks = Locks::default();
        let said = Arc::new(Mutex::new(Vec::new()));
        let tell = |id: u64| {
            let said = said.clone();
            Box::new(move |how| said.lock().push((id, how))) as Granted
        };
        let all = lock(libc::F_WRLCK, 1, 0, u64::MAX);
        locks.take(1, 5, &all).expect("free");
        for id in 1..=3 {
            locks.take_or_wait((2, id), (5, &FileLock { owner: id, ..all }, true), tell(id));
        }
        locks.cancel(2, Some(1));
        assert_eq!(*said.lock(), [(1, Err(Errno(libc::EINTR)))]);
        locks.end(1);
        assert_eq!(said.lock()[1..], [(2, Ok(()))], "one at a time");
        locks.take_or_wait((3, 9), (5, &all, false), tell(9));
        assert_eq!(said.lock().last(), Some(&(9, Err(Errno(libc::EAGAIN)))));
        locks.end(2);
        assert_eq!(said.lock().last(), Some(&(3, Err(Errno(libc::EINTR)))), "its session went");
    }

    #[test]
    fn in_the_grace_period_only_former_holders_get_locks() {
        let locks = Locks::default();
        let said = Arc::new(Mutex::new(Vec::new()));
        let tell = |id: u64| {
            let said = said.clone();
            Box::new(move |how| said.lock().push((id, how))) as Granted
        };
        let all = lock(libc::F_WRLCK, 1, 0, u64::MAX);
        locks.begin_grace(vec![2]);
        locks.take_or_wait((1, 1), (5, &all, true), tell(1));
        locks.take_or_wait((1, 2), (5, &FileLock { owner: 2, ..all }, false), tell(2));
        locks.take_or_wait((1, 3), (6, &all, false), tell(3));
        locks.take_or_wait((1, 4), (6, &FileLock { kind: 77, ..all }, false), tell(4));
        assert_eq!(*said.lock(), [(4, Err(Errno(libc::EINVAL)))]);
        assert!(locks.may_reclaim(2) && !locks.may_reclaim(1));
        assert_eq!(locks.reclaim(3, false, (5, &all)), Err(Errno(libc::EIO)), "it had none");
        assert_eq!(locks.reclaim(2, true, (5, &all)), Ok(()), "its former holder has it again");
        assert_eq!(locks.give_back(2, 9, &all), Ok(()));
        locks.end_grace();
        said.lock().sort_unstable_by_key(|(id, _)| *id);
        assert_eq!(said.lock()[..2], [(2, Err(Errno(libc::EAGAIN))), (3, Ok(()))]);
        assert_eq!(locks.give_back(2, 5, &all), Ok(()));
        assert_eq!(said.lock().last(), Some(&(1, Ok(()))));
        assert_eq!(locks.reclaim(2, true, (7, &all)), Err(Errno(libc::EIO)), "the grace is over");
    }

    #[test]
    fn after_the_grace_period_an_owner_reclaims_only_what_it_has() {
        let locks = Locks::default();
        let write = |owner, start, end| lock(libc::F_WRLCK, owner, start, end);
        for (start, end) in [(0, 9), (20, 29), (10, 19)] {
            locks.take(1, 5, &lock(libc::F_RDLCK, 7, start, end)).expect("free");
        }
        assert_eq!(locks.reclaim(1, true, (5, &write(7, 5, 25))), Ok(()));
        assert_eq!(locks.take(2, 5, &lock(libc::F_RDLCK, 1, 5, 5)), Err(Errno(libc::EAGAIN)));
        assert_eq!(
            locks.reclaim(1, true, (5, &write(8, 40, 50))),
            Err(Errno(libc::EIO)),
            "another owner"
        );
        assert_eq!(locks.held_by(1), 0, "what is left of the file's locks is worth nothing");
        locks.take(1, 5, &write(7, 0, 9)).expect("free");
        assert_eq!(
            locks.reclaim(1, true, (5, &write(7, 0, 10))),
            Err(Errno(libc::EIO)),
            "more than it has"
        );
    }

    #[test]
    fn a_server_that_stops_grants_no_lock_to_waiters() {
        let locks = Locks::default();
        let all = lock(libc::F_WRLCK, 1, 0, u64::MAX);
        locks.take(1, 5, &all).expect("free");
        let said = Arc::new(Mutex::new(None));
        let told = said.clone();
        locks.take_or_wait((2, 1), (5, &all, true), Box::new(move |how| *told.lock() = Some(how)));
        locks.close();
        assert_eq!(locks.give_back(1, 5, &all), Ok(()));
        locks.end_grace();
        assert_eq!(*said.lock(), None);
    }

    #[test]
    fn unlocking_parts_of_a_range_stays_within_the_limit() {
        let locks = Locks::default();
        let whole = lock(libc::F_WRLCK, 7, 0, u64::MAX);
        locks.take(1, 5, &whole).expect("free");
        let part = |at: u64| lock(libc::F_WRLCK, 7, 4 * at + 1, 4 * at + 2);
        let max = LOCKS_MAX as u64;
        for at in 0..max - 1 {
            assert_eq!(locks.give_back(1, 5, &part(at)), Ok(()));
        }
        assert_eq!(locks.held_by(1), LOCKS_MAX);
        for at in [max, 2 * max] {
            assert_eq!(locks.give_back(1, 5, &part(at)), Err(Errno(libc::ENOLCK)));
            let other = FileLock { kind: libc::F_RDLCK, ..part(at) };
            assert_eq!(locks.take(1, 5, &other), Err(Errno(libc::ENOLCK)), "it would be cut, too");
            assert_eq!(locks.test(2, 5, &part(at)).kind, libc::F_WRLCK, "it is held as before");
        }
        assert_eq!(locks.test(2, 5, &part(0)).kind, libc::F_UNLCK);
        // What does not add a lock works.
        assert_eq!(locks.take(1, 5, &part(3)), Ok(()), "it closes a gap");
        assert_eq!(locks.held_by(1), LOCKS_MAX - 1);
        assert_eq!(locks.give_back(1, 5, &part(3)), Ok(()));
        assert_eq!(locks.give_back(1, 5, &lock(libc::F_WRLCK, 7, 0, 99)), Ok(()));
        assert_eq!(locks.give_back(1, 5, &part(max)), Ok(()));
        assert_eq!(locks.give_back(1, 5, &whole), Ok(()));
        assert_eq!(locks.held_by(1), 0);
    }
}
