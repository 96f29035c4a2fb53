//! Reads that end later, on the ring of the thread that started them.
//!
//! A thread that serves requests has a ring of its own. A read that goes through that ring needs no
//! other thread: the thread goes on with other requests, and finds the end of the read beside them.

use crate::buffer::AlignedBuf;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

/// Gets the buffer of a read that has ended. It must not wait for another read of the same ring.
pub type ReadDone = Box<dyn FnOnce(io::Result<Arc<AlignedBuf>>) + Send>;

/// The ring of the calling thread.
pub trait ReadRing {
    /// Starts `read`. Its end comes later, on this thread.
    fn start(&self, read: FileRead);
}

/// A read of an open file.
pub struct FileRead {
    /// Kept open until the read has ended.
    file: Arc<dyn AsFd + Send + Sync>,
    offset: u64,
    buf: Arc<AlignedBuf>,
    /// Bytes that are in the buffer.
    moved: usize,
    done: ReadDone,
}

impl FileRead {
    /// Reads the whole of `buf`, of which nobody else has a share.
    pub(crate) fn new(
        file: Arc<dyn AsFd + Send + Sync>,
        offset: u64,
        buf: Arc<AlignedBuf>,
        done: ReadDone,
    ) -> Self {
        Self { file, offset, buf, moved: 0, done }
    }

    /// What the kernel is asked for next: these bytes of the file, from this offset. The memory
    /// stays where it is until [`FileRead::step`].
    pub fn rest(&mut self) -> (BorrowedFd<'_>, u64, &mut [u8]) {
        let buf = Arc::get_mut(&mut self.buf).expect("nobody else has a share");
        (self.file.as_fd(), self.offset + self.moved as u64, &mut buf[self.moved..])
    }

    /// The kernel has answered with a number of bytes, or a negated errno. `None`: the read has
    /// ended; otherwise the kernel must be asked for the rest.
    pub fn step(mut self, result: i32) -> Option<Self> {
        match result {
            errno if errno == -libc::EINTR => return Some(self),
            errno if errno < 0 => {
                (self.done)(Err(io::Error::from_raw_os_error(-errno)));
                return None;
            }
            // The file ends before the volume does: somebody cut it, and holes read as zeros.
            0 => self.rest().2.fill(0),
            bytes => {
                self.moved += bytes as usize;
                if self.moved < self.buf.len() {
                    return Some(self);
                }
            }
        }
        (self.done)(Ok(self.buf));
        None
    }
}

#[cfg(test)]
#[expect(clippy::disallowed_methods, reason = "tests may unwrap")]
mod tests {
    use super::*;
    use crate::buffer::BLOCK_SIZE;
    use std::fs::File;
    use std::sync::mpsc::{Receiver, channel};

    fn read(offset: u64) -> (FileRead, Receiver<io::Result<Arc<AlignedBuf>>>) {
        let (ended, end) = channel();
        let file = Arc::new(File::open("/dev/null").unwrap());
        let mut buf = AlignedBuf::zeroed(2 * BLOCK_SIZE);
        buf.fill(7);
        let done = Box::new(move |result| ended.send(result).unwrap());
        (FileRead::new(file, offset, Arc::new(buf), done), end)
    }

    #[test]
    fn a_short_read_goes_on_where_it_stopped() {
        let (read, end) = read(40_960);
        let mut read = read.step(512).expect("there is more");
        let (_, offset, rest) = read.rest();
        assert_eq!((offset, rest.len()), (40_960 + 512, 2 * BLOCK_SIZE - 512));
        let read = read.step(-libc::EINTR).expect("it is tried again");
        assert!(end.try_recv().is_err());
        assert!(read.step(2 * BLOCK_SIZE as i32 - 512).is_none());
        assert!(end.recv().unwrap().is_ok());
    }

    #[test]
    fn what_lies_behind_the_end_of_the_file_is_zeros() {
        let (read, end) = read(0);
        let read = read.step(BLOCK_SIZE as i32).expect("there is more");
        assert!(read.step(0).is_none());
        let buf = end.recv().unwrap().unwrap();
        assert!(buf[..BLOCK_SIZE].iter().all(|byte| *byte == 7));
        assert!(buf[BLOCK_SIZE..].iter().all(|byte| *byte == 0));
    }

    #[test]
    fn an_error_ends_the_read() {
        let (read, end) = read(0);
        assert!(read.step(-libc::EIO).is_none());
        assert_eq!(end.recv().unwrap().unwrap_err().raw_os_error(), Some(libc::EIO));
    }
}
