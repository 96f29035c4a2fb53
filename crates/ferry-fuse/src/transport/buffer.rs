//! Reusable buffers in which a chosen place is page-aligned, so that the payload behind a header is.

const PAGE: usize = 4096;

/// Zeroed memory of a fixed length, whose byte number `front` lies at the start of a page.
#[derive(Debug)]
pub(crate) struct Buffer {
    memory: Vec<u8>,
    start: usize,
    len: usize,
}

impl Buffer {
    /// `front` bytes before the page boundary (at most a page), `rest` from it on.
    pub(crate) fn new(front: usize, rest: usize) -> Self {
        assert!(front <= PAGE, "a header is shorter than a page");
        let len = front + rest;
        // Fresh zeroed memory costs nothing until it is touched.
        let memory = vec![0_u8; len + 2 * PAGE];
        let to_boundary = memory.as_ptr().align_offset(PAGE);
        let start = to_boundary + PAGE - front;
        assert!(start + len <= memory.len(), "two pages of slack hold any alignment");
        Self { memory, start, len }
    }

    pub(crate) fn bytes(&mut self) -> &mut [u8] {
        &mut self.memory[self.start..self.start + self.len]
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
        }
    }
}
