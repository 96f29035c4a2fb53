//! [`Showing`]: the version that a replica shows, and the turn to a newer one.

use crate::api::{Attr, Errno, Host, Ino};
use crate::known::{Known, ReplicaVersion};
use crate::reader::Reader;
use crate::replica::carried::{CarriedReplica, Handles, known_file};
use crate::replica::timeline::Timeline;
use parking_lot::{Condvar, Mutex, RwLock};
use std::collections::BTreeMap;
use std::mem;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

/// A file that a newer version has no more is read from its last version for so long. That is far
/// below the grace after which an owner deletes what no newer version needs.
const HELD: Duration = Duration::from_secs(120);
/// So many versions are held for such files, at most, and so much memory each has.
const HELD_VERSIONS_MAX: usize = 4;
const HELD_BYTES: usize = 4 << 20;
/// So often a turn that waits for the kernel looks whether the mount has ended.
const LOOK: Duration = Duration::from_millis(100);

/// A turn looks so often for files that were opened since its last look, before opening waits.
const ROUNDS: u32 = 2;

/// A version that is open. It is closed with its last user.
pub(crate) struct Current {
    pub(crate) reader: Reader,
    pub(crate) timeline: Timeline,
    /// The number of its root, and the first one in the log that it lacks.
    pub(crate) version: (u64, u64),
    /// When a newer one was shown in its place.
    replaced: OnceLock<Duration>,
}

impl Current {
    pub(crate) fn new(reader: Reader, timeline: Timeline, version: (u64, u64)) -> Self {
        Self { reader, timeline, version, replaced: OnceLock::new() }
    }

    /// For the process that goes on.
    pub(crate) fn carried(&self) -> ReplicaVersion {
        let says = self.reader.fs.superblock().timeline_words();
        let (root, log) = self.version;
        ReplicaVersion { timeline: self.timeline.number(), says, root, log }
    }

    /// The attributes of an inode, as programs see them. An orphan is not there: a version has
    /// not all of its contents any more (REPLICA-5).
    pub(crate) fn attributes(&self, ino: Ino) -> Result<(Attr, Duration), Errno> {
        let (attr, valid) = self.reader.attributes(self.timeline, ino)?;
        if attr.nlink == 0 { Err(Errno(libc::ESTALE)) } else { Ok((attr, valid)) }
    }

    /// Whether it has the inode that programs know by this number. One that cannot be read it may
    /// have.
    fn has(&self, number: Ino) -> bool {
        let found = self.timeline.inner(number).and_then(|ino| self.attributes(ino));
        !matches!(found, Err(Errno(libc::ESTALE)))
    }

    /// What is shown by now is newer.
    pub(crate) fn is_replaced(&self) -> bool {
        self.replaced.get().is_some()
    }
}

impl Drop for Current {
    fn drop(&mut self) {
        if let Err(error) = self.reader.fs.close() {
            tracing::warn!(%error, "a version of the volume was not closed cleanly");
        }
    }
}

/// Which requests are answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Request {
    /// Of contents: always.
    Contents,
    /// A listing by this open directory, from its begin or where it was before (REPLICA-6).
    Listing { handle: u64, begins: bool },
    /// Another one: not while the kernel still has pages of an older version (REPLICA-2).
    Other,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    Steady,
    /// The process before this one showed another version, perhaps. The kernel drops pages of
    /// that.
    TakingOver,
    /// The kernel drops pages of the version before.
    Turning,
    /// The mount ends.
    Ended,
}

/// What a file that programs have open is read from.
#[derive(Default)]
enum ReadFrom {
    /// The version that is shown.
    #[default]
    Newest,
    /// The last version that had it, for a time.
    Held(Arc<Current>),
    /// No version: it is stale.
    Nothing,
}

/// A file that programs have open.
#[derive(Default)]
struct OpenFile {
    count: u64,
    from: ReadFrom,
}

struct State {
    stage: Stage,
    current: Arc<Current>,
    /// By the numbers that programs see.
    open: BTreeMap<Ino, OpenFile>,
    /// The same, one for each time that it was opened.
    handles: Handles,
    /// The versions of listings that have begun, by open directory.
    listings: BTreeMap<u64, Arc<Current>>,
}

impl State {
    /// The version that answers requests for an inode. `ESTALE`: none any more. What is shown may
    /// still have it as an orphan, without its contents.
    fn version_of(&self, number: Ino) -> Result<Arc<Current>, Errno> {
        match self.open.get(&number).map(|file| &file.from) {
            Some(ReadFrom::Held(version)) => Ok(Arc::clone(version)),
            Some(ReadFrom::Nothing) => Err(Errno(libc::ESTALE)),
            Some(ReadFrom::Newest) | None => Ok(Arc::clone(&self.current)),
        }
    }

    /// The files that are read from the version that all others are.
    fn following(&self) -> Vec<Ino> {
        let follows = |file: &OpenFile| matches!(file.from, ReadFrom::Newest);
        let files = self.open.iter().filter(|(_, file)| follows(file));
        files.map(|(number, _)| *number).collect()
    }

    /// The versions that are held, one for each file and listing.
    fn held(&self) -> impl Iterator<Item = &Arc<Current>> {
        let files = self.open.values().filter_map(|file| match &file.from {
            ReadFrom::Held(version) => Some(version),
            ReadFrom::Newest | ReadFrom::Nothing => None,
        });
        files.chain(self.listings.values()).filter(|version| version.is_replaced())
    }

    /// Turns to a newer version. Of the files that are `open` and follow, those that are not
    /// `there` any more are held from now on. Returns the version before, and the others.
    fn turn(
        &mut self,
        new: &Arc<Current>,
        open: Vec<Ino>,
        there: &BTreeMap<Ino, bool>,
        now: Duration,
    ) -> (Arc<Current>, Vec<Ino>) {
        if self.stage == Stage::Steady {
            self.stage = Stage::Turning;
        }
        let old = mem::replace(&mut self.current, Arc::clone(new));
        old.replaced.get_or_init(|| now);
        let (stay, removed): (Vec<_>, Vec<_>) =
            open.into_iter().partition(|number| there.get(number) == Some(&true));
        for number in &removed {
            if let Some(file) = self.open.get_mut(number) {
                file.from = ReadFrom::Held(Arc::clone(&old));
            }
        }
        if self.held().any(|held| Arc::ptr_eq(held, &old)) {
            old.reader.fs.set_memory_limit(HELD_BYTES);
        }
        (old, stay)
    }
}

/// What is shown.
pub(crate) struct Showing {
    state: Mutex<State>,
    changed: Condvar,
    host: RwLock<Option<Arc<dyn Host>>>,
    /// Where open files are noted for the process that goes on if this one is killed.
    known: Option<Arc<Known>>,
    /// A read of the version failed: what it remembers of that must not outlast the reason.
    failed: AtomicBool,
}

impl Showing {
    /// `before`: what the process before has left, if this one goes on with its mount. `epoch`: a
    /// random number that it did not have. Waits.
    pub(crate) fn new(
        current: Current,
        before: Option<&CarriedReplica>,
        known: Option<Arc<Known>>,
        epoch: u32,
    ) -> Self {
        let files = before.map_or(&[][..], |before| &before.files);
        let mut open: BTreeMap<Ino, OpenFile> = BTreeMap::new();
        for (_, number) in files {
            // This process cannot hold a version that it has not opened (REPLICA-5).
            let from = || if current.has(*number) { ReadFrom::Newest } else { ReadFrom::Nothing };
            let file = open.entry(*number).or_insert_with(|| OpenFile { count: 0, from: from() });
            file.count += 1;
        }
        if let Some(known) = &known {
            files.iter().for_each(|file| known.opened(&known_file(*file)));
        }
        let state = State {
            stage: if before.is_some() { Stage::TakingOver } else { Stage::Steady },
            current: Arc::new(current),
            open,
            handles: Handles::new(epoch, files),
            listings: BTreeMap::new(),
        };
        Self {
            state: Mutex::new(state),
            changed: Condvar::new(),
            host: RwLock::default(),
            known,
            failed: AtomicBool::new(false),
        }
    }

    /// The files of which the kernel is to drop the pages before anything but their contents is
    /// told (REPLICA-7). `None`: no process was before, or that is done.
    pub(crate) fn older_pages(&self) -> Option<Vec<Ino>> {
        let state = self.state.lock();
        (state.stage == Stage::TakingOver).then(|| state.following())
    }

    /// The kernel has dropped them.
    pub(crate) fn taken_over(&self) {
        let mut state = self.state.lock();
        if state.stage == Stage::TakingOver {
            state.stage = Stage::Steady;
        }
        drop(state);
        self.changed.notify_all();
    }

    /// Waits until the kernel has dropped them.
    pub(crate) fn await_taken_over(&self) {
        let mut state = self.state.lock();
        self.changed.wait_while(&mut state, |state| state.stage == Stage::TakingOver);
    }

    pub(crate) fn set_host(&self, host: Option<Arc<dyn Host>>) {
        *self.host.write() = host;
    }

    pub(crate) fn host(&self) -> Option<Arc<dyn Host>> {
        self.host.read().clone()
    }

    /// What is shown now.
    pub(crate) fn now(&self) -> Arc<Current> {
        Arc::clone(&self.state.lock().current)
    }

    /// Whether a read failed since this was asked last.
    pub(crate) fn take_failed(&self) -> bool {
        self.failed.swap(false, Ordering::Relaxed)
    }

    /// The version is to be opened again.
    pub(crate) fn set_failed(&self) {
        self.failed.store(true, Ordering::Relaxed);
    }

    /// Answers a request for an inode, by the number that programs see. Waits. A version that
    /// cannot be read, as the owner has deleted a part of it, is left for the one shown by then.
    pub(crate) fn with<T>(
        &self,
        kind: Request,
        number: Ino,
        request: impl Fn(&Current, Ino) -> Result<T, Errno>,
    ) -> Result<T, Errno> {
        let mut current = self.enter(kind, number)?;
        loop {
            let answer = request(&current, current.timeline.inner(number)?);
            if !matches!(answer, Err(Errno(libc::EIO))) {
                return answer;
            }
            let newer = self.enter(kind, number)?;
            if Arc::ptr_eq(&current, &newer) {
                // To open what is shown anew would help no file that is read from an older version.
                if !current.is_replaced() {
                    self.set_failed();
                }
                return answer;
            }
            current = newer;
        }
    }

    fn enter(&self, kind: Request, number: Ino) -> Result<Arc<Current>, Errno> {
        // It is dropped behind the lock.
        let _left;
        let mut state = self.state.lock();
        while matches!(state.stage, Stage::TakingOver | Stage::Turning) && kind != Request::Contents
        {
            self.changed.wait(&mut state);
        }
        if state.stage == Stage::Ended {
            return Err(Errno(libc::EIO));
        }
        match kind {
            Request::Listing { handle, begins: false } => {
                let begun = state.listings.get(&handle).map(Arc::clone);
                begun.map_or_else(|| state.version_of(number), Ok)
            }
            Request::Listing { handle, begins: true } => {
                let version = state.version_of(number)?;
                _left = state.listings.insert(handle, Arc::clone(&version));
                Ok(version)
            }
            Request::Contents | Request::Other => state.version_of(number),
        }
    }

    /// The listing of an open directory has ended. The result is to be dropped by a thread that
    /// may wait.
    pub(crate) fn listed(&self, handle: u64) -> Option<Arc<Current>> {
        self.state.lock().listings.remove(&handle)
    }

    /// A file is open from now on, by this handle.
    pub(crate) fn opened(&self, number: Ino) -> u64 {
        let mut state = self.state.lock();
        state.open.entry(number).or_default().count += 1;
        let fh = state.handles.add(number);
        if let Some(known) = &self.known {
            known.opened(&known_file((fh, number)));
        }
        fh
    }

    /// The handle is not open any more. The result is to be dropped by a thread that may wait.
    pub(crate) fn released(&self, fh: u64) -> Option<Arc<Current>> {
        let mut state = self.state.lock();
        let number = state.handles.remove(fh)?;
        if let Some(known) = &self.known {
            known.closed(fh);
        }
        let file = state.open.get_mut(&number)?;
        file.count -= 1;
        if file.count > 0 {
            return None;
        }
        match state.open.remove(&number)?.from {
            ReadFrom::Held(version) => Some(version),
            ReadFrom::Newest | ReadFrom::Nothing => None,
        }
    }

    /// The handles of open files, and their inodes.
    pub(crate) fn handles(&self) -> Vec<(u64, Ino)> {
        self.state.lock().handles.all()
    }

    /// Some files that are open.
    pub(crate) fn some_open(&self, most: usize) -> Vec<Ino> {
        self.state.lock().open.keys().take(most).copied().collect()
    }

    /// Files and listings that are read from an older version.
    pub(crate) fn held(&self) -> usize {
        self.state.lock().held().count()
    }

    /// Versions that were held for too long are left. Waits.
    pub(crate) fn leave_held(&self, now: Duration) {
        let mut state = self.state.lock();
        let mut times: Vec<Duration> =
            state.held().filter_map(|version| version.replaced.get().copied()).collect();
        times.sort_unstable();
        times.dedup();
        let too_many = times.len().checked_sub(HELD_VERSIONS_MAX + 1).map(|last| times[last]);
        let ends = |version: &Current| {
            let since = version.replaced.get();
            since.is_some_and(|since| now > *since + HELD || Some(*since) <= too_many)
        };
        let is_left = |from: &ReadFrom| matches!(from, ReadFrom::Held(version) if ends(version));
        let files = state.open.values_mut().filter(|file| is_left(&file.from));
        let left: Vec<ReadFrom> =
            files.map(|file| mem::replace(&mut file.from, ReadFrom::Nothing)).collect();
        let ended = state.listings.iter().filter(|(_, version)| ends(version));
        let ended: Vec<u64> = ended.map(|(handle, _)| *handle).collect();
        let listings: Vec<_> =
            ended.iter().filter_map(|handle| state.listings.remove(handle)).collect();
        drop(state);
        drop((left, listings));
    }

    /// Shows a newer version. Waits until the kernel has no page of the one before, but for files
    /// that the new one has no more: these are held.
    pub(crate) fn turn(&self, new: Current, now: Duration) {
        let new = Arc::new(new);
        let (mut there, mut rounds): (BTreeMap<Ino, bool>, _) = (BTreeMap::new(), 0);
        let (old, contents) = loop {
            let unknown: Vec<Ino> = {
                let mut state = self.state.lock();
                rounds += 1;
                if rounds > ROUNDS && state.stage == Stage::Steady {
                    // Programs that open files wait now: else there may be no end of it.
                    state.stage = Stage::Turning;
                }
                let open = state.following();
                if open.iter().all(|number| there.contains_key(number)) {
                    break state.turn(&new, open, &there, now);
                }
                open.into_iter().filter(|number| !there.contains_key(number)).collect()
            };
            for number in unknown {
                there.insert(number, new.has(number));
            }
        };
        if !contents.is_empty() {
            self.drop_pages(contents);
        }
        let mut state = self.state.lock();
        if state.stage == Stage::Turning {
            state.stage = Stage::Steady;
        }
        drop(state);
        self.changed.notify_all();
        drop(old);
    }

    fn drop_pages(&self, contents: Vec<Ino>) {
        let Some(host) = self.host() else { return };
        let (done, dropped) = channel();
        let told = move || {
            // Nobody waits any more where the mount has ended.
            let _waited_for = done.send(());
        };
        host.forget_contents(contents, Box::new(told));
        while dropped.recv_timeout(LOOK) == Err(RecvTimeoutError::Timeout)
            && self.state.lock().stage == Stage::Turning
        {}
    }

    /// From now on requests fail. It does not wait for those under way.
    pub(crate) fn end(&self) {
        self.state.lock().stage = Stage::Ended;
        self.changed.notify_all();
    }
}
