//! A change with no other session in its way: checked, applied, and what its client may cache of
//! it.

use ferry_fs::{Attr, Errno, Ino};

use super::applying::{Applying, Done};
use crate::codec::List;
use crate::message::{Info, Made, Makes, Op, Outcome};
use crate::server::session::Applied;

impl Applying<'_> {
    /// Applies a change. No other session is in its way on `inos`, and it waits for none.
    pub(in crate::server) fn change(&self, op: Op, inos: &[Ino]) -> Applied {
        let mut op = op;
        let Info { needs_writable, makes, .. } = op.info();
        let writes = matches!(op, Op::Write { .. });
        if self.session.read_only && needs_writable {
            return Applied::failed(Errno(libc::EROFS));
        }
        let taken = self.names_taken(&op);
        let permitted = self
            .stay_inside(&op)
            .and_then(|()| self.permit(&mut op))
            .and_then(|()| self.check_early(&op));
        let outcome = match permitted.and_then(|()| self.make(op)) {
            Ok(outcome) => outcome,
            Err(errno) => return Applied::failed(errno),
        };
        self.names_lost(inos, &taken);
        let file = inos.first().filter(|_| writes && self.decided.is_some());
        let size = file.and_then(|ino| self.attr_now(*ino).ok()).map(|attr| attr.size);
        let made = match &outcome {
            Outcome::Entry { known: Some(known) } => self.session.volume_ino(known.attr.ino),
            _ => None,
        };
        let made = made.filter(|made| !inos.contains(made));
        let after: Vec<Attr> =
            inos.iter().copied().chain(made).filter_map(|ino| self.leased(ino)).collect();
        let empty = makes == Makes::Directory
            && made.is_some_and(|made| {
                after.iter().any(|attr| attr.ino == made) && self.is_empty(made)
            });
        let made = self.decided.map(|decided| {
            let touched = inos.iter().map(|ino| self.session.client_ino(*ino)).collect();
            Made { at: decided.at, size: size.unwrap_or(0), touched: List(touched) }
        });
        Applied { outcome, after, empty, made }
    }

    /// An early-acknowledged change makes an inode under a number that is reserved for the client,
    /// and the client has its lease before others can find it.
    fn check_early(&self, op: &Op) -> Result<(), Errno> {
        let Some(ack) = self.early else { return Ok(()) };
        let makes = op.info().makes.is_inode();
        match ack.ino {
            None if !makes => Ok(()),
            Some(ino) if makes && self.session.reservations.use_number(ino) => {
                if self.core.leases.grant_new(self.session.number, ino) {
                    Ok(())
                } else {
                    Err(Errno(libc::ENOSPC))
                }
            }
            _ => Err(Errno(libc::EINVAL)),
        }
    }

    fn make(&self, op: Op) -> Done {
        let made_as = self.early.and_then(|ack| ack.ino);
        let made = self.make_any(op);
        if let (Some(ino), Err(_)) = (made_as, &made) {
            self.core.leases.revoke_new(self.session.number, ino);
        }
        made
    }
}
