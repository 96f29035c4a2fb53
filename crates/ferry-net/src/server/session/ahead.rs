//! What waiting changes will need of the volume, so that it is read before their turn comes.

use ferry_fs::{Ino, Needed, SetAttr};

use super::state::{Session, State, Worker};
use crate::message::{Claim, OFFSET_MAX, Op, Use};
use crate::server::capability;

/// Of the changes that wait, so many are read for.
const REACH: usize = 64;
/// Inodes of a claim that waits, at most. When its turn comes, all are read at the same time.
const CLAIMED_MAX: usize = 32;

impl Session {
    /// What a change needs that has just arrived, if its turn comes soon, and not now.
    pub(in crate::server) fn needed_by(&self, op: &Op, key: &[u8; 16]) -> Vec<Needed> {
        let state = self.state.lock();
        let waits = state.worker != Worker::Idle && state.queue.len() < REACH;
        if waits { self.needed(&state, op, key) } else { Vec::new() }
    }

    /// What the change needs whose turn comes soon, since another one has left the queue.
    pub(in crate::server) fn needed_soon(&self, key: &[u8; 16]) -> Vec<Needed> {
        let state = self.state.lock();
        state
            .queue
            .get(REACH - 1)
            .map_or_else(Vec::new, |change| self.needed(&state, &change.op, key))
    }

    /// What the next changes need, now that the session knows more inodes.
    pub(in crate::server) fn needed_with_new_inodes(&self, key: &[u8; 16]) -> Vec<Needed> {
        let state = self.state.lock();
        state
            .queue
            .iter()
            .take(REACH)
            .flat_map(|change| self.needed(&state, &change.op, key))
            .collect()
    }

    fn needed(&self, state: &State, op: &Op, key: &[u8; 16]) -> Vec<Needed> {
        let info = op.info();
        let ino = |ino: Ino| self.known_in(state, ino);
        // A client that replays opens a file right before it writes.
        let opening = |fh: u64| {
            state.queue.iter().take(REACH).find_map(|change| match change.op {
                Op::Open { ino: opened, fh: number, .. } if number == fh => ino(opened),
                _ => None,
            })
        };
        let file = |fh: u64| state.handles.get(&fh).map(|open| open.ino).or_else(|| opening(fh));
        let inodes =
            info.inodes_with(Use::Opened).filter_map(ino).chain(info.handles().filter_map(file));
        let names =
            info.names().filter_map(|(dir, name)| Some(Needed::Name(ino(dir)?, name.to_vec())));
        let bytes = |offset: u64, len: usize| {
            let end = offset.checked_add(len as u64).filter(|end| *end <= OFFSET_MAX)?;
            Some(offset..end)
        };
        let overwritten = match op {
            Op::Write { fh, offset, data, append: false, .. } => {
                file(*fh).zip(bytes(*offset, data.len()))
            }
            Op::Setattr { ino: cut, set: SetAttr { size: Some(size), .. }, .. } => {
                ino(*cut).zip(bytes(*size, 0))
            }
            _ => None,
        };
        let overwritten = overwritten.map(|(ino, bytes)| Needed::Overwritten(ino, bytes));
        let claims = match op {
            Op::Claim { inodes } => &inodes.0[..inodes.0.len().min(CLAIMED_MAX)],
            _ => &[],
        };
        let is_proven = |claim: &&Claim| capability::found_in(key, &self.path, claim).is_some();
        let inodes = inodes.chain(claims.iter().filter(is_proven).map(|claim| claim.ino));
        inodes.map(Needed::Inode).chain(names).chain(overwritten).collect()
    }
}
