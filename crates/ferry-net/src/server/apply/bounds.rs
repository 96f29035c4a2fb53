//! Whether an operation stays within what its session's client mounts: EXPORT-3 and EXPORT-4.

use std::sync::atomic::Ordering;

use ferry_fs::{Errno, Ino};

use super::applying::Applying;
use crate::message::{Op, Use};
use crate::server::core::Core;
use crate::server::exports::{Bounds, Location};
use crate::server::session::Session;

const READ_ONLY: Errno = Errno(libc::EROFS);

impl Core {
    /// A name was moved from one directory to another: what was inside may be outside.
    pub(super) fn moved(&self) {
        self.moves.fetch_add(1, Ordering::SeqCst);
    }

    fn locate(&self, session: &Session, bounds: &Bounds, ino: Ino) -> Result<Location, Errno> {
        bounds.locate(&*self.fs, ino, self.moves.load(Ordering::SeqCst)).or_else(|errno| {
            // EXPORT-3: an open file is used as it was opened.
            match session.handle_of(ino) {
                Some(_) => Ok(Location::Changeable),
                None => Err(errno),
            }
        })
    }

    /// Whether an inode, by the volume's number, is within the session's bounds.
    pub(in crate::server) fn is_inside(&self, session: &Session, ino: Ino) -> bool {
        session.bounds.as_ref().is_none_or(|bounds| self.locate(session, bounds, ino).is_ok())
    }

    /// Whether the session's client may change it in every way: it may not move what is on the way
    /// to a read-only export.
    pub(in crate::server) fn is_changeable(&self, session: &Session, ino: Ino) -> bool {
        session.bounds.as_ref().is_none_or(|bounds| {
            !bounds.pinned.contains(&ino)
                && self.locate(session, bounds, ino) == Ok(Location::Changeable)
        })
    }
}

impl Applying<'_> {
    /// Whether an operation stays within the bounds: EXPORT-3 and EXPORT-4.
    pub(super) fn stay_inside(&self, op: &Op) -> Result<(), Errno> {
        let Some(bounds) = &self.session.bounds else { return Ok(()) };
        let location = |ino: Ino| self.core.locate(self.session, bounds, self.ino(ino)?);
        let changeable = |ino: Ino| match location(ino)? {
            Location::Changeable => Ok(()),
            Location::ReadOnly => Err(READ_ONLY),
        };
        let not_pinned = |dir: Ino, name: &[u8]| {
            let moves = |ino: Ino| bounds.pinned.contains(&ino);
            let meant = || self.core.named(self.session.volume_ino(dir)?, name);
            let pinned = !bounds.pinned.is_empty() && meant().is_some_and(|attr| moves(attr.ino));
            if pinned { Err(Errno(libc::EBUSY)) } else { Ok(()) }
        };
        let info = op.info();
        if let Op::Link { ino, parent, .. } = op {
            changeable(*parent)?;
            return if location(*ino)? == Location::ReadOnly {
                Err(Errno(libc::EXDEV))
            } else {
                Ok(())
            };
        }
        if info.needs_writable {
            info.inodes().try_for_each(changeable)?;
        } else {
            info.inodes_with(Use::Opened).try_for_each(|ino| location(ino).map(drop))?;
        }
        let mut taken = info.names().filter(|_| info.naming.takes_names());
        taken.try_for_each(|(dir, name)| not_pinned(dir, name))
    }
}
