//! Mounts on a directory, and unmounts.
//!
//! Root calls mount(2) and umount2(2); other users run `fusermount3`, which is set-user-id root.

use std::ffi::CString;
use std::fs::{self, File};
use std::io::{self, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;

use rustix::fs::{Mode, OFlags};
use rustix::io::{FdFlags, fcntl_setfd};
use rustix::mount::{MountFlags, UnmountFlags};
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};
use rustix::process::{getegid, geteuid};

use crate::device::FuseDevice;
use crate::error::Error;
use crate::init::IO_MAX;

/// The program that mounts for users who are not root.
pub const HELPER: &str = "fusermount3";
/// How the mount's type is shown: FUSE, and which file system.
const SUBTYPE: &str = "ferry";

/// The options of a mount.
#[derive(Clone, Debug)]
pub struct MountOptions {
    /// The mount's source, as `mount` shows it.
    pub fsname: String,
    /// Nothing can be changed.
    pub read_only: bool,
    /// Users other than the one who mounts may use it (as the permission bits allow, which the
    /// kernel checks). `None`: yes if root mounts. Other users need `user_allow_other` in
    /// /etc/fuse.conf.
    pub allow_other: Option<bool>,
    /// Set-user-id and set-group-id bits have no effect (always so if not root mounts).
    pub nosuid: bool,
    /// Device nodes have no effect (always so if not root mounts).
    pub nodev: bool,
    /// Programs on the mount cannot be executed.
    pub noexec: bool,
    /// Reads do not update access times.
    pub noatime: bool,
    /// Each read updates the access time.
    pub strictatime: bool,
    /// Listings do not update the access times of directories.
    pub nodiratime: bool,
    /// How requests travel between the kernel and this process.
    pub transport: Transport,
    /// Threads that serve /dev/fuse; `None`: by the number of cores.
    pub threads: Option<usize>,
    /// While requests follow each other closely, a thread at the scheduler's idle priority keeps a
    /// core from halting, so that answers wake programs sooner.
    pub idle_poll: bool,
}

impl Default for MountOptions {
    fn default() -> Self {
        Self {
            fsname: SUBTYPE.into(),
            read_only: false,
            allow_other: None,
            nosuid: false,
            nodev: false,
            noexec: false,
            noatime: false,
            strictatime: false,
            nodiratime: false,
            transport: Transport::Auto,
            threads: None,
            idle_poll: true,
        }
    }
}

/// How requests travel between the kernel and this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transport {
    /// Per-core io_uring queues if the kernel offers them (6.14 and later, with the module's
    /// parameter `enable_uring`), else /dev/fuse.
    Auto,
    /// Reads and writes of `/dev/fuse`, without io_uring.
    Device,
}

/// How to unmount.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unmount {
    /// Only if nothing is in use (`EBUSY` otherwise).
    Normal,
    /// Detach it now; it ends when its last file is closed.
    Lazy,
    /// End it now: every request, waiting or to come, fails. Works without the daemon.
    Force,
}

/// Mounts on `mountpoint`, which is absolute, and gives the mount's descriptor.
pub(crate) fn mount(mountpoint: &Path, options: &MountOptions) -> Result<FuseDevice, Error> {
    if geteuid().is_root() {
        mount_as_root(mountpoint, options)
    } else {
        mount_by_helper(mountpoint, options)
    }
}

fn mount_as_root(mountpoint: &Path, options: &MountOptions) -> Result<FuseDevice, Error> {
    let device = FuseDevice::open().map_err(Error::Device)?;
    let fd = device.file().as_raw_fd();
    let allow_other = if options.allow_other.unwrap_or(true) { ",allow_other" } else { "" };
    let gid = getegid().as_raw();
    let data = format!(
        "fd={fd},rootmode=40000,user_id=0,group_id={gid},default_permissions,max_read={IO_MAX}{allow_other}"
    );
    let data = CString::new(data).expect("it has no zero");
    let flags = [
        (options.read_only, MountFlags::RDONLY),
        (options.nosuid, MountFlags::NOSUID),
        (options.nodev, MountFlags::NODEV),
        (options.noexec, MountFlags::NOEXEC),
        (options.noatime, MountFlags::NOATIME),
        (options.strictatime, MountFlags::STRICTATIME),
        (options.nodiratime, MountFlags::NODIRATIME),
    ];
    let flags = flags.iter().filter(|(set, _)| *set).map(|(_, flag)| *flag).collect();
    rustix::mount::mount(&options.fsname, mountpoint, c"fuse.ferry", flags, &*data)
        .map_err(|error| Error::Mount { mountpoint: mountpoint.into(), error: error.into() })?;
    Ok(device)
}

fn mount_by_helper(mountpoint: &Path, options: &MountOptions) -> Result<FuseDevice, Error> {
    let helper = |e: io::Error| Error::Helper(e.to_string());
    let (ours, theirs) = UnixStream::pair().map_err(helper)?;
    // The child inherits it.
    fcntl_setfd(&theirs, FdFlags::empty()).map_err(|e| helper(e.into()))?;
    let mut option = format!(
        "fsname={},subtype={SUBTYPE},default_permissions,max_read={IO_MAX}",
        options.fsname.replace('\\', "\\\\").replace(',', "\\,")
    );
    let words = [
        (options.read_only, ",ro"),
        (options.allow_other == Some(true), ",allow_other"),
        (options.noexec, ",noexec"),
        (options.noatime, ",noatime"),
    ];
    option.extend(words.iter().filter(|(set, _)| *set).map(|(_, word)| *word));
    let output = Command::new(HELPER)
        .args(["-o", &option, "--"])
        .arg(mountpoint)
        .env("_FUSE_COMMFD", theirs.as_raw_fd().to_string())
        .output()
        .map_err(helper)?;
    drop(theirs);
    if !output.status.success() {
        return Err(Error::Helper(String::from_utf8_lossy(&output.stderr).trim().into()));
    }
    match receive_fd(&ours).map_err(helper)? {
        Some(fd) => Ok(FuseDevice::from_file(File::from(fd))),
        None => Err(Error::Helper("it sent no descriptor".into())),
    }
}

/// Receives one descriptor; `None` if the other side closed without sending one.
fn receive_fd(socket: &UnixStream) -> io::Result<Option<OwnedFd>> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut byte = [0];
    recvmsg(socket, &mut [IoSliceMut::new(&mut byte)], &mut control, RecvFlags::CMSG_CLOEXEC)?;
    Ok(control.drain().find_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut descriptors) => descriptors.next(),
        _ => None,
    }))
}

/// Unmounts what is mounted on `mountpoint`. Never asks the file system anything, so it works on a
/// mount whose daemon hangs or is gone.
pub fn unmount(mountpoint: &Path, how: Unmount) -> Result<(), Error> {
    let mountpoint = absolute(mountpoint)
        .map_err(|error| Error::Unmount { mountpoint: mountpoint.into(), error })?;
    let fail = |error| Error::Unmount { mountpoint: mountpoint.clone(), error };
    let connection = connection(&mountpoint).map_err(fail)?;
    let Some(connection) = connection else { return Err(Error::NotMounted(mountpoint)) };
    if how == Unmount::Force {
        // If sysfs does not permit it or is not mounted, MNT_FORCE does the same for root.
        let aborted = abort_in_sysfs(connection);
        tracing::debug!(?aborted, connection, "aborted the FUSE connection");
    }
    if geteuid().is_root() {
        let flags = match how {
            Unmount::Normal => UnmountFlags::empty(),
            Unmount::Lazy => UnmountFlags::DETACH,
            Unmount::Force => UnmountFlags::FORCE | UnmountFlags::DETACH,
        };
        let unmounted = rustix::mount::unmount(&mountpoint, flags | UnmountFlags::NOFOLLOW);
        return unmounted.map_err(|error| fail(error.into()));
    }
    let flag = if how == Unmount::Normal { "-u" } else { "-uz" };
    let output = Command::new(HELPER)
        .args([flag, "--"])
        .arg(&mountpoint)
        .output()
        .map_err(|e| Error::Helper(e.to_string()))?;
    if output.status.success() {
        Ok(())
    } else {
        Err(Error::Helper(String::from_utf8_lossy(&output.stderr).trim().into()))
    }
}

/// The path with everything above its last component resolved: looking at the last one could hang.
pub(crate) fn absolute(path: &Path) -> io::Result<PathBuf> {
    let path = std::path::absolute(path)?;
    match (path.parent(), path.file_name()) {
        (Some(parent), Some(name)) => Ok(parent.canonicalize()?.join(name)),
        _ => Ok(path),
    }
}

fn abort_in_sysfs(connection: u32) -> io::Result<()> {
    fs::write(format!("/sys/fs/fuse/connections/{connection}/abort"), "1")
}

/// Ends a connection, though a process may have its descriptor yet: every request, waiting or to
/// come, fails. For root, or the user that has mounted it where sysfs permits it.
pub fn abort(connection: u32) -> io::Result<()> {
    if abort_in_sysfs(connection).is_ok() {
        return Ok(());
    }
    // The directory need not be mounted. An attempt to unmount by force does the same for root.
    let table = fs::read_to_string("/proc/self/mountinfo")?;
    let mut mounts = table.lines().filter_map(fuse_mount);
    let Some((_, mountpoint)) = mounts.find(|(number, _)| *number == connection) else {
        return Ok(());
    };
    // The mount is in use, so it stays: programs must not come to write below it.
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let _in_use = rustix::fs::open(&mountpoint, flags, Mode::empty())?;
    match rustix::mount::unmount(&mountpoint, UnmountFlags::FORCE | UnmountFlags::NOFOLLOW) {
        Ok(()) | Err(rustix::io::Errno::BUSY) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

/// The number of the FUSE connection that is mounted on `mountpoint` (the topmost, if several are).
pub fn connection(mountpoint: &Path) -> io::Result<Option<u32>> {
    let table = fs::read_to_string("/proc/self/mountinfo")?;
    let mut mounts = table.lines().rev().filter_map(fuse_mount);
    Ok(mounts.find(|(_, path)| path == mountpoint).map(|(number, _)| number))
}

/// The number of a connection, and where it is mounted, of a line `ID PARENT MAJOR:MINOR ROOT
/// MOUNTPOINT OPTIONS… - TYPE SOURCE …`, with `\ooo` for spaces and the like.
fn fuse_mount(line: &str) -> Option<(u32, PathBuf)> {
    let (mount, kind) = line.split_once(" - ")?;
    let mut fields = mount.split(' ');
    let (device, path) = (fields.nth(2)?, fields.nth(1)?);
    let kind = kind.split(' ').next()?;
    let is_fuse = kind == "fuse" || kind.starts_with("fuse.");
    let number = device.split_once(':')?.1.parse().ok()?;
    is_fuse.then(|| (number, unescaped(path)))
}

fn unescaped(path: &str) -> PathBuf {
    use std::os::unix::ffi::OsStringExt;
    let mut bytes = Vec::with_capacity(path.len());
    let mut rest = path.as_bytes();
    while let [first, tail @ ..] = rest {
        let code = tail.get(..3).and_then(|d| std::str::from_utf8(d).ok());
        match code.and_then(|d| u8::from_str_radix(d, 8).ok()) {
            Some(byte) if *first == b'\\' => {
                bytes.push(byte);
                rest = &tail[3..];
            }
            _ => {
                bytes.push(*first);
                rest = tail;
            }
        }
    }
    std::ffi::OsString::from_vec(bytes).into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_connection_is_found_in_the_mount_table() {
        let line = "30 22 0:43 / /mnt/a\\040b rw,nosuid - fuse.ferry /vol rw,user_id=0";
        assert_eq!(fuse_mount(line), Some((43, "/mnt/a b".into())));
        let ext4 = "30 22 8:1 / /mnt rw shared:1 - ext4 /dev/sda1 rw";
        assert_eq!(fuse_mount(ext4), None);
        let tagged = "30 22 0:9 / /mnt rw shared:1 master:2 - fuse x rw";
        assert_eq!(fuse_mount(tagged), Some((9, "/mnt".into())));
    }

    #[test]
    fn escapes_in_the_mount_table_are_undone() {
        assert_eq!(unescaped("/a\\134b\\011c"), Path::new("/a\\b\tc"));
        assert_eq!(unescaped("/plain\\x"), Path::new("/plain\\x"));
    }

    #[test]
    fn unmounting_a_directory_without_a_mount_is_an_error() {
        let dir = tempfile::tempdir().expect("a directory");
        assert!(matches!(unmount(dir.path(), Unmount::Normal), Err(Error::NotMounted(_))));
    }
}
