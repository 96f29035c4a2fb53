//! Where a workload runs: below a directory of any mounted file system, or in process on a volume
//! in memory whose device takes real time. Both look the same to a workload: a [`Target`] has an
//! empty [`Dir`], which has [`Dir`]s and [`File`]s.

mod mounted;
mod volume;

pub use volume::VolumeOptions;

use crate::error::BenchError;
use crate::run::{Sample, Variant};
use crate::stats::Histogram;
use ferry_fs::FlushPolicy;
use mounted::Mounted;
pub(crate) use mounted::own_cpu_time;
use rustix::fs::FallocateFlags;
use rustix::io::{ReadWriteFlags, pwritev2};
use serde_json::Value;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use volume::{Owned, Volume};

/// What reports call a volume in this process.
const IN_PROCESS: &str = "in process";

/// Where a workload runs: a directory, or a volume in process.
pub struct Target {
    name: String,
    kind: Kind,
}

enum Kind {
    Mounted(Mounted),
    Volume(Arc<Volume>),
}

/// Processor time used so far.
#[derive(Clone, Copy, Debug, Default)]
pub struct CpuTime {
    /// By this process: the callers, and in process the file system too.
    pub client: Duration,
    /// By the mount's daemon, where it is known which process that is.
    pub daemon: Option<Duration>,
}

impl CpuTime {
    /// All of it.
    pub fn total(&self) -> Duration {
        self.client + self.daemon.unwrap_or_default()
    }
}

impl Target {
    /// A directory on any file system. A new directory is made in it, and removed with all that is
    /// in it at the end. `daemon`: the process that serves the mount, whose processor time counts,
    /// too.
    pub fn on(path: &Path, daemon: Option<u32>) -> Result<Self, BenchError> {
        Ok(Self {
            name: path.display().to_string(),
            kind: Kind::Mounted(Mounted::new(path, daemon)?),
        })
    }

    /// The same, called otherwise in reports.
    #[must_use]
    pub fn called(self, name: String) -> Self {
        Self { name, ..self }
    }

    /// A new volume in memory, in this process.
    pub fn in_process(options: &VolumeOptions) -> Result<Self, BenchError> {
        Ok(Self { name: IN_PROCESS.into(), kind: Kind::Volume(Volume::new(options)?) })
    }

    /// What reports call it.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// A directory in which nobody else works. Make one of your own in it for each turn, and
    /// [`Dir::remove_tree`] it after.
    pub fn root(&self) -> Dir {
        match &self.kind {
            Kind::Mounted(target) => Dir::Mounted(target.root()),
            Kind::Volume(volume) => Dir::Volume(Owned::root(volume)),
        }
    }

    /// The same as a path; `None` in process.
    pub fn path(&self) -> Option<PathBuf> {
        match &self.kind {
            Kind::Mounted(target) => Some(target.root().path().to_owned()),
            Kind::Volume(_) => None,
        }
    }

    /// The counters that `ferry stats --json` shows; `None` where no FerryFS is.
    pub fn stats(&self) -> Result<Option<Value>, BenchError> {
        match &self.kind {
            Kind::Mounted(target) => target.stats(),
            Kind::Volume(volume) => Ok(Some(volume.stats())),
        }
    }

    /// Whether it is a FerryFS, which has counters and flush policies.
    pub fn is_ferry(&self) -> Result<bool, BenchError> {
        Ok(self.stats()?.is_some())
    }

    /// Sets the flush policy, and forgets how long flushes took so far. An error where no FerryFS
    /// is.
    pub fn tune(&self, policy: FlushPolicy) -> Result<(), BenchError> {
        match &self.kind {
            Kind::Mounted(target) => target.tune(policy),
            Kind::Volume(volume) => Ok(volume.tune(policy)?),
        }
    }

    /// Makes everything durable: before a turn, so that it does not pay for what was before.
    pub fn sync(&self) -> Result<(), BenchError> {
        match &self.kind {
            Kind::Mounted(target) => target.sync(),
            Kind::Volume(volume) => Ok(volume.sync()?),
        }
    }

    /// Makes many files durable at a time, the asynchronous way of `ferry sync`; they are opened as
    /// they are asked for. The first error, if any file failed.
    pub fn sync_files(&self, files: impl Iterator<Item = io::Result<File>>) -> io::Result<()> {
        match &self.kind {
            Kind::Mounted(_) => mounted::sync_files(files),
            Kind::Volume(volume) => volume.sync_files(files),
        }
    }

    /// Bytes that its file system holds in all, as `df` says it.
    pub fn size(&self) -> Result<u64, BenchError> {
        match &self.kind {
            Kind::Mounted(target) => target.size(),
            Kind::Volume(volume) => Ok(volume.size()?),
        }
    }

    /// Processor time used so far.
    pub fn cpu_time(&self) -> Result<CpuTime, BenchError> {
        let client = own_cpu_time();
        let daemon = match &self.kind {
            Kind::Mounted(target) => target.daemon_cpu_time()?,
            Kind::Volume(_) => None,
        };
        Ok(CpuTime { client, daemon })
    }

    /// How late the modelled device answered since the last call of this; `None` on a path.
    pub fn take_lateness(&self) -> Option<Histogram> {
        match &self.kind {
            Kind::Mounted(_) => None,
            Kind::Volume(volume) => Some(volume.take_lateness()),
        }
    }
}

/// Where the turns of a variant are.
pub enum TurnTarget {
    /// All of them on this target.
    On(Target),
    /// Each on a new volume in memory.
    NewVolume(VolumeOptions),
}

impl TurnTarget {
    /// A variant with the name of the target, whose turns are there.
    pub fn variant<'a>(
        &'a self,
        mut turn: impl FnMut(&Target, u32) -> Result<Sample, BenchError> + 'a,
    ) -> Variant<'a> {
        match self {
            Self::On(target) => Variant::new(target.name(), move |round| turn(target, round)),
            Self::NewVolume(volume) => {
                Variant::new(IN_PROCESS, move |round| turn(&Target::in_process(volume)?, round))
            }
        }
    }
}

/// A directory. Threads may share it; each thread is a caller of its own.
#[derive(Clone)]
pub enum Dir {
    /// On a mounted file system.
    #[doc(hidden)]
    Mounted(Arc<mounted::MountedDir>),
    /// A volume in this process.
    #[doc(hidden)]
    Volume(Arc<Owned>),
}

/// An open file.
pub enum File {
    /// On a mounted file system.
    #[doc(hidden)]
    Mounted(std::fs::File),
    /// A volume in this process.
    #[doc(hidden)]
    Volume(volume::OpenFile),
}

impl Dir {
    /// Makes a directory.
    pub fn mkdir(&self, name: &str) -> io::Result<Self> {
        match self {
            Self::Mounted(dir) => Ok(Self::Mounted(dir.mkdir(name)?)),
            Self::Volume(dir) => Ok(Self::Volume(dir.mkdir(name)?)),
        }
    }

    /// Opens a directory.
    pub fn open_dir(&self, name: &str) -> io::Result<Self> {
        match self {
            Self::Mounted(dir) => Ok(Self::Mounted(dir.open_dir(name)?)),
            Self::Volume(dir) => Ok(Self::Volume(dir.open_dir(name)?)),
        }
    }

    /// Makes a file that must not be there yet, for reading and writing.
    pub fn create(&self, name: &str) -> io::Result<File> {
        match self {
            Self::Mounted(dir) => Ok(File::Mounted(dir.open(name, true)?)),
            Self::Volume(dir) => Ok(File::Volume(dir.create(name)?)),
        }
    }

    /// Opens a file for reading and writing.
    pub fn open(&self, name: &str) -> io::Result<File> {
        match self {
            Self::Mounted(dir) => Ok(File::Mounted(dir.open(name, false)?)),
            Self::Volume(dir) => Ok(File::Volume(dir.open(name)?)),
        }
    }

    /// The size of what has this name.
    pub fn stat(&self, name: &str) -> io::Result<u64> {
        match self {
            Self::Mounted(dir) => dir.stat(name),
            Self::Volume(dir) => dir.stat(name),
        }
    }

    /// Removes a file's name.
    pub fn unlink(&self, name: &str) -> io::Result<()> {
        match self {
            Self::Mounted(dir) => dir.unlink(name),
            Self::Volume(dir) => dir.unlink(name),
        }
    }

    /// Gives a file another name, maybe in another directory of the same target.
    pub fn rename(&self, name: &str, to: &Self, new: &str) -> io::Result<()> {
        match (self, to) {
            (Self::Mounted(dir), Self::Mounted(to)) => dir.rename(name, to, new),
            (Self::Volume(dir), Self::Volume(to)) => dir.rename(name, to, new),
            _ => Err(io::ErrorKind::CrossesDevices.into()),
        }
    }

    /// Gives a file one name more.
    pub fn link(&self, name: &str, to: &Self, new: &str) -> io::Result<()> {
        match (self, to) {
            (Self::Mounted(dir), Self::Mounted(to)) => dir.link(name, to, new),
            (Self::Volume(dir), Self::Volume(to)) => dir.link(name, to, new),
            _ => Err(io::ErrorKind::CrossesDevices.into()),
        }
    }

    /// Removes a directory in this one, with all that is in it.
    pub fn remove_tree(&self, name: &str) -> io::Result<()> {
        match self {
            Self::Mounted(dir) => dir.remove_tree(name),
            Self::Volume(dir) => dir.remove_tree(name),
        }
    }
}

impl File {
    /// Writes all of `data` at `offset`.
    pub fn write_at(&self, data: &[u8], offset: u64) -> io::Result<()> {
        match self {
            Self::Mounted(file) => std::os::unix::fs::FileExt::write_all_at(file, data, offset),
            Self::Volume(file) => file.write_at(data, offset),
        }
    }

    /// Writes all of `data` at the end by one call; returns where it ends, if nobody else moves the
    /// end.
    pub fn append(&self, data: &[u8]) -> io::Result<u64> {
        match self {
            Self::Mounted(file) => {
                let written = pwritev2(file, &[io::IoSlice::new(data)], 0, ReadWriteFlags::APPEND)?;
                if written < data.len() {
                    return Err(io::ErrorKind::WriteZero.into());
                }
                Ok(file.metadata()?.len())
            }
            Self::Volume(file) => file.append(data),
        }
    }

    /// Reads at `offset`; fewer bytes than there is room for only at the end.
    pub fn read_at(&self, out: &mut [u8], offset: u64) -> io::Result<usize> {
        match self {
            Self::Mounted(file) => std::os::unix::fs::FileExt::read_at(file, out, offset),
            Self::Volume(file) => file.read_at(out, offset),
        }
    }

    /// Truncates, or extends with zeros.
    pub fn set_len(&self, len: u64) -> io::Result<()> {
        match self {
            Self::Mounted(file) => file.set_len(len),
            Self::Volume(file) => file.set_len(len),
        }
    }

    /// Makes a hole.
    pub fn punch(&self, offset: u64, len: u64) -> io::Result<()> {
        match self {
            Self::Mounted(file) => {
                let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
                Ok(rustix::fs::fallocate(file, hole, offset, len)?)
            }
            Self::Volume(file) => file.punch(offset, len),
        }
    }

    /// Makes the file durable.
    pub fn sync(&self) -> io::Result<()> {
        match self {
            Self::Mounted(file) => file.sync_all(),
            Self::Volume(file) => file.sync(),
        }
    }
}
