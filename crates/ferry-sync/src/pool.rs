//! Runs fsyncs on threads, if io_uring is not available.

use crate::sys;
use parking_lot::Mutex;
use std::io;
use std::os::fd::RawFd;
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, Sender};
use std::thread::{Builder, JoinHandle};

type FsyncEnded = (usize, io::Result<()>);

pub struct FsyncPool {
    jobs: usize,
    data_only: bool,
    work: Option<Sender<(RawFd, usize)>>,
    queue: Arc<Mutex<Receiver<(RawFd, usize)>>>,
    answer: Sender<FsyncEnded>,
    answers: Receiver<FsyncEnded>,
    threads: Vec<JoinHandle<()>>,
}

impl FsyncPool {
    /// `jobs`: the most threads.
    pub fn new(jobs: usize, data_only: bool) -> Self {
        let (work, queue) = mpsc::channel();
        let (answer, answers) = mpsc::channel();
        let queue = Arc::new(Mutex::new(queue));
        Self { jobs, data_only, work: Some(work), queue, answer, answers, threads: Vec::new() }
    }

    /// Starts an fsync. The descriptor must stay open until the slot has ended.
    pub fn push(&mut self, file: RawFd, slot: usize, ended: &mut Vec<FsyncEnded>) {
        if self.threads.len() < self.jobs {
            let (queue, answer, data_only) =
                (Arc::clone(&self.queue), self.answer.clone(), self.data_only);
            let started = Builder::new()
                .name("ferry-fsync".into())
                .spawn(move || serve(&queue, &answer, data_only));
            self.threads.extend(started.ok());
        }
        match &self.work {
            Some(work) if !self.threads.is_empty() => {
                work.send((file, slot)).expect("the queue lives as long as the pool");
            }
            // No thread could be started: sync here.
            _ => ended.push((slot, sys::fsync(file, self.data_only))),
        }
    }

    /// Waits until at least one has ended.
    pub fn reap(&mut self, ended: &mut Vec<FsyncEnded>) {
        if ended.is_empty() {
            ended.push(self.answers.recv().expect("the pool itself holds a sender"));
        }
        ended.extend(self.answers.try_iter());
    }
}

fn serve(queue: &Mutex<Receiver<(RawFd, usize)>>, answer: &Sender<FsyncEnded>, data_only: bool) {
    loop {
        let work = queue.lock().recv();
        let Ok((file, slot)) = work else { return };
        if answer.send((slot, sys::fsync(file, data_only))).is_err() {
            return;
        }
    }
}

impl Drop for FsyncPool {
    fn drop(&mut self) {
        self.work = None;
        for thread in self.threads.drain(..) {
            // It runs nothing that panics; if it did, the missing answer has been reported.
            let _ended = thread.join();
        }
    }
}
