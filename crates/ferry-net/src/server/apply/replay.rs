//! A change that a client replays, because the server that had applied it has crashed.

use ferry_fs::Errno;

use super::applying::{Applying, Done};
use crate::message::{Naming, Op, Outcome};
use crate::server::session::Applied;

impl Applying<'_> {
    /// Makes a change again that was promised to a server that crashed: nobody else changes
    /// anything meanwhile, or sees it.
    pub(in crate::server) fn redo(&self, op: Op) -> Applied {
        let mut op = op;
        // Whoever may not promise makes again what the server has decided, and may no more than
        // then.
        let permitted = self.core.applying(self.session, self.who, None).permit(&mut op);
        let makes = op.info().makes.is_inode();
        let made = match self.promise.and_then(|promise| promise.ino) {
            _ if let Err(errno) = permitted => Err(errno),
            _ if self.session.read_only => Err(Errno(libc::EROFS)),
            Some(ino) if !makes || !self.session.provisions.is_old(ino) => Err(Errno(libc::EINVAL)),
            None if makes => Err(Errno(libc::EINVAL)),
            _ => self.stay_inside(&op).and_then(|()| self.make_again(op)),
        };
        let outcome = made.unwrap_or_else(|Errno(errno)| Outcome::Failed { errno });
        Applied::alone(outcome)
    }

    /// What is there already, for no mark says so of changes that came before the session had one,
    /// is made.
    fn make_again(&self, op: Op) -> Done {
        let info = op.info();
        let ino = match &op {
            Op::Link { ino, .. } => self.ino(*ino).ok(),
            _ => self.promise.and_then(|promise| promise.ino),
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
                        if self.session.inward(known.attr.ino) == ino =>
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
