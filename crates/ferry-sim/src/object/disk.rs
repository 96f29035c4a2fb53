//! The disk of a machine, for its local log. Other owners have their turns at each write and flush,
//! and the machine may crash there.

use super::turns::Turns;
use crate::device::SimDevice;
use ferry_device::{AlignedBuf, BlockDevice, Io};
use std::io;
use std::sync::Arc;
use std::time::Duration;

/// What a write or a flush takes, at most.
const TIME_MAX_US: u64 = 2000;

/// The disk as the owner of a machine reaches it.
pub(super) struct SimDisk {
    pub turns: Arc<Turns>,
    pub owner: usize,
    pub device: Arc<SimDevice>,
}

impl SimDisk {
    fn pass(&self) {
        let time = self.turns.world().rng.below(TIME_MAX_US);
        self.turns.pass(self.owner, Duration::from_micros(time));
    }
}

impl BlockDevice for SimDisk {
    fn capacity(&self) -> u64 {
        self.device.capacity()
    }

    fn read(&self, offset: u64, buf: &mut AlignedBuf) -> io::Result<()> {
        self.device.read(offset, buf)
    }

    fn write(&self, offset: u64, buf: &AlignedBuf) -> io::Result<()> {
        self.pass();
        let done = self.device.write(offset, buf);
        self.pass();
        done
    }

    fn flush(&self) -> io::Result<()> {
        self.pass();
        let done = self.device.flush();
        self.pass();
        done
    }

    fn submit(&self, batch: Vec<Io>) {
        self.pass();
        self.device.submit(batch);
    }

    fn discard(&self, offset: u64, len: u64) -> io::Result<()> {
        self.device.discard(offset, len)
    }

    fn allocate(&self, offset: u64, len: u64) -> io::Result<()> {
        self.device.allocate(offset, len)
    }

    fn host_free(&self) -> Option<u64> {
        self.device.host_free()
    }
}
