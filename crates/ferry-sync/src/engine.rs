//! Which way each file goes, and how many are held open.

use crate::bulk::{self, Batch};
use crate::lane::Lane;
use crate::sys::{self, BULK_FILES_MAX, Device};
use crate::{JOBS_MAX, Options, Summary};
use std::collections::{HashMap, VecDeque};
use std::io;
use std::os::fd::AsFd;
use std::sync::mpsc::{self, Receiver, SyncSender};
use std::thread::{self, Builder};

/// FerryFS's share of the work that is not yet durable.
struct Collecting<T, F> {
    batch: Batch<F>,
    names: Vec<T>,
}

struct Engine<T, F, D> {
    done: D,
    summary: Summary,
    lane: Lane<T, F>,
    /// For each file system, the batch that is being collected; `None`: not FerryFS.
    ways: HashMap<Device, Option<Collecting<T, F>>>,
    /// Files in the collected batches, and how many there may be.
    collected: usize,
    batch_max: usize,
    batches: Option<SyncSender<Batch<F>>>,
    answers: Receiver<Vec<Option<F>>>,
    /// Names of the batches that are not answered, oldest first.
    unanswered: VecDeque<Vec<T>>,
}

pub fn run<T, F: AsFd + Send>(
    files: impl Iterator<Item = (T, io::Result<F>)>,
    options: &Options,
    done: impl FnMut(T, io::Result<()>),
) -> Summary {
    let jobs = options.jobs.clamp(1, JOBS_MAX).min(options.open_files / 4 + 1);
    // Three batches can be open at a time: collected, on their way, and given back to be settled.
    let batch_max = (options.open_files.saturating_sub(jobs) / 3).clamp(1, BULK_FILES_MAX);
    thread::scope(|scope| {
        // No queue between: a batch waits with its collector until the one before is durable.
        let (batches, to_commit) = mpsc::sync_channel(0);
        let (answered, answers) = mpsc::channel();
        let data_only = options.data_only;
        let committer = move || bulk::commit_all(to_commit, answered, data_only);
        let started = Builder::new().name("ferry-bulk-sync".into()).spawn_scoped(scope, committer);
        let mut engine = Engine {
            done,
            summary: Summary::default(),
            lane: Lane::new(jobs, data_only),
            ways: HashMap::new(),
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

fn tell<T>(summary: &mut Summary, done: &mut impl FnMut(T, io::Result<()>), name: T, result: io::Result<()>) {
    match result {
        Ok(()) => summary.synced += 1,
        Err(_) => summary.failed += 1,
    }
    done(name, result);
}

impl<T, F: AsFd, D: FnMut(T, io::Result<()>)> Engine<T, F, D> {
    fn tell(&mut self, name: T, result: io::Result<()>) {
        tell(&mut self.summary, &mut self.done, name, result);
    }

    fn add(&mut self, name: T, file: io::Result<F>) {
        let identified = file.and_then(|file| sys::identify(file.as_fd()).map(|identity| (file, identity)));
        let (file, identity) = match identified {
            Ok(both) => both,
            Err(error) => return self.tell(name, Err(error)),
        };
        if !identity.regular || self.batches.is_none() {
            return self.alone(name, file);
        }
        let way = self.ways.entry(identity.device).or_insert_with(|| {
            bulk::understood(file.as_fd()).then(|| Collecting { batch: Batch::default(), names: Vec::new() })
        });
        let Some(collecting) = way else { return self.alone(name, file) };
        if let Err(error) = sys::hand_over(file.as_fd()) {
            return self.tell(name, Err(error));
        }
        collecting.batch.files.push(file);
        collecting.batch.inos.push(identity.ino);
        collecting.names.push(name);
        self.collected += 1;
        if self.collected >= self.batch_max {
            self.send_batches();
        }
    }

    fn alone(&mut self, name: T, file: F) {
        let Self { lane, summary, done, .. } = self;
        lane.push(name, file, &mut |name, result| tell(summary, done, name, result));
    }

    fn send_batches(&mut self) {
        self.collected = 0;
        let ready = |way: &mut Option<Collecting<T, F>>| {
            way.as_mut()
                .filter(|c| !c.names.is_empty())
                .map(|c| (std::mem::take(&mut c.batch), std::mem::take(&mut c.names)))
        };
        let ready: Vec<_> = self.ways.values_mut().filter_map(ready).collect();
        for (batch, names) in ready {
            match self.batches.as_ref().map(|batches| batches.send(batch)) {
                Some(Ok(())) => self.unanswered.push_back(names),
                Some(Err(unsent)) => {
                    names.into_iter().zip(unsent.0.files).for_each(|(n, f)| self.alone(n, f))
                }
                None => unreachable!("batches are collected only while they can be sent"),
            }
            while let Ok(answer) = self.answers.try_recv() {
                self.take(answer);
            }
        }
    }

    /// What came of the oldest batch.
    fn take(&mut self, answer: Vec<Option<F>>) {
        let names = self.unanswered.pop_front().expect("each batch is answered once, in order");
        for (name, file) in names.into_iter().zip(answer) {
            match file {
                None => self.tell(name, Ok(())),
                Some(file) => self.alone(name, file),
            }
        }
    }

    fn finish(&mut self) {
        self.send_batches();
        self.batches = None;
        while let Ok(answer) = self.answers.recv() {
            self.take(answer);
        }
        let Self { lane, summary, done, .. } = self;
        lane.drain(&mut |name, result| tell(summary, done, name, result));
    }
}
