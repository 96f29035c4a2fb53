//! Two steps answered as one request: the second begins when the first has succeeded, the answer is
//! the first one's, and either may park.
//!
//! This makes writes durable before they are answered, if the descriptor was opened with `O_SYNC`
//! or `O_DSYNC`, or pwritev2(2) had `RWF_SYNC` or `RWF_DSYNC`. After a write to its page cache the
//! kernel sends an FSYNC itself. After direct I/O it sends none: the flag in the WRITE request is
//! all that says so. The request does not distinguish the two; an additional FSYNC finds everything
//! durable.

use ferry_fs::{Answer, Complete, Cx, Errno, Interrupt, Park, Reply, RequestId, Stop};
use parking_lot::Mutex;

/// Runs `first`, then `second`, and answers what `first` returned.
pub(crate) fn chain<T, S>(
    cx: &Cx<'_>,
    first: impl FnOnce(&Cx<'_>) -> Answer<T>,
    second: S,
) -> Answer<T>
where
    T: Into<Reply> + Copy,
    S: Fn(&Cx<'_>) -> Answer<()> + Clone + Send + 'static,
{
    let answer = first(&Cx { park: &FirstStep { cx, second: &second }, ..*cx })?;
    second(&Cx { park: &SecondStep { park: cx.park, answer }, ..*cx })?;
    Ok(answer)
}

/// Parks the request, and has `begin` start something that calls its argument at its end. Then
/// `step` runs and answers the request. If the argument is dropped instead, the request fails.
pub(crate) fn behind<T: Into<Reply>>(
    cx: &Cx<'_>,
    begin: impl FnOnce(Box<dyn FnOnce() + Send>),
    step: impl FnOnce(&Cx<'_>) -> Answer<T> + Send + 'static,
) -> Answer<T> {
    let request = cx.request();
    let open = OpenRequest { complete: Mutex::new(Some(cx.park.park(None))), request };
    let (uid, gid, pid, umask) = (cx.uid, cx.gid, cx.pid, cx.umask);
    begin(Box::new(move || open.run(|park| step(&Cx { uid, gid, pid, umask, park }))));
    Err(Stop::Parked)
}

fn answering(complete: Complete, answer: Reply) -> Complete {
    Box::new(move |second| complete(second.map(|_| answer)))
}

/// Parks the first step: its completion runs the second.
struct FirstStep<'w, S> {
    cx: &'w Cx<'w>,
    second: &'w S,
}

impl<S: Fn(&Cx<'_>) -> Answer<()> + Clone + Send + 'static> Park for FirstStep<'_, S> {
    fn park(&self, interrupt: Option<Interrupt>) -> Complete {
        let (complete, second) = (self.cx.park.park(interrupt), self.second.clone());
        let (uid, gid, pid, umask) = (self.cx.uid, self.cx.gid, self.cx.pid, self.cx.umask);
        Box::new(move |first| {
            let Ok(answer) = first else { return complete(first) };
            let complete = Mutex::new(Some(answering(complete, answer)));
            let open = OpenRequest { complete, request: None };
            open.run(|park| second(&Cx { uid, gid, pid, umask, park }));
        })
    }

    fn may_wait(&self) -> bool {
        self.cx.park.may_wait()
    }

    fn request(&self) -> Option<RequestId> {
        self.cx.request()
    }
}

/// Parks the second step if the first did not park.
struct SecondStep<'w, T> {
    park: &'w dyn Park,
    answer: T,
}

impl<T: Into<Reply> + Copy> Park for SecondStep<'_, T> {
    fn park(&self, interrupt: Option<Interrupt>) -> Complete {
        answering(self.park.park(interrupt), self.answer.into())
    }

    fn may_wait(&self) -> bool {
        self.park.may_wait()
    }

    fn request(&self) -> Option<RequestId> {
        self.park.request()
    }
}

/// Parks a step of a request that is in the table already.
struct OpenRequest {
    complete: Mutex<Option<Complete>>,
    request: Option<RequestId>,
}

impl OpenRequest {
    /// Runs the step, and answers the request unless the step parks.
    fn run<T: Into<Reply>>(&self, step: impl FnOnce(&dyn Park) -> Answer<T>) {
        match step(self) {
            Ok(answer) => self.answer(Ok(answer.into())),
            Err(Stop::Errno(errno)) => self.answer(Err(errno)),
            Err(Stop::Parked) => {}
        }
    }

    fn answer(&self, result: Result<Reply, Errno>) {
        if let Some(complete) = self.complete.lock().take() {
            complete(result);
        }
    }
}

impl Park for OpenRequest {
    fn park(&self, _interrupt: Option<Interrupt>) -> Complete {
        self.complete.lock().take().expect("a request parks once")
    }

    fn request(&self) -> Option<RequestId> {
        self.request
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;

    /// Counts the requests that parked, and keeps their answers.
    #[derive(Clone, Default)]
    struct TestPark {
        parked: Arc<Mutex<u32>>,
        answers: Arc<Mutex<Vec<Result<Reply, Errno>>>>,
    }

    impl Park for TestPark {
        fn park(&self, _interrupt: Option<Interrupt>) -> Complete {
            *self.parked.lock() += 1;
            let answers = self.answers.clone();
            Box::new(move |answer| answers.lock().push(answer))
        }

        fn request(&self) -> Option<ferry_fs::RequestId> {
            None
        }
    }

    /// A step that answers at once, or parks until the test completes it.
    #[derive(Clone, Default)]
    struct TestStep {
        parks: bool,
        asked: Arc<Mutex<u32>>,
        held: Arc<Mutex<Option<Complete>>>,
    }

    impl TestStep {
        fn run<T>(&self, cx: &Cx<'_>, result: Result<T, Errno>) -> Answer<T> {
            *self.asked.lock() += 1;
            if self.parks {
                *self.held.lock() = Some(cx.park.park(None));
                return Err(Stop::Parked);
            }
            result.map_err(Stop::Errno)
        }
        fn complete(&self, result: Result<Reply, Errno>) {
            (self.held.lock().take().expect("it was asked"))(result);
        }
    }

    #[test]
    fn a_step_behind_another_runs_at_its_end_and_answers_whether_it_parks_or_not() {
        for parks in [false, true] {
            let waiter = TestPark::default();
            let cx = Cx { uid: 1, gid: 2, pid: 3, umask: 0, park: &waiter };
            let step = TestStep { parks, ..TestStep::default() };
            let (theirs, mut done) = (step.clone(), None);
            let now = behind(&cx, |end| done = Some(end), move |cx| theirs.run(cx, Ok(7_u64)));
            assert!(matches!(now, Err(Stop::Parked)));
            assert_eq!((*waiter.parked.lock(), *step.asked.lock()), (1, 0), "it has not begun");
            done.expect("it was begun")();
            assert_eq!((*waiter.parked.lock(), *step.asked.lock()), (1, 1));
            if parks {
                assert!(waiter.answers.lock().is_empty(), "the step has not ended");
                step.complete(Ok(Reply::Count(7)));
            }
            assert!(matches!(waiter.answers.lock()[..], [Ok(Reply::Count(7))]));
        }
    }

    const EIO: Errno = Errno(libc::EIO);

    /// The answer to a write of 7 bytes and its fsync, and how often the fsync ran. `parks` says
    /// which of the two parks.
    fn ask(
        parks: [bool; 2],
        written: Result<u64, Errno>,
        durable: Result<(), Errno>,
    ) -> (Result<u64, Errno>, u32) {
        let [write, fsync] = parks.map(|parks| TestStep { parks, ..TestStep::default() });
        let waiter = TestPark::default();
        let cx = Cx { uid: 1, gid: 2, pid: 3, umask: 0, park: &waiter };
        let theirs = fsync.clone();
        let now = chain(&cx, |cx| write.run(cx, written), move |cx| theirs.run(cx, durable));
        let parked = (parks[0] || (parks[1] && written.is_ok())) as u32;
        assert_eq!(*waiter.parked.lock(), parked, "once, or not at all");
        if parks[0] {
            assert_eq!(*fsync.asked.lock(), 0, "nothing is written yet");
            write.complete(written.map(Reply::Count));
        }
        if parks[1] && written.is_ok() {
            assert!(waiter.answers.lock().is_empty(), "it is not durable yet");
            fsync.complete(durable.map(Reply::from));
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
    fn a_synchronous_write_is_answered_after_its_fsync_whichever_of_them_parks() {
        for parks in [[false, false], [false, true], [true, false], [true, true]] {
            assert_eq!(ask(parks, Ok(7), Ok(())), (Ok(7), 1), "{parks:?}");
            assert_eq!(ask(parks, Ok(7), Err(EIO)), (Err(EIO), 1), "{parks:?}");
            assert_eq!(ask(parks, Err(EIO), Ok(())), (Err(EIO), 0), "{parks:?}");
        }
    }
}
