//! Everybody else's way: one fsync a file, many in flight.

use crate::pool::Pool;
use crate::ring::Ring;
use std::io;
use std::os::fd::{AsFd, AsRawFd};

enum Way {
    Ring(Box<Ring>),
    /// Where the process may have no io_uring.
    Pool(Pool),
}

/// Fsyncs in flight: at most as many as it has slots.
pub struct Lane<T, F> {
    jobs: usize,
    data_only: bool,
    way: Option<Way>,
    slots: Vec<Option<(T, F)>>,
    free: Vec<usize>,
    ended: Vec<(usize, io::Result<()>)>,
}

impl<T, F: AsFd> Lane<T, F> {
    pub fn new(jobs: usize, data_only: bool) -> Self {
        Self { jobs, data_only, way: None, slots: Vec::new(), free: Vec::new(), ended: Vec::new() }
    }

    /// Syncs a file; waits only if all slots are taken.
    pub fn push(&mut self, name: T, file: F, done: &mut impl FnMut(T, io::Result<()>)) {
        let (jobs, data_only) = (self.jobs, self.data_only);
        let way = self.way.get_or_insert_with(|| match Ring::new(jobs, data_only) {
            Ok(ring) => Way::Ring(Box::new(ring)),
            Err(_) => Way::Pool(Pool::new(jobs, data_only)),
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
        match way {
            Way::Ring(ring) => ring.push(fd, slot),
            Way::Pool(pool) => pool.push(fd, slot, &mut self.ended),
        }
        if self.in_flight() >= self.jobs {
            self.reap(done);
        }
    }

    /// Waits for all.
    pub fn drain(&mut self, done: &mut impl FnMut(T, io::Result<()>)) {
        while self.in_flight() > 0 {
            self.reap(done);
        }
    }

    fn in_flight(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    /// Waits for at least one, and tells all that have ended.
    fn reap(&mut self, done: &mut impl FnMut(T, io::Result<()>)) {
        match &mut self.way {
            Some(Way::Ring(ring)) => ring.reap(&mut self.ended),
            Some(Way::Pool(pool)) => pool.reap(&mut self.ended),
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

    /// Both kinds of lane give every file its own answer.
    #[test]
    fn each_file_gets_its_own_answer_whatever_carries_it() {
        let dir = tempfile::tempdir().expect("a directory");
        for pool in [false, true] {
            for jobs in [1, 3, 64] {
                let mut lane = Lane::new(jobs, false);
                if pool {
                    lane.way = Some(Way::Pool(Pool::new(jobs, false)));
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
