//! Which snapshots are open, with a source that counts and a clock that is set.

use super::*;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::SeqCst};
use std::thread;

/// A clock that is set, in seconds.
#[derive(Default)]
struct Set(AtomicU64);

impl Clock for Set {
    fn monotonic(&self) -> Duration {
        Duration::from_secs(self.0.load(SeqCst))
    }
    fn wall(&self) -> Duration {
        self.monotonic()
    }
}

/// A snapshot is its number.
#[derive(Default)]
struct Numbers {
    opened: Mutex<Vec<u64>>,
    closed: Mutex<Vec<u64>>,
    open: AtomicUsize,
}

impl Source for Numbers {
    type Snapshot = u64;

    fn open(&self, number: u64) -> Result<u64, Errno> {
        // So that others come meanwhile.
        thread::yield_now();
        if number == 404 {
            return Err(Errno(libc::ENOENT));
        }
        self.opened.lock().push(number);
        Ok(number)
    }

    fn close(&self, snapshot: Arc<u64>) {
        self.closed.lock().push(*snapshot);
    }

    fn note_open(&self, open: usize) {
        assert!(open <= OPEN_MAX, "no more are open");
        self.open.store(open, SeqCst);
    }
}

fn world() -> (Arc<OpenSnapshots<Numbers>>, Arc<Set>) {
    let clock = Arc::new(Set::default());
    (
        OpenSnapshots::new(
            Numbers::default(),
            Arc::clone(&clock) as Arc<dyn Clock>,
            CarriedTrees { first: 1_000, numbers: Vec::new() },
            OPEN_MAX,
        ),
        clock,
    )
}

fn read(open: &Arc<OpenSnapshots<Numbers>>, number: u64) -> Result<u64, Errno> {
    let tree = open.tree(number)?;
    open.with(tree, |snapshot| Ok(*snapshot))
}

#[test]
fn the_one_that_was_not_used_for_the_longest_time_is_closed_first() {
    let (open, clock) = world();
    let most = OPEN_MAX as u64;
    for number in 0..most {
        clock.0.fetch_add(1, SeqCst);
        assert_eq!(read(&open, number), Ok(number));
    }
    clock.0.fetch_add(1, SeqCst);
    assert_eq!(read(&open, 0), Ok(0));
    assert_eq!(read(&open, most), Ok(most));
    assert_eq!(*open.source.closed.lock(), [1]);
    assert_eq!(open.source.opened.lock().len(), OPEN_MAX + 1, "none is opened twice");
    assert_eq!(read(&open, 1), Ok(1), "it is opened again");
    open.end();
    open.close();
    assert_eq!(open.source.open.load(SeqCst), 0);
    assert_eq!(read(&open, 1), Err(Errno(libc::EIO)));
}

#[test]
fn what_nobody_uses_is_closed_and_what_somebody_uses_is_not() {
    let (open, clock) = world();
    assert_eq!(read(&open, 1), Ok(1));
    let used = open.tree(2).expect("there are few");
    let during = open.with(used, |snapshot| {
        clock.0.fetch_add(IDLE.as_secs(), SeqCst);
        open.close_idle(&mut open.state.lock());
        Ok(*snapshot)
    });
    assert_eq!((during, &*open.source.closed.lock()), (Ok(2), &vec![1]));
    open.end();
    open.close();
    assert_eq!(*open.source.closed.lock(), [1, 2]);
}

#[test]
fn a_failed_read_closes_the_snapshot_and_a_deleted_one_is_stale() {
    let (open, _clock) = world();
    let tree = open.tree(1).expect("there are few");
    let failed: Result<(), _> = open.with(tree, |_| Err(Errno(libc::EIO)));
    assert_eq!((failed, &*open.source.closed.lock()), (Err(Errno(libc::EIO)), &vec![1]));
    let absent: Result<(), _> = open.with(tree, |_| Err(Errno(libc::ENOENT)));
    assert_eq!(absent, Err(Errno(libc::ENOENT)));
    assert_eq!(open.source.closed.lock().len(), 1, "a missing name is no failure");
    assert_eq!(read(&open, 404), Err(Errno(libc::ESTALE)));
    open.end();
    open.close();
}

#[test]
fn many_threads_read_many_snapshots_with_few_open() {
    let (open, clock) = world();
    thread::scope(|scope| {
        for thread in 0..8 {
            let (open, clock) = (&open, &clock);
            scope.spawn(move || {
                for n in 0..500 {
                    clock.0.fetch_add(1, SeqCst);
                    let number = (thread * 7 + n * 5) % 20;
                    assert_eq!(read(open, number), Ok(number));
                }
            });
        }
    });
    open.end();
    open.close();
    let (opened, closed) = (open.source.opened.lock(), open.source.closed.lock());
    assert_eq!(opened.len(), closed.len());
}
