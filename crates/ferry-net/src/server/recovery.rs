//! After a start: the server waits for clients of the one before, and gives up those that do not
//! come, or do not go on.

use crate::rt::collections::HashSet;
use std::time::Duration;

use tokio::sync::oneshot;

use super::core::Core;

/// Who makes something again after a crash is given up after so many holds without anything that it
/// does.
const STALL_HOLDS: u32 = 2;
/// How often sessions are looked at whose client has gone.
pub(super) const EXPIRY_INTERVAL: Duration = Duration::from_secs(1);

impl Core {
    /// Whoever has held a lock at the server before and has not come loses it.
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

    /// The hold is over: clients that have not come by now can make nothing again.
    pub(super) fn give_up_absent(&self) {
        for id in self.barrier.give_up_absent() {
            tracing::warn!(
                "a client has not come back in time: what it had promised and was not durable is lost"
            );
            self.fs.remove_session(id);
        }
    }

    /// Who has not come in a hold since `began` is not waited for any longer, nor who has come and
    /// then done nothing of what is waited for.
    pub(super) fn give_up_late(&self, began: Duration, hold: Duration) {
        let now = self.env.clock.monotonic();
        if now.saturating_sub(began) >= hold {
            self.give_up_absent();
        }
        let most = hold * STALL_HOLDS;
        for id in self.barrier.awaited() {
            let session = self.sessions.lock().get(&id).cloned();
            if let Some(session) = session.filter(|session| session.is_stalled(now, most)) {
                tracing::warn!(
                    client = session.name,
                    "does not go on making again what it had promised"
                );
                self.fence(&session);
                session.give_up_replay();
                self.barrier.release(id);
            }
        }
    }

    /// Until all is made again after a crash, or given up; whether the server still goes on then.
    pub(super) async fn made_again(&self) -> bool {
        let (told, open) = oneshot::channel();
        self.barrier.wait(Box::new(move || {
            let _gone = told.send(());
        }));
        open.await.is_ok()
    }

    /// Until nobody has claimed anything for so long.
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
