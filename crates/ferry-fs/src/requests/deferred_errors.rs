//! Writes that fail behind a program's back.
//!
//! With `cache=writeback` the kernel takes a write at once and hands it over later; if that fails,
//! it says so at the next fsync or close. A program that does nothing but write would go on for
//! ever on a full volume, and lose all of it. But before each write the kernel looks at the file's
//! attributes, and asks for them, on behalf of that descriptor, if they are not valid: so a failure
//! makes them invalid, and the next such question is answered with the error, once for each
//! descriptor that writes. Nobody else asks so: stat(2) and fstat(2) name no descriptor, and a read
//! needs no attributes that became invalid.

use crate::api::{Errno, Ino};
use crate::local::local_fs::{CacheMode, LocalFs};

impl LocalFs {
    /// A write by this handle failed, perhaps one of the kernel's own.
    pub(crate) fn note_deferred_error(&self, ino: Ino, fh: u64, error: Errno) {
        if self.options.cache != CacheMode::Writeback {
            return;
        }
        let Some(handle) = self.handles.get(ino, fh) else { return };
        // What the kernel had taken from a program is lost on a volume that has become read-only.
        let error = if error == Errno(libc::EROFS) { Errno(libc::EIO) } else { error };
        handle.inode.kernel_write_errors.add(error);
        if let Some(host) = &*self.host.read() {
            host.invalidate_attributes(ino);
        }
    }

    /// The error of a failure that this handle was not told yet.
    pub(crate) fn tell_deferred_error(&self, ino: Ino, fh: u64) -> Result<(), Errno> {
        let Some(handle) = self.handles.get(ino, fh).filter(|handle| handle.writes) else {
            return Ok(());
        };
        handle.inode.kernel_write_errors.tell(&handle.kernel_write_errors).map_or(Ok(()), Err)
    }
}
