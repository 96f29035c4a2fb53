//! A descriptor of /dev/fuse: reads the kernel's messages, writes answers and notifications.

use std::fs::{File, OpenOptions};
use std::io::{self, IoSlice, Read, Write};
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, Ordering};

use ferry_env::activity::{self, Layer};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use zerocopy::IntoBytes;

use crate::abi::OutHeader;
use crate::sys;

const DEVICE: &str = "/dev/fuse";
const OUT_HEADER: usize = size_of::<OutHeader>();

/// A descriptor of a mount.
#[derive(Debug)]
pub(crate) struct FuseDevice(File);

impl FuseDevice {
    /// Opens a descriptor that belongs to no mount yet.
    pub(crate) fn open() -> io::Result<Self> {
        Ok(Self(OpenOptions::new().read(true).write(true).open(DEVICE)?))
    }

    pub(crate) fn from_file(file: File) -> Self {
        Self(file)
    }

    /// Another descriptor of the same mount. The kernel keeps a list of taken requests for each.
    pub(crate) fn try_clone(&self) -> io::Result<Self> {
        let fresh = Self::open()?;
        sys::clone_device(fresh.0.as_fd(), self.0.as_fd())?;
        Ok(fresh)
    }

    pub(crate) fn file(&self) -> &File {
        &self.0
    }

    /// Reads one message into `buffer`; `None`: the mount is gone, or `stop` is set. A signal makes
    /// a thread look at `stop` again.
    pub(crate) fn receive(&self, buffer: &mut [u8], stop: &AtomicBool) -> Option<usize> {
        loop {
            if stop.load(Ordering::Acquire) {
                return None;
            }
            match (&self.0).read(buffer) {
                Ok(n) => return Some(n),
                Err(e) => match e.raw_os_error() {
                    // ENOENT: the kernel withdrew the request (its process was killed) during the
                    // copy.
                    Some(libc::EINTR | libc::EAGAIN | libc::ENOENT) => {}
                    Some(libc::ENODEV | libc::ECONNABORTED) => return None,
                    _ => {
                        tracing::error!(error = %e, "reading /dev/fuse");
                        return None;
                    }
                },
            }
        }
    }

    /// Whether more messages wait. On an error it says so too: the next read reports the error.
    pub(crate) fn has_more(&self) -> bool {
        let mut this = [PollFd::new(&self.0, PollFlags::IN)];
        !matches!(poll(&mut this, Some(&Timespec::default())), Ok(0))
    }

    /// Writes one answer: `error` is 0, or a negated errno without a body.
    pub(crate) fn answer(&self, unique: u64, error: i32, body: &[u8]) {
        let _answering = activity::enter(Layer::Answer);
        let head = OutHeader { len: (OUT_HEADER + body.len()) as u32, error, unique };
        let parts = [IoSlice::new(head.as_bytes()), IoSlice::new(body)];
        Self::check_sent(unique, (&self.0).write_vectored(&parts));
    }

    /// Writes one answer whose header stands before its body.
    pub(crate) fn answer_whole(&self, unique: u64, message: &[u8]) {
        let _answering = activity::enter(Layer::Answer);
        Self::check_sent(unique, (&self.0).write(message));
    }

    fn check_sent(unique: u64, result: io::Result<usize>) {
        if let Err(error) = result {
            // ENOENT: the request was aborted; ENODEV: the mount is gone. Nobody waits.
            if !matches!(error.raw_os_error(), Some(libc::ENOENT | libc::ENODEV)) {
                tracing::error!(unique, %error, "the kernel refused an answer");
            }
        }
    }
}
