//! Another size for a volume in use.
//!
//! A longer volume gets its bytes from the device first, then the superblock says so. A shorter one
//! is emptied behind its new end first; then the superblock says so; then the device is cut. Work
//! that takes long is done in turns: after one, everything is as if nobody had asked, and the
//! caller asks again. So a caller that is killed leaves nothing behind.

use crate::api::ioctl::ResizeAnswer;
use crate::api::{Answer, Cx, Errno, ROOT};
use crate::error::FsError;
use crate::local::local_fs::{LocalFs, errno};
use crate::requests::grow_log::superblock_error;
use crate::space::free_blocks::Want;
use crate::space::resize::NoLimit;
use crate::volume::{SIZE_MIN, Superblock, Unfit, write_resized};
use crate::writeback::vacate::Vacated;
use ferry_device::{BLOCK_SIZE, Longest};
use std::io;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// A turn ends after this time.
const TURN: Duration = Duration::from_millis(500);

impl LocalFs {
    /// The answer to [`crate::ioctl::RESIZE`], from a thread that may wait.
    pub(crate) fn do_resize(&self, cx: &Cx, input: &[u8]) -> Answer<Vec<u8>> {
        let asked = input.first_chunk().copied();
        self.change_volume(cx, "resize", move |fs| {
            let size = asked.map(u64::from_ne_bytes).ok_or_else(|| errno(libc::EINVAL))?;
            fs.resize_volume(size).map(ResizeAnswer::encode)
        })
    }

    /// Gives the volume `asked` bytes, or all that its device has if that is 0; or does a turn of
    /// the work for it.
    pub(crate) fn resize_volume(&self, asked: u64) -> Result<ResizeAnswer, FsError> {
        let _one_at_a_time = self.growing.lock();
        let old = self.current_superblock()?;
        let longest = self.dev.capacity_max().map_err(io_errno)?;
        let most = longest.bytes();
        let size = match longest {
            Longest::Asked(_) if asked == 0 => return Ok(ResizeAnswer::SizeWanted),
            Longest::Given(_) if asked == 0 => most,
            _ => asked,
        };
        let size = size / BLOCK_SIZE as u64 * BLOCK_SIZE as u64;
        if size > most {
            return Ok(ResizeAnswer::AtMost(most));
        }
        if size == old.size {
            // A crash may have left the device longer.
            self.dev.resize(size).map_err(io_errno)?;
            return Ok(ResizeAnswer::Done(size));
        }
        let new = match old.resized(size.max(SIZE_MIN)) {
            Ok(new) => new,
            Err(Unfit::AtLeast(bytes)) => return Ok(ResizeAnswer::AtLeast(bytes)),
            Err(Unfit::AtMost(bytes)) => return Ok(ResizeAnswer::AtMost(bytes)),
            Err(Unfit::Segments) if size > old.size => {
                return Ok(ResizeAnswer::AtMost(old.size_with(u32::MAX)));
            }
            Err(Unfit::Segments) => {
                return Ok(self.too_small(&old, self.data.space.fewest_segments()));
            }
        };
        if size < SIZE_MIN {
            return Ok(self.too_small(&old, self.data.space.fewest_segments()));
        }
        if size > old.size { self.enlarge(&old, &new) } else { self.reduce(&old, &new) }
    }

    /// Gives the volume what one has that is made now, or does a turn of the work for it. For an
    /// owner whom nobody else asks.
    pub fn upgrade(&self) -> Result<ResizeAnswer, Errno> {
        self.upgrade_volume().map_err(|error| self.report("upgrade", ROOT, error))
    }

    fn upgrade_volume(&self) -> Result<ResizeAnswer, FsError> {
        let _one_at_a_time = self.growing.lock();
        let old = self.current_superblock()?;
        if old.is_newest() {
            return Ok(ResizeAnswer::Done(old.size));
        }
        let most = match self.dev.capacity_max() {
            Err(error) if error.raw_os_error() == Some(libc::EOPNOTSUPP) => self.dev.capacity(),
            most => most.map_err(io_errno)?.bytes(),
        };
        match old.upgraded(most) {
            None => Ok(ResizeAnswer::NoRoom),
            Some(new) if new.segment_count < old.segment_count => self.reduce(&old, &new),
            Some(new) => self.enlarge(&old, &new),
        }
    }

    fn too_small(&self, old: &Superblock, segments: u32) -> ResizeAnswer {
        ResizeAnswer::TooSmall(old.size_with(segments).max(SIZE_MIN).min(old.size))
    }

    /// Grows the volume, or changes what its superblock says without moving its end.
    fn enlarge(&self, old: &Superblock, new: &Superblock) -> Result<ResizeAnswer, FsError> {
        let from_to = |from: u64, to: u64| match from == to {
            true => Ok(()),
            false => self.dev.resize(to).map_err(io_errno),
        };
        from_to(old.size, new.size)?;
        if let Err(error) = self.allocate_moved(old, new) {
            tracing::warn!(volume = self.name, %error, "the volume cannot be made longer");
            from_to(new.size, old.size)?;
            return Ok(ResizeAnswer::HostFull);
        }
        self.switch(old, new)?;
        self.data.extend(&new.geometry());
        Ok(self.resized(new))
    }

    /// Makes it smaller, or does some of the work for that.
    fn reduce(&self, old: &Superblock, new: &Superblock) -> Result<ResizeAnswer, FsError> {
        let end = new.segment_count;
        let began = self.env.clock.monotonic();
        let go_on = || self.env.clock.monotonic().saturating_sub(began) < TURN;
        if self.data.space.lacking_before(end).is_err() {
            // What was removed a moment ago is on its way back.
            self.data.await_removed(Want::new(u64::MAX >> 1));
        }
        let room = match self.data.make_room_before(end, &go_on) {
            Err(error) if error.errno() == Errno(libc::ENOSPC) => return Ok(ResizeAnswer::NoRoom),
            room => room?,
        };
        match room {
            Ok(Vacated::All) => {}
            Ok(not_yet) => return Ok(self.not_vacated(not_yet, end)),
            Err(no_limit) => return Ok(self.no_limit(old, no_limit)),
        }
        if let Err(no_limit) = self.data.space.set_limit(end) {
            return Ok(self.no_limit(old, no_limit));
        }
        let done = match self.data.vacate(end, &go_on) {
            Ok(Vacated::All) => self.cut(old, new),
            Ok(not_yet) => Ok(self.not_vacated(not_yet, end)),
            Err(error) if error.errno() == Errno(libc::ENOSPC) => Ok(ResizeAnswer::NoRoom),
            Err(error) => Err(error),
        };
        if !matches!(done, Ok(ResizeAnswer::Done(_))) {
            self.data.space.lift_limit();
        }
        done
    }

    fn no_limit(&self, old: &Superblock, why: NoLimit) -> ResizeAnswer {
        match why {
            NoLimit::Needs(segments) => self.too_small(old, segments),
            NoLimit::HostFull => ResizeAnswer::HostFull,
        }
    }

    /// What is not done yet, or cannot be.
    fn not_vacated(&self, how_far: Vacated, end: u32) -> ResizeAnswer {
        match how_far {
            Vacated::All | Vacated::Left => {
                ResizeAnswer::Left(self.data.space.used_from(end).into())
            }
            Vacated::Stuck(segment) => ResizeAnswer::Stuck(segment.into()),
        }
    }

    /// Ends the volume at the limit, where nothing is in use any more.
    fn cut(&self, old: &Superblock, new: &Superblock) -> Result<ResizeAnswer, FsError> {
        if let Err(error) = self.allocate_moved(old, new) {
            tracing::warn!(volume = self.name, %error, "the volume cannot be made shorter");
            return Ok(ResizeAnswer::HostFull);
        }
        self.switch(old, new)?;
        self.data.cut(&new.geometry());
        if new.size < old.size {
            let cut = self.dev.discard(new.size, old.size - new.size);
            if let Err(error) = cut.and_then(|()| self.dev.resize(new.size)) {
                tracing::warn!(volume = self.name, %error, "what lies behind the volume stays there");
            }
        }
        Ok(self.resized(new))
    }

    /// Takes the host's space for the log and the slots if they move.
    fn allocate_moved(&self, old: &Superblock, new: &Superblock) -> io::Result<()> {
        if new.log_offset != old.log_offset {
            self.dev.allocate(new.log_offset, new.log_len)?;
        }
        if new.home_map_offsets != old.home_map_offsets {
            for offset in new.home_map_offsets {
                self.dev.allocate(offset, new.home_map_len)?;
            }
        }
        Ok(())
    }

    /// From now on the parts of the volume are where `new` says.
    fn switch(&self, old: &Superblock, new: &Superblock) -> Result<(), FsError> {
        let persist = &mut || write_resized(&*self.dev, old, new).map_err(superblock_error);
        Ok(self.journal.relocate(&new.geometry(), persist)?)
    }

    fn resized(&self, new: &Superblock) -> ResizeAnswer {
        self.size.store(new.size, Ordering::Relaxed);
        tracing::info!(volume = self.name, bytes = new.size, "the volume has another size");
        ResizeAnswer::Done(new.size)
    }
}

fn io_errno(error: io::Error) -> FsError {
    errno(error.raw_os_error().unwrap_or(libc::EIO))
}
