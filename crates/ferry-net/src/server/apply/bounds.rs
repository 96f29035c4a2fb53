//! Whether an operation stays within what its session's client mounts: EXPORT-3 and EXPORT-4.

use std::sync::atomic::Ordering;

use ferry_fs::{Errno, Ino};

use super::applying::Applying;
use crate::message::{Op, Use};
use crate::server::core::Core;
use crate::server::session::Session;
use crate::server::walls::{Place, Walls};

const READ_ONLY: Errno = Errno(libc::EROFS);

impl Core {
    /// A name was moved from one directory to another: what was inside may be outside.
    pub(super) fn moved(&self) {
        self.moves.fetch_add(1, Ordering::SeqCst);
    }

    fn place(&self, session: &Session, walls: &Walls, ino: Ino) -> Result<Place, Errno> {
        walls.place(&*self.fs, ino, self.moves.load(Ordering::SeqCst)).or_else(|errno| {
            // EXPORT-3: an open file is used as it was opened.
            match session.handle_of(ino) {
                Some(_) => Ok(Place::Changeable),
                None => Err(errno),
            }
        })
    }

    /// Whether an inode, by the volume's number, is inside the session's walls.
    pub(in crate::server) fn is_inside(&self, session: &Session, ino: Ino) -> bool {
        session.walls.as_ref().is_none_or(|walls| self.place(session, walls, ino).is_ok())
    }

    /// Whether the session's client may change it there, in every way: it may not move what is on
    /// the way to a read-only export.
    pub(in crate::server) fn is_changeable(&self, session: &Session, ino: Ino) -> bool {
        session.walls.as_ref().is_none_or(|walls| {
            !walls.pinned.contains(&ino) && self.place(session, walls, ino) == Ok(Place::Changeable)
        })
    }
}

impl Applying<'_> {
    /// Whether an operation stays within the walls: EXPORT-3 and EXPORT-4.
    pub(super) fn stay_inside(&self, op: &Op) -> Result<(), Errno> {
        let Some(walls) = &self.session.walls else { return Ok(()) };
        let place = |ino: Ino| self.core.place(self.session, walls, self.ino(ino)?);
        let changeable = |ino: Ino| match place(ino)? {
            Place::Changeable => Ok(()),
            Place::ReadOnly => Err(READ_ONLY),
        };
        let keeps_place = |dir: Ino, name: &[u8]| {
            let moves = |ino: Ino| walls.pinned.contains(&ino);
            let meant = || self.core.named(self.session.inward(dir)?, name);
            let pinned = !walls.pinned.is_empty() && meant().is_some_and(|attr| moves(attr.ino));
            if pinned { Err(Errno(libc::EBUSY)) } else { Ok(()) }
        };
        let info = op.info();
        if let Op::Link { ino, parent, .. } = op {
            changeable(*parent)?;
            return if place(*ino)? == Place::ReadOnly { Err(Errno(libc::EXDEV)) } else { Ok(()) };
        }
        if info.needs_writable {
            info.inodes().try_for_each(changeable)?;
        } else {
            info.inodes_with(Use::Opened).try_for_each(|ino| place(ino).map(drop))?;
        }
        let mut taken = info.names().filter(|_| info.naming.takes_names());
        taken.try_for_each(|(dir, name)| keeps_place(dir, name))
    }
}
