//! Whether more threads can run than there are cores.
//!
//! Then no core is idle, and [`crate::request::idle_poll`] has nothing to keep awake. Its spinning
//! would do harm: a core that runs a thread of the idle class does not count as idle, so the
//! scheduler fetches no waiting thread from another core for it.

use std::fs::File;
use std::io::Read;
use std::path::PathBuf;
use std::thread;

/// The question, to the kernel.
#[derive(Debug)]
pub(crate) struct Crowd {
    cores: usize,
    /// Of the form of `/proc/loadavg`: its fourth word is `RUNNABLE/THREADS`. It is opened for
    /// each question, because the thread that asks has no file open meanwhile.
    loads: PathBuf,
}

impl Crowd {
    /// That of this machine.
    pub(crate) fn of_machine() -> Self {
        let cores = thread::available_parallelism().map_or(1, usize::from);
        Self { cores, loads: "/proc/loadavg".into() }
    }

    /// Whether more threads run or wait for a core than there are cores; the caller counts as one.
    /// `false` where the kernel does not say.
    pub(crate) fn is_there(&self) -> bool {
        let mut text = [0; 64];
        let read = File::open(&self.loads).and_then(|mut file| file.read(&mut text));
        read.is_ok_and(|len| runnable(&text[..len]).is_some_and(|threads| threads > self.cores))
    }
}

fn runnable(loads: &[u8]) -> Option<usize> {
    let word = str::from_utf8(loads).ok()?.split(' ').nth(3)?;
    word.split_once('/')?.0.parse().ok()
}

#[cfg(test)]
pub(crate) mod tests {
    #![expect(clippy::disallowed_methods, reason = "a test's own files can be written")]
    use super::*;

    /// A crowd that a file says is there, or not.
    pub(crate) struct TestCrowd(tempfile::TempDir);

    impl TestCrowd {
        pub(crate) fn new() -> Self {
            let this = Self(tempfile::tempdir().unwrap());
            this.set(1);
            this
        }
        pub(crate) fn set(&self, runnable: usize) {
            // A rename: a reader sees one of both texts.
            let new = self.0.path().join("new");
            std::fs::write(&new, format!("0.20 0.18 0.12 {runnable}/80 11206\n")).unwrap();
            std::fs::rename(new, self.0.path().join("loads")).unwrap();
        }
        pub(crate) fn crowd(&self) -> Crowd {
            Crowd { cores: 2, loads: self.0.path().join("loads") }
        }
    }

    #[test]
    fn a_crowd_is_more_runnable_threads_than_cores() {
        let said = TestCrowd::new();
        for (runnable, crowd) in [(1, false), (2, false), (3, true), (12, true)] {
            said.set(runnable);
            assert_eq!(said.crowd().is_there(), crowd, "{runnable}");
        }
    }

    #[test]
    fn a_kernel_that_does_not_say_has_no_crowd() {
        for text in ["", "0.20 0.18 0.12", "0.20 0.18 0.12 x/80 1", "0.20 0.18 0.12 9 1", "\u{e4}"]
        {
            assert_eq!(runnable(text.as_bytes()), None, "{text}");
        }
        assert!(!Crowd { cores: 0, loads: "/proc/none".into() }.is_there());
    }

    #[test]
    fn the_kernel_says_how_many_threads_can_run() {
        assert!(Crowd { cores: 0, ..Crowd::of_machine() }.is_there(), "this thread runs");
        assert!(!Crowd { cores: usize::MAX, ..Crowd::of_machine() }.is_there());
    }
}
