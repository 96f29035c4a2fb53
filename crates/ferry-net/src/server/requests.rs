//! Requests that wait for leases, without a thread: those that must see what another client has
//! acknowledged early, and those that ask for write leases.

use std::sync::Arc;

use ferry_fs::{Errno, Ino};

use super::apply::{Applying, Asked, Respond};
use super::core::Core;
use super::leases::{Progress, Wants};
use super::panics::answered;
use super::session::Session;
use crate::codec::List;
use crate::message::{BATCH_MAX, Caller, Held, Op, Outcome};

/// A request of a client.
pub(super) struct Request {
    pub(super) session: Arc<Session>,
    /// The connection that brought it, and its number there.
    pub(super) id: (u64, u64),
    pub(super) caller: Caller,
    pub(super) op: Op,
    pub(super) respond: Respond,
}

impl Request {
    pub(super) fn applying<'a>(&'a self, core: &'a Arc<Core>) -> Applying<'a> {
        core.applying(&self.session, self.caller, None)
    }
}

impl Core {
    /// Answers a request, now or when what it waits for has come.
    pub(super) fn answer(self: &Arc<Self>, request: Request) {
        // The client asks the next server again.
        if self.panics.is_ending() {
            return;
        }
        if self.barrier.is_closed() && request.op.info().shows {
            let core = Arc::clone(self);
            let runtime = self.runtime.clone();
            let again =
                move || drop(runtime.spawn_blocking(move || answered(|| core.answer(request))));
            return self.barrier.wait(Box::new(again));
        }
        if let Op::Lease { .. } = request.op {
            let core = Arc::clone(self);
            self.runtime.spawn(async move { core.lease(request).await });
        } else if let Op::Walk { .. } = request.op {
            let core = Arc::clone(self);
            self.runtime.spawn(async move { core.walk(request).await });
        } else if let Some((request, inos)) = self.try_answer(request) {
            let core = Arc::clone(self);
            self.runtime.spawn(async move { core.answer_later(request, inos).await });
        }
    }

    /// Answers a request, or returns it with the inodes on which others have write leases.
    fn try_answer(self: &Arc<Self>, request: Request) -> Option<(Request, Vec<Ino>)> {
        let Request { session, id, caller, op, respond } = request;
        let applying = self.applying(&session, caller, None);
        match applying.request(id, op, respond) {
            Asked::Answered => None,
            Asked::Behind(inos, op, respond) => {
                Some((Request { session, id, caller, op: *op, respond }, inos))
            }
        }
    }

    async fn answer_later(self: Arc<Self>, request: Request, inos: Vec<Ino>) {
        let (mut request, mut inos) = (request, inos);
        loop {
            let position = self.leases.ask(request.session.number, Wants::Read, inos.clone());
            let _begun = position.wait(|recalls| self.recall(recalls)).await;
            let core = Arc::clone(&self);
            let answered = crate::rt::task::spawn_blocking(move || {
                let again = answered(|| core.try_answer(request));
                drop(position);
                again
            });
            match answered.await {
                Ok(Some((again, behind))) => {
                    request = again;
                    // At first the request waits for the missing inodes alone: a client that reads
                    // a directory may keep the holder from what the holder would return first. If
                    // it lacked another inode each time, it would never have all at once.
                    inos.extend(behind);
                    inos.sort_unstable();
                    inos.dedup();
                }
                _ => return,
            }
        }
    }

    /// What a request for leases waits for, and on which of that its session gets no lease. A
    /// change by an open file may be `Busy` for an inode that its session does not know any more.
    fn lease_inodes(&self, session: &Session, inodes: &[Ino]) -> (Vec<Ino>, Vec<Ino>) {
        let may = session.may_acknowledge_early();
        let (mut inos, mut without) = (Vec::new(), Vec::new());
        let mut unknown = Vec::new();
        for ino in inodes {
            let Some(known) = session.volume_ino(*ino) else {
                unknown.push(*ino);
                continue;
            };
            inos.push(known);
            if !may || !self.is_changeable(session, known) {
                without.push(known);
            }
        }
        let open = session.open_among(unknown);
        inos.extend(&open);
        without.extend(open);
        inos.sort_unstable();
        inos.dedup();
        (inos, without)
    }

    /// Grants the write leases that a client asks for, as far as possible.
    async fn lease(self: Arc<Self>, request: Request) {
        let Op::Lease { inodes } = &request.op else { return };
        if inodes.0.len() > BATCH_MAX {
            return (request.respond)(Outcome::Failed { errno: libc::EINVAL }, 0);
        }
        let session = Arc::clone(&request.session);
        let (inos, without) = self.lease_inodes(&session, &inodes.0);
        let granted = if inos.is_empty() || session.is_over() {
            Vec::new()
        } else {
            let position = self.leases.ask_for_leases(session.number, inos, without);
            match position.wait(|recalls| self.recall(recalls)).await {
                Progress::Begun(granted) if self.is_safe(&session, &granted).await => granted,
                Progress::Begun(unsafe_still) => {
                    self.recall(&self.leases.grant_not_sent(session.number, &unsafe_still));
                    Vec::new()
                }
                _ => Vec::new(),
            }
        };
        let (core, all, number) = (Arc::clone(&self), granted.clone(), session.number);
        let answered = crate::rt::task::spawn_blocking(move || {
            let applying = request.applying(&core);
            // A removed inode needs no lease, and neither does a session that has ended.
            let over = request.session.is_over();
            let (held, removed): (Vec<_>, Vec<_>) = granted
                .iter()
                .map(|ino| (*ino, held(&applying, *ino)))
                .partition(|(_, held)| held.is_ok() && !over);
            let held = held.into_iter().filter_map(|(_, held)| held.ok()).collect();
            (request.respond)(Outcome::Leases { held: List(held) }, 0);
            core.leases.grant_sent(session.number, &granted);
            let removed: Vec<Ino> = removed.into_iter().map(|(ino, _)| ino).collect();
            core.leases.give_back(session.number, &removed, None);
        });
        if answered.await.is_err() {
            // It has panicked. A lease that no client was told of is not recalled, and others would
            // wait for it.
            self.recall(&self.leases.grant_not_sent(number, &all));
        }
    }
}

fn held(applying: &Applying<'_>, ino: Ino) -> Result<Held, Errno> {
    let attr = applying.attr_now(ino)?;
    Ok(Held { attr, plain: applying.fs().is_plain(ino)? })
}
