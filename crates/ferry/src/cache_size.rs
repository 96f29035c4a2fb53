//! How much memory a daemon may use, and how it gives way when memory is short.
//!
//! Unless `cache_size` says otherwise, a mount may use an eighth of the memory that the machine
//! has, or that the control groups (version 2) of the daemon allow, if that is less.
//!
//! The kernel says for how long programs waited for memory (pressure stall information). A thread
//! looks once a second. If they waited for a tenth of that second, the daemon gives an eighth of
//! its memory up, down to an eighth of `cache_size`. When nobody has waited for ten seconds, it
//! takes a sixteenth of `cache_size` back, each second.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::Duration;

use ferry_env::Env;

/// A mount may use this part of the memory.
pub const SHARE: u64 = 8;
/// However little there is, a mount may use so many bytes.
pub const CACHE_SIZE_MIN: u64 = 64 << 20;

/// The thread looks this often.
const PERIOD: Duration = Duration::from_secs(1);
/// Memory is short if programs wait for this part of the time, at least.
const SHORT_SHARE: u32 = 10;
/// The daemon gives this part of its memory up at a time.
const GIVEN_SHARE: usize = 8;
/// This part of `cache_size` is never given up.
const LEAST_SHARE: usize = 8;
/// So many looks in a row must find that nobody waits, before the daemon takes memory back.
const QUIET_LOOKS: u32 = 10;
/// It takes this part of `cache_size` back at a time.
const TAKEN_SHARE: usize = 16;

/// Bytes of the machine's memory.
pub fn machine_bytes() -> u64 {
    let info = rustix::system::sysinfo();
    (info.totalram as u64).saturating_mul(u64::from(info.mem_unit))
}

/// The memory that a mount may use if nobody said how much.
pub fn default_bytes() -> usize {
    default_of(allowed_bytes("self"))
}

/// The memory that the machine has, or that the control groups of a process allow, if that is less;
/// `process`: its name below /proc.
pub fn allowed_bytes(process: &str) -> u64 {
    let allowed = groups(process).iter().filter_map(|group| allowed_by(group)).min();
    machine_bytes().min(allowed.unwrap_or(u64::MAX))
}

fn default_of(allowed: u64) -> usize {
    usize::try_from((allowed / SHARE).max(CACHE_SIZE_MIN)).unwrap_or(usize::MAX)
}

/// The directories of a process's control group and of those above it, but for the root.
fn groups(process: &str) -> Vec<PathBuf> {
    let own = std::fs::read_to_string(format!("/proc/{process}/cgroup")).unwrap_or_default();
    // Beside version 1, version 2 has a directory of its own.
    let roots = [Path::new("/sys/fs/cgroup"), Path::new("/sys/fs/cgroup/unified")];
    let root = roots.into_iter().find(|root| root.join("cgroup.controllers").exists());
    root.map_or(Vec::new(), |root| groups_below(root, &own))
}

/// `own`: what `/proc/PID/cgroup` says.
fn groups_below(root: &Path, own: &str) -> Vec<PathBuf> {
    let path = own.lines().find_map(|line| line.strip_prefix("0::/")).unwrap_or_default();
    let group = root.join(path.trim_end_matches(" (deleted)"));
    group.ancestors().take_while(|group| *group != root).map(Path::to_path_buf).collect()
}

/// The bytes that a group allows; `None`: any number.
fn allowed_by(group: &Path) -> Option<u64> {
    let limit = |name| std::fs::read_to_string(group.join(name)).ok()?.trim().parse::<u64>().ok();
    [limit("memory.max"), limit("memory.high")].into_iter().flatten().min()
}

/// For how long programs have waited for memory since the machine, or the group, was started.
fn stalled(pressure: &str) -> Option<Duration> {
    let some = pressure.lines().find_map(|line| line.strip_prefix("some "))?;
    let total = some.split(' ').find_map(|word| word.strip_prefix("total="))?;
    total.parse().ok().map(Duration::from_micros)
}

/// The file that says for how long programs have waited: those of the innermost group that has
/// one, or of the whole machine.
fn pressure_file() -> PathBuf {
    let of_groups = groups("self").into_iter().map(|group| group.join("memory.pressure"));
    of_groups.into_iter().find(|file| file.exists()).unwrap_or("/proc/pressure/memory".into())
}

/// How much memory the daemon may use, from look to look.
struct Governor {
    cache_size: usize,
    limit: usize,
    quiet_looks: u32,
}

impl Governor {
    fn new(cache_size: usize) -> Self {
        Self { cache_size, limit: cache_size, quiet_looks: 0 }
    }

    /// Programs have waited for `stalled` of the time that has `passed` since the last look.
    fn look(&mut self, stalled: Duration, passed: Duration) -> usize {
        if stalled.is_zero() {
            self.quiet_looks += 1;
        } else {
            self.quiet_looks = 0;
        }
        if stalled * SHORT_SHARE >= passed {
            let less = self.limit - self.limit / GIVEN_SHARE;
            self.limit = less.max(self.cache_size / LEAST_SHARE);
        } else if self.quiet_looks >= QUIET_LOOKS {
            let more = self.limit.saturating_add(self.cache_size / TAKEN_SHARE);
            self.limit = more.min(self.cache_size);
        }
        self.limit
    }
}

/// The thread that looks whether memory is short. It ends when this is dropped.
pub struct GivesWay {
    stop: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl GivesWay {
    /// Starts the thread for a file system that was opened with `cache_size`. Where the kernel does
    /// not say whether memory is short, there is none.
    pub fn start<F: Send + Sync + 'static>(
        fs: &Arc<F>,
        set_limit: fn(&F, usize),
        cache_size: usize,
        env: &Env,
    ) -> Self {
        let file = pressure_file();
        let read = move || stalled(&std::fs::read_to_string(&file).ok()?);
        let Some(mut before) = read() else {
            tracing::debug!("the kernel does not say when memory is short");
            return Self { stop: None, thread: None };
        };
        let (stop, stopped) = channel();
        let (fs, clock) = (Arc::downgrade(fs), Arc::clone(&env.clock));
        let body = move || {
            let (mut governor, mut last) = (Governor::new(cache_size), clock.monotonic());
            while stopped.recv_timeout(PERIOD) == Err(RecvTimeoutError::Timeout) {
                let (Some(fs), Some(now)) = (fs.upgrade(), read()) else { return };
                let (at, was) = (clock.monotonic(), governor.limit);
                let limit = governor.look(now.saturating_sub(before), at - last);
                (before, last) = (now, at);
                if limit != was {
                    tracing::debug!(limit, "memory in use is bounded anew");
                    set_limit(&fs, limit);
                }
            }
        };
        let thread = std::thread::Builder::new().name("ferry-memory".into()).spawn(body);
        if let Err(error) = &thread {
            tracing::warn!(%error, "the cache will not give way when memory is short");
        }
        Self { stop: Some(stop), thread: thread.ok() }
    }
}

impl Drop for GivesWay {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the thread that looks at memory panicked");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: usize = 1 << 20;

    #[test]
    fn memory_is_given_up_under_pressure_and_taken_back_when_it_is_over() {
        let mut governor = Governor::new(800 * MIB);
        let mut look = |millis| governor.look(Duration::from_millis(millis), PERIOD);
        assert_eq!(look(99), 800 * MIB, "a little is no reason");
        assert_eq!(look(100), 700 * MIB);
        assert!((0..100).all(|_| look(900) >= 100 * MIB));
        assert_eq!(look(900), 100 * MIB, "an eighth stays");
        assert!((0..9).all(|_| look(0) == 100 * MIB), "it may come again at once");
        assert_eq!(look(0), 150 * MIB);
        assert_eq!(look(1), 150 * MIB);
        assert!((0..9).all(|_| look(0) == 150 * MIB));
        assert_eq!((0..100).map(|_| look(0)).max(), Some(800 * MIB));
    }

    #[test]
    fn the_kernel_says_for_how_long_programs_have_waited() {
        let text = "some avg10=0.00 avg60=1.10 avg300=0.01 total=3438510\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=763248\n";
        assert_eq!(stalled(text), Some(Duration::from_micros(3_438_510)));
        assert_eq!(stalled("nonsense"), None);
    }

    #[test]
    fn the_least_that_a_group_or_one_above_it_allows_counts() {
        let root = tempfile::tempdir().expect("a directory");
        let (outer, inner) = (root.path().join("outer"), root.path().join("outer/inner"));
        std::fs::create_dir_all(&inner).expect("made");
        for (file, text) in [
            (outer.join("memory.max"), "4294967296\n"),
            (outer.join("memory.high"), "2147483648\n"),
            (inner.join("memory.max"), "max\n"),
        ] {
            std::fs::write(file, text).expect("written");
        }
        let own = "4:memory:/other\n0::/outer/inner\n";
        let groups = groups_below(root.path(), own);
        assert_eq!(groups, [inner.clone(), outer.clone()]);
        assert_eq!((allowed_by(&inner), allowed_by(&outer)), (None, Some(2 << 30)));
        assert!(groups_below(root.path(), "0::/\n").is_empty());
        assert_eq!(default_of(2 << 30), 256 * MIB);
        assert_eq!(default_of(128 << 20), 64 * MIB, "however little there is");
    }
}
