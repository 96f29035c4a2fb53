//! Another length for a mirror in use.
//!
//! The sides' devices become long enough first. Then, with writers kept out, each side gets a map
//! of the regions that there will be (MIRROR-8), and a header with the new length and a higher
//! generation, as for a new list of sides (MIRROR-3): a side that lacks it is out. At the end files
//! are cut. A side that is absent or out has a lower generation and stays stale, so that its length
//! counts for nothing.

use super::super::component::Component;
use super::super::length::{cut, lengthen};
use super::regions::region_len;
use super::shared::Shared;
use super::worker::Worker;
use crate::buffer::BLOCK_SIZE;
use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;

impl Worker {
    /// As [`crate::BlockDevice::resize`] says.
    pub fn resize(&mut self, bytes: u64) -> io::Result<()> {
        if self.rebuild.is_some() {
            return Err(io::Error::from_raw_os_error(libc::EBUSY));
        }
        let shared = Arc::clone(&self.shared);
        let block = BLOCK_SIZE as u64;
        let len = bytes.next_multiple_of(block).max(block);
        lengthen(with_len(&shared, len))?;
        let all = shared.regions.all();
        self.keep_out(all.clone());
        let switched = self.switch(len);
        shared.regions.unfreeze(all);
        switched?;
        cut(with_len(&shared, len))
    }

    /// No writer is inside any region.
    fn switch(&mut self, len: u64) -> io::Result<()> {
        let shared = Arc::clone(&self.shared);
        let before = shared.capacity();
        // Never less: the present ones become parts of the new ones.
        let unit = region_len(len).max(shared.regions.region_len());
        self.write_map_of(unit, &shared.regions.reshaped(len, unit), true)?;
        self.reshape(len, unit);
        let live = shared.live.load(Ordering::SeqCst);
        let failed = self.raise(live);
        if failed == 0 {
            self.announce(0);
        } else {
            let error = io::Error::from_raw_os_error(libc::EIO);
            if !self.put_out(failed, &error) {
                // What the headers say now is as long as the shorter of both, or longer.
                self.reshape(before, unit);
                return Err(error);
            }
        }
        shared.set_capacity(len);
        Ok(())
    }

    /// The regions and the headers to be written are those of a mirror of so many bytes: also the
    /// header that a new side will get, which begins as a copy of the first one.
    fn reshape(&mut self, len: u64, unit: u64) {
        self.shared.regions.reshape(len, unit);
        self.seen = vec![0; self.shared.regions.count()];
        self.headers.iter_mut().for_each(|header| (header.len, header.unit) = (len, unit));
    }
}

/// The sides that have everything, each with this length.
fn with_len(shared: &Shared, len: u64) -> impl Iterator<Item = (&Arc<Component>, u64)> {
    shared.those(shared.live.load(Ordering::SeqCst)).map(move |(_, side)| (side, len))
}
