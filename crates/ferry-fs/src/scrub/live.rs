//! The scrub of a mounted volume: one at a time, on a thread of its own.

use crate::scrub::report::{Damage, ScrubReport, Verified};
use crate::scrub::run::scrub_source;
use crate::scrub::source::{ScrubOptions, ScrubProgress, Source, Watch};
use crate::store::data_store::DataStore;
use crate::volume::read_superblock_copies;
use ferry_env::activity::{self, Operation};
use ferry_env::{Env, Utc};
use ferry_journal::Journal;
use parking_lot::{Condvar, Mutex};
use serde::{Deserialize, Serialize};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

/// What a volume's scrub is at.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ScrubState {
    /// There was none since the volume was mounted.
    #[default]
    Never,
    /// It is on its way.
    Running,
    /// It came to the end.
    Complete,
    /// It was stopped before.
    Stopped,
}

/// The newest scrub of a mounted volume, without its list of damage.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct ScrubStatus {
    /// Scrubs are counted from 1 on.
    pub number: u64,
    /// What it is at.
    pub state: ScrubState,
    /// When it was started, in UTC; empty: never.
    pub started: String,
    /// How long it took, or has taken so far, in nanoseconds.
    pub time_ns: u64,
    /// Most bytes in a second; 0: any number.
    pub rate_bytes: u64,
    /// Bytes verified.
    pub done_bytes: u64,
    /// Bytes to verify, as far as is known.
    pub total_bytes: u64,
    /// Damaged blocks found.
    pub damaged_blocks: u64,
    /// Places in the list of damage, once it has ended.
    pub damage_listed: u64,
    /// Places that the list had no room for.
    pub damage_not_listed: u64,
    /// Blocks that were overwritten or removed before they could be read.
    pub passed_blocks: u64,
    /// What was verified, once it has ended.
    pub verified: Verified,
}

/// The scrubs of a mounted volume.
#[derive(Default)]
pub(crate) struct Scrubs {
    shared: Arc<Shared>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

#[derive(Default)]
struct Shared {
    now: Mutex<Now>,
    /// The running one is to stop.
    stopping: Condvar,
}

#[derive(Default)]
struct Now {
    status: ScrubStatus,
    damage: Vec<Damage>,
    began: Duration,
    stop: bool,
    closed: bool,
}

/// What the thread needs of a volume.
pub(crate) struct Mounted {
    pub(crate) journal: Arc<Journal>,
    pub(crate) data: Arc<DataStore>,
    /// Held while the log grows, or the volume gets another size.
    pub(crate) growing: Arc<Mutex<()>>,
    pub(crate) env: Env,
}

/// Why no scrub was started.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum NotStarted {
    /// One is on its way.
    Running,
    /// The volume is being closed.
    Closed,
    /// There is no thread for it.
    NoThread,
}

impl Scrubs {
    /// Starts one; its number. Without `background` it has ended when this returns.
    pub(crate) fn start(
        &self,
        volume: Mounted,
        options: ScrubOptions,
        background: bool,
    ) -> Result<u64, NotStarted> {
        let mut thread = self.thread.lock();
        let number = self.begin(options, &volume.env)?;
        if let Some(last) = thread.take() {
            // It has ended, or is about to: its state says so.
            join(last);
        }
        let shared = self.shared.clone();
        let work = move || shared.run(&volume, options);
        if !background {
            work();
            return Ok(number);
        }
        match std::thread::Builder::new().name("ferry-scrub".into()).spawn(work) {
            Ok(started) => *thread = Some(started),
            Err(error) => {
                tracing::error!(%error, "no thread for a scrub");
                self.shared.now.lock().status.state = ScrubState::Stopped;
                return Err(NotStarted::NoThread);
            }
        }
        Ok(number)
    }

    fn begin(&self, options: ScrubOptions, env: &Env) -> Result<u64, NotStarted> {
        let mut now = self.shared.now.lock();
        if now.closed {
            return Err(NotStarted::Closed);
        }
        if now.status.state == ScrubState::Running {
            return Err(NotStarted::Running);
        }
        let number = now.status.number + 1;
        now.began = env.clock.monotonic();
        now.stop = false;
        now.damage.clear();
        now.status = ScrubStatus {
            number,
            state: ScrubState::Running,
            started: utc(env.clock.wall().as_secs()),
            rate_bytes: options.rate.unwrap_or(0),
            ..ScrubStatus::default()
        };
        Ok(number)
    }

    /// Stops the one that is on its way, if one is. Does not wait for its end.
    pub(crate) fn stop(&self) {
        self.shared.now.lock().stop = true;
        self.shared.stopping.notify_all();
    }

    /// Stops for good, and waits for the end.
    pub(crate) fn close(&self) {
        self.shared.now.lock().closed = true;
        self.stop();
        if let Some(thread) = self.thread.lock().take() {
            join(thread);
        }
    }

    /// The newest one.
    pub(crate) fn status(&self, env: &Env) -> ScrubStatus {
        let now = self.shared.now.lock();
        let mut status = now.status.clone();
        if status.state == ScrubState::Running {
            status.time_ns = nanos_since(now.began, env);
        }
        status
    }

    /// Damage that the newest one found, from this place in the list on.
    pub(crate) fn damage(&self, from: usize, most: usize) -> Vec<Damage> {
        self.shared.now.lock().damage.iter().skip(from).take(most).cloned().collect()
    }
}

fn join(thread: JoinHandle<()>) {
    if thread.join().is_err() {
        tracing::error!("a scrub's thread panicked");
    }
}

fn nanos_since(began: Duration, env: &Env) -> u64 {
    u64::try_from(env.clock.monotonic().saturating_sub(began).as_nanos()).unwrap_or(u64::MAX)
}

impl Shared {
    fn run(&self, volume: &Mounted, options: ScrubOptions) {
        let _doing = activity::begin(Operation::Scrub);
        tracing::info!(rate = options.rate, "scrubbing");
        let data = &volume.data;
        // A log that grows moves the geometry before the superblocks, and back if it fails.
        let at_rest = volume.growing.lock();
        let (geometry, superblocks) = (data.geometry(), read_superblock_copies(data.device()));
        drop(at_rest);
        let source = Source {
            device: data.device(),
            geometry,
            superblocks,
            segments: &|| data.geometry().segment_count,
            journal: &volume.journal,
            settled: &|block| data.wait_written(block),
            live_bytes: data.totals().live,
        };
        let report = scrub_source(&source, options, &volume.env, &mut Follower(self));
        for damage in report.damage.iter().take(DAMAGE_LOGGED_MAX) {
            tracing::error!("damaged: {damage}");
        }
        tracing::info!(
            complete = report.complete,
            verified_bytes = report.verified.bytes(),
            damaged_blocks = report.damaged_blocks,
            "scrubbed"
        );
        self.end(report, &volume.env);
    }

    fn end(&self, report: ScrubReport, env: &Env) {
        let mut now = self.now.lock();
        let now = &mut *now;
        now.status.time_ns = nanos_since(now.began, env);
        now.status.state = if report.complete { ScrubState::Complete } else { ScrubState::Stopped };
        now.status.done_bytes = report.verified.bytes();
        now.status.verified = report.verified;
        now.status.damaged_blocks = report.damaged_blocks;
        now.status.damage_listed = report.damage.len() as u64;
        now.status.damage_not_listed = report.damage_not_listed;
        now.status.passed_blocks = report.passed_blocks;
        now.damage = report.damage;
    }
}

/// So many damaged places go to the daemon's log.
const DAMAGE_LOGGED_MAX: usize = 100;

/// Passes on how far it is, and when to stop.
struct Follower<'s>(&'s Shared);

impl Watch for Follower<'_> {
    fn progress(&mut self, at: &ScrubProgress) -> bool {
        let mut now = self.0.now.lock();
        now.status.done_bytes = at.done_bytes;
        now.status.total_bytes = at.total_bytes;
        now.status.damaged_blocks = at.damaged_blocks;
        !now.stop
    }

    fn wait(&mut self, time: Duration) -> bool {
        let mut now = self.0.now.lock();
        // A stop wakes it; woken early for no reason, it reads a little early.
        if !now.stop {
            self.0.stopping.wait_for(&mut now, time);
        }
        !now.stop
    }
}

/// Seconds since the epoch as `2026-11-21T11:05:00Z`.
fn utc(secs: u64) -> String {
    let Utc { year, month, day, hour, minute, second } = Utc::from_secs(secs);
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}Z")
}

#[cfg(test)]
mod tests {
    use super::utc;

    #[test]
    fn seconds_are_dates() {
        assert_eq!(utc(0), "1970-01-01T00:00:00Z");
        assert_eq!(utc(951_782_399), "2000-02-28T23:59:59Z");
        assert_eq!(utc(951_782_400), "2000-02-29T00:00:00Z");
        assert_eq!(utc(951_868_800), "2000-03-01T00:00:00Z");
        assert_eq!(utc(1_795_259_205), "2026-11-21T11:06:45Z");
        assert_eq!(utc(4_107_542_399), "2100-02-28T23:59:59Z");
        assert_eq!(utc(4_107_542_400), "2100-03-01T00:00:00Z");
    }
}
