//! Finding names: a directory's entries, their cookies, and the answer to a lookup.

use crate::api::{Entry, Errno, Ino, NAME_MAX};
use crate::error::FsError;
use crate::inode::dir_cache::{Cached, DirName};
use crate::inode::incore::Inode;
use crate::inode::state::InodeState;
use crate::keys::{self, BadRecord, Dentry, Key};
use crate::local::local_fs::{LocalFs, VALID, errno};
use crate::patience;
use crate::posix::{self, is_dir};
use std::collections::BTreeMap;
use std::sync::Arc;

/// Cookies below this one are `.`, `..` and the start.
pub(crate) const FIRST_COOKIE: u64 = 256;
/// Names with equal hashes that one directory can hold.
const DISAMBIGUATORS: u64 = 256;

/// What a directory has under a name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Found {
    /// An entry and its cookie.
    Present(u64, Dentry),
    /// None; the cookie to make it with.
    Absent(Option<u64>),
}

impl Found {
    /// The entry, or `ENOENT`.
    pub(crate) fn present(self) -> Result<(u64, Dentry), FsError> {
        match self {
            Found::Present(cookie, target) => Ok((cookie, target)),
            Found::Absent(_) => Err(errno(libc::ENOENT)),
        }
    }

    /// The cookie for a new entry, or `EEXIST`; `ENOSPC` when there is none left.
    pub(crate) fn absent(self) -> Result<u64, FsError> {
        match self {
            Found::Present(..) => Err(errno(libc::EEXIST)),
            Found::Absent(cookie) => cookie.ok_or(errno(libc::ENOSPC)),
        }
    }
}

/// Refuses names that cannot be.
pub(crate) fn check_name(name: &[u8]) -> Result<(), FsError> {
    Ok(posix::check_name(name)?)
}

/// Refuses a directory that is none, or that was removed.
pub(crate) fn check_dir(state: &InodeState) -> Result<(), FsError> {
    if !is_dir(state.rec.mode) {
        return Err(errno(libc::ENOTDIR));
    }
    if state.rec.nlink == 0 { Err(errno(libc::ENOENT)) } else { Ok(()) }
}

impl LocalFs {
    /// Finds `name` in `dir`, whose lock the caller holds (`state` shows it).
    pub(crate) fn find(
        &self,
        dir: &Inode,
        state: &InodeState,
        name: &[u8],
    ) -> Result<Found, FsError> {
        let base = self.hash.base(name);
        loop {
            match dir.dir.find(base, name) {
                Cached::Present(cookie, target) => return Ok(Found::Present(cookie, target)),
                Cached::Absent(cookie) => return Ok(Found::Absent(cookie)),
                Cached::Unknown
                    if dir.dir.is_worth_loading(state.rec.size, self.table.load_most()) =>
                {
                    self.load_dir(dir)?
                }
                Cached::Unknown => return self.find_stored(dir.ino, base, name),
            }
        }
    }

    /// Finds a name of a directory that is not cached.
    pub(crate) fn find_stored(&self, dir: Ino, base: u64, name: &[u8]) -> Result<Found, FsError> {
        patience::may_wait()?;
        let (mut found, mut free, mut bad) = (None, base, None);
        let (from, to) =
            (keys::dentry_from(dir, base), keys::dentry_from(dir, base + DISAMBIGUATORS));
        self.journal.scan(&from, &to, &mut |key, value| {
            let Some((cookie, entry)) = self.entry_of(key, value, &mut bad) else { return false };
            if *entry.name == *name {
                found = Some(Found::Present(cookie, entry.target));
            }
            if cookie == free {
                free += 1;
            }
            found.is_none()
        })?;
        match bad {
            Some(bad) => Err(bad.into()),
            None => {
                Ok(found.unwrap_or(Found::Absent((free < base + DISAMBIGUATORS).then_some(free))))
            }
        }
    }

    /// Reads all entries of `dir` into its cache. Its lock is held.
    pub(crate) fn load_dir(&self, dir: &Inode) -> Result<(), FsError> {
        patience::may_wait()?;
        let (mut entries, mut bad) = (Vec::new(), None);
        let (from, to) = (keys::dentry_from(dir.ino, 0), keys::dentry_end(dir.ino));
        self.journal.scan(&from, &to, &mut |key, value| {
            entries.extend(self.entry_of(key, value, &mut bad));
            bad.is_none()
        })?;
        if let Some(bad) = bad {
            return Err(bad.into());
        }
        self.table.cache_dir(dir, BTreeMap::from_iter(entries));
        Ok(())
    }

    /// A stored entry; one that cannot be read goes to `bad`.
    pub(crate) fn entry_of(
        &self,
        key: &[u8],
        value: &[u8],
        bad: &mut Option<BadRecord>,
    ) -> Option<(u64, DirName)> {
        match (keys::parse(key), Dentry::decode(value)) {
            (Some(Key::Dentry(_, cookie, name)), Ok(target)) => {
                Some((cookie, DirName { name: name.into(), target }))
            }
            _ => {
                *bad = Some(BadRecord { what: "directory entry" });
                None
            }
        }
    }

    /// Finds a name, and its inode, holding the directory's lock only while looking: the caller
    /// looks again under its locks.
    pub(crate) fn glance(&self, dir: &Inode, name: &[u8]) -> Result<Option<Arc<Inode>>, FsError> {
        let state = dir.state.read_now()?;
        check_dir(&state)?;
        match self.find(dir, &state, name)? {
            Found::Present(_, target) => self.target(dir.ino, target.ino).map(Some),
            Found::Absent(_) => Ok(None),
        }
    }

    /// The inode of an entry. That there is none is damage.
    pub(crate) fn target(&self, dir: Ino, ino: Ino) -> Result<Arc<Inode>, FsError> {
        let found = self.table.get(ino)?;
        found.ok_or_else(|| {
            tracing::error!(
                volume = self.name,
                directory = dir,
                inode = ino,
                "an entry leads to no inode: run `ferry fsck`"
            );
            FsError::Errno(Errno(libc::EIO))
        })
    }

    /// Finds a name and counts a lookup of its inode.
    pub(crate) fn do_lookup(&self, parent: Ino, name: &[u8]) -> Result<Entry, FsError> {
        if name.len() > NAME_MAX {
            return Err(errno(libc::ENAMETOOLONG));
        }
        let dir = self.table.need(parent)?;
        let inode = {
            let state = dir.state.read_now()?;
            // "." is asked of anything by a caller that has only its number: an NFS server, a
            // client of a server that was restarted. Of a removed file the kernel may not have
            // taken its lookups back yet: only an open handle keeps it.
            if name == b"." && state.rec.nlink == 0 && !self.reclaimer.holds() {
                let is_retained =
                    if is_dir(state.rec.mode) { dir.is_known() } else { dir.is_open() };
                if !is_retained {
                    return Err(errno(libc::ESTALE));
                }
            }
            if name != b"." && !is_dir(state.rec.mode) {
                return Err(errno(libc::ENOTDIR));
            }
            let ino = match name {
                b"." => parent,
                b".." => state.rec.parent,
                _ => match self.find(&dir, &state, name)? {
                    Found::Present(_, target) => target.ino,
                    Found::Absent(_) => {
                        return Ok(Entry { attr: None, entry_valid: VALID, attr_valid: VALID });
                    }
                },
            };
            let inode = self.target(parent, ino)?;
            // Counted while the directory is locked: as long as the name is there, nobody reclaims
            // the inode.
            self.count_lookup(&inode);
            inode
        };
        let attr = inode.state.read_now().map(|state| state.attr(inode.ino));
        attr.map(|attr| self.entry(attr)).inspect_err(|_| self.forget_inode(&inode, 1))
    }
}
