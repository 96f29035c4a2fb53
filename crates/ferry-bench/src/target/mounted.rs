//! A directory of a mounted file system, through system calls.

use super::File;
use crate::error::BenchError;
use ferry_fs::FlushPolicy;
use ferry_fuse::control::{self, TuneRequest};
use parking_lot::Mutex;
use rustix::fd::OwnedFd;
use rustix::fs::{AtFlags, Mode, OFlags, linkat, mkdirat, openat, renameat, statat, unlinkat};
use rustix::time::{ClockId, clock_gettime};
use serde_json::Value;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

/// A directory on a mount. Dropping it removes what the workload has made there.
pub struct Mounted {
    root: Arc<MountedDir>,
    daemon: Option<u32>,
    /// The flush policy before the first change.
    policy: Mutex<Option<FlushPolicy>>,
}

/// A directory: names in it are found from its descriptor.
pub struct MountedDir {
    fd: OwnedFd,
    path: PathBuf,
}

/// Tells the directories apart that one process makes.
static NEXT: AtomicU32 = AtomicU32::new(0);

impl Mounted {
    pub fn new(path: &Path, daemon: Option<u32>) -> Result<Self, BenchError> {
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let own = path.join(format!("ferry-bench.{}.{number}", std::process::id()));
        fs::create_dir(&own)
            .map_err(BenchError::path(path, "cannot make a directory for the bench"))?;
        let root = MountedDir::open_path(own).map_err(BenchError::path(path, "cannot open"))?;
        Ok(Self { root: Arc::new(root), daemon, policy: Mutex::default() })
    }

    pub fn root(&self) -> Arc<MountedDir> {
        self.root.clone()
    }

    /// Nothing where the question is not understood: not FerryFS.
    pub fn stats(&self) -> Result<Option<Value>, BenchError> {
        match control::stats(&self.file()?) {
            Ok(json) => Ok(serde_json::from_slice(&json).ok()),
            Err(e) if is_foreign(&e) => Ok(None),
            Err(e) => Err(BenchError::path(&self.root.path, "cannot read the statistics")(e)),
        }
    }

    /// At the end the policy of before is back.
    pub fn tune(&self, policy: FlushPolicy) -> Result<(), BenchError> {
        let mut before = self.policy.lock();
        if before.is_none() {
            let stats = self.stats()?;
            let name = stats.as_ref().and_then(|stats| stats.pointer("/flush/policy")?.as_str());
            *before = name.and_then(|name| name.parse().ok());
        }
        self.set_policy(policy)
    }

    fn set_policy(&self, policy: FlushPolicy) -> Result<(), BenchError> {
        let asked = TuneRequest { flush: Some(policy), fast_flush: None, reset_flush_time: true };
        let failed = BenchError::path(&self.root.path, "cannot set the flush policy");
        control::tune(&self.file()?, &asked).map_err(failed)
    }

    pub fn size(&self) -> Result<u64, BenchError> {
        match rustix::fs::fstatvfs(self.file()?) {
            Ok(stat) => Ok(stat.f_blocks * stat.f_frsize),
            Err(error) => {
                Err(BenchError::path(&self.root.path, "cannot ask for its size")(error.into()))
            }
        }
    }

    pub fn sync(&self) -> Result<(), BenchError> {
        let file = self.file()?;
        let failed = BenchError::path(&self.root.path, "cannot sync");
        if let Err(error) = rustix::fs::syncfs(&file) {
            return Err(failed(error.into()));
        }
        match control::sync(&file) {
            Err(e) if !is_foreign(&e) => Err(failed(e)),
            _ => Ok(()),
        }
    }

    /// From the kernel's count of ticks, mostly 10 ms long.
    pub fn daemon_cpu_time(&self) -> Result<Option<Duration>, BenchError> {
        let Some(pid) = self.daemon else { return Ok(None) };
        let stat = format!("/proc/{pid}/stat");
        let failed = BenchError::path(&stat, "cannot read");
        let text = fs::read_to_string(&stat).map_err(failed)?;
        // The name, in brackets, may hold anything; what follows are numbers.
        let fields = text.rsplit(')').next().unwrap_or_default().split_whitespace();
        let ticks: u64 =
            fields.skip(11).take(2).filter_map(|field| field.parse::<u64>().ok()).sum();
        Ok(Some(Duration::from_nanos(
            ticks * 1_000_000_000 / rustix::param::clock_ticks_per_second(),
        )))
    }

    fn file(&self) -> Result<fs::File, BenchError> {
        fs::File::open(&self.root.path).map_err(BenchError::path(&self.root.path, "cannot open"))
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        let before = self.policy.lock().take();
        if let Some(Err(error)) = before.map(|policy| self.set_policy(policy)) {
            tracing::warn!(%error, "the flush policy stays as the bench has set it");
        }
        if let Err(error) = fs::remove_dir_all(&self.root.path) {
            tracing::warn!(path = %self.root.path.display(), %error, "what the bench has made is left there");
        }
    }
}

fn is_foreign(error: &io::Error) -> bool {
    matches!(
        error.raw_os_error(),
        Some(libc::ENOTTY | libc::EINVAL | libc::EOPNOTSUPP | libc::ENOSYS)
    )
}

/// Processor time of this process.
pub fn own_cpu_time() -> Duration {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    Duration::new(time.tv_sec.unsigned_abs(), u32::try_from(time.tv_nsec).unwrap_or_default())
}

/// As `ferry sync` does it. The first error, if any file failed.
pub fn sync_files(files: impl Iterator<Item = io::Result<File>>) -> io::Result<()> {
    let files = files.map(|file| match file {
        Ok(File::Mounted(file)) => ((), Ok(file)),
        Ok(File::Volume(_)) => ((), Err(io::ErrorKind::CrossesDevices.into())),
        Err(error) => ((), Err(error)),
    });
    let mut result = Ok(());
    ferry_sync::sync_each(files, &ferry_sync::Options::default(), |(), synced| {
        if result.is_ok() {
            result = synced;
        }
    });
    result
}

impl MountedDir {
    fn open_path(path: PathBuf) -> io::Result<Self> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        Ok(Self { fd: rustix::fs::open(&path, flags, Mode::empty())?, path })
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    pub fn mkdir(&self, name: &str) -> io::Result<Arc<Self>> {
        mkdirat(&self.fd, name, Mode::from(0o755))?;
        self.open_dir(name)
    }

    pub fn open_dir(&self, name: &str) -> io::Result<Arc<Self>> {
        Ok(Arc::new(Self::open_path(self.path.join(name))?))
    }

    pub fn open(&self, name: &str, new: bool) -> io::Result<fs::File> {
        let flags = OFlags::RDWR | OFlags::CLOEXEC;
        let flags = if new { flags | OFlags::CREATE | OFlags::EXCL } else { flags };
        Ok(openat(&self.fd, name, flags, Mode::from(0o644))?.into())
    }

    pub fn stat(&self, name: &str) -> io::Result<u64> {
        Ok(statat(&self.fd, name, AtFlags::SYMLINK_NOFOLLOW)?.st_size.unsigned_abs())
    }

    pub fn unlink(&self, name: &str) -> io::Result<()> {
        Ok(unlinkat(&self.fd, name, AtFlags::empty())?)
    }

    pub fn rename(&self, name: &str, to: &Self, new: &str) -> io::Result<()> {
        Ok(renameat(&self.fd, name, &to.fd, new)?)
    }

    pub fn link(&self, name: &str, to: &Self, new: &str) -> io::Result<()> {
        Ok(linkat(&self.fd, name, &to.fd, new, AtFlags::empty())?)
    }

    pub fn remove_tree(&self, name: &str) -> io::Result<()> {
        fs::remove_dir_all(self.path.join(name))
    }
}
