//! Walks: what a client asks for before a program that goes through a tree needs it, many
//! directories in one answer.
//!
//! * WALK-1: no other session waits for a walk. The walk leaves out what its holder uses
//!   (`leases/ahead`), and what has not come back after [`super::core::WalkTimes`]. The answer
//!   waits for a
//!   sync if it tells what others have changed (`unstable`, UNSTABLE-3).
//! * WALK-2: the leases of a step are recalled at once; a step is what the step before has listed.
//!   Each lease is entered before the inode is read. Write leases replace read leases at the end,
//!   so that no session that wants one waits for the walk; and only if nothing of others is left to
//!   be made durable (`unstable`, UNSTABLE-1).
//! * WALK-3: an answer tells of no inode without a lease, and of each directory wholly or not at
//!   all. It is as long as one answer may be; a client that wants more asks again.
//! * WALK-4: a directory is listed only for users that may list and search it. A client that may
//!   not acknowledge early gets no write leases.

use crate::rt::collections::{HashMap, HashSet};
use std::sync::Arc;

use crate::rt::time::{Instant, timeout_at};
use ferry_fs::{Attr, Ino};

use super::apply::Applying;
use super::core::Core;
use super::leases::Wants;
use super::requests::Request;
use crate::codec::List;
use crate::message::{
    DirName, Found, Listed, Op, Outcome, Purpose, Seen, WALK_BYTES_MAX, WALK_DIRS_MAX, WALK_ENTRIES,
};

/// Bytes of an inode in an answer.
const SEEN_BYTES: usize = 118;
/// Bytes of a name beside the name itself.
const NAME_BYTES: usize = 24;

/// A walk and its answer so far.
struct Walk {
    purpose: Purpose,
    /// Inodes of the next step, by the volume's numbers. Those of the first step were asked for.
    next: Vec<Ino>,
    /// Their indices among those that were asked for.
    asked: HashMap<Ino, u32>,
    first: bool,
    /// For a session with bounds: the directory in which each was found.
    found_in: HashMap<Ino, Ino>,
    /// What was asked for and has no room.
    rest: Vec<u32>,
    /// With the volume's numbers.
    seen: Vec<(Ino, Seen)>,
    dirs: Vec<Listed>,
    entries: usize,
    bytes: usize,
}

impl Walk {
    fn new(purpose: Purpose) -> Self {
        let (next, rest, seen, dirs) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        let (asked, found_in) = (HashMap::default(), HashMap::default());
        Self { purpose, next, asked, first: true, found_in, rest, seen, dirs, entries: 0, bytes: 0 }
    }

    fn is_full(&self) -> bool {
        self.entries >= WALK_ENTRIES || self.bytes >= WALK_BYTES_MAX
    }
}

/// Write leases that the answer is about to grant. When this is dropped they may be recalled; at
/// once if the answer was not sent.
struct Granting<'a> {
    core: &'a Core,
    session: u64,
    inos: Vec<Ino>,
    is_sent: bool,
}

impl Drop for Granting<'_> {
    fn drop(&mut self) {
        if self.is_sent {
            self.core.leases.grant_sent(self.session, &self.inos);
        } else {
            self.core.recall(&self.core.leases.grant_not_sent(self.session, &self.inos));
        }
    }
}

impl Core {
    /// Answers a walk.
    pub(super) async fn walk(self: Arc<Self>, request: Request) {
        let mut request = request;
        let Op::Walk { dirs, mut purpose } = request.op else { return };
        if dirs.0.len() > WALK_DIRS_MAX {
            return (request.respond)(Outcome::Failed { errno: libc::EINVAL }, 0);
        }
        let session = Arc::clone(&request.session);
        if !session.may_acknowledge_early() || self.leases.is_barred(session.number) {
            purpose = purpose.min(Purpose::Look {});
        }
        request.op = Op::Nothing {};
        let mut walk = Walk::new(purpose);
        let core = Arc::clone(&self);
        let found = crate::rt::task::spawn_blocking(move || {
            request.applying(&core).find(&dirs.0, &mut walk);
            (request, walk)
        });
        // If it has panicked, it is answered.
        let Ok(both) = found.await else { return };
        (request, walk) = both;
        let wants = Wants::Walk { writes: purpose == Purpose::Remove {} };
        let deadline = Instant::now() + self.walk_times.wait_max;
        while !walk.next.is_empty() && !session.is_over() {
            let position = self.leases.ask(session.number, wants, walk.next.clone());
            let timed_out =
                timeout_at(deadline, position.wait(|recalls| self.recall(recalls))).await.is_err();
            drop(position);
            let core = Arc::clone(&self);
            let step = crate::rt::task::spawn_blocking(move || {
                request.applying(&core).step(&mut walk);
                (request, walk)
            });
            let Ok(both) = step.await else { return };
            (request, walk) = both;
            if timed_out {
                break;
            }
        }
        let inos: Vec<Ino> = walk.seen.iter().map(|(ino, _)| *ino).collect();
        if !self.is_safe(&session, &inos).await {
            walk = Walk::new(walk.purpose);
        }
        let _answered =
            crate::rt::task::spawn_blocking(move || self.send_walk(request, walk)).await;
    }

    /// Sends the answer.
    fn send_walk(&self, request: Request, walk: Walk) {
        let Walk { purpose, mut seen, asked, dirs, rest, .. } = walk;
        let session = &request.session;
        let mut granting =
            Granting { core: self, session: session.number, inos: Vec::new(), is_sent: false };
        if purpose == (Purpose::Remove {}) && !session.is_over() {
            let others = |ino: &Ino| self.unstable.is_others(session.number, &[*ino]);
            let inos = seen.iter().map(|(ino, _)| *ino);
            let inos: Vec<Ino> =
                inos.filter(|ino| !others(ino) && self.is_changeable(session, *ino)).collect();
            granting.inos = self.leases.upgrade(session.number, &inos);
            if granting.inos.iter().any(others) {
                // Another session has changed something between the two: the client could not rely
                // on the answer.
                let outcome = Outcome::Walked {
                    inodes: List(Vec::new()),
                    dirs: List(Vec::new()),
                    found: List(Vec::new()),
                    rest: List(Vec::new()),
                };
                return (request.respond)(outcome, 0);
            }
            let granted: HashSet<Ino> = granting.inos.iter().copied().collect();
            for (ino, seen) in seen.iter_mut().filter(|(ino, _)| granted.contains(ino)) {
                (seen.writes, seen.plain) = (true, self.fs.is_plain(*ino).unwrap_or(false));
            }
        }
        let found = |(ino, _): &(Ino, Seen)| {
            Some(Found { index: *asked.get(ino)?, ino: session.client_ino(*ino) })
        };
        let found = List(seen.iter().filter_map(found).collect());
        let inodes = List(seen.into_iter().map(|(_, seen)| seen).collect());
        // A session that has ended needs no leases.
        granting.is_sent = !session.is_over();
        (request.respond)(Outcome::Walked { inodes, dirs: List(dirs), found, rest: List(rest) }, 0);
    }
}

impl Applying<'_> {
    /// What was asked for, as far as the client may name it. What a name means is certain only
    /// under a lease.
    fn find(&self, names: &[DirName], walk: &mut Walk) {
        for (at, DirName { parent, name }) in (0..).zip(names) {
            let parent = self.session.volume_ino(*parent).filter(|_| name != b"..");
            let readable = |dir: &Ino| self.core.leases.is_readable(self.session.number, &[*dir]);
            let may = |dir: &Ino| {
                self.core.is_inside(self.session, *dir) && readable(dir) && self.may_walk(*dir)
            };
            let Some(parent) = parent.filter(may) else { continue };
            let found = self
                .call(|cx| self.fs().lookup(cx, parent, name))
                .ok()
                .and_then(|entry| entry.attr);
            let Some(Attr { ino, .. }) = found else { continue };
            self.fs().forget(ino, 1);
            if self.session.bounds.is_some() {
                walk.found_in.insert(ino, parent);
            }
            if walk.asked.insert(ino, at).is_none() {
                walk.next.push(ino);
            }
        }
    }

    /// Reads the inodes of a step, and lists those that are directories, as long as there is room.
    fn step(&self, walk: &mut Walk) {
        let asked_for = std::mem::take(&mut walk.first);
        let lists_only = walk.purpose == Purpose::List {};
        for ino in std::mem::take(&mut walk.next) {
            if walk.is_full() && asked_for {
                walk.rest.extend(walk.asked.get(&ino));
            } else if !walk.is_full() || !lists_only {
                let seen = self.see(ino, walk);
                let is_dir = seen.is_some_and(|attr| attr.mode & libc::S_IFMT == libc::S_IFDIR);
                let listed = !is_dir || walk.is_full() || self.list_whole(ino, walk);
                // If it is the first one, there is never room for it.
                if !listed && asked_for && !walk.dirs.is_empty() {
                    walk.rest.extend(walk.asked.get(&ino));
                }
            }
        }
    }

    /// An inode as it is under a lease, if the client can get one.
    fn see(&self, ino: Ino, walk: &mut Walk) -> Option<Attr> {
        if !self.core.leases.grant(self.session.number, ino) {
            return None;
        }
        let entry = self.call(|cx| self.fs().lookup(cx, ino, b".")).ok()?;
        let dir = walk.found_in.get(&ino).copied().unwrap_or(0);
        let Outcome::Entry { known: Some(known) } = self.entry(dir, entry) else { return None };
        walk.seen.push((ino, Seen { known, writes: false, plain: false }));
        walk.bytes += SEEN_BYTES;
        Some(known.attr)
    }

    /// Lists a directory that is leased, if the user may list it; `false`: there is no room. What
    /// the names mean is read in the next step.
    fn list_whole(&self, dir: Ino, walk: &mut Walk) -> bool {
        if !self.may_walk(dir) {
            return true;
        }
        let lists_only = walk.purpose == Purpose::List {};
        let (mut names, mut inside, mut bytes) = (Vec::new(), Vec::new(), walk.bytes);
        let listed = self.call(|cx| {
            self.fs().readdir(cx, dir, 0, 0, false, &mut |entry| {
                bytes += NAME_BYTES + entry.name.len() + if lists_only { 0 } else { SEEN_BYTES };
                if bytes > WALK_BYTES_MAX {
                    return false;
                }
                let is_dir = entry.kind == libc::S_IFDIR;
                if *entry.name != *b"." && *entry.name != *b".." && (is_dir || !lists_only) {
                    inside.push(entry.ino);
                }
                names.push(self.name(dir, entry));
                true
            })
        });
        if bytes > WALK_BYTES_MAX {
            return false;
        }
        if listed.is_ok() {
            walk.entries += names.len();
            walk.bytes += names.iter().map(|name| NAME_BYTES + name.name.len()).sum::<usize>();
            let room = if lists_only {
                WALK_DIRS_MAX.saturating_sub(walk.next.len())
            } else {
                inside.len()
            };
            if self.session.bounds.is_some() {
                walk.found_in.extend(inside.iter().map(|ino| (*ino, dir)));
            }
            walk.next.extend(inside.into_iter().take(room));
            walk.dirs.push(Listed { ino: self.session.client_ino(dir), names: List(names) });
        }
        true
    }
}
