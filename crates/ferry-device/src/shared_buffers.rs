//! Buffers in memory that outlives the process: in a file without a name, mapped.
//!
//! A write that was under way when the process was killed may not have reached the device. The next
//! process finds the bytes here, by the offset on the device that they go to.
//!
//! ```text
//! 0                  of each slot 8 bytes, native order: 1 + the offset that its bytes go to, or 0
//! SLOTS x 8 bytes    slots of SLOT_BYTES
//! ```
#![expect(unsafe_code, reason = "words and buffers in mapped memory")]

use crate::mapping::Mapping;
use parking_lot::Mutex;
use rustix::fs::ftruncate;
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

pub(crate) const SLOTS: usize = 512;
/// The longest buffer: a batch of write-back with its summaries.
pub const SLOT_BYTES: usize = 1040 << 12;
pub(crate) const SLOTS_AT: usize = SLOTS * size_of::<u64>();
/// Bytes of such memory. What nobody has written takes none.
pub const SHARED_BUFFERS_BYTES: usize = SLOTS_AT + SLOTS * SLOT_BYTES;
/// The memory of so many slots stays, for the next buffers. That of the others goes back to the
/// system if it was longer than `SMALL`.
const STAYS: usize = 8;
const SMALL: usize = 128 << 10;

/// The buffers, and which of them are free. Their heads are atomic words, and each slot belongs to
/// one buffer at most.
#[derive(Debug)]
pub struct SharedBuffers {
    mapping: Mapping,
    /// Of each slot a bit, which is set if it is free.
    free: Mutex<[u64; SLOTS / 64]>,
}

/// A slot that belongs to a buffer.
pub(crate) struct Slot {
    buffers: Arc<SharedBuffers>,
    number: usize,
}

impl SharedBuffers {
    /// At the end of the file, which grows by [`SHARED_BUFFERS_BYTES`].
    pub fn behind(file: OwnedFd) -> io::Result<Arc<Self>> {
        let file = File::from(file);
        let from = file.metadata()?.len();
        let file = OwnedFd::from(file);
        ftruncate(&file, from + SHARED_BUFFERS_BYTES as u64)?;
        let mapping = Mapping::new(file, from, SHARED_BUFFERS_BYTES)?;
        Ok(Arc::new(Self { mapping, free: Mutex::new([u64::MAX; SLOTS / 64]) }))
    }

    /// A slot for `len` bytes. `None`: there is no room.
    pub(crate) fn slot(self: &Arc<Self>, len: usize) -> Option<Slot> {
        if len > SLOT_BYTES {
            return None;
        }
        let mut free = self.free.lock();
        let word = free.iter().position(|free| *free != 0)?;
        let bit = free[word].trailing_zeros();
        free[word] &= !(1 << bit);
        Some(Slot { buffers: Arc::clone(self), number: word * 64 + bit as usize })
    }

    fn heads(&self) -> &[AtomicU64] {
        // SAFETY: so many are mapped, aligned to a page, for as long as `self` lives. They are in
        // no slot.
        unsafe { std::slice::from_raw_parts(self.mapping.at().as_ptr().cast(), SLOTS) }
    }
}

impl Slot {
    /// Where in the mapping it begins.
    fn first(&self) -> usize {
        SLOTS_AT + self.number * SLOT_BYTES
    }

    /// Its `SLOT_BYTES` bytes, with any contents. They belong to the owner of the slot until
    /// [`Slot::give_back`]: it was free, so nobody else has them.
    pub(crate) fn bytes(&self) -> NonNull<u8> {
        // SAFETY: inside of the mapping, which lives as long as `self`.
        unsafe { self.buffers.mapping.at().add(self.first()) }
    }

    pub(crate) fn goes_to(&self, offset: u64) {
        self.buffers.heads()[self.number].store(offset + 1, Ordering::Release);
    }

    /// The buffer is gone, of whose bytes so many were used.
    pub(crate) fn give_back(&self, used: usize) {
        let buffers = &self.buffers;
        if self.number >= STAYS && used > SMALL {
            let bytes = self.first()..self.first() + SLOT_BYTES;
            if let Err(error) = buffers.mapping.make_zero(bytes) {
                tracing::debug!(%error, "memory of a buffer is not given back");
            }
        }
        buffers.free.lock()[self.number / 64] |= 1 << (self.number % 64);
    }
}
