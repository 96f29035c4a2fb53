//! Listing directories.
//!
//! The cookie of an entry is its place in the order of names' hashes: it does not move when others
//! come and go, so that a listing that goes on behind a cookie sees every entry that was there all
//! the time exactly once.

use crate::api::{DirEntry, Ino, Opened};
use crate::error::FsError;
use crate::inode::dir_cache::DirName;
use crate::inode::incore::Inode;
use crate::inode::state::InodeState;
use crate::keys;
use crate::local::local_fs::{LocalFs, errno};
use crate::namespace::names::{FIRST_COOKIE, check_dir};
use crate::patience;
use crate::posix::is_dir;
use std::cell::Cell;
use std::sync::Arc;

/// So many entries are fetched at once, first, and when the reader wants more.
const BATCHES: [usize; 2] = [32, 48];

/// Takes an entry; `false`: it did not fit.
type Sink<'s> = &'s mut dyn FnMut(&DirEntry) -> bool;

impl LocalFs {
    pub(crate) fn do_opendir(&self, ino: Ino) -> Result<Opened, FsError> {
        let inode = self.table.need(ino)?;
        if !is_dir(inode.state.read_now()?.rec.mode) {
            return Err(errno(libc::ENOTDIR));
        }
        // Every change goes through the kernel, which drops its cached listing then: it may keep it
        // from one open to the next.
        Ok(Opened { keep_cache: true, cache_dir: true, ..Opened::default() })
    }

    pub(crate) fn do_readdir(
        &self,
        ino: Ino,
        cookie: u64,
        plus: bool,
        sink: Sink<'_>,
    ) -> Result<(), FsError> {
        let dir = self.table.need(ino)?;
        self.list_behind(&dir, cookie, plus, sink, || {
            if self.options.directory_access_times {
                self.touch_atime(&dir);
            }
        })
    }

    /// The same with attributes, for what is added up: the access time stays.
    pub(crate) fn do_survey(&self, ino: Ino, cookie: u64, sink: Sink<'_>) -> Result<(), FsError> {
        let dir = self.table.need(ino)?;
        self.list_behind(&dir, cookie, true, sink, || ())
    }

    fn list_behind(
        &self,
        dir: &Inode,
        cookie: u64,
        plus: bool,
        sink: Sink<'_>,
        touch: impl FnOnce(),
    ) -> Result<(), FsError> {
        let is_begun = Cell::new(false);
        let sink: Sink<'_> = &mut |entry| {
            let fits = sink(entry);
            is_begun.set(is_begun.get() || fits);
            fits
        };
        let mut at = cookie;
        if at < FIRST_COOKIE && !self.list_dots(dir, &mut at, sink)? {
            return Ok(());
        }
        touch();
        for batch in std::iter::once(BATCHES[0]).chain(std::iter::repeat(BATCHES[1])) {
            let (entries, inodes) = match self.next_entries(dir, at, batch, plus) {
                // The listing goes on behind what it has; the next request hears of an error.
                Err(_) if is_begun.get() => return Ok(()),
                next => next?,
            };
            let last = entries.len() < batch;
            at = entries.last().map_or(at, |(cookie, _)| *cookie);
            if !self.give_entries(entries, inodes, sink) || last {
                break;
            }
        }
        Ok(())
    }

    /// `.` and `..`; `false`: one did not fit.
    fn list_dots(&self, dir: &Inode, at: &mut u64, sink: Sink<'_>) -> Result<bool, FsError> {
        let parent = {
            let state = dir.state.read_now()?;
            if !is_dir(state.rec.mode) {
                return Err(errno(libc::ENOTDIR));
            }
            state.rec.parent
        };
        for (cookie, name, ino) in [(1, &b"."[..], dir.ino), (2, b"..", parent)] {
            let dot = DirEntry { name: name.into(), ino, kind: libc::S_IFDIR, cookie, entry: None };
            if *at < cookie && !sink(&dot) {
                return Ok(false);
            }
        }
        *at = FIRST_COOKIE - 1;
        Ok(true)
    }

    /// Up to `most` entries behind `after` and, for `plus`, their inodes, each with a lookup
    /// counted while the directory is locked: as long as a name is there, nobody reclaims its
    /// inode.
    #[expect(clippy::type_complexity, reason = "two lists that belong together, for one caller")]
    fn next_entries(
        &self,
        dir: &Inode,
        after: u64,
        most: usize,
        plus: bool,
    ) -> Result<(Vec<(u64, DirName)>, Vec<Option<Arc<Inode>>>), FsError> {
        let mut entries = Vec::with_capacity(most);
        let state = dir.state.read_now()?;
        if check_dir(&state).is_err() {
            return Ok((entries, Vec::new()));
        }
        self.list(dir, &state, (after, most), &mut entries)?;
        let mut inodes = Vec::new();
        if plus {
            // An entry whose inode is damaged is listed all the same.
            for (_, name) in &entries {
                match self.target(dir.ino, name.target.ino) {
                    Err(FsError::WouldWait) => return Err(FsError::WouldWait),
                    known => inodes.push(known.ok()),
                }
            }
            inodes.iter().flatten().for_each(|inode: &Arc<Inode>| self.count_lookup(inode));
        }
        Ok((entries, inodes))
    }

    fn list(
        &self,
        dir: &Inode,
        state: &InodeState,
        (after, most): (u64, usize),
        entries: &mut Vec<(u64, DirName)>,
    ) -> Result<(), FsError> {
        // A cache that was just filled may be gone again, if others take the memory.
        for is_filled in [false, true] {
            if dir.dir.list(after, most, entries).is_some() {
                return Ok(());
            }
            if is_filled || state.rec.size > self.table.load_most() {
                break;
            }
            self.load_dir(dir)?;
        }
        self.list_stored(dir.ino, after, most, entries)
    }

    fn list_stored(
        &self,
        dir: Ino,
        after: u64,
        most: usize,
        entries: &mut Vec<(u64, DirName)>,
    ) -> Result<(), FsError> {
        patience::may_wait()?;
        let mut bad = None;
        let (from, to) = (keys::dentry_from(dir, after.saturating_add(1)), keys::dentry_end(dir));
        self.journal.scan(&from, &to, &mut |key, value| {
            entries.extend(self.entry_of(key, value, &mut bad));
            bad.is_none() && entries.len() < most
        })?;
        bad.map_or(Ok(()), |bad| Err(bad.into()))
    }

    /// Hands entries out; `false`: one did not fit. Lookups of those that were not taken, or whose
    /// attributes another thread is changing, are taken back.
    fn give_entries(
        &self,
        entries: Vec<(u64, DirName)>,
        inodes: Vec<Option<Arc<Inode>>>,
        sink: Sink<'_>,
    ) -> bool {
        let mut fits = true;
        let mut inodes = inodes.into_iter();
        for (cookie, DirName { name, target }) in entries {
            let inode = inodes.next().flatten();
            let attr = |inode: &Arc<Inode>| Some(inode.state.read_now().ok()?.attr(inode.ino));
            let entry = inode.as_ref().filter(|_| fits).and_then(attr).map(|attr| self.entry(attr));
            let is_known = entry.is_some();
            fits =
                fits && sink(&DirEntry { name, ino: target.ino, kind: target.kind, cookie, entry });
            if let (false, Some(inode)) = (fits && is_known, inode) {
                self.forget_inode(&inode, 1);
            }
        }
        fits
    }
}
