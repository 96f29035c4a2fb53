//! A batch: data of one or many files on its way to the device in one write.

use crate::cache::eviction::CachedFile;
use crate::keys::BLOCK;
use ferry_device::{AlignedBuf, SharedBuffers};
use ferry_env::activity::{self, Layer};
use ferry_journal::JournalError;
use parking_lot::{Condvar, Mutex};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Data that is being written. Its pages stay in memory until it has completed *and* been logged:
/// in between, the extent map still says where the old data is.
pub struct Batch {
    /// Where it goes, in device blocks.
    range: Range<u64>,
    completed: AtomicBool,
    /// The device does not have it: its pages are the only copy, and stay in memory.
    failed: AtomicBool,
    logged: AtomicBool,
    files: Mutex<Vec<Arc<dyn CachedFile>>>,
    writes: Arc<Transfers>,
}

impl Batch {
    /// Starts a batch to device blocks `range`; counts in `writes` until it completes.
    pub fn start(range: Range<u64>, writes: &Arc<Transfers>) -> Arc<Self> {
        writes.in_flight.lock().push(range.clone());
        Arc::new(Self {
            range,
            completed: AtomicBool::new(false),
            failed: AtomicBool::new(false),
            logged: AtomicBool::new(false),
            files: Mutex::default(),
            writes: Arc::clone(writes),
        })
    }

    /// The batch has data of `file`, which is told if the write fails.
    pub fn add_file(&self, file: Arc<dyn CachedFile>) {
        self.files.lock().push(file);
    }

    /// It needs its pages no longer.
    pub fn is_over(&self) -> bool {
        self.completed.load(Ordering::Acquire)
            && self.logged.load(Ordering::Acquire)
            && !self.failed.load(Ordering::Acquire)
    }

    /// The extent maps of all that it carries say where its data is (or the data is dirty again).
    pub fn set_logged(&self) {
        self.logged.store(true, Ordering::Release);
    }

    /// The device has written it, or failed. Called wherever that is found out: takes no lock that
    /// is ever held over a call of the journal.
    pub fn complete(&self, result: Result<(), JournalError>) {
        let files = std::mem::take(&mut *self.files.lock());
        if let Err(error) = result {
            self.failed.store(true, Ordering::Release);
            files.iter().for_each(|file| file.write_failed(&error));
        }
        if !self.completed.swap(true, Ordering::AcqRel) {
            let mut in_flight = self.writes.in_flight.lock();
            if let Some(at) = in_flight.iter().position(|range| *range == self.range) {
                in_flight.swap_remove(at);
            }
            drop(in_flight);
            self.writes.completed.notify_all();
        }
    }
}

/// Data on its way to the device, and the buffers it travels in.
#[derive(Default)]
pub struct Transfers {
    /// Places that are being written, in device blocks. No two overlap.
    in_flight: Mutex<Vec<Range<u64>>>,
    completed: Condvar,
    buffers: Mutex<Vec<Arc<AlignedBuf>>>,
    /// Those that outlive the process.
    shared: Option<Arc<SharedBuffers>>,
}

/// Large buffers that are kept for later use.
const BUFFERS_MAX: usize = 8;

impl Transfers {
    /// With buffers that outlive the process, if there are such.
    pub fn held_in(shared: Option<Arc<SharedBuffers>>) -> Self {
        Self { shared, ..Self::default() }
    }

    /// Waits until less than `most` bytes are in flight.
    pub fn wait_below(&self, most: usize) {
        let mut in_flight = self.in_flight.lock();
        while bytes(&in_flight) >= most {
            let _waiting = activity::enter(Layer::DeviceWrite);
            self.completed.wait(&mut in_flight);
        }
    }

    /// Waits while any of these device blocks is being written.
    pub fn wait_for(&self, blocks: Range<u64>) {
        let mut in_flight = self.in_flight.lock();
        while in_flight.iter().any(|range| range.start < blocks.end && blocks.start < range.end) {
            let _waiting = activity::enter(Layer::DeviceWrite);
            self.completed.wait(&mut in_flight);
        }
    }

    /// Bytes on their way.
    pub fn in_flight(&self) -> usize {
        bytes(&self.in_flight.lock())
    }

    /// A buffer of `len` bytes with any contents; one of `large` bytes or less may be an old one.
    pub fn buffer(&self, len: usize, large: usize) -> Arc<AlignedBuf> {
        if let Some(buf) = self.shared.as_ref().and_then(|shared| AlignedBuf::shared(shared, len)) {
            return Arc::new(buf);
        }
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
        if buf.len() > large / 8 && !buf.is_shared() {
            let mut buffers = self.buffers.lock();
            if buffers.len() < BUFFERS_MAX {
                buffers.push(Arc::clone(buf));
            }
        }
    }
}

fn bytes(in_flight: &[Range<u64>]) -> usize {
    in_flight.iter().map(|range| (range.end - range.start) as usize * BLOCK as usize).sum()
}
