//! A change that finds no space: it is made again as long as some is on its way back.
//!
//! What programs have removed takes space until their kernel has closed and forgotten it, and the
//! server has heard of that; what other clients have reserved, until they give it back. So who
//! meets a full volume tells the server what this kernel has forgotten, gives back what it has
//! reserved itself, and asks how much is free then. The server counts as free whatever comes back
//! without any program's doing, and has the other clients asked for what they do not need: as long
//! as the change would fit into that it is tried again.

use std::sync::{Arc, Weak};
use std::time::Duration;

use crate::rt::Mutex;
use ferry_fs::{Errno, write_cost};

use super::RemoteFs;
use super::link::{Pending, Waiter};
use crate::message::{Op, Outcome};

/// A change is tried so often. The first time at once, then after this time, after twice that, and
/// so on: three seconds in all.
const TRIES_MAX: u32 = 9;
const RETRY_FIRST: Duration = Duration::from_millis(25);
/// If nothing is free, it is asked once more: the kernel may have been closing a file just then.
const ASKED_MIN: u32 = 2;
/// What the kernel forgets is told at once for so long.
const HURRY_TIME: Duration = Duration::from_secs(1);

impl RemoteFs {
    /// The server has found no space for a change that somebody waits for.
    pub(super) fn find_space(&self, mut change: Pending) {
        change.refusals += 1;
        self.hurry();
        self.link.spare_all();
        let waiter = Asking { fs: self.this.clone(), change: Mutex::new(Some(change)) };
        self.link.request(Pending::new(Default::default(), Op::Statfs {}, Arc::new(waiter)));
    }

    /// Space is lacking, here or elsewhere.
    pub(super) fn hurry(&self) {
        *self.hurries.lock() = Some(self.cache.now());
        self.tell_forgotten();
    }

    /// Whether that was so a moment ago.
    pub(super) fn hurries(&self) -> bool {
        self.hurries.lock().is_some_and(|since| self.cache.now().since(since) < HURRY_TIME)
    }

    /// Tries a change again, after a while.
    fn try_again(&self, change: Pending) {
        let later = RETRY_FIRST * (1 << change.refusals >> 2);
        let this = self.this.clone();
        let again = move || {
            let Some(fs) = this.upgrade() else { return change.waiter.fail(Errno(libc::ENOTCONN)) };
            let waiter = Arc::clone(&change.waiter);
            if let Some(key) = fs.link.change(change) {
                waiter.moved(key);
            }
        };
        let runtime = self.runtime.lock();
        match &*runtime {
            Some(runtime) if later >= RETRY_FIRST => {
                runtime.spawn(async move {
                    crate::rt::time::sleep(later).await;
                    again();
                });
            }
            _ => {
                drop(runtime);
                again();
            }
        }
    }
}

/// Bytes that must be free for a change, roughly.
fn needs(op: &Op) -> u64 {
    match op {
        Op::Write { data, .. } => write_cost(data.len()),
        Op::Fallocate { len, .. } | Op::Copy { len, .. } => *len,
        _ => write_cost(0),
    }
}

/// A change for which space is looked for.
struct Asking {
    fs: Weak<RemoteFs>,
    change: Mutex<Option<Pending>>,
}

impl Waiter for Asking {
    fn answer(&self, outcome: Outcome, _leased: u8) {
        let Some(change) = self.change.lock().take() else { return };
        let has_room = match outcome {
            Outcome::Totals { totals } => {
                totals.blocks_available * u64::from(totals.block_size) >= needs(&change.op)
            }
            _ => false,
        };
        let again = change.refusals < if has_room { TRIES_MAX } else { ASKED_MIN };
        match self.fs.upgrade() {
            Some(fs) if again => fs.try_again(change),
            _ => change.waiter.answer(Outcome::Failed { errno: libc::ENOSPC }, 0),
        }
    }

    fn fail(&self, errno: Errno) {
        if let Some(change) = self.change.lock().take() {
            change.waiter.fail(errno);
        }
    }
}
