//! How notifications reach the kernel.
//!
//! One that concerns contents or names may wait in the kernel, without an end by a signal, for a
//! page or a directory whose owner waits for a request. If the process is killed then, nobody
//! answers that request before the next process serves. But the next one waits until this one has
//! closed the volume. So such a notification is written by a thread that has no other descriptor
//! than that of the mount, and does nothing else. It may outlast all others.

use std::io::{self, Write};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::mpsc::{SyncSender, sync_channel};
use std::thread;

use crate::device::FuseDevice;
use crate::sys::leave_descriptors;

/// A notification, and where the result of writing it goes.
type Message = (Vec<u8>, SyncSender<io::Result<usize>>);

/// Where the notifications of one kind are written.
pub(crate) enum Outlet {
    /// By the caller: they wait for nothing.
    Here(Arc<FuseDevice>),
    /// By a thread that has nothing else open.
    Apart(SyncSender<Message>),
}

impl Outlet {
    /// For notifications that wait for nothing, or for others.
    pub(crate) fn of(device: &Arc<FuseDevice>, may_wait: bool) -> Self {
        if !may_wait {
            return Self::Here(Arc::clone(device));
        }
        Self::apart(device).unwrap_or_else(|error| {
            tracing::warn!(%error, "if this process is killed, its mount may hang");
            Self::Here(Arc::clone(device))
        })
    }

    fn apart(device: &Arc<FuseDevice>) -> io::Result<Self> {
        let (messages, received) = sync_channel::<Message>(0);
        let (ready, is_ready) = sync_channel(1);
        let device = Arc::clone(device);
        let write = move || {
            let left = leave_descriptors(device.file().as_fd());
            let is_apart = left.is_ok();
            // Nobody has given up: it waits for this.
            let _told = ready.send(left);
            while is_apart && let Ok((message, result)) = received.recv() {
                let _told = result.send(device.file().write(&message));
            }
        };
        thread::Builder::new().name("fuse-notify-out".into()).spawn(write)?;
        is_ready.recv().map_err(io::Error::other)??;
        Ok(Self::Apart(messages))
    }

    /// Writes a notification, and waits until the kernel has done what it says.
    pub(crate) fn write(&self, message: Vec<u8>) -> io::Result<usize> {
        match self {
            Self::Here(device) => device.file().write(&message),
            Self::Apart(messages) => {
                let (result, written) = sync_channel(1);
                messages.send((message, result)).map_err(io::Error::other)?;
                written.recv().map_err(io::Error::other)?
            }
        }
    }
}
