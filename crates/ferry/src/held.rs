//! What is held of a mount between two processes: by a holder, or by systemd.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs::File;
use std::io::{self, IoSlice, Read, Seek, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStringExt;
use std::path::PathBuf;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{MemfdFlags, memfd_create};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};

use crate::error::CliError;
use crate::mounts::{self, Mount};

/// What the next process needs, by name: words, and a descriptor.
pub type HeldThings = BTreeMap<Vec<u8>, (Vec<u8>, Option<OwnedFd>)>;

/// Bytes of a control message with a descriptor.
pub const RIGHTS: usize = rustix::cmsg_space!(ScmRights(1));
/// The mount's connection to the kernel.
pub const DEVICE: &str = "device";
/// Where it is mounted.
pub const MOUNTPOINT: &str = "mountpoint";
/// The kernel's number of the connection.
pub const CONNECTION: &str = "connection";

/// Sends words, and a descriptor.
pub fn send(socket: &OwnedFd, parts: &[&[u8]], descriptor: Option<&OwnedFd>) -> io::Result<()> {
    let bytes = parts.join(&b' ');
    let mut space = [MaybeUninit::uninit(); RIGHTS];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let descriptors = descriptor.map(|descriptor| [descriptor.as_fd()]);
    if let Some(descriptors) = &descriptors {
        control.push(SendAncillaryMessage::ScmRights(descriptors));
    }
    sendmsg(socket, &[IoSlice::new(&bytes)], &mut control, SendFlags::NOSIGNAL)?;
    Ok(())
}

/// Memory with these bytes, for the next process.
pub fn memory(name: &str, bytes: &[u8]) -> Result<OwnedFd, CliError> {
    let failed = |error: io::Error| CliError::Failed(format!("memory for the holder: {error}"));
    let memory = memfd_create(name, MemfdFlags::CLOEXEC);
    let mut memory = File::from(memory.map_err(|error| failed(error.into()))?);
    memory.write_all(bytes).map_err(failed)?;
    Ok(memory.into())
}

/// All bytes of such memory.
pub fn read_all(memory: OwnedFd) -> io::Result<Vec<u8>> {
    let (mut memory, mut bytes) = (File::from(memory), Vec::new());
    memory.rewind()?;
    memory.read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// The number of the connection, if it lives. The kernel gives the number of one that has ended to
/// another mount.
fn connection(held: &HeldThings) -> Option<u32> {
    let (_, device) = held.get(DEVICE.as_bytes())?;
    let mut ended = [PollFd::new(device.as_ref()?, PollFlags::empty())];
    let ended = poll(&mut ended, Some(&Timespec::default())).is_ok_and(|ended| ended > 0);
    let (number, _) = held.get(CONNECTION.as_bytes()).filter(|_| !ended)?;
    std::str::from_utf8(number).ok()?.parse().ok()
}

/// Ends the mount, if it is in these.
pub fn end(held: &HeldThings) {
    if let Some(Err(error)) = connection(held).map(ferry_fuse::abort) {
        tracing::error!(%error, "programs may hang: end the mount with `ferry umount --force`");
    }
}

/// The mount in these, if the kernel has it yet at the same mount point.
pub fn mounted(held: &HeldThings) -> io::Result<Option<Mount>> {
    let Some((number, (target, _))) = connection(held).zip(held.get(MOUNTPOINT.as_bytes())) else {
        return Ok(None);
    };
    let (device, target) =
        (format!("0:{number}"), PathBuf::from(OsString::from_vec(target.clone())));
    let is_it =
        |mount: &Mount| mount.is_ferry() && mount.device == device && mount.target == target;
    Ok(mounts::list()?.into_iter().find(is_it))
}
