//! A batch: data of one or many files on its way to the device in one write.

use crate::inode::Inode;
use ferry_device::AlignedBuf;
use ferry_journal::JournalError;
use parking_lot::{Condvar, Mutex};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Data that is being written. Its pages stay in memory until it has landed.
pub struct Batch {
    bytes: usize,
    landed: AtomicBool,
    inodes: Mutex<Vec<Arc<Inode>>>,
    traffic: Arc<Traffic>,
}

impl Batch {
    /// Starts a batch of `bytes`; counts in `traffic` until it lands.
    pub fn start(bytes: usize, traffic: &Arc<Traffic>) -> Arc<Self> {
        *traffic.flying.lock() += bytes;
        Arc::new(Self {
            bytes,
            landed: AtomicBool::new(false),
            inodes: Mutex::default(),
            traffic: Arc::clone(traffic),
        })
    }

    /// `inode` has data in it, and is told of a failure.
    pub fn carries(&self, inode: &Arc<Inode>) {
        self.inodes.lock().push(Arc::clone(inode));
    }

    /// It needs its pages no longer.
    pub fn landed(&self) -> bool {
        self.landed.load(Ordering::Acquire)
    }

    /// The device has written it, or failed. Called wherever that is found out: takes no lock that is ever held over a call
    /// of the journal.
    pub fn land(&self, result: Result<(), JournalError>) {
        let inodes = std::mem::take(&mut *self.inodes.lock());
        if let Err(error) = result {
            for inode in &inodes {
                tracing::error!(inode = inode.ino, %error, "data could not be written");
                inode.file.set_error(libc::EIO);
            }
        }
        if !self.landed.swap(true, Ordering::AcqRel) {
            *self.traffic.flying.lock() -= self.bytes;
            self.traffic.landed.notify_all();
        }
    }
}

/// Bytes on their way to the device, and the buffers they travel in.
#[derive(Default)]
pub struct Traffic {
    flying: Mutex<usize>,
    landed: Condvar,
    buffers: Mutex<Vec<Arc<AlignedBuf>>>,
}

/// Large buffers that are kept for later use.
const BUFFERS_KEPT: usize = 8;

impl Traffic {
    /// Waits until less than `most` bytes fly.
    pub fn wait_below(&self, most: usize) {
        let mut flying = self.flying.lock();
        while *flying >= most {
            self.landed.wait(&mut flying);
        }
    }

    /// Bytes on their way.
    pub fn flying(&self) -> usize {
        *self.flying.lock()
    }

    /// A buffer of `len` bytes with any contents; one of `large` bytes or less may be an old one.
    pub fn buffer(&self, len: usize, large: usize) -> Arc<AlignedBuf> {
        if len <= large / 8 || len > large {
            return Arc::new(AlignedBuf::zeroed(len));
        }
        let mut buffers = self.buffers.lock();
        let idle = buffers.iter().position(|b| Arc::strong_count(b) == 1);
        let old = idle.map(|i| buffers.swap_remove(i));
        drop(buffers);
        let mut buf = old.unwrap_or_else(|| Arc::new(AlignedBuf::zeroed(large)));
        Arc::get_mut(&mut buf).expect("nobody else has it: it was idle in our list").set_len(len);
        buf
    }

    /// Keeps a large buffer for later use, when the device is done with it.
    pub fn keep(&self, buf: &Arc<AlignedBuf>, large: usize) {
        if buf.len() > large / 8 {
            let mut buffers = self.buffers.lock();
            if buffers.len() < BUFFERS_KEPT {
                buffers.push(Arc::clone(buf));
            }
        }
    }
}
