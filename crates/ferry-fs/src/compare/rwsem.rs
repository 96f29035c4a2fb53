//! The lock that XFS puts around each read and write of a file, for `Locking::Inode` alone: what
//! readers starve of is not that a writer excludes them, but how Linux's read-write semaphore picks
//! who is next, and a fair lock in its place would not show it.
//!
//! As in `kernel/locking/rwsem.c` (6.18): a writer that runs takes the lock past all that wait.
//! Readers that wait get it, all at once, when no writer runs to take it as it is given up; and no
//! reader joins others past a writer that waits. A thread that has waited for 4 ms
//! (`RWSEM_WAIT_TIMEOUT`) is the next, with all other readers if it is one.

use crate::sync::{AtomicBool, Condvar, LOOKS, Mutex, Ordering, lock, pause, wait_at_most};
use std::time::Duration;

/// A thread that has waited for so long is the next.
const PATIENCE: Duration = Duration::from_millis(4);

/// The thread that has lost patience: no other is let in before.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
enum Next {
    #[default]
    Anybody,
    Readers,
    Writer,
}

#[derive(Default)]
struct State {
    /// The holder: a writer,
    writer: bool,
    /// or so many readers.
    readers: u32,
    /// Readers that wait, and how often all that waited were let in.
    waiting: u32,
    rounds: u64,
    next: Next,
    /// Writers that look, and those that sleep.
    looking: u32,
    sleeping: u32,
}

/// It.
#[derive(Default)]
pub struct Rwsem {
    state: Mutex<State>,
    /// A writer has it; read by the threads that look.
    written: AtomicBool,
    let_in: Condvar,
    free: Condvar,
}

/// It is held by a reader.
pub struct Reading<'l>(&'l Rwsem);
/// It is held by a writer.
pub struct Writing<'l>(&'l Rwsem);

impl Rwsem {
    /// Takes it with other readers.
    pub fn read(&self) -> Reading<'_> {
        let mut state = lock(&self.state);
        let joins = state.readers == 0 || state.sleeping == 0;
        if !state.writer && state.next == Next::Anybody && joins {
            state.readers += 1;
            return Reading(self);
        }
        state.waiting += 1;
        let round = state.rounds;
        while state.rounds == round {
            let timed_out;
            (state, timed_out) = wait_at_most(&self.let_in, state, PATIENCE);
            if timed_out && state.rounds == round && state.next == Next::Anybody {
                state.next = Next::Readers;
                if !state.writer {
                    self.let_readers_in(&mut state);
                }
            }
        }
        Reading(self)
    }

    /// Takes it alone.
    pub fn write(&self) -> Writing<'_> {
        let mut state = lock(&self.state);
        let (mut looks, mut next) = (0, false);
        while state.writer || state.readers > 0 || (state.next != Next::Anybody && !next) {
            if state.writer && state.next == Next::Anybody && looks < LOOKS {
                state.looking += 1;
                drop(state);
                while self.written.load(Ordering::Relaxed) && looks < LOOKS {
                    looks += 1;
                    pause();
                }
                looks += 1;
                state = lock(&self.state);
                state.looking -= 1;
            } else {
                let timed_out;
                state.sleeping += 1;
                (state, timed_out) = wait_at_most(&self.free, state, PATIENCE);
                state.sleeping -= 1;
                looks = 0;
                if timed_out && state.next == Next::Anybody {
                    (state.next, next) = (Next::Writer, true);
                }
            }
        }
        if next {
            state.next = Next::Anybody;
        }
        state.writer = true;
        self.written.store(true, Ordering::Relaxed);
        Writing(self)
    }

    /// The lock was given up, and nobody has it.
    fn pass_on(&self, state: &mut State) {
        match state.next {
            Next::Writer => {
                self.free.notify_all();
            }
            Next::Readers => self.let_readers_in(state),
            Next::Anybody if state.looking > 0 => {}
            Next::Anybody if state.waiting > 0 => self.let_readers_in(state),
            Next::Anybody => {
                self.free.notify_one();
            }
        }
    }

    fn let_readers_in(&self, state: &mut State) {
        state.readers += std::mem::take(&mut state.waiting);
        state.rounds += 1;
        state.next = Next::Anybody;
        self.let_in.notify_all();
    }
}

impl Drop for Writing<'_> {
    fn drop(&mut self) {
        let mut state = lock(&self.0.state);
        state.writer = false;
        self.0.written.store(false, Ordering::Relaxed);
        self.0.pass_on(&mut state);
    }
}

impl Drop for Reading<'_> {
    fn drop(&mut self) {
        let mut state = lock(&self.0.state);
        state.readers -= 1;
        if state.readers == 0 {
            self.0.pass_on(&mut state);
        }
    }
}
