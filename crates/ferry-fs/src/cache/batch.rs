//! A batch: data of one or many files on its way to the device in one write.

use crate::cache::eviction::CachedFile;
use crate::keys::BLOCK;
use ferry_device::AlignedBuf;
use ferry_journal::JournalError;
use parking_lot::{Condvar, Mutex};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Data that is being written. Its pages stay in memory until it has landed *and* been logged: in
/// between, the extent map still says where the old data is.
pub struct Batch {
    /// Where it goes, in device blocks.
    place: Range<u64>,
    landed: AtomicBool,
    /// The device does not have it: its pages are the only place where it can be read, and stay.
    failed: AtomicBool,
    logged: AtomicBool,
    files: Mutex<Vec<Arc<dyn CachedFile>>>,
    traffic: Arc<Traffic>,
}

impl Batch {
    /// Starts a batch to device blocks `place`; counts in `traffic` until it lands.
    pub fn start(place: Range<u64>, traffic: &Arc<Traffic>) -> Arc<Self> {
        traffic.flying.lock().push(place.clone());
        Arc::new(Self {
            place,
            landed: AtomicBool::new(false),
            failed: AtomicBool::new(false),
            logged: AtomicBool::new(false),
            files: Mutex::default(),
            traffic: Arc::clone(traffic),
        })
    }

    /// The batch has data of `file`, which is told if the write fails.
    pub fn add_file(&self, file: Arc<dyn CachedFile>) {
        self.files.lock().push(file);
    }

    /// It needs its pages no longer.
    pub fn is_over(&self) -> bool {
        self.landed.load(Ordering::Acquire)
            && self.logged.load(Ordering::Acquire)
            && !self.failed.load(Ordering::Acquire)
    }

    /// The extent maps of all that it carries say where its data is (or the data is dirty again).
    pub fn set_logged(&self) {
        self.logged.store(true, Ordering::Release);
    }

    /// The device has written it, or failed. Called wherever that is found out: takes no lock that
    /// is ever held over a call of the journal.
    pub fn land(&self, result: Result<(), JournalError>) {
        let files = std::mem::take(&mut *self.files.lock());
        if let Err(error) = result {
            self.failed.store(true, Ordering::Release);
            files.iter().for_each(|file| file.write_failed(&error));
        }
        if !self.landed.swap(true, Ordering::AcqRel) {
            let mut flying = self.traffic.flying.lock();
            if let Some(at) = flying.iter().position(|place| *place == self.place) {
                flying.swap_remove(at);
            }
            drop(flying);
            self.traffic.landed.notify_all();
        }
    }
}

/// Data on its way to the device, and the buffers it travels in.
#[derive(Default)]
pub struct Traffic {
    /// Places that are being written, in device blocks. No two overlap.
    flying: Mutex<Vec<Range<u64>>>,
    landed: Condvar,
    buffers: Mutex<Vec<Arc<AlignedBuf>>>,
}

/// Large buffers that are kept for later use.
const BUFFERS_KEPT: usize = 8;

impl Traffic {
    /// Waits until less than `most` bytes fly.
    pub fn wait_below(&self, most: usize) {
        let mut flying = self.flying.lock();
        while bytes(&flying) >= most {
            self.landed.wait(&mut flying);
        }
    }

    /// Waits while any of these device blocks is being written.
    pub fn wait_for(&self, blocks: Range<u64>) {
        let mut flying = self.flying.lock();
        while flying.iter().any(|place| place.start < blocks.end && blocks.start < place.end) {
            self.landed.wait(&mut flying);
        }
    }

    /// Bytes on their way.
    pub fn flying(&self) -> usize {
        bytes(&self.flying.lock())
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

fn bytes(flying: &[Range<u64>]) -> usize {
    flying.iter().map(|place| (place.end - place.start) as usize * BLOCK as usize).sum()
}
