//! Following: the thread that looks for newer versions, and how far behind they are.

use crate::known::{Known, ReplicaVersion};
use crate::local::local_fs::{AccessTimes, CacheMode, FsOptions, LocalFs};
use crate::reader::Reader;
use crate::replica::carried::CarriedReplica;
use crate::replica::showing::{Current, Showing};
use crate::replica::timeline::Timeline;
use crate::volume::VolumeError;
use ferry_device::BlockDevice;
use ferry_env::Env;
use parking_lot::Mutex;
use serde::Serialize;
use std::error::Error;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::Duration;

/// While a replica turns, two versions are open.
const VERSIONS: usize = 2;

/// What a volume is at some time: what a crash would leave then.
pub struct Version {
    /// Reads as the volume was then.
    pub dev: Arc<dyn BlockDevice>,
    /// The volume was rolled back since the version before, or may have been.
    pub new_timeline: bool,
    /// Epoch of the owner that wrote it.
    pub epoch: u64,
    /// The number of its root.
    pub root: u64,
    /// The first number in the log that it lacks.
    pub log: u64,
    /// Whether each read of `dev` has succeeded so far.
    pub is_readable: Box<dyn Fn() -> bool + Send>,
}

/// Where versions come from.
pub trait Versions: Send + 'static {
    /// Looks for one that is newer than the last one; it has all that was durable when the look
    /// began. `anew`: the last one again, if there is none. Waits.
    fn look(&mut self, anew: bool) -> Result<Option<Version>, Box<dyn Error>>;
}

/// How far behind the volume a replica is.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Lag {
    /// What is shown has all that was durable this long ago: since the last look began that
    /// succeeded.
    pub behind_ns: u64,
    /// What is shown is the newest for so long: since the look began that found it.
    pub unchanged_ns: u64,
    /// Epoch of the owner that wrote what is shown.
    pub epoch: u64,
    /// The number of its root.
    pub root: u64,
    /// The first number in the log that it lacks.
    pub log: u64,
    /// Looks that succeeded.
    pub looks: u64,
    /// Looks that failed.
    pub looks_failed: u64,
    /// Versions that were shown.
    pub versions: u64,
    /// How often the volume was rolled back, or may have been. One of which a root tells, and the
    /// volume itself in a later version, counts twice.
    pub rollbacks: u64,
    /// Why the last look failed, if it did.
    pub error: Option<String>,
}

/// What was seen when.
struct Seen {
    lag: Lag,
    looked: Duration,
    found: Duration,
}

impl Seen {
    /// The first version was found by a look that began at `begun`. `went_back`: the process before
    /// showed one of an earlier timeline.
    fn new(version: &Version, went_back: bool, begun: Duration) -> Self {
        let mut seen = Self { lag: Lag::default(), looked: begun, found: begun };
        seen.show(version, went_back, begun);
        seen
    }

    fn show(&mut self, version: &Version, went_back: bool, begun: Duration) {
        let Version { epoch, root, log, .. } = *version;
        (self.lag.epoch, self.lag.root, self.lag.log) = (epoch, root, log);
        self.lag.rollbacks += u64::from(went_back);
        self.lag.versions += 1;
        self.found = begun;
        self.succeed(begun);
    }

    fn succeed(&mut self, begun: Duration) {
        self.looked = begun;
        self.lag.looks += 1;
        if self.lag.error.take().is_some() {
            tracing::info!("the replica follows again");
        }
    }

    fn fail(&mut self, error: String) {
        self.lag.looks_failed += 1;
        if self.lag.error.is_none() {
            tracing::warn!(error, "the replica falls behind, and looks again");
        }
        self.lag.error = Some(error);
    }

    /// As it is at `now`.
    fn lag(&self, now: Duration) -> Lag {
        let since =
            |then: Duration| u64::try_from(now.saturating_sub(then).as_nanos()).unwrap_or(u64::MAX);
        Lag { behind_ns: since(self.looked), unchanged_ns: since(self.found), ..self.lag.clone() }
    }
}

/// Opens a version. `before`: what was shown until then. The volume itself says, too, that it was
/// rolled back: where a backup has brought it, nothing else does.
fn open(
    version: &Version,
    before: Option<&ReplicaVersion>,
    options: &FsOptions,
    env: &Env,
) -> Result<Current, VolumeError> {
    let fs = LocalFs::open(Arc::clone(&version.dev), options.clone(), env.clone())?;
    // What cannot be read now is no damage: without it this would be an older state.
    if !(version.is_readable)() {
        let _closed = fs.close();
        let source = io::Error::other("the store does not give all of it now");
        return Err(VolumeError::Io { what: "open this version", source });
    }
    let says = fs.superblock().timeline_words();
    let timeline = match before.map(|it| (Timeline::at(it.timeline), it.says)) {
        Some((before, said)) if version.new_timeline || said != says => before.next(),
        Some((before, _)) => before,
        None => Timeline::default(),
    };
    Ok(Current::new(Reader::new(fs), timeline, (version.root, version.log)))
}

/// A process goes on with a mount with the same volume only, and with no version that is older than
/// the one that programs saw (REPLICA-1).
fn must_go_on(current: &Current, before: &CarriedReplica) -> Result<(), VolumeError> {
    let why = if current.reader.fs.superblock().number() != before.volume {
        "that is another volume than the one that is mounted"
    } else if current.version < (before.version.root, before.version.log) {
        "the store names an older version than the one that programs have seen"
    } else {
        return Ok(());
    };
    Err(VolumeError::Io { what: "go on with the mount", source: io::Error::other(why) })
}

/// How a volume is followed.
#[derive(Clone, Debug)]
pub struct ReplicaOptions {
    /// Between two looks for a newer version.
    pub interval: Duration,
    /// What the kernel caches of contents.
    pub cache: CacheMode,
    /// Memory of all versions that are open together, in bytes.
    pub cache_bytes: usize,
    /// The user that has mounted it.
    pub owner: u32,
    /// Where what another process needs is noted, in case this one is killed.
    pub known: Option<Arc<Known>>,
}

/// What is shown, and what was seen of the volume.
pub(crate) struct Following {
    pub(crate) env: Env,
    pub(crate) options: ReplicaOptions,
    /// Bytes of memory that may be used now.
    memory_limit: AtomicUsize,
    pub(crate) showing: Showing,
    /// Held during a turn to a newer version, and while another process takes over.
    turns: Mutex<()>,
    seen: Mutex<Seen>,
}

impl Following {
    /// Shows `first`. `begun`: when the look began that found it. `before`: what the process before
    /// has left.
    pub(crate) fn open(
        (first, begun): (&Version, Duration),
        before: Option<&CarriedReplica>,
        options: ReplicaOptions,
        env: Env,
    ) -> Result<Self, VolumeError> {
        let seen = before.map(|before| &before.version);
        let current = open(first, seen, &version_options(&options), &env)?;
        before.map_or(Ok(()), |before| must_go_on(&current, before))?;
        let went_back = seen.is_some_and(|it| it.timeline != current.timeline.number());
        if went_back {
            tracing::warn!(
                "the volume was rolled back, or its roots since the process before have been deleted: open files and working directories are stale"
            );
        }
        if let Some(known) = &options.known {
            let fs = &current.reader.fs;
            known.set_volume(fs.superblock().number(), fs.recovered().last.0);
            known.shows(&current.carried());
        }
        let epoch = env.entropy.next_u64() as u32;
        Ok(Self {
            memory_limit: AtomicUsize::new(options.cache_bytes),
            showing: Showing::new(current, before, options.known.clone(), epoch),
            turns: Mutex::default(),
            seen: Mutex::new(Seen::new(first, went_back, begun)),
            env,
            options,
        })
    }

    /// What the next process needs.
    pub(crate) fn carry(&self) -> CarriedReplica {
        let current = self.showing.now();
        let volume = current.reader.fs.superblock().number();
        CarriedReplica { volume, version: current.carried(), files: self.showing.handles() }
    }

    /// Does what the kernel must not drop pages behind. Waits for a turn that is under way.
    pub(crate) fn without_turns<T>(&self, work: impl FnOnce() -> T) -> T {
        let _none = self.turns.lock();
        self.showing.await_taken_over();
        work()
    }

    /// How far behind the volume it is.
    pub(crate) fn lag(&self) -> Lag {
        self.seen.lock().lag(self.env.clock.monotonic_with_sleep())
    }

    /// From now on `bytes` of memory may be used.
    pub(crate) fn set_memory_limit(&self, bytes: usize) {
        self.memory_limit.store(bytes, Ordering::Relaxed);
        self.bound_memory_of(&self.showing.now().reader.fs);
    }

    fn bound_memory_of(&self, version: &LocalFs) {
        version.set_memory_limit(self.memory_limit.load(Ordering::Relaxed) / VERSIONS);
    }

    /// The thread's body: looks each interval, until the sender of `stopped` is dropped.
    pub(crate) fn run(&self, mut source: Box<dyn Versions>, stopped: &Receiver<()>) {
        // The volume was rolled back before a version that is not shown yet.
        let mut new_timeline = false;
        let interval = self.options.interval;
        // The kernel takes no size from an answer that came before it dropped pages. A second turn
        // at once would have reads end at the size of before.
        self.showing.await_taken_over();
        while stopped.recv_timeout(interval) == Err(RecvTimeoutError::Timeout) {
            self.look(&mut *source, &mut new_timeline);
        }
    }

    /// Looks once. `new_timeline`: the volume was rolled back before a version that could not be
    /// opened.
    fn look(&self, source: &mut dyn Versions, new_timeline: &mut bool) {
        let begun = self.env.clock.monotonic_with_sleep();
        self.showing.leave_held(begun);
        let anew = self.showing.take_failed();
        let version = match source.look(anew) {
            Ok(Some(version)) => version,
            Ok(None) => return self.seen.lock().succeed(begun),
            Err(error) => {
                if anew {
                    self.showing.set_failed();
                }
                return self.seen.lock().fail(error.to_string());
            }
        };
        *new_timeline |= version.new_timeline;
        let version = Version { new_timeline: *new_timeline, ..version };
        let before = self.showing.now();
        match open(&version, Some(&before.carried()), &version_options(&self.options), &self.env) {
            Ok(current) => {
                let went_back = current.timeline != before.timeline;
                drop(before);
                *new_timeline = false;
                self.bound_memory_of(&current.reader.fs);
                let turn = self.turns.lock();
                // Before programs see it (REPLICA-7).
                if let Some(known) = &self.options.known {
                    known.shows(&current.carried());
                }
                self.showing.turn(current, self.env.clock.monotonic_with_sleep());
                drop(turn);
                if went_back {
                    tracing::warn!(
                        "the volume was rolled back, or its roots of a long time are missing: working directories are stale here, and files that are open stay as they were for two minutes"
                    );
                }
                tracing::debug!(root = version.root, log = version.log, "a newer version is shown");
                self.seen.lock().show(&version, went_back, begun);
            }
            Err(error) => {
                self.showing.set_failed();
                self.seen.lock().fail(format!("the newest version cannot be opened: {error}"));
            }
        }
    }
}

/// How each version is opened.
fn version_options(options: &ReplicaOptions) -> FsOptions {
    FsOptions {
        read_only: true,
        access_times: AccessTimes::Never,
        directory_access_times: false,
        cache_bytes: options.cache_bytes / VERSIONS,
        owner: options.owner,
        ..FsOptions::default()
    }
}
