//! Syncs files one by one, with many fsyncs in flight: the path for directories and for file
//! systems other than FerryFS.

use crate::pool::FsyncPool;
use crate::ring::FsyncRing;
use std::io;
use std::os::fd::{AsFd, AsRawFd};

enum FsyncBackend {
    Ring(Box<FsyncRing>),
    /// Used if the process may not use io_uring.
    Pool(FsyncPool),
}

/// Fsyncs in flight, at most `jobs`; each has a slot.
pub struct FsyncLane<T, F> {
    jobs: usize,
    data_only: bool,
    backend: Option<FsyncBackend>,
    slots: Vec<Option<(T, F)>>,
    free: Vec<usize>,
    ended: Vec<(usize, io::Result<()>)>,
}

impl<T, F: AsFd> FsyncLane<T, F> {
    pub fn new(jobs: usize, data_only: bool) -> Self {
        Self {
            jobs,
            data_only,
            backend: None,
            slots: Vec::new(),
            free: Vec::new(),
            ended: Vec::new(),
        }
    }

    /// Starts the fsync of a file; waits only if `jobs` are in flight.
    pub fn push(&mut self, name: T, file: F, done: &mut impl FnMut(T, io::Result<()>)) {
        let (jobs, data_only) = (self.jobs, self.data_only);
        let backend = self.backend.get_or_insert_with(|| match FsyncRing::new(jobs, data_only) {
            Ok(ring) => FsyncBackend::Ring(Box::new(ring)),
            Err(_) => FsyncBackend::Pool(FsyncPool::new(jobs, data_only)),
        });
        let slot = match self.free.pop() {
            Some(slot) => slot,
            None => {
                self.slots.push(None);
                self.slots.len() - 1
            }
        };
        let fd = file.as_fd().as_raw_fd();
        self.slots[slot] = Some((name, file));
        match backend {
            FsyncBackend::Ring(ring) => ring.push(fd, slot),
            FsyncBackend::Pool(pool) => pool.push(fd, slot, &mut self.ended),
        }
        if self.in_flight() >= self.jobs {
            self.reap(done);
        }
    }

    /// Waits until none is in flight.
    pub fn drain(&mut self, done: &mut impl FnMut(T, io::Result<()>)) {
        while self.in_flight() > 0 {
            self.reap(done);
        }
    }

    fn in_flight(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    /// Waits for at least one, and reports every fsync that has ended.
    fn reap(&mut self, done: &mut impl FnMut(T, io::Result<()>)) {
        match &mut self.backend {
            Some(FsyncBackend::Ring(ring)) => ring.reap(&mut self.ended),
            Some(FsyncBackend::Pool(pool)) => pool.reap(&mut self.ended),
            None => {}
        }
        for (slot, result) in self.ended.drain(..) {
            let (name, file) = self.slots[slot].take().expect("only what was pushed ends");
            self.free.push(slot);
            drop(file);
            done(name, result);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;

    #[test]
    fn each_file_gets_its_own_answer_from_either_backend() {
        let dir = tempfile::tempdir().expect("a directory");
        for pool in [false, true] {
            for jobs in [1, 3, 64] {
                let mut lane = FsyncLane::new(jobs, false);
                if pool {
                    lane.backend = Some(FsyncBackend::Pool(FsyncPool::new(jobs, false)));
                }
                let mut answers = vec![0; 200];
                let mut done = |name: usize, result: io::Result<()>| {
                    answers[name] += if result.is_ok() { 1 } else { 100 };
                };
                for name in 0..200 {
                    // A pipe cannot be synced.
                    let file = if name % 7 == 0 {
                        std::io::pipe().map(|(reader, _)| std::os::fd::OwnedFd::from(reader))
                    } else {
                        File::create(dir.path().join(name.to_string())).map(Into::into)
                    };
                    lane.push(name, file.expect("opens"), &mut done);
                    assert!(lane.in_flight() < jobs.max(2));
                }
                lane.drain(&mut done);
                for (name, answer) in answers.iter().enumerate() {
                    assert_eq!(*answer, if name % 7 == 0 { 100 } else { 1 }, "file {name}");
                }
            }
        }
    }
}
