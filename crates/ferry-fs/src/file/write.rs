//! Writing into memory: space is reserved, bytes are copied into folios, and that is all.

use crate::api::{Errno, ReservationId};
use crate::cache::folio::PIECE;
use crate::cache::pages::Known;
use crate::error::FsError;
use crate::extents::Place;
use crate::file::plan::{Ready, apply, prepare};
use crate::inode::incore::Inode;
use crate::keys::BLOCK;
use crate::order::{Guard, Rank};
use crate::space::free_blocks::Purse;
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

    /// The same; its space is taken from a reservation, if that has enough. Who refuses to wait for
    /// space gets [`FsError::WouldWait`]; then nothing was written.
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
        let (purse, mut touch) = (self.purse(reservation), touch);
        // One append at a time, of whatever length: what the next one writes begins behind all of
        // it.
        let appends = (at == At::End).then(|| Guard::wait(Rank::Tail, || inode.file.tail.lock()));
        let mut at = at;
        let mut end = match at {
            At::Offset(offset) => offset,
            At::End => inode.state.share().rec.size,
        };
        let mut busy = busy;
        for piece in data.chunks(PIECE) {
            self.throttle()?;
            end = self.write_piece(busy, &purse, inode, at, piece, &mut touch)?;
            // A part of it is there: it cannot be made again by somebody else.
            busy = Busy::Wait;
            at = At::Offset(end);
        }
        drop(appends);
        self.cache.shrink();
        Ok(end)
    }

    fn write_piece(
        &self,
        busy: Busy,
        purse: &Option<Arc<Purse>>,
        inode: &Arc<Inode>,
        at: At,
        data: &[u8],
        touch: &mut Touch<'_>,
    ) -> Result<u64, FsError> {
        if let (At::Offset(offset), Touch::Nothing | Touch::Times(_) | Touch::Exactly(_)) =
            (at, &touch)
            && let Some(end) = offset.checked_add(data.len() as u64)
            && self.write_shared(busy, purse, inode, offset, data, touch)?
        {
            return Ok(end);
        }
        let mut claim = self.space.claim_from(purse.clone());
        loop {
            let mut state = inode.state.write();
            let offset = match at {
                At::Offset(offset) => offset,
                At::End => state.rec.size,
            };
            let end = offset.checked_add(data.len() as u64).filter(|e| *e <= i64::MAX as u64);
            let end = end.ok_or(Errno(libc::EFBIG))?;
            let mut pages = inode.file.pages.write();
            pages.attach(&self.cache, &inode.file.front);
            let plan = match prepare(&state, &pages, offset..end) {
                Ready::Yes(plan) => plan,
                Ready::Load(window) => {
                    drop((state, pages));
                    self.load_window(inode, window)?;
                    continue;
                }
                Ready::Fetch(block) => {
                    drop((state, pages));
                    self.fetch_block(inode, block)?;
                    continue;
                }
            };
            let want = plan.wants(&self.space);
            if !claim.take(want) {
                drop((state, pages));
                self.find_space_or_refuse(busy, want, &mut claim)?;
                continue;
            }
            let size = state.rec.size.max(end);
            apply(inode, &state, &mut pages, &plan, data, size);
            state.rec.size = size;
            touch.apply(&mut state.rec);
            self.dirtied(inode, &mut state, &pages);
            return Ok(end);
        }
    }

    /// Makes bytes `[from, to)` zeros by writing them, where they are not zeros already. Both lie
    /// in one block.
    pub(crate) fn zero_bytes(&self, inode: &Arc<Inode>, from: u64, to: u64) -> Result<(), FsError> {
        let block = from / BLOCK;
        let mut claim = self.space.claim();
        loop {
            let mut state = inode.state.write();
            let to = to.min(state.rec.size);
            if from >= to {
                return Ok(());
            }
            let mut pages = inode.file.pages.write();
            pages.attach(&self.cache, &inode.file.front);
            let inline = block == 0 && state.logged.inline.is_some();
            if !pages.has(block) && !inline {
                match pages.place(block, state.logged.blocks) {
                    Known::Is(Place::Data(..)) => {}
                    Known::Is(_) => return Ok(()),
                    Known::Load(window) => {
                        drop((state, pages));
                        self.load_window(inode, window)?;
                        continue;
                    }
                }
            }
            let plan = match prepare(&state, &pages, from..to) {
                Ready::Yes(plan) => plan,
                Ready::Load(window) => {
                    drop((state, pages));
                    self.load_window(inode, window)?;
                    continue;
                }
                Ready::Fetch(block) => {
                    drop((state, pages));
                    self.fetch_block(inode, block)?;
                    continue;
                }
            };
            let want = plan.wants(&self.space);
            if !claim.take(want) {
                drop((state, pages));
                self.find_space(want, &mut claim)?;
                continue;
            }
            let size = state.rec.size;
            apply(
                inode,
                &state,
                &mut pages,
                &plan,
                &[0; BLOCK as usize][..(to - from) as usize],
                size,
            );
            self.dirtied(inode, &mut state, &pages);
            return Ok(());
        }
    }
}
