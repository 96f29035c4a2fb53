//! Renaming: moving, replacing and swapping names.

use crate::api::{Ino, ROOT, RenameFlags, Timestamp};
use crate::credits::{DENTRY_BYTES, FULL_RECORD_BYTES, RECORD_BYTES, SMALL_BYTES};
use crate::error::FsError;
use crate::inode::incore::Inode;
use crate::inode::locked::Locked;
use crate::keys::{self, Dentry, InodeRecord};
use crate::known::inode_flag;
use crate::local::local_fs::{LocalFs, change_entries, errno, put_inode};
use crate::local::transaction::How;
use crate::namespace::create::LINK_MAX;
use crate::namespace::names::{Found, check_dir, check_name};
use crate::namespace::remove::{Kind, check_removable};
use crate::order::{Guard, Rank};
use crate::patience;
use crate::posix::{inherit_group, is_dir, is_regular};
use crate::store::data_store::{Busy, Dirty};
use ferry_journal::{Credits, Seq, Transaction};
use parking_lot::MutexGuard;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// An inode more, and the counters.
const WHITEOUT_CREDITS: Credits = Credits {
    keys: CREDITS.keys + 3,
    bytes: CREDITS.bytes + DENTRY_BYTES + RECORD_BYTES + SMALL_BYTES,
    urgent: false,
};

const CREDITS: Credits = Credits {
    keys: 8,
    bytes: 2 * DENTRY_BYTES + 2 * RECORD_BYTES + 2 * FULL_RECORD_BYTES + 2 * SMALL_BYTES,
    urgent: false,
};

/// Deeper than this there are no directories: only damage makes the way up longer.
const DEPTH_MAX: usize = 1 << 20;

/// One side of a rename: a directory, a name in it, and the inode that it led to when the request
/// came.
struct Side<'r> {
    dir: &'r Inode,
    name: &'r [u8],
    inode: Option<Arc<Inode>>,
}

impl Side<'_> {
    /// The inode to lock for this side; the directory itself where there is none.
    fn to_lock(&self) -> &Inode {
        self.inode.as_deref().unwrap_or(self.dir)
    }
}

impl LocalFs {
    /// Renames `parent`/`name` to `new_parent`/`new_name`.
    pub(crate) fn do_rename(
        &self,
        how: How,
        (parent, name): (Ino, &[u8]),
        (new_parent, new_name): (Ino, &[u8]),
        flags: RenameFlags,
        caller: (u32, u32),
    ) -> Result<(), FsError> {
        for name in [name, new_name] {
            if matches!(name, b"." | b"..") {
                return Err(errno(libc::EBUSY));
            }
            check_name(name)?;
        }
        if flags.exchange && (flags.no_replace || flags.whiteout) {
            return Err(errno(libc::EINVAL));
        }
        self.writable()?;
        if self.was_made(how) {
            return Ok(());
        }
        let dirs = (self.table.need(parent)?, self.table.need(new_parent)?);
        loop {
            let from = Side { dir: &dirs.0, name, inode: self.glance(&dirs.0, name)? };
            let to = Side { dir: &dirs.1, name: new_name, inode: self.glance(&dirs.1, new_name)? };
            let done = match flags.exchange {
                true => self.exchange(how, &from, &to)?,
                false => self.rename_over(how, &from, &to, flags, caller)?,
            };
            if done {
                return Ok(());
            }
        }
    }

    /// Moves a name, over another one perhaps. `false`: the names lead elsewhere by now, look
    /// again.
    fn rename_over(
        &self,
        how: How,
        from: &Side<'_>,
        to: &Side<'_>,
        flags: RenameFlags,
        caller: (u32, u32),
    ) -> Result<bool, FsError> {
        let source = from.inode.as_deref().ok_or(errno(libc::ENOENT))?;
        if flags.no_replace && to.inode.is_some() {
            return Err(errno(libc::EEXIST));
        }
        let source_is_dir = is_dir(source.state.read_now()?.rec.mode);
        if to.inode.is_none() || flags.whiteout {
            self.admit(how, 0)?;
        }
        if flags.whiteout {
            self.admit_number(how)?;
        }
        self.write_back_before_replacing(how, from, to)?;
        let mut txn = self.begin(how, if flags.whiteout { WHITEOUT_CREDITS } else { CREDITS })?;
        let moves_dir = source_is_dir && from.dir.ino != to.dir.ino;
        let _moving = moves_dir.then(|| self.moving()).transpose()?;
        if moves_dir {
            self.check_not_below(to.dir.ino, source.ino)?;
        }
        let mut locked = Locked::new([from.dir, to.dir, source, to.to_lock()])?;
        let Some((old_cookie, new)) = self.look_again(&mut locked, from, to)? else {
            return Ok(false);
        };
        let victim = to.inode.as_deref();
        if victim.is_some_and(|v| v.ino == source.ino) {
            return Ok(true); // Two names of one inode: POSIX says to do nothing.
        }
        let cookie = match new {
            Found::Present(cookie, _) => cookie,
            absent => absent.absent()?,
        };
        // What replaces a file must be whole.
        if victim.is_some() && !source_is_dir && self.has_lost(source.ino, inode_flag::LOST) {
            self.note_told(source);
            return Err(errno(libc::EIO));
        }
        if let Some(victim) = victim {
            let kind = if source_is_dir { Kind::Directory } else { Kind::File };
            check_removable(locked.state(victim), kind)?;
        } else if moves_dir && locked.state(to.dir).rec.nlink >= LINK_MAX {
            return Err(errno(libc::EMLINK));
        }

        let now = self.time(how);
        if let Some(victim) = victim {
            self.drop_name(&mut txn, victim, locked.state(victim), now);
        }
        let state = locked.state(source);
        state.rec.ctime = now;
        if moves_dir {
            state.rec.parent = to.dir.ino;
        }
        put_inode(&mut txn, source.ino, state);
        let target = Dentry { ino: source.ino, kind: state.rec.mode & libc::S_IFMT };
        if flags.whiteout {
            let white = self.put_whiteout(&mut txn, caller, &locked.state(from.dir).rec, now)?;
            self.set_name(&mut txn, &mut locked, from, (old_cookie, white), now);
        } else {
            self.unset_name(&mut txn, &mut locked, from, (old_cookie, source_is_dir), now);
        }
        self.set_name(&mut txn, &mut locked, to, (cookie, target), now);
        let mut changed = vec![from.dir, to.dir, source];
        changed.extend(victim);
        let seq = if flags.whiteout { self.counters.commit_made(txn) } else { txn.commit() };
        self.renamed(seq, source_is_dir, &changed);
        drop(locked);
        if let Some(victim) = &to.inode {
            self.reclaim_if_unknown(victim);
        }
        Ok(true)
    }

    /// A character device 0/0, for a name in the directory of which this is the record.
    fn put_whiteout(
        &self,
        txn: &mut Transaction<'_>,
        (uid, gid): (u32, u32),
        dir: &InodeRecord,
        now: Timestamp,
    ) -> Result<Dentry, FsError> {
        let (_, gid) = inherit_group((dir.mode, dir.gid), (libc::S_IFCHR, gid));
        let times = InodeRecord {
            atime: now,
            mtime: now,
            ctime: now,
            btime: now,
            ..InodeRecord::default()
        };
        let record = InodeRecord { mode: libc::S_IFCHR, uid, gid, nlink: 1, ..times };
        let ino = self.number_for(None)?;
        txn.put(&keys::inode(ino), &record.encode());
        Ok(Dentry { ino, kind: libc::S_IFCHR })
    }

    /// A file that takes the name of another has its contents before the name: after a crash there
    /// is the old file or the new one, never an empty one.
    fn write_back_before_replacing(
        &self,
        how: How,
        from: &Side<'_>,
        to: &Side<'_>,
    ) -> Result<(), FsError> {
        if let (Some(source), Some(victim)) = (&from.inode, &to.inode)
            && source.ino != victim.ino
            && is_regular(source.state.read_now()?.rec.mode)
        {
            if how.busy == Busy::Refuse && self.data.would_wait([source]) {
                return Err(FsError::WouldWait);
            }
            self.data.write_back(Dirty::File(source), how.busy)?;
        }
        Ok(())
    }

    /// Under the locks: the old name's cookie and what is at the new name, if both lead where they
    /// did when the request came.
    fn look_again(
        &self,
        locked: &mut Locked<'_>,
        from: &Side<'_>,
        to: &Side<'_>,
    ) -> Result<Option<(u64, Found)>, FsError> {
        check_dir(locked.state(from.dir))?;
        check_dir(locked.state(to.dir))?;
        let old = self.find(from.dir, locked.state(from.dir), from.name)?;
        let new = self.find(to.dir, locked.state(to.dir), to.name)?;
        let same = |found: &Found, side: &Side<'_>| match (found, &side.inode) {
            (Found::Present(_, target), Some(inode)) => target.ino == inode.ino,
            (Found::Absent(_), None) => true,
            _ => false,
        };
        match old {
            Found::Present(cookie, _) if same(&old, from) && same(&new, to) => {
                Ok(Some((cookie, new)))
            }
            _ => Ok(None),
        }
    }

    /// Takes the entry at `side` away.
    fn unset_name(
        &self,
        txn: &mut Transaction<'_>,
        locked: &mut Locked<'_>,
        side: &Side<'_>,
        (cookie, subdirectory): (u64, bool),
        now: Timestamp,
    ) {
        let state = locked.state(side.dir);
        change_entries(state, -1, -i32::from(subdirectory), now);
        put_inode(txn, side.dir.ino, state);
        txn.delete(&keys::dentry(side.dir.ino, cookie, side.name));
        if side.dir.dir.remove(cookie) {
            self.table.dir_entries_shrank(1);
        }
    }

    /// Makes `side`'s name lead to `target`; what it led to lost the name already.
    fn set_name(
        &self,
        txn: &mut Transaction<'_>,
        locked: &mut Locked<'_>,
        side: &Side<'_>,
        (cookie, target): (u64, Dentry),
        now: Timestamp,
    ) {
        let replaced_dir = side.inode.as_deref().is_some_and(|i| is_dir(locked.state(i).rec.mode));
        let state = locked.state(side.dir);
        let subdirectories = i32::from(is_dir(target.kind)) - i32::from(replaced_dir);
        change_entries(state, i64::from(side.inode.is_none()), subdirectories, now);
        put_inode(txn, side.dir.ino, state);
        txn.put(&keys::dentry(side.dir.ino, cookie, side.name), &target.encode());
        if side.dir.dir.insert(cookie, side.name, target) {
            self.table.dir_entries_grew(1);
        }
    }

    /// Refuses to move directory `moved` to a directory below itself. The rename lock is held, so
    /// nothing else moves.
    fn check_not_below(&self, dir: Ino, moved: Ino) -> Result<(), FsError> {
        let mut at = dir;
        for _ in 0..DEPTH_MAX {
            if at == moved {
                return Err(errno(libc::EINVAL));
            }
            if at == ROOT {
                return Ok(());
            }
            at = self.table.need(at)?.state.read_now()?.rec.parent;
        }
        tracing::error!(
            volume = self.name,
            inode = dir,
            "a directory is below itself: run `ferry fsck`"
        );
        Err(errno(libc::EIO))
    }

    /// The rename lock. A thread that must not wait gets [`FsError::WouldWait`] if another one has
    /// it.
    fn moving(&self) -> Result<Guard<MutexGuard<'_, ()>>, FsError> {
        if !patience::is_hurried() {
            return Ok(Guard::wait(Rank::Rename, || self.rename_lock.lock()));
        }
        let lock = self.rename_lock.try_lock().ok_or(FsError::WouldWait)?;
        Ok(Guard::tried(Rank::Rename, lock))
    }

    /// Swaps what two names lead to. `false`: they lead elsewhere by now, look again.
    fn exchange(&self, how: How, a: &Side<'_>, b: &Side<'_>) -> Result<bool, FsError> {
        let (Some(ia), Some(ib)) = (&a.inode, &b.inode) else { return Err(errno(libc::ENOENT)) };
        let mut txn = self.begin(how, CREDITS)?;
        let across = a.dir.ino != b.dir.ino;
        // One lock at a time.
        let is_directory =
            |inode: &Inode| Ok::<_, FsError>(is_dir(inode.state.read_now()?.rec.mode));
        let dirs = [is_directory(ia)?, is_directory(ib)?];
        let moves_dir = across && (dirs[0] || dirs[1]);
        let _moving = moves_dir.then(|| self.moving()).transpose()?;
        for (inode, is_dir, dir) in [(ia, dirs[0], b.dir), (ib, dirs[1], a.dir)] {
            if is_dir && across {
                self.check_not_below(dir.ino, inode.ino)?;
            }
        }
        let mut locked = Locked::new([a.dir, b.dir, &**ia, &**ib])?;
        let Some((cookie_a, Found::Present(cookie_b, _))) = self.look_again(&mut locked, a, b)?
        else {
            return Ok(false);
        };
        let now = self.time(how);
        for (inode, dir) in [(ia, b.dir), (ib, a.dir)] {
            let state = locked.state(inode);
            state.rec.ctime = now;
            if is_dir(state.rec.mode) {
                state.rec.parent = dir.ino;
            }
            put_inode(&mut txn, inode.ino, state);
        }
        let [to_b, to_a] =
            [ia, ib].map(|i| Dentry { ino: i.ino, kind: locked.state(i).rec.mode & libc::S_IFMT });
        self.set_name(&mut txn, &mut locked, a, (cookie_a, to_a), now);
        self.set_name(&mut txn, &mut locked, b, (cookie_b, to_b), now);
        self.renamed(txn.commit(), dirs[0] || dirs[1], &[a.dir, b.dir, ia, ib]);
        Ok(true)
    }

    /// After the commit of a rename.
    fn renamed(&self, seq: Seq, directory: bool, changed: &[&Inode]) {
        self.committed(seq, changed);
        if directory {
            self.newest_dir_move.fetch_max(seq.0, Ordering::AcqRel);
            if let Some(known) = &self.options.known {
                known.moved(seq.0);
            }
        }
    }
}
