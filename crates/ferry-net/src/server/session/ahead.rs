//! What waiting changes will need of the volume, so that it is read before their turn comes.

use ferry_fs::{Ino, Needed};

use super::state::{Session, State, Worker};
use crate::message::{Op, Use};

/// Of the changes that wait, so many are read for.
const REACH: usize = 32;

impl Session {
    /// What a change needs that has just arrived, if its turn comes soon, and not now.
    pub(in crate::server) fn needed_by(&self, op: &Op) -> Vec<Needed> {
        let state = self.state.lock();
        let waits = state.worker != Worker::Idle && state.queue.len() < REACH;
        if waits { self.needed(&state, op) } else { Vec::new() }
    }

    /// What the change needs whose turn comes soon, since another one has left the queue.
    pub(in crate::server) fn needed_soon(&self) -> Vec<Needed> {
        let state = self.state.lock();
        state.queue.get(REACH - 1).map_or_else(Vec::new, |change| self.needed(&state, &change.op))
    }

    fn needed(&self, state: &State, op: &Op) -> Vec<Needed> {
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
        let written = match op {
            Op::Write { fh, offset, data, append: false, .. } => file(*fh).map(|ino| {
                Needed::Overwritten(ino, *offset..offset.saturating_add(data.len() as u64))
            }),
            _ => None,
        };
        inodes.map(Needed::Inode).chain(names).chain(written).collect()
    }
}
