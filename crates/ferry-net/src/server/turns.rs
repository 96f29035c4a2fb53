//! The ordered stream of a session: one change after the other, each when its turn on what it touches has come.

use std::sync::Arc;

use ferry_fs::Ino;

use super::Core;
use super::apply::Applying;
use super::leases::{Recalls, Turn};
use super::session::{Change, Session};
use crate::message::BATCH_MAX;

impl Core {
    /// Applies a session's changes until there are none, or one has to wait for its turn: then it goes on when that has come.
    pub(super) fn apply_all(self: &Arc<Self>, session: &Arc<Session>) {
        while let Some(change) = session.next() {
            let inos = touched(self, session, &change);
            let turn = self.leases.turn_now(session.id, &inos);
            // A name may have come to mean another inode before the turn began.
            match turn.filter(|turn| turn.inos() == touched(self, session, &change)) {
                Some(turn) => self.apply(session, change, &turn),
                None => {
                    let (core, session) = (Arc::clone(self), Arc::clone(session));
                    self.runtime.spawn(async move { core.apply_later(session, change).await });
                    return;
                }
            }
        }
        if session.is_over() {
            session.clear(&*self.fs);
        }
    }

    fn apply(&self, session: &Session, change: Change, turn: &Turn) {
        // It may have waited, and its client may be evicted.
        if session.is_over() {
            return;
        }
        let applied = Applying { core: self, session, who: change.who }.change(change.op, turn.inos());
        session.applied(change.seq, applied, change.room);
    }

    /// Waits without a thread.
    async fn apply_later(self: Arc<Self>, session: Arc<Session>, change: Change) {
        let mut change = change;
        loop {
            let inos = {
                let (core, session) = (Arc::clone(&self), Arc::clone(&session));
                let looked = tokio::task::spawn_blocking(move || (touched(&core, &session, &change), change));
                let Ok((inos, same)) = looked.await else { return };
                change = same;
                inos
            };
            let turn = self.leases.turn(session.id, inos, |recalls| self.recall(&recalls)).await;
            let (core, session) = (Arc::clone(&self), Arc::clone(&session));
            let applied = tokio::task::spawn_blocking(move || {
                if turn.inos() != touched(&core, &session, &change) {
                    return Some(change);
                }
                core.apply(&session, change, &turn);
                drop(turn);
                core.apply_all(&session);
                None
            });
            match applied.await {
                Ok(Some(again)) => change = again,
                _ => return,
            }
        }
    }

    fn recall(&self, recalls: &Recalls) {
        for (id, inos) in recalls {
            let session = self.sessions.lock().get(id).cloned();
            for batch in inos.chunks(BATCH_MAX) {
                if let Some(session) = &session {
                    session.recall(batch.iter().copied());
                }
            }
        }
    }
}

fn touched(core: &Core, session: &Session, change: &Change) -> Vec<Ino> {
    Applying { core, session, who: change.who }.touched(&change.op)
}
