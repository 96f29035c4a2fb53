//! Decides whether each file is synced in a batch or by its own fsync, and how many files are open.

use crate::bulk::{self, BulkBatch};
use crate::lane::FsyncLane;
use crate::sys::{self, BULK_FILES_MAX, DeviceNumber};
use crate::{JOBS_MAX, Options, Summary};
use std::collections::{HashMap, VecDeque};
use std::io;
use std::os::fd::AsFd;
use std::sync::mpsc::{self, Receiver, SyncSender};
use std::thread::{self, Builder};

/// The batch of one FerryFS that is being collected.
struct Collecting<T, F> {
    batch: BulkBatch<F>,
    names: Vec<T>,
}

struct SyncEngine<T, F, D> {
    done: D,
    summary: Summary,
    lane: FsyncLane<T, F>,
    /// For each file system, the batch that is being collected; `None`: not FerryFS.
    collecting: HashMap<DeviceNumber, Option<Collecting<T, F>>>,
    /// Files in all collected batches.
    collected: usize,
    /// The most that they may be.
    batch_max: usize,
    batches: Option<SyncSender<BulkBatch<F>>>,
    answers: Receiver<Vec<Option<F>>>,
    /// The names of the files in unanswered batches, oldest first.
    unanswered: VecDeque<Vec<T>>,
}

/// Syncs all files; see [`crate::sync_each`].
pub fn run<T, F: AsFd + Send>(
    files: impl Iterator<Item = (T, io::Result<F>)>,
    options: &Options,
    done: impl FnMut(T, io::Result<()>),
) -> Summary {
    let jobs = options.jobs.clamp(1, JOBS_MAX).min(options.open_files / 4 + 1);
    // Three batches can be open at a time: one collected, one in flight, and one given back for
    // fsync.
    let batch_max = (options.open_files.saturating_sub(jobs) / 3).clamp(1, BULK_FILES_MAX);
    thread::scope(|scope| {
        // Without a queue: a batch stays with its collector until the batch before it is durable.
        let (batches, to_commit) = mpsc::sync_channel(0);
        let (answered, answers) = mpsc::channel();
        let data_only = options.data_only;
        let committer = move || bulk::commit_all(to_commit, answered, data_only);
        let started = Builder::new().name("ferry-bulk-sync".into()).spawn_scoped(scope, committer);
        let mut engine = SyncEngine {
            done,
            summary: Summary::default(),
            lane: FsyncLane::new(jobs, data_only),
            collecting: HashMap::new(),
            collected: 0,
            batch_max,
            batches: started.is_ok().then_some(batches),
            answers,
            unanswered: VecDeque::new(),
        };
        for (name, file) in files {
            engine.add(name, file);
        }
        engine.finish();
        engine.summary
    })
}

fn report<T>(
    summary: &mut Summary,
    done: &mut impl FnMut(T, io::Result<()>),
    name: T,
    result: io::Result<()>,
) {
    match result {
        Ok(()) => summary.synced += 1,
        Err(_) => summary.failed += 1,
    }
    done(name, result);
}

impl<T, F: AsFd, D: FnMut(T, io::Result<()>)> SyncEngine<T, F, D> {
    fn report(&mut self, name: T, result: io::Result<()>) {
        report(&mut self.summary, &mut self.done, name, result);
    }

    fn add(&mut self, name: T, file: io::Result<F>) {
        let identified =
            file.and_then(|file| sys::identify(file.as_fd()).map(|identity| (file, identity)));
        let (file, identity) = match identified {
            Ok(both) => both,
            Err(error) => return self.report(name, Err(error)),
        };
        if !identity.regular || self.batches.is_none() {
            return self.fsync_alone(name, file);
        }
        let batch = self.collecting.entry(identity.device).or_insert_with(|| {
            bulk::understood(file.as_fd())
                .then(|| Collecting { batch: BulkBatch::default(), names: Vec::new() })
        });
        let Some(collecting) = batch else { return self.fsync_alone(name, file) };
        if let Err(error) = sys::write_back(file.as_fd()) {
            return self.report(name, Err(error));
        }
        collecting.batch.files.push(file);
        collecting.batch.inos.push(identity.ino);
        collecting.names.push(name);
        self.collected += 1;
        if self.collected >= self.batch_max {
            self.send_batches();
        }
    }

    fn fsync_alone(&mut self, name: T, file: F) {
        let Self { lane, summary, done, .. } = self;
        lane.push(name, file, &mut |name, result| report(summary, done, name, result));
    }

    fn send_batches(&mut self) {
        self.collected = 0;
        let ready = |collecting: &mut Option<Collecting<T, F>>| {
            collecting
                .as_mut()
                .filter(|c| !c.names.is_empty())
                .map(|c| (std::mem::take(&mut c.batch), std::mem::take(&mut c.names)))
        };
        let ready: Vec<_> = self.collecting.values_mut().filter_map(ready).collect();
        for (batch, names) in ready {
            match self.batches.as_ref().map(|batches| batches.send(batch)) {
                Some(Ok(())) => self.unanswered.push_back(names),
                Some(Err(unsent)) => {
                    names.into_iter().zip(unsent.0.files).for_each(|(n, f)| self.fsync_alone(n, f))
                }
                None => unreachable!("batches are collected only while they can be sent"),
            }
            while let Ok(answer) = self.answers.try_recv() {
                self.batch_answered(answer);
            }
        }
    }

    /// Reports the files of the oldest batch; those that are not durable get an fsync of their own.
    fn batch_answered(&mut self, answer: Vec<Option<F>>) {
        let names = self.unanswered.pop_front().expect("each batch is answered once, in order");
        for (name, file) in names.into_iter().zip(answer) {
            match file {
                None => self.report(name, Ok(())),
                Some(file) => self.fsync_alone(name, file),
            }
        }
    }

    fn finish(&mut self) {
        self.send_batches();
        self.batches = None;
        while let Ok(answer) = self.answers.recv() {
            self.batch_answered(answer);
        }
        let Self { lane, summary, done, .. } = self;
        lane.drain(&mut |name, result| report(summary, done, name, result));
    }
}
