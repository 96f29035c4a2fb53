//! Writing into memory: space is reserved, bytes are copied into folios, and that is all.

use crate::api::{Errno, ReservationId};
use crate::cache::folio::CHUNK_BYTES;
use crate::cache::pages::Known;
use crate::error::FsError;
use crate::extents::Mapping;
use crate::file::plan::{Needs, apply, prepare};
use crate::inode::incore::Inode;
use crate::keys::BLOCK;
use crate::order::{Guard, Rank};
use crate::space::free_blocks::ReservedSpace;
use crate::store::data_store::{At, Busy, DataStore, Touch};
use std::sync::Arc;

impl DataStore {
    /// Writes all of `data` into memory, with its space reserved. Returns the offset behind the
    /// last byte. Of more than 1 MiB a part may have been written when it fails.
    pub fn write(
        &self,
        inode: &Arc<Inode>,
        at: At,
        data: &[u8],
        touch: Touch<'_>,
    ) -> Result<u64, FsError> {
        self.write_from(Busy::Wait, None, inode, at, data, touch)
    }

    /// The same; its space is taken from a reservation, if that has enough. A caller that refuses
    /// to wait for space gets [`FsError::WouldWait`]; then nothing was written.
    pub fn write_from(
        &self,
        busy: Busy,
        reservation: Option<ReservationId>,
        inode: &Arc<Inode>,
        at: At,
        data: &[u8],
        touch: Touch<'_>,
    ) -> Result<u64, FsError> {
        self.writable()?;
        #[cfg(feature = "compare")]
        let _compared = self.inode_locks.write(inode.ino);
        let (reserved_space, mut touch) = (self.reserved_space(reservation), touch);
        // One append at a time, of whatever length: what the next one writes begins behind all of
        // it.
        let appends = (at == At::End).then(|| Guard::wait(Rank::Tail, || inode.file.tail.lock()));
        let mut at = at;
        let mut end = match at {
            At::Offset(offset) => offset,
            At::End => inode.state.share().rec.size,
        };
        let mut busy = busy;
        for chunk in data.chunks(CHUNK_BYTES) {
            self.throttle()?;
            end = self.write_chunk(busy, &reserved_space, inode, at, chunk, &mut touch)?;
            // A part of it is written, so another thread cannot start it over.
            busy = Busy::Wait;
            at = At::Offset(end);
        }
        drop(appends);
        self.cache.shrink();
        Ok(end)
    }

    fn write_chunk(
        &self,
        busy: Busy,
        reserved_space: &Option<Arc<ReservedSpace>>,
        inode: &Arc<Inode>,
        at: At,
        data: &[u8],
        touch: &mut Touch<'_>,
    ) -> Result<u64, FsError> {
        if let (At::Offset(offset), Touch::Nothing | Touch::Times(_) | Touch::Exactly(_)) =
            (at, &touch)
            && let Some(end) = offset.checked_add(data.len() as u64)
            && self.write_shared(busy, reserved_space, inode, offset, data, touch)?
        {
            return Ok(end);
        }
        let mut claim = self.space.claim_from(reserved_space.clone());
        self.change_contents(inode, busy, &mut claim, |claim| {
            let mut state = inode.state.write();
            let offset = match at {
                At::Offset(offset) => offset,
                At::End => state.rec.size,
            };
            let end = offset.checked_add(data.len() as u64).filter(|e| *e <= i64::MAX as u64);
            let end = end.ok_or(FsError::Errno(Errno(libc::EFBIG)))?;
            let mut pages = inode.file.pages.write();
            pages.attach(&self.cache, &inode.file.front);
            let plan = prepare(&state, &pages, offset..end)?;
            let want = plan.wants(&self.space);
            if !claim.take(want) {
                return Err(Needs::Space(want));
            }
            let size = state.rec.size.max(end);
            apply(inode, &state, &mut pages, &plan, data, size);
            state.rec.size = size;
            touch.apply(&mut state.rec);
            self.dirtied(inode, &mut state, &pages);
            Ok(end)
        })
    }

    /// Makes bytes `[from, to)` zeros by writing them, where they are not zeros already. Both lie
    /// in one block.
    pub(crate) fn zero_bytes(&self, inode: &Arc<Inode>, from: u64, to: u64) -> Result<(), FsError> {
        let block = from / BLOCK;
        let mut claim = self.space.claim();
        self.change_contents(inode, Busy::Wait, &mut claim, |claim| {
            let mut state = inode.state.write();
            let to = to.min(state.rec.size);
            if from >= to {
                return Ok(());
            }
            let mut pages = inode.file.pages.write();
            pages.attach(&self.cache, &inode.file.front);
            let inline = block == 0 && state.logged.inline.is_some();
            if !pages.has(block) && !inline {
                match pages.mapping(block, state.logged.blocks) {
                    Known::Is(Mapping::Data(..)) => {}
                    Known::Is(_) => return Ok(()),
                    Known::Load(window) => return Err(Needs::Window(window)),
                }
            }
            let plan = prepare(&state, &pages, from..to)?;
            let want = plan.wants(&self.space);
            if !claim.take(want) {
                return Err(Needs::Space(want));
            }
            let (size, zeros) = (state.rec.size, &[0; BLOCK as usize][..(to - from) as usize]);
            apply(inode, &state, &mut pages, &plan, zeros, size);
            self.dirtied(inode, &mut state, &pages);
            Ok(())
        })
    }
}
