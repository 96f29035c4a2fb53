//! Memory that O_DIRECT accepts.
#![expect(
    unsafe_code,
    reason = "std has no safe way to allocate with an alignment chosen at run time"
)]

use crate::shared_buffers::{SharedBuffers, Slot};
use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::fmt;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;
use std::sync::Arc;

/// Unit of every transfer: offsets, lengths and memory are multiples of it, in bytes.
pub const BLOCK_SIZE: usize = 4096;

/// A byte buffer, aligned to [`BLOCK_SIZE`] and a multiple of it long.
pub struct AlignedBuf {
    ptr: NonNull<u8>,
    len: usize,
    /// Bytes allocated, at least `len`.
    capacity: usize,
    /// Where its memory is, if not in the process's own.
    slot: Option<Slot>,
}

// SAFETY: the buffer owns its memory; nothing else points to it.
unsafe impl Send for AlignedBuf {}
// SAFETY: shared access only reads.
unsafe impl Sync for AlignedBuf {}

impl AlignedBuf {
    /// `len` bytes of zeros.
    ///
    /// # Panics
    /// When `len` is zero or not a multiple of [`BLOCK_SIZE`].
    pub fn zeroed(len: usize) -> Self {
        assert!(len > 0 && len.is_multiple_of(BLOCK_SIZE), "length {len} is not whole blocks");
        let layout = Self::layout(len);
        // SAFETY: the layout has a non-zero size.
        let ptr = unsafe { alloc_zeroed(layout) };
        Self {
            ptr: NonNull::new(ptr).unwrap_or_else(|| handle_alloc_error(layout)),
            len,
            capacity: len,
            slot: None,
        }
    }

    /// `len` bytes with any contents, in memory that outlives the process. `None`: it has no room.
    ///
    /// # Panics
    /// When `len` is zero or not a multiple of [`BLOCK_SIZE`].
    pub fn shared(buffers: &Arc<SharedBuffers>, len: usize) -> Option<Self> {
        assert!(len > 0 && len.is_multiple_of(BLOCK_SIZE), "length {len} is not whole blocks");
        let slot = buffers.slot(len)?;
        Some(Self { ptr: slot.bytes(), len, capacity: len, slot: Some(slot) })
    }

    /// Whether its memory outlives the process.
    pub fn is_shared(&self) -> bool {
        self.slot.is_some()
    }

    /// It will be written to the device, at this offset. If its memory outlives the process, the
    /// next one finds it by that.
    pub fn goes_to(&self, offset: u64) {
        self.slot.iter().for_each(|slot| slot.goes_to(offset));
    }

    /// Makes it `len` bytes long, at most what it was made with; every byte keeps its value.
    ///
    /// # Panics
    /// When `len` is zero, not a multiple of [`BLOCK_SIZE`] or too large.
    pub fn set_len(&mut self, len: usize) {
        assert!(
            len > 0 && len.is_multiple_of(BLOCK_SIZE) && len <= self.capacity,
            "length {len} does not fit"
        );
        self.len = len;
    }

    fn layout(len: usize) -> Layout {
        Layout::from_size_align(len, BLOCK_SIZE).expect("whole blocks below isize::MAX")
    }
}

impl fmt::Debug for AlignedBuf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "AlignedBuf({} bytes)", self.len)
    }
}

impl Drop for AlignedBuf {
    fn drop(&mut self) {
        match &self.slot {
            Some(slot) => slot.give_back(self.capacity),
            // SAFETY: allocated in `zeroed` with the same layout.
            None => unsafe { dealloc(self.ptr.as_ptr(), Self::layout(self.capacity)) },
        }
    }
}

impl Deref for AlignedBuf {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        // SAFETY: `len` of `capacity` initialised bytes that `self` owns.
        unsafe { std::slice::from_raw_parts(self.ptr.as_ptr(), self.len) }
    }
}

impl DerefMut for AlignedBuf {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: `len` of `capacity` initialised bytes that `self` owns, borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(self.ptr.as_ptr(), self.len) }
    }
}
