//! What changes of a server's clients will need is read before their turn comes.
//!
//! A server makes the changes of a client one after the other. Where the volume is far away, each
//! that reads what nobody has in memory would hold up all behind it for the time of one request to
//! the store. So several read at the same time, ahead of their changes.

use crate::api::Ino;
use crate::error::FsError;
use crate::inode::dir_cache::Cached;
use crate::local::jobs::ReadAhead;
use crate::local::local_fs::LocalFs;
use crate::namespace::names::Found;
use crate::session_store::Needed;

/// Of all changes, so much may wait for being read. A client whose changes fail at once would fill
/// the memory otherwise.
const WAITING_MAX: usize = 1024;

impl LocalFs {
    pub(crate) fn do_read_ahead(&self, needed: Needed) {
        if self.data.is_far() && !self.has(&needed) {
            let read = move |fs: &Self| {
                // The change itself reads it again, and gets the error.
                if let Err(error) = fs.bring(&needed) {
                    tracing::debug!(?needed, %error, "a change cannot be read ahead");
                }
            };
            self.reads_ahead.push_if_fewer(ReadAhead(Box::new(read)), WAITING_MAX);
        }
    }

    /// Whether a change that needs this reads nothing.
    fn has(&self, needed: &Needed) -> bool {
        match needed {
            Needed::Inode(ino) => self.table.peek(*ino).is_some(),
            Needed::Name(dir, name) => self.table.peek(*dir).is_some_and(|dir| {
                match dir.dir.find(self.hash.base(name), name) {
                    Cached::Present(_, target) => self.table.peek(target.ino).is_some(),
                    Cached::Absent(_) => true,
                    Cached::Unknown => false,
                }
            }),
            Needed::Overwritten(ino, bytes) => {
                self.table.peek(*ino).is_some_and(|inode| !self.data.reads_for(&inode, bytes))
            }
        }
    }

    /// Reads it. Nothing is locked while the store is asked: who changes the directory meanwhile
    /// does not wait for that.
    fn bring(&self, needed: &Needed) -> Result<(), FsError> {
        match needed {
            Needed::Inode(ino) => self.table.get(*ino).map(drop),
            Needed::Name(dir, name) => self.bring_name(*dir, name),
            Needed::Overwritten(ino, bytes) => match self.table.get(*ino)? {
                Some(inode) => self.data.bring_for(&inode, bytes),
                None => Ok(()),
            },
        }
    }

    fn bring_name(&self, dir: Ino, name: &[u8]) -> Result<(), FsError> {
        let Some(dir) = self.table.get(dir)? else { return Ok(()) };
        match self.find_stored(dir.ino, self.hash.base(name), name)? {
            Found::Present(_, target) => self.table.get(target.ino).map(drop),
            Found::Absent(_) => Ok(()),
        }
    }
}
