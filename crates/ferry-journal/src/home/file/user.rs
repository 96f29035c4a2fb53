//! The file as redb uses it.

use super::HomeFile;
use crate::home::guard;
use redb::StorageBackend;
use std::io;
use std::sync::Arc;

/// The file as one database sees it; a failed database keeps an old one.
pub struct FileUser {
    file: Arc<HomeFile>,
    epoch: u64,
}

impl HomeFile {
    /// The file for one more database; only the newest user may write.
    pub fn user(self: &Arc<Self>) -> FileUser {
        FileUser { file: self.clone(), epoch: *self.epoch.read() }
    }
}

impl FileUser {
    fn file(&self) -> io::Result<&HomeFile> {
        self.of_epoch(*self.file.epoch.read())
    }

    /// The epoch ends when nobody is here.
    fn writing(&self, write: impl FnOnce(&HomeFile) -> io::Result<()>) -> io::Result<()> {
        let epoch = self.file.epoch.read();
        write(self.of_epoch(*epoch)?)
    }

    fn of_epoch(&self, epoch: u64) -> io::Result<&HomeFile> {
        if self.epoch == epoch {
            Ok(&self.file)
        } else {
            Err(io::Error::other("the home store was opened anew after a failure"))
        }
    }
}

impl std::fmt::Debug for FileUser {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "home store, epoch {}", self.epoch)
    }
}

impl StorageBackend for FileUser {
    fn len(&self) -> io::Result<u64> {
        Ok(self.file()?.state.read().map.len)
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        let file = self.file()?;
        file.read_page(offset, out).map_err(|error| io::Error::other(guard::unreadable(error)))?;
        if offset > 0 {
            file.read_ahead(out);
        }
        Ok(())
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        self.writing(|file| file.set_len(len))
    }

    fn sync_data(&self) -> io::Result<()> {
        self.writing(|file| file.sync())
    }

    fn write(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        self.writing(|file| file.write(offset, data))
    }
}
