//! Snapshots of the volume: the device has them, the file system makes it durable first.

use crate::api::{Answer, Cx, Errno, ROOT, Stop, ioctl};
use crate::error::FsError;
use crate::local::jobs::SnapshotChange;
use crate::local::local_fs::{LocalFs, errno};
use crate::requests::stats::{ended, index, json};
use std::io;

/// Snapshots in one answer, at most. A name has at most 255 bytes, and more as JSON.
const PAGE: usize = 30;

impl LocalFs {
    /// Makes a snapshot of all that the volume has now.
    pub fn create_snapshot(&self, name: &str) -> Result<(), FsError> {
        self.sync()?;
        self.dev.create_snapshot(name).map_err(of_device)
    }

    /// Deletes a snapshot.
    pub fn delete_snapshot(&self, name: &str) -> Result<(), FsError> {
        self.dev.delete_snapshot(name).map_err(of_device)
    }

    /// The answer to [`ioctl::SNAPSHOT_CREATE`] and [`ioctl::SNAPSHOT_DELETE`], from a thread that
    /// may wait.
    pub(crate) fn do_change_snapshots(&self, cx: &Cx, cmd: u32, input: &[u8]) -> Answer<Vec<u8>> {
        self.only_owner(cx)?;
        // A device without snapshots is told at once, before anything is made durable for it.
        self.dev.snapshots().map_err(of_device)?;
        self.writable()?;
        let name = input.split(|byte| *byte == 0).next().unwrap_or_default();
        let name = str::from_utf8(name).map_err(|_| Errno(libc::EINVAL))?.to_owned();
        let change = move |fs: &Self| match cmd {
            ioctl::SNAPSHOT_CREATE => fs.create_snapshot(&name),
            _ => fs.delete_snapshot(&name),
        };
        if !self.options.background {
            return Ok(change(self).map(|()| Vec::new())?);
        }
        // The device goes on with what it has begun.
        let parked = cx.park::<Vec<u8>>(Some(Box::new(|| ())));
        let then = move |fs: &Self| {
            let changed = change(fs).map_err(|error| fs.not_durable("a snapshot", ROOT, error));
            parked.complete(changed.map(|()| Vec::new()));
        };
        self.snapshot_changes.push(SnapshotChange(Box::new(then)));
        Err(Stop::Parked)
    }

    /// The answer to [`ioctl::SNAPSHOT_LIST`].
    pub(crate) fn do_list_snapshots(
        &self,
        cx: &Cx<'_>,
        input: &[u8],
        out_max: usize,
    ) -> Result<Vec<u8>, FsError> {
        self.only_owner(cx)?;
        let from = index(input)?;
        let snapshots = self.dev.snapshots().map_err(of_device)?;
        let page = snapshots.iter().skip(from).take(PAGE);
        ended(json(&page.map(|one| (&one.name, one.made_secs)).collect::<Vec<_>>()), out_max)
    }
}

fn of_device(error: io::Error) -> FsError {
    errno(error.raw_os_error().unwrap_or(libc::EIO))
}
