//! A longer log for a mounted volume: it moves into the last segments, which nothing may be using.

use crate::api::{Answer, Cx};
use crate::error::FsError;
use crate::local::local_fs::{LocalFs, errno};
use crate::volume::{LOG_MAX, Superblock, VolumeError, read_superblock, write_superblock};
use ferry_journal::JournalError;
use std::io;
use std::sync::Arc;

/// The log has at most this part of the volume, as `ferry mkfs` allows.
const LOG_SHARE: u64 = 4;

pub(crate) fn superblock_error(source: io::Error) -> JournalError {
    JournalError::Io { what: "superblock", source: Arc::new(source) }
}

impl LocalFs {
    /// The answer to [`crate::ioctl::GROW_LOG`], from a thread that may wait.
    pub(crate) fn do_grow_log(&self, cx: &Cx, input: &[u8]) -> Answer<Vec<u8>> {
        let asked = input.first_chunk().copied();
        self.change_volume(cx, "grow the log", move |fs| {
            let len = asked.map(u64::from_ne_bytes).ok_or_else(|| errno(libc::EINVAL))?;
            fs.grow_log(len).map(|()| Vec::new())
        })
    }

    /// Returns when the log has at least `len` bytes.
    pub(crate) fn grow_log(&self, len: u64) -> Result<(), FsError> {
        let _one_at_a_time = self.growing.lock();
        let sb = self.current_superblock()?;
        if len <= sb.log_len || len > LOG_MAX.min(sb.size / LOG_SHARE) {
            return Err(errno(libc::EINVAL));
        }
        let segments =
            u32::try_from(len.div_ceil(sb.segment_len)).map_err(|_| errno(libc::EINVAL))?;
        if segments >= sb.segment_count {
            return Err(errno(libc::ENOSPC));
        }
        let before = self.data.geometry();
        let new = sb.with_log_behind(segments);
        if !self.data.take_last_segments(segments, &new.geometry()) {
            return Err(errno(libc::ENOSPC));
        }
        let persist = &mut || write_superblock(&*self.dev, &new).map_err(superblock_error);
        let grown = self.journal.relocate(&new.geometry(), persist);
        match &grown {
            Ok(()) => tracing::info!(volume = self.name, bytes = new.log_len, "the log has grown"),
            Err(_) => self.data.give_last_segments_back(&before),
        }
        Ok(grown?)
    }

    /// The volume's superblock as it is now.
    pub(crate) fn current_superblock(&self) -> Result<Superblock, FsError> {
        read_superblock(&self.dev).map_err(|error| match error {
            VolumeError::Io { source, .. } => superblock_error(source).into(),
            _ => errno(libc::EIO),
        })
    }
}
