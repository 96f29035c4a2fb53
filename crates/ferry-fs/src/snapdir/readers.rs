//! [`Reader`]: an open snapshot, and the files of it that are being read.

use crate::api::{Answer, Cx, Errno, Filesystem, Ino};
use crate::inprocess::{FromReply, InProcess};
use crate::local::local_fs::LocalFs;
use parking_lot::Mutex;
use std::collections::VecDeque;
use std::sync::Arc;

/// Files of a snapshot that are open here, at most.
const FILES_MAX: usize = 64;

/// An open snapshot. The kernel knows no handles of its files: a file that is read is opened here,
/// so that what comes next is read ahead, and stays open until many others were read.
pub(crate) struct Reader {
    pub(crate) fs: Arc<LocalFs>,
    /// Files and their handles; the one that was read last is the last.
    files: Mutex<VecDeque<(Ino, u64)>>,
}

impl Reader {
    pub(crate) fn new(fs: Arc<LocalFs>) -> Self {
        Self { fs, files: Mutex::default() }
    }

    /// Makes a request of the snapshot's file system.
    pub(crate) fn ask<T: FromReply>(
        &self,
        request: impl FnOnce(&LocalFs, &Cx) -> Answer<T>,
    ) -> Result<T, Errno> {
        InProcess::default().call(|cx| request(&self.fs, cx))
    }

    /// Makes a request with a handle of the file.
    pub(crate) fn ask_of_file<T: FromReply>(
        &self,
        ino: Ino,
        mut request: impl FnMut(&LocalFs, &Cx, u64) -> Answer<T>,
    ) -> Result<T, Errno> {
        let fh = match self.last_used(ino) {
            Some(fh) => fh,
            None => self.open(ino)?,
        };
        match self.ask(|fs, cx| request(fs, cx, fh)) {
            // Others have read so many files meanwhile that it was closed.
            Err(Errno(libc::EBADF)) => {
                let fh = self.ask(|fs, cx| fs.open(cx, ino, libc::O_RDONLY, false))?.fh;
                let answer = self.ask(|fs, cx| request(fs, cx, fh));
                self.fs.do_release(fh);
                answer
            }
            answer => answer,
        }
    }

    fn last_used(&self, ino: Ino) -> Option<u64> {
        let mut files = self.files.lock();
        let at = files.iter().rposition(|(open, _)| *open == ino)?;
        let file = files.remove(at)?;
        files.push_back(file);
        Some(file.1)
    }

    fn open(&self, ino: Ino) -> Result<u64, Errno> {
        let fh = self.ask(|fs, cx| fs.open(cx, ino, libc::O_RDONLY, false))?.fh;
        let closed = {
            let mut files = self.files.lock();
            files.push_back((ino, fh));
            if files.len() > FILES_MAX { files.pop_front() } else { None }
        };
        if let Some((_, fh)) = closed {
            self.fs.do_release(fh);
        }
        Ok(fh)
    }
}
