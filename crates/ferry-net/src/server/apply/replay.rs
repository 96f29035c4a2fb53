//! A change that a client replays, because the server that had applied it has crashed.

use ferry_fs::Errno;

use super::applying::{Applying, Done};
use crate::message::{Naming, Op, Outcome};
use crate::server::session::Applied;

impl Applying<'_> {
    /// Replays a change that a crashed server may have applied: meanwhile no other client changes
    /// or sees anything.
    pub(in crate::server) fn replay(&self, op: Op) -> Applied {
        let mut op = op;
        // A client that may not acknowledge early replays what the server had decided, and may do
        // no more than then.
        let permitted = self.core.applying(self.session, self.caller, None).permit(&mut op);
        let makes = op.info().makes.is_inode();
        let made = match self.early.and_then(|ack| ack.ino) {
            _ if let Err(errno) = permitted => Err(errno),
            _ if self.session.read_only => Err(Errno(libc::EROFS)),
            Some(ino) if !makes || !self.session.reservations.is_former(ino) => {
                Err(Errno(libc::EINVAL))
            }
            None if makes => Err(Errno(libc::EINVAL)),
            _ => self.stay_inside(&op).and_then(|()| self.make_replayed(op)),
        };
        let outcome = made.unwrap_or_else(|Errno(errno)| Outcome::Failed { errno });
        Applied::alone(outcome)
    }

    /// A change that is there already counts as applied: changes before the session was recorded
    /// left no number on the volume.
    fn make_replayed(&self, op: Op) -> Done {
        let info = op.info();
        let ino = match &op {
            Op::Link { ino, .. } => self.ino(*ino).ok(),
            _ => self.early.and_then(|ack| ack.ino),
        };
        let named = info.names().next().filter(|_| info.naming == Naming::Adds);
        let named = named.map(|(parent, name)| (parent, name.to_vec(), ino));
        let removes = matches!(info.naming, Naming::Removes | Naming::RemovesDirectory);
        match (self.make_any(op), named) {
            (Err(Errno(libc::EEXIST)), Some((parent, name, ino))) => {
                let parent = self.ino(parent)?;
                let found = self.call(|cx| self.fs().lookup(cx, parent, &name))?;
                let outcome = self.entry(parent, found);
                match &outcome {
                    Outcome::Entry { known: Some(known) }
                        if self.session.volume_ino(known.attr.ino) == ino =>
                    {
                        Ok(outcome)
                    }
                    _ => Err(Errno(libc::EEXIST)),
                }
            }
            (Err(Errno(libc::ENOENT)), _) if removes => Ok(Outcome::Done {}),
            (made, _) => made,
        }
    }
}
