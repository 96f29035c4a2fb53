//! Flushes through the host's page cache.
//!
//! The host tells of a page that it could not write once for each open file: to whichever flush
//! asks first. Another one under way beside it, or right behind it, would hear of a success that is
//! none. So they go one at a time, and after a failure no later one succeeds.

use parking_lot::Mutex;
use std::io;

/// The error of the flush that failed, if one did.
#[derive(Default)]
pub(super) struct CachedFlushes(Mutex<Option<i32>>);

impl CachedFlushes {
    /// Calls `flush`, unless one has failed.
    pub(super) fn flush(&self, flush: impl FnOnce() -> io::Result<()>) -> io::Result<()> {
        let mut failed = self.0.lock();
        if let Some(errno) = *failed {
            return Err(io::Error::from_raw_os_error(errno));
        }
        flush().inspect_err(|error| *failed = Some(error.raw_os_error().unwrap_or(libc::EIO)))
    }
}

#[cfg(test)]
#[expect(clippy::disallowed_methods, reason = "tests may unwrap")]
mod tests {
    use super::*;
    use std::sync::mpsc;
    use std::thread;

    #[test]
    fn no_flush_succeeds_during_or_after_a_failed_one() {
        let flushes = CachedFlushes::default();
        flushes.flush(|| Ok(())).unwrap();
        let (begun, wait) = mpsc::channel();
        thread::scope(|scope| {
            let first = scope.spawn(|| {
                flushes.flush(|| {
                    begun.send(()).unwrap();
                    thread::yield_now();
                    Err(io::Error::from_raw_os_error(libc::ENOSPC))
                })
            });
            wait.recv().unwrap();
            // The host would say that this one has succeeded.
            let second = flushes.flush(|| Ok(())).unwrap_err();
            assert_eq!(second.raw_os_error(), Some(libc::ENOSPC));
            assert!(first.join().unwrap().is_err());
        });
        assert!(flushes.flush(|| Ok(())).is_err());
    }
}
