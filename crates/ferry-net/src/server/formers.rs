//! How far sessions had come that ended because their clients were away for too long.
//!
//! A client that comes back takes what the last connection may have lost from here: it learns which
//! of its changes were applied, and nothing is reported as lost that is there. The server remembers
//! that as long as it runs: the volume has no record of a session that has ended.

use crate::rt::collections::VecDeque;

use super::session::Session;
use crate::limits::Peer;
use crate::message::Former;

/// The sessions that are remembered.
const FORMERS_MAX: usize = 4096;
/// Their answers.
const ANSWERS_MAX: usize = 1 << 16;

/// The oldest first.
#[derive(Default)]
pub(super) struct Formers {
    all: VecDeque<Ended>,
    answers: usize,
}

struct Ended {
    id: u128,
    peer: Peer,
    path: Vec<u8>,
    former: Former,
}

impl Formers {
    /// A session has ended.
    pub(super) fn add(&mut self, session: &Session, former: Former) {
        self.answers += former.answers.0.len();
        let (id, peer, path) = (session.id, session.peer.clone(), session.path.clone());
        self.all.push_back(Ended { id, peer, path, former });
        while self.all.len() > FORMERS_MAX || self.answers > ANSWERS_MAX {
            let Some(Ended { former, .. }) = self.all.pop_front() else { break };
            self.answers -= former.answers.0.len();
        }
    }

    /// How far the session of this client had come. It stays: the client may not hear of it.
    pub(super) fn find(&self, id: u128, peer: &Peer, path: &[u8]) -> Option<Former> {
        let is_it = |ended: &&Ended| ended.id == id && ended.peer == *peer && ended.path == path;
        self.all.iter().find(is_it).map(|ended| ended.former.clone())
    }
}
