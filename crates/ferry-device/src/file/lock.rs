//! Ownership of a volume: one writer or several readers. A refused process learns the owner's pid.
//!
//! The lock belongs to the open file description, so it lasts as long as any process has it open
//! (through fork and exec too), and another handle in the same process is refused like a stranger.
//! Such locks do not tell their holder's pid (`F_OFD_GETLK` answers -1), a classic POSIX lock is
//! dropped when the process closes *any* descriptor of the file, and a pid written into the volume
//! can be stale. So the range itself says it: every holder locks `pid` bytes that start at
//! [`LOCK_START`]. All ranges share the first byte, so they exclude each other as one lock would,
//! and a refused process reads the pid off the length of the lock in the way. Lock and pid are one
//! and cannot disagree.
//!
//! The lock of a killed process lives on until the device is through with the writes that it had in
//! flight; that is as it must be, and short. A process that comes in between waits for it rather
//! than report a holder that is no more.

use super::sys::{self, RangeLock};
use std::fs::{self, File};
use std::io;
use std::path::Path;
use std::time::Duration;

/// First byte of the lock, beyond any byte of a volume.
const LOCK_START: i64 = 1 << 62;
/// How often to ask again while the lock has no holder that one could name, or a dying one: 5
/// seconds in all.
const ATTEMPTS: u32 = 1_000;
/// Time between two attempts.
const ATTEMPT_INTERVAL: Duration = Duration::from_millis(5);

/// The process that holds a lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LockHolder {
    /// As the holder itself saw it; 0 if the lock is not one of ours.
    pub pid: u32,
    /// It holds the lock exclusively.
    pub writing: bool,
}

/// The lock of a file that has no other contents, held by this process until it is dropped.
#[derive(Debug)]
pub struct FileLock {
    _file: File,
}

impl FileLock {
    /// Takes the lock of a file, which is made if it is absent. The inner error is who holds it.
    pub fn take(path: &Path, exclusive: bool) -> io::Result<Result<Self, LockHolder>> {
        let mut options = File::options();
        let file = options.read(true).write(true).create(true).truncate(false).open(path)?;
        Ok(acquire(&file, exclusive)?.map(|()| Self { _file: file }))
    }

    /// Who holds the lock of a file. Nothing is taken, so nobody is refused meanwhile.
    pub fn holder(path: &Path) -> io::Result<Option<LockHolder>> {
        let file = match File::open(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            other => other?,
        };
        let mut last = None;
        for _ in 0..ATTEMPTS {
            let ours = RangeLock { kind: libc::F_WRLCK, start: LOCK_START, len: 1 };
            last = sys::conflicting_lock(&file, ours)?.map(LockHolder::of);
            if last.is_none_or(|holder| !is_dying(holder.pid)) {
                break;
            }
            pause();
        }
        Ok(last)
    }
}

impl LockHolder {
    fn of(lock: RangeLock) -> Self {
        let pid = u32::try_from(lock.len).unwrap_or_default();
        Self { pid, writing: lock.kind == libc::F_WRLCK }
    }
}

/// Takes the lock for this process, exclusively or shared. The inner error is the holder.
pub(super) fn acquire(file: &File, exclusive: bool) -> io::Result<Result<(), LockHolder>> {
    let kind = if exclusive { libc::F_WRLCK } else { libc::F_RDLCK };
    let lock = RangeLock { kind, start: LOCK_START, len: i64::from(std::process::id()) };
    let mut last = None;
    for _ in 0..ATTEMPTS {
        if sys::try_lock(file, lock)? {
            return Ok(Ok(()));
        }
        // The owner may have left before we ask for its pid: then try again at once.
        if let Some(other) = sys::conflicting_lock(file, lock)? {
            let holder = LockHolder::of(other);
            if !is_dying(holder.pid) {
                return Ok(Err(holder));
            }
            last = Some(holder);
            pause();
        }
    }
    // In another pid namespace a holder may look dead and be well.
    last.map_or_else(|| Err(io::Error::from_raw_os_error(libc::EAGAIN)), |holder| Ok(Err(holder)))
}

/// Gives up the lock now, even if the open file lives on.
pub(super) fn release(file: &File) -> io::Result<()> {
    sys::try_lock(file, RangeLock { kind: libc::F_UNLCK, start: LOCK_START, len: 0 }).map(|_| ())
}

#[expect(
    clippy::disallowed_methods,
    reason = "the kernel tells nobody that the I/O of a dead process has ended, and \
    a lock request that waits could not be given up"
)]
fn pause() {
    std::thread::sleep(ATTEMPT_INTERVAL);
}

/// Whether the process has exited, or is about to and will not run any of its code again.
fn is_dying(pid: u32) -> bool {
    match fs::read_to_string(format!("/proc/{pid}/stat")) {
        Ok(stat) => {
            // Between taking the signal and being marked as exiting a thread shows neither; the
            // process shows the signal to its end.
            stat_is_dying(&stat)
                || fs::read_to_string(format!("/proc/{pid}/status"))
                    .is_ok_and(|status| status_is_killed(&status))
        }
        // Without /proc one cannot know.
        Err(_) => fs::exists("/proc/self/stat").unwrap_or(false),
    }
}

/// Reads a line of `/proc/PID/stat` (see proc(5)): its state, flags and pending signals.
fn stat_is_dying(stat: &str) -> bool {
    /// `PF_EXITING` of the kernel's task flags.
    const EXITING: u64 = 4;
    // The command's name may hold anything, spaces and parentheses too. Behind it, the state is
    // field 3.
    let Some((_, fields)) = stat.rsplit_once(')') else { return false };
    let fields: Vec<_> = fields.split_whitespace().collect();
    let field = |number: usize| fields.get(number - 3).copied().unwrap_or_default();
    let bits = |number| field(number).parse::<u64>().unwrap_or_default();
    let killed = bits(31) & 1 << (libc::SIGKILL - 1) != 0;
    matches!(field(3), "Z" | "X") || bits(9) & EXITING != 0 || killed
}

/// Looks for SIGKILL among the signals that are pending for the whole process, in
/// `/proc/PID/status`.
fn status_is_killed(status: &str) -> bool {
    let pending = status.lines().find_map(|line| line.strip_prefix("ShdPnd:"));
    let mask =
        pending.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or_default();
    mask & 1 << (libc::SIGKILL - 1) != 0
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{AlignedBuf, BLOCK_SIZE, BlockDevice, FileDevice, FileRead, OpenMode, ReadRing};
    use ferry_env::Env;
    use std::sync::Arc;

    /// A line of `/proc/PID/stat` with what matters filled in.
    fn stat(state: &str, flags: u64, pending: u64) -> String {
        let before_pending = ["0"; 21].join(" ");
        format!("42 (a ) name) {state} 1 42 42 0 -1 {flags} {before_pending} {pending} 0 0 0")
    }

    #[test]
    fn the_lock_of_a_file_tells_who_holds_it() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("lock");
        assert_eq!(FileLock::holder(&path).expect("no file, no holder"), None);
        let ours = |writing| LockHolder { pid: std::process::id(), writing };
        let reader = FileLock::take(&path, false).expect("a file").expect("it is free");
        let second = FileLock::take(&path, false).expect("a file").expect("readers share it");
        assert_eq!(FileLock::take(&path, true).expect("a file").expect_err("held"), ours(false));
        drop((reader, second));
        let writer = FileLock::take(&path, true).expect("a file").expect("it is free");
        assert_eq!(FileLock::take(&path, false).expect("a file").expect_err("held"), ours(true));
        assert_eq!(FileLock::holder(&path).expect("a file"), Some(ours(true)));
        drop(writer);
        assert_eq!(FileLock::holder(&path).expect("a file"), None);
    }

    #[test]
    fn a_dying_process_is_recognized() {
        assert!(!is_dying(std::process::id()));
        assert!(is_dying(u32::MAX));
        assert!(!stat_is_dying(&stat("S", 0x40_0040, 0)));
        assert!(!stat_is_dying(&stat("R", 0x40_0040, 1 << (libc::SIGTERM - 1))));
        assert!(stat_is_dying(&stat("Z", 0x40_0044, 0)));
        assert!(stat_is_dying(&stat("R", 0x40_0044, 0)));
        assert!(stat_is_dying(&stat("D", 0x40_0040, 1 << (libc::SIGKILL - 1))));
        assert!(status_is_killed(
            "Name:\tferry\nSigPnd:\t0000000000000000\nShdPnd:\t0000000000000100\nSigBlk:\t0\n"
        ));
        assert!(!status_is_killed("SigPnd:\t0000000000000000\nShdPnd:\t0000000000004000\n"));
    }

    /// Descriptors of this process that lead to a file.
    fn descriptors_of(path: &Path) -> usize {
        let all = fs::read_dir("/proc/self/fd").expect("/proc is mounted").flatten();
        all.filter(|one| fs::read_link(one.path()).is_ok_and(|to| to == path)).count()
    }

    #[test]
    fn of_a_file_that_is_replaced_before_it_is_owned_the_other_one_is_opened() {
        let directory = tempfile::tempdir().expect("a directory");
        let directory = directory.path().canonicalize().expect("it is there");
        let (path, other) = (directory.join("volume"), directory.join("other"));
        let env = Env::real();
        for (path, size) in [(&path, 1 << 20), (&other, 2 << 20)] {
            drop(FileDevice::create(path, size, false, &env).expect("a file"));
        }
        let file = File::options().read(true).write(true).open(&path).expect("the first one");
        // As the lock of a process that has died, and whose last writes are under way.
        let dead = RangeLock { kind: libc::F_WRLCK, start: LOCK_START, len: i64::from(i32::MAX) };
        assert!(sys::try_lock(&file, dead).expect("locks work"));
        let opened = std::thread::scope(|scope| {
            let opening = scope.spawn(|| FileDevice::open(&path, OpenMode::ReadWrite, &env));
            // It has opened the file, and waits for the owner.
            while descriptors_of(&path) < 2 && !opening.is_finished() {
                std::thread::yield_now();
            }
            fs::rename(&other, &path).expect("it is replaced");
            drop(file);
            opening.join().expect("no panic")
        });
        assert_eq!(opened.expect("it opens").capacity(), 2 << 20);
    }

    /// A ring whose reads never end.
    #[derive(Default)]
    struct Endless(std::cell::RefCell<Vec<FileRead>>);

    impl ReadRing for Endless {
        fn start(&self, read: FileRead) {
            self.0.borrow_mut().push(read);
        }
    }

    #[test]
    fn a_read_that_a_ring_has_yet_does_not_hold_the_lock() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("volume");
        let device = FileDevice::create(&path, 1 << 20, false, &Env::real()).expect("a file");
        let (ring, buf) = (Endless::default(), Arc::new(AlignedBuf::zeroed(BLOCK_SIZE)));
        device.start_read(&ring, 0, buf, Box::new(drop));
        let read = ring.0.borrow_mut().pop();
        let file = read.expect("it was started").rest().0.try_clone_to_owned();
        let any = RangeLock { kind: libc::F_WRLCK, start: LOCK_START, len: 1 };
        let in_the_way = sys::conflicting_lock(&file.expect("a descriptor").into(), any);
        assert!(in_the_way.expect("locks work").is_some(), "the reads' own description has it");
    }
}
