//! Reusable buffers in which a chosen offset is page-aligned, so that the payload behind a header
//! is.
#![expect(unsafe_code, reason = "memory from mmap(2)")]

use std::alloc::{Layout, handle_alloc_error};
use std::ptr::{self, NonNull};

const PAGE: usize = 4096;

/// Zeroed memory of a fixed length, whose byte number `front` lies at the start of a page.
///
/// The memory comes from mmap(2) in pages of 4 KiB, and only touched pages become resident.
/// Thousands of requests may be parked, each in a buffer that could hold a large one. An allocator
/// would clear part of each new buffer (glibc some 60 KiB), and huge pages would make whole buffers
/// resident.
#[derive(Debug)]
pub(crate) struct Buffer {
    /// Whole pages; the buffer ends within the last one.
    memory: NonNull<u8>,
    pages: usize,
    start: usize,
    len: usize,
}

// SAFETY: the memory is the buffer's own.
unsafe impl Send for Buffer {}

impl Buffer {
    /// Makes a buffer of `front` bytes before a page boundary (at most a page) and `rest` bytes
    /// from it on.
    pub(crate) fn new(front: usize, rest: usize) -> Self {
        assert!(front <= PAGE, "a header is shorter than a page");
        let pages = 1 + rest.div_ceil(PAGE);
        let (access, kind) =
            (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        // SAFETY: a new mapping, which nobody else knows.
        let memory = unsafe { libc::mmap(ptr::null_mut(), pages * PAGE, access, kind, -1, 0) };
        let usable = NonNull::new(memory.cast::<u8>()).filter(|_| memory != libc::MAP_FAILED);
        let Some(memory) = usable else {
            handle_alloc_error(
                Layout::from_size_align(pages * PAGE, PAGE).expect("a page is a power of two"),
            )
        };
        // SAFETY: the whole mapping that was just made. A kernel without huge pages refuses, and
        // needs it not.
        let _ =
            unsafe { libc::madvise(memory.as_ptr().cast(), pages * PAGE, libc::MADV_NOHUGEPAGE) };
        Self { memory, pages, start: PAGE - front, len: front + rest }
    }

    pub(crate) fn bytes(&mut self) -> &mut [u8] {
        // SAFETY: `start + len` bytes are mapped, zeroed at first, and borrowed as `self` is.
        unsafe { std::slice::from_raw_parts_mut(self.memory.as_ptr().add(self.start), self.len) }
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        // SAFETY: the mapping of `new`, which nothing borrows any more.
        let unmapped = unsafe { libc::munmap(self.memory.as_ptr().cast(), self.pages * PAGE) };
        debug_assert_eq!(unmapped, 0, "the mapping is there");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_payload_is_page_aligned() {
        for front in [0, 16, 80, PAGE] {
            let mut buffer = Buffer::new(front, 3 * PAGE);
            let bytes = buffer.bytes();
            assert_eq!(bytes.len(), front + 3 * PAGE);
            assert_eq!(bytes[front..].as_ptr().align_offset(PAGE), 0);
            assert!(bytes.iter().all(|byte| *byte == 0));
            bytes.fill(1);
        }
    }

    #[test]
    fn untouched_pages_take_no_memory() {
        let resident = || {
            let pages = std::fs::read_to_string("/proc/self/statm").expect("Linux");
            pages.split(' ').nth(1).and_then(|pages| pages.parse::<usize>().ok()).expect("a number")
                * PAGE
        };
        let before = resident();
        let mut buffers: Vec<Buffer> = (0..1000).map(|_| Buffer::new(0, 1 << 20)).collect();
        buffers.iter_mut().for_each(|buffer| buffer.bytes()[0] = 1);
        let grown = resident() - before;
        assert!(grown < 1000 * 4 * PAGE, "{grown} bytes");
    }
}
