//! Bulk sync: many open files become durable as one commit (`docs/bulk-sync.md`).
//!
//! The request names inodes, so it must not tell a program more than fsync would: it covers only
//! files that the caller's user has open. And it cannot know which descriptor asks, so it tells
//! write errors without marking them as told: a program that gets one calls fsync on the
//! descriptor, and hears it as often as fsync says it, once.

use crate::api::{Answer, Cx, Errno, Ino, Parked, Stop, ioctl};
use crate::error::FsError;
use crate::inode::incore::Inode;
use crate::local::handles::Handle;
use crate::local::jobs::BlockingFsync;
use crate::local::local_fs::LocalFs;
use crate::store::data_store::{Busy, Dirty};
use ferry_env::activity::Layer;
use ferry_journal::{JournalError, Seq};
use std::sync::Arc;

/// Bytes before the files.
const HEAD: usize = 8;

/// It is for a thread that may wait; nothing is decided.
struct WouldWait;

/// The files of a request, and what becomes of them.
struct Asked {
    /// For each file an errno, or 0.
    errnos: Vec<i32>,
    /// The handles through which the caller may ask, each with its file's place in the request; in
    /// order of the files.
    handles: Vec<(usize, Arc<Handle>)>,
    /// Files that were not durable when they were asked for, and the contexts that make them so.
    waiting: Vec<(usize, Seq)>,
}

impl LocalFs {
    /// All dirty data of the files is written back together; the newest of their contexts is
    /// forced, once; then all are answered.
    pub(crate) fn do_sync_files(&self, cx: &Cx, input: &[u8], out_max: usize) -> Answer<Vec<u8>> {
        self.must_see_all()?;
        let inos = requested(input).filter(|inos| out_max >= HEAD + 8 * inos.len());
        let mut asked = self.find_files(cx.uid, &inos.ok_or(Errno(libc::EINVAL))?);
        let is_long = self.is_long(cx, asked.handles.iter().map(|(_, handle)| &handle.inode));
        if !is_long && self.log_files(&mut asked, self.patience(cx)).is_ok() {
            return match asked.newest() {
                None => Ok(asked.answer()),
                Some(newest) => {
                    self.force_files(asked, newest, cx.park_in::<Vec<u8>>(Layer::Commit, None));
                    Err(Stop::Parked)
                }
            };
        }
        let (files, parked) = (asked.inodes(), cx.park_in::<Vec<u8>>(Layer::Commit, None));
        let then = move |fs: &LocalFs| {
            // What can be refused was refused above.
            let _waited = fs.log_files(&mut asked, Busy::Wait);
            match asked.newest() {
                None => parked.complete(Ok(asked.answer())),
                Some(newest) => fs.force_files(asked, newest, parked),
            }
        };
        self.blocking_fsyncs.push(BlockingFsync { files, then: Box::new(then) });
        Err(Stop::Parked)
    }

    /// What is dirty of the files goes into contexts.
    fn log_files(&self, asked: &mut Asked, busy: Busy) -> Result<(), WouldWait> {
        match self.data.write_back(Dirty::Files(asked.inodes()), busy) {
            Ok(_) => {}
            Err(FsError::WouldWait) => return Err(WouldWait),
            Err(error) => drop(self.report("bulk sync", 0, error)),
        }
        // Whatever kept a file from being written with the others: it is answered for by an attempt
        // of its own.
        for (file, handle) in &asked.handles {
            if !self.data.is_dirty(&handle.inode) {
                continue;
            }
            match self.data.write_back(Dirty::File(&handle.inode), busy) {
                Ok(_) => {}
                Err(FsError::WouldWait) => return Err(WouldWait),
                Err(error) => {
                    asked.errnos[*file] = self.not_durable("bulk sync", handle.inode.ino, error).0;
                }
            }
        }
        let durable = self.journal.durable();
        let waiting =
            asked.handles.iter().map(|(file, handle)| (*file, self.newest_of(&handle.inode)));
        asked.waiting = waiting.filter(|(_, seq)| *seq > durable).collect();
        Ok(())
    }

    /// Answers once `newest` is durable.
    fn force_files(&self, mut asked: Asked, newest: Seq, parked: Parked<Vec<u8>>) {
        let done = move |forced: Result<(), JournalError>| {
            if forced.is_err() {
                asked.waiting.iter().for_each(|(file, _)| asked.errnos[*file] = libc::EIO);
            }
            parked.complete(Ok(asked.answer()));
        };
        self.journal.force(newest, Box::new(done));
    }

    /// Files that this user does not have open are refused, whether they exist or not.
    fn find_files(&self, uid: u32, inos: &[Ino]) -> Asked {
        let mut asked = Asked {
            errnos: vec![0; inos.len()],
            handles: Vec::with_capacity(inos.len()),
            waiting: Vec::new(),
        };
        for (file, ino) in inos.iter().enumerate() {
            let known = asked.handles.len();
            asked
                .handles
                .extend(self.handles.of(*ino, uid).into_iter().map(|handle| (file, handle)));
            if asked.handles.len() == known {
                asked.errnos[file] = libc::EBADF;
            }
        }
        asked
    }
}

impl Asked {
    fn inodes(&self) -> Vec<Arc<Inode>> {
        self.handles.iter().map(|(_, handle)| handle.inode.clone()).collect()
    }

    /// The context to be forced, if any.
    fn newest(&self) -> Option<Seq> {
        self.waiting.iter().map(|(_, seq)| *seq).max()
    }

    fn answer(mut self) -> Vec<u8> {
        for (file, handle) in &self.handles {
            if let Some(error) = handle.inode.file.errors.untold(&handle.error_cursor) {
                self.errnos[*file] = error.0;
            }
        }
        let count = self.errnos.len() as u32;
        let mut out = Vec::with_capacity(HEAD + 8 * self.errnos.len());
        out.extend(count.to_ne_bytes());
        out.extend(0_u32.to_ne_bytes());
        out.extend(
            self.errnos.iter().flat_map(|errno| u64::from(errno.unsigned_abs()).to_ne_bytes()),
        );
        out
    }
}

/// The inode numbers of a request, if it is one.
fn requested(input: &[u8]) -> Option<Vec<Ino>> {
    let (count, rest) = input.split_first_chunk::<4>()?;
    let (flags, files) = rest.split_first_chunk::<4>()?;
    let count = usize::try_from(u32::from_ne_bytes(*count)).ok()?;
    // FerryFS logs times with the data: an fdatasync skips nothing.
    let known = u32::from_ne_bytes(*flags) & !ioctl::SYNC_FILES_DATA == 0;
    let files =
        files.get(..count.checked_mul(8)?).filter(|_| known && count <= ioctl::SYNC_FILES_MAX)?;
    Some(files.as_chunks::<8>().0.iter().map(|ino| Ino::from_ne_bytes(*ino)).collect())
}
