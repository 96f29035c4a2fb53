//! The parts of a mount, and what several kinds of requests need of them.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use crate::rt::Mutex;
use crate::rt::runtime::Runtime;
use ferry_fs::{Cx, Errno, Ino};

use super::cache::Cache;
use super::change::Pending;
use super::clock_reading::ClockReading;
use super::kernel::Kernel;
use super::left::Left;
use super::link::Link;
use super::losses::{Loss, Report};
use super::tables::{Node, Tables};
use super::walks::Walking;
use crate::codec::List;
use crate::message::{Caller, Claim, Forgotten, Known, Op};

/// So many forgotten inodes are told at once, or what there is at each ping.
const FORGET_BATCH: usize = 64;
/// The file system.
pub struct RemoteFs {
    pub(super) this: Weak<RemoteFs>,
    pub(super) link: Arc<Link>,
    pub(super) cache: Arc<Cache>,
    pub(super) tables: Mutex<Tables>,
    pub(super) forgotten: Mutex<Vec<Forgotten>>,
    /// Space is lacking: until then what the kernel forgets is told at once.
    pub(super) hurries: Mutex<Option<ClockReading>>,
    pub(super) walking: Mutex<Walking>,
    pub(super) kernel: Arc<Kernel>,
    /// What all files are opened with, besides what programs say.
    pub(super) open_flags: i32,
    /// How long an unmount waits until early-acknowledged changes are applied.
    pub(super) timeout: Duration,
    /// Changes that programs were told of and that are lost.
    pub(super) lost: AtomicU64,
    /// Those that the log does not name yet.
    pub(super) losses: Mutex<Vec<Loss>>,
    /// They are named in the log as soon as no lock is held: nothing is replayed.
    pub(super) losses_are_known: AtomicBool,
    pub(super) runtime: Mutex<Option<Runtime>>,
    /// Some file's pages were read by the kernel.
    pub(super) some_mapped: AtomicBool,
    pub(super) abandoned: AtomicBool,
    /// Another process has left the mount, and this one has not connected yet.
    pub(super) is_left: AtomicBool,
    /// It was killed: what its requests have come to that are begun again.
    pub(super) left: Left,
}

impl RemoteFs {
    /// Whether the server lets this client change anything.
    pub fn is_read_only(&self) -> bool {
        self.link.is_read_only()
    }

    /// Whether changes are answered before the server has made them, where its leases allow that.
    pub fn is_asynchronous(&self) -> bool {
        self.cache.lock().asynchronous
    }

    /// Switches that, for the changes to come. What has been answered early before is still on its
    /// way, see [`RemoteFs::unanswered`]. `false`: the server does not let this client do so.
    #[must_use]
    pub fn set_asynchronous(&self, on: bool) -> bool {
        if on && !self.link.has_early_acks() {
            return false;
        }
        self.cache.lock().asynchronous = on;
        self.ask_for_supplies();
        true
    }

    /// The number of changes that were answered early and that the server has not answered. An
    /// error: the server has been away for as long as operations wait for it.
    pub fn unanswered(&self) -> Result<usize, Errno> {
        self.link.early()
    }

    /// What this side counts (`connection`, `client_cache` and `fuse` of `ferry stats`), without
    /// asking the server.
    pub fn figures(&self) -> serde_json::Value {
        let mut connection = self.link.json();
        connection["lost_changes"] = self.lost.load(Ordering::Relaxed).into();
        connection["async"] = self.is_asynchronous().into();
        serde_json::Value::from_iter([
            ("connection", connection),
            ("client_cache", self.cache.json()),
            ("fuse", self.kernel.stats()),
        ])
    }

    /// Of the connection, without asking the server.
    #[cfg(test)]
    pub(crate) fn connection(&self) -> serde_json::Value {
        self.link.json()
    }

    /// Bytes and inodes that are reserved.
    #[cfg(test)]
    pub(crate) fn reserved(&self) -> (u64, u64) {
        match self.cache.lock().reservation.remaining() {
            Some(Op::Remaining { bytes, inodes }) => (bytes, inodes),
            _ => (0, 0),
        }
    }

    /// Sends a change that nobody waits for.
    pub(super) fn tell(&self, op: Op) {
        self.link.change(Pending::unattended(op));
    }

    /// The answer to an early-acknowledged change has named an inode, or never will.
    pub(super) fn confirm(&self, ino: Ino, known: Option<&Known>) {
        let node = self.tables.lock().confirm(ino, known);
        self.removed_from_tables(ino, node);
    }

    /// The kernel does not know an inode any more.
    pub(super) fn removed_from_tables(&self, ino: Ino, node: Option<Node>) {
        let Some(Node { stamp, capability, .. }) = node else { return };
        let known =
            capability.is_none_or(|capability| self.link.remember(Claim { ino, capability }));
        if known {
            self.forgotten(Forgotten { ino, stamp });
        } else {
            self.tables.lock().told_forgotten([ino].into_iter());
        }
    }

    /// A replayed change has created or named an inode.
    pub(super) fn known_again(&self, ino: Ino, known: &Known) {
        if !self.tables.lock().known_again(ino, known) {
            let _known = self.link.remember(Claim { ino, capability: known.capability });
        }
    }

    /// Changes of these are lost.
    pub(super) fn report_lost(&self, touched: &[Ino], losses: Vec<Loss>) {
        self.lost.fetch_add(losses.len() as u64, Ordering::Relaxed);
        self.losses.lock().extend(losses);
        self.tables.lock().damage(touched.iter().copied());
    }

    /// Names in the log what is lost.
    pub(super) fn tell_losses(&self) {
        let losses = std::mem::take(&mut *self.losses.lock());
        let report = Report::of(&losses, &self.tables.lock());
        report.log();
    }

    /// The kernel takes lookups back, or a request that it will not hear of.
    pub(super) fn forget_known(&self, ino: Ino, count: u64) {
        let node = {
            let mut cache = self.cache.lock();
            let node = self.tables.lock().forget(ino, count);
            if node.is_some() {
                cache.unsee(ino);
            }
            node
        };
        self.removed_from_tables(ino, node);
    }

    /// The server is told of it, with others.
    pub(super) fn forgotten(&self, one: Forgotten) {
        let full = {
            let mut forgotten = self.forgotten.lock();
            forgotten.push(one);
            forgotten.len() >= FORGET_BATCH || self.hurries()
        };
        if full {
            self.tell_forgotten();
        }
    }

    /// It may be the last thing that keeps a removed file there.
    pub(super) fn tell_forgotten(&self) {
        let batch = std::mem::take(&mut *self.forgotten.lock());
        if batch.is_empty() {
            return;
        }
        let inos: Vec<Ino> = batch.iter().map(|one| one.ino).collect();
        self.link.give_back(&inos);
        self.tell(Op::Forget { inodes: List(batch) });
        self.tables.lock().told_forgotten(inos.into_iter());
    }

    pub(super) fn release_handle(&self, fh: u64) {
        let ended = self.tables.lock().remove_handle(fh);
        let locked = ended.as_ref().map(|(ino, _)| *ino);
        if let Some((ino, locks)) = ended {
            locks.into_iter().for_each(|lock| self.tell(Op::Unlock { ino, lock }));
        }
        self.tell(Op::Release { fh });
        let mut tables = self.tables.lock();
        tables.told_closed(fh);
        locked.into_iter().for_each(|ino| tables.note_locks(ino));
    }
}

/// The kernel's number of a request: a process that goes on finds it again under the same number.
/// 0: nobody goes on.
pub(super) fn number(cx: &Cx<'_>) -> u64 {
    cx.request().map_or(0, |request| request.unique)
}

/// The program of a request.
pub(super) fn caller(cx: &Cx<'_>) -> Caller {
    Caller { uid: cx.uid, gid: cx.gid, pid: cx.pid, umask: cx.umask }
}
