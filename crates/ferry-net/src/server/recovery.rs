//! After a start: the server waits for the clients of the previous server, and gives up those that
//! do not come or make no progress.

use crate::rt::collections::HashSet;
use std::time::Duration;

use tokio::sync::oneshot;

use super::core::Core;

/// A client that replays is given up after so many hold times without progress.
const STALL_HOLDS: u32 = 2;
/// How often the server looks for sessions whose client is away.
pub(super) const EXPIRY_INTERVAL: Duration = Duration::from_secs(1);

impl Core {
    /// Sessions that held locks at the previous server and have not come lose them.
    pub(super) fn end_grace(&self) {
        let here: HashSet<u128> = self
            .all()
            .iter()
            .filter(|session| session.is_lock_holder())
            .map(|session| session.id)
            .collect();
        let mut absent = self.locks.former();
        absent.retain(|id| !here.contains(id));
        if !absent.is_empty()
            && let Err(error) = self.fs.remove_lock_holders(&absent)
        {
            tracing::error!(%error, "clients that have lost their locks may take them for theirs at the next server");
        }
        self.locks.end_grace();
    }

    /// The hold time is over: clients that have not come cannot replay.
    pub(super) fn give_up_absent(&self) {
        let absent = self.barrier.give_up_absent();
        if absent.is_empty() {
            return;
        }
        for _ in &absent {
            tracing::warn!(
                "a client has not come back in time: what it had acknowledged and was not durable is lost"
            );
        }
        // Before others may change anything (DURABLE-4).
        self.fs.revoke_sessions(&absent);
        absent.into_iter().for_each(|id| self.barrier.release(id));
    }

    /// Gives up the sessions that have not come in a hold time since `began`, and those that have
    /// come and make no progress.
    pub(super) fn give_up_overdue(&self, began: Duration, hold: Duration) {
        let now = self.env.clock.monotonic();
        if now.saturating_sub(began) >= hold {
            self.give_up_absent();
        }
        let most = hold * STALL_HOLDS;
        for id in self.barrier.awaited() {
            let session = self.sessions.lock().get(&id).cloned();
            if let Some(session) = session.filter(|session| session.is_stalled(now, most)) {
                tracing::warn!(client = session.name, "does not go on with its replay");
                session.give_up_replay(&*self.fs);
                self.leases.end_fenced_epoch(session.number);
                self.barrier.release(id);
            }
        }
    }

    /// Waits until the barrier is open. Returns whether the server still goes on then.
    pub(super) async fn all_settled(&self) -> bool {
        let (told, open) = oneshot::channel();
        self.barrier.wait(Box::new(move || {
            let _closed = told.send(());
        }));
        open.await.is_ok()
    }

    /// Waits until no client has claimed an inode for so long.
    pub(super) async fn all_claimed(&self, quiet: Duration) {
        let claims = || {
            let since = self.env.clock.monotonic().saturating_sub(quiet);
            self.all().iter().any(|session| session.has_claimed(since))
        };
        while claims() {
            crate::rt::time::sleep(EXPIRY_INTERVAL).await;
        }
    }
}
