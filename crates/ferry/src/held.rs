//! What is held of a mount between two processes: by a holder, or by systemd.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, IoSlice, Read, Seek, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};

use rustix::fs::{MemfdFlags, memfd_create};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};

use crate::error::CliError;

/// What the next process needs, by name: words, and a descriptor.
pub type HeldThings = BTreeMap<Vec<u8>, (Vec<u8>, Option<OwnedFd>)>;

/// Bytes of a control message with a descriptor.
pub const RIGHTS: usize = rustix::cmsg_space!(ScmRights(1));
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

/// Ends the mount, if it is in these.
pub fn end(held: &HeldThings) {
    let number = held
        .get(CONNECTION.as_bytes())
        .and_then(|(number, _)| std::str::from_utf8(number).ok()?.parse().ok());
    if let Some(Err(error)) = number.map(ferry_fuse::abort) {
        tracing::error!(%error, "programs may hang: end the mount with `ferry umount --force`");
    }
}
