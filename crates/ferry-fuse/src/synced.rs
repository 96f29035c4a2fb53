//! Writes that are answered once they are durable: those to a descriptor opened with `O_SYNC` or `O_DSYNC`, and those of pwritev2(2)
//! with `RWF_SYNC` or `RWF_DSYNC`.
//!
//! Behind a write to its page cache the kernel sends an FSYNC itself. Behind direct I/O it sends none: the flag in the WRITE
//! request is all that says so. The request does not tell the one from the other; an FSYNC on top finds all of it durable.

use ferry_fs::{Answer, Complete, Cx, Errno, Interrupt, Park, Reply, Stop};
use parking_lot::Mutex;

/// Makes a write, then an fsync of the file, and answers with the number that the write did. Either may park.
pub(crate) fn synced<S>(cx: &Cx<'_>, write: impl FnOnce(&Cx<'_>) -> Answer<u64>, fsync: S) -> Answer<u64>
where
    S: Fn(&Cx<'_>) -> Answer<()> + Clone + Send + 'static,
{
    let count = write(&Cx { park: &Writing { cx, fsync: &fsync }, ..*cx })?;
    fsync(&Cx { park: &Syncing { park: cx.park, count }, ..*cx })?;
    Ok(count)
}

fn counted(complete: Complete, count: u64) -> Complete {
    Box::new(move |synced| complete(synced.map(|_| Reply::Count(count))))
}

/// How the write parks: what completes it goes on with the fsync.
struct Writing<'w, S> {
    cx: &'w Cx<'w>,
    fsync: &'w S,
}

impl<S: Fn(&Cx<'_>) -> Answer<()> + Clone + Send + 'static> Park for Writing<'_, S> {
    fn park(&self, interrupt: Option<Interrupt>) -> Complete {
        let (complete, fsync) = (self.cx.park.park(interrupt), self.fsync.clone());
        let (uid, gid, pid, umask) = (self.cx.uid, self.cx.gid, self.cx.pid, self.cx.umask);
        Box::new(move |written| {
            let Ok(Reply::Count(count)) = written else { return complete(written) };
            let rest = Rest { complete: Mutex::new(Some(counted(complete, count))) };
            match fsync(&Cx { uid, gid, pid, umask, promise: None, park: &rest }) {
                Ok(()) => rest.answer(Ok(Reply::Empty)),
                Err(Stop::Errno(errno)) => rest.answer(Err(errno)),
                Err(Stop::Parked) => {}
            }
        })
    }

    fn may_wait(&self) -> bool {
        self.cx.park.may_wait()
    }
}

/// How the fsync behind a write parks that was done at once.
struct Syncing<'w> {
    park: &'w dyn Park,
    count: u64,
}

impl Park for Syncing<'_> {
    fn park(&self, interrupt: Option<Interrupt>) -> Complete {
        counted(self.park.park(interrupt), self.count)
    }

    fn may_wait(&self) -> bool {
        self.park.may_wait()
    }
}

/// How the fsync behind a write parks that had parked itself: the request is open already.
struct Rest {
    complete: Mutex<Option<Complete>>,
}

impl Rest {
    fn answer(&self, result: Result<Reply, Errno>) {
        if let Some(complete) = self.complete.lock().take() {
            complete(result);
        }
    }
}

impl Park for Rest {
    fn park(&self, _interrupt: Option<Interrupt>) -> Complete {
        self.complete.lock().take().expect("a request parks once")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;

    /// Requests parked, and what they were answered with.
    #[derive(Clone, Default)]
    struct Waiter {
        parked: Arc<Mutex<u32>>,
        answers: Arc<Mutex<Vec<Result<Reply, Errno>>>>,
    }

    impl Park for Waiter {
        fn park(&self, _interrupt: Option<Interrupt>) -> Complete {
            *self.parked.lock() += 1;
            let answers = self.answers.clone();
            Box::new(move |answer| answers.lock().push(answer))
        }
    }

    /// Something that answers at once, or parks until it is let go.
    #[derive(Clone, Default)]
    struct Step {
        parks: bool,
        asked: Arc<Mutex<u32>>,
        held: Arc<Mutex<Option<Complete>>>,
    }

    impl Step {
        fn run<T>(&self, cx: &Cx<'_>, result: Result<T, Errno>) -> Answer<T> {
            *self.asked.lock() += 1;
            if self.parks {
                *self.held.lock() = Some(cx.park.park(None));
                return Err(Stop::Parked);
            }
            result.map_err(Stop::Errno)
        }
        fn let_go(&self, result: Result<Reply, Errno>) {
            (self.held.lock().take().expect("it was asked"))(result);
        }
    }

    const EIO: Errno = Errno(libc::EIO);

    /// The answer to a write of 7 bytes and its fsync, whichever of them parks; how often the fsync was asked for.
    fn ask(
        parks: [bool; 2],
        written: Result<u64, Errno>,
        durable: Result<(), Errno>,
    ) -> (Result<u64, Errno>, u32) {
        let [write, fsync] = parks.map(|parks| Step { parks, ..Step::default() });
        let waiter = Waiter::default();
        let cx = Cx { uid: 1, gid: 2, pid: 3, umask: 0, promise: None, park: &waiter };
        let theirs = fsync.clone();
        let now = synced(&cx, |cx| write.run(cx, written), move |cx| theirs.run(cx, durable));
        let parked = (parks[0] || (parks[1] && written.is_ok())) as u32;
        assert_eq!(*waiter.parked.lock(), parked, "once, or not at all");
        if parks[0] {
            assert_eq!(*fsync.asked.lock(), 0, "nothing is written yet");
            write.let_go(written.map(Reply::Count));
        }
        if parks[1] && written.is_ok() {
            assert!(waiter.answers.lock().is_empty(), "it is not durable yet");
            fsync.let_go(durable.map(Reply::from));
        }
        let mut answers = waiter.answers.lock();
        let answer = match now {
            Err(Stop::Parked) => match answers.pop().expect("an answer") {
                Ok(Reply::Count(count)) => Ok(count),
                Ok(other) => panic!("{other:?} is no answer to a write"),
                Err(errno) => Err(errno),
            },
            Err(Stop::Errno(errno)) => Err(errno),
            Ok(count) => Ok(count),
        };
        assert!(answers.is_empty(), "one answer");
        let asked = *fsync.asked.lock();
        (answer, asked)
    }

    #[test]
    fn a_write_is_answered_after_its_fsync_whichever_parks() {
        for parks in [[false, false], [false, true], [true, false], [true, true]] {
            assert_eq!(ask(parks, Ok(7), Ok(())), (Ok(7), 1), "{parks:?}");
            assert_eq!(ask(parks, Ok(7), Err(EIO)), (Err(EIO), 1), "{parks:?}");
            assert_eq!(ask(parks, Err(EIO), Ok(())), (Err(EIO), 0), "{parks:?}");
        }
    }
}
