//! Open files.

use crate::api::Ino;
use crate::errseq::ErrorCursor;
use crate::file::read::Misses;
use crate::file::stream::Stream;
use crate::inode::incore::Inode;
use parking_lot::Mutex;
use std::collections::BTreeSet;
use std::sync::Arc;

const SHARDS: usize = 8;

/// An open file.
pub(crate) struct Handle {
    pub(crate) inode: Arc<Inode>,
    /// The user that opened it.
    pub(crate) uid: u32,
    /// Which write error this handle was told last.
    pub(crate) error_cursor: ErrorCursor,
    /// The write error that its newest close reported.
    pub(crate) error_closed: ErrorCursor,
    /// Reads move no access time (`O_NOATIME`).
    pub(crate) noatime: bool,
    /// What becomes of what it reads from the device.
    pub(crate) misses: Misses,
    /// Where its reads got.
    pub(crate) stream: Stream,
    /// Reads and writes bypass the kernel's page cache.
    pub(crate) direct: bool,
    /// Counted in [`Inode::bypassing`].
    pub(crate) bypassing: bool,
    /// Not for reading only.
    pub(crate) writes: bool,
    /// What it was told of [`Inode::kernel_write_errors`].
    pub(crate) kernel_write_errors: ErrorCursor,
}

#[derive(Default)]
struct Slots {
    /// With their numbers.
    handles: Vec<Option<(u64, Arc<Handle>)>>,
    free: Vec<usize>,
    /// The same by inode.
    by_ino: BTreeSet<(Ino, usize)>,
    /// The upper half of the next number.
    next: u32,
}

/// All open files. A handle's number is never 0, which stands for none.
///
/// A request that a process had served when it was killed may come again, also one that closes a
/// file. So no number comes twice: the upper half counts the files that are opened, in each process
/// that goes on from a random number on.
#[derive(Default)]
pub(crate) struct Handles {
    shards: [Mutex<Slots>; SHARDS],
}

impl Handles {
    pub(crate) fn add(&self, handle: Handle) -> u64 {
        let shard = handle.inode.ino as usize % SHARDS;
        let handle = Arc::new(handle);
        let mut slots = self.shards[shard].lock();
        let slot = slots.free.pop().unwrap_or_else(|| {
            slots.handles.push(None);
            slots.handles.len() - 1
        });
        slots.by_ino.insert((handle.inode.ino, slot));
        let number = u64::from(slots.next) << 32 | ((slot + 1) * SHARDS + shard) as u64;
        slots.next = slots.next.wrapping_add(1);
        slots.handles[slot] = Some((number, handle));
        number
    }

    /// The upper halves of numbers count from here on.
    pub(crate) fn count_from(&self, next: u32) {
        self.shards.iter().for_each(|shard| shard.lock().next = next);
    }

    fn slot_of(fh: u64) -> Option<(usize, usize)> {
        let fh = fh as u32 as usize;
        Some((fh % SHARDS, (fh / SHARDS).checked_sub(1)?))
    }

    /// The handle, if it is one of this inode.
    pub(crate) fn get(&self, ino: Ino, fh: u64) -> Option<Arc<Handle>> {
        let (shard, slot) = Self::slot_of(fh)?;
        let (number, handle) = self.shards[shard].lock().handles.get(slot)?.clone()?;
        (number == fh && handle.inode.ino == ino).then_some(handle)
    }

    pub(crate) fn remove(&self, fh: u64) -> Option<Arc<Handle>> {
        let (shard, slot) = Self::slot_of(fh)?;
        let mut slots = self.shards[shard].lock();
        let (_, handle) = slots.handles.get_mut(slot)?.take_if(|(number, _)| *number == fh)?;
        slots.free.push(slot);
        slots.by_ino.remove(&(handle.inode.ino, slot));
        Some(handle)
    }

    /// The inode's handles that `uid` opened; all of them for root.
    pub(crate) fn of(&self, ino: Ino, uid: u32) -> Vec<Arc<Handle>> {
        let slots = self.shards[ino as usize % SHARDS].lock();
        let all = slots.by_ino.range((ino, 0)..=(ino, usize::MAX));
        let all = all.filter_map(|(_, slot)| slots.handles[*slot].as_ref());
        let all = all.map(|(_, handle)| handle);
        all.filter(|handle| uid == 0 || handle.uid == uid).cloned().collect()
    }

    /// The inodes with a handle that writes, each once.
    pub(crate) fn open_for_writing(&self) -> Vec<Ino> {
        let mut open = Vec::new();
        for slots in self.shards.iter().map(|shard| shard.lock()) {
            let all = slots.handles.iter().flatten().map(|(_, handle)| handle);
            open.extend(all.filter(|handle| handle.writes).map(|handle| handle.inode.ino));
        }
        open.sort_unstable();
        open.dedup();
        open
    }

    /// What `of` makes of each, with its number.
    pub(crate) fn map<T>(&self, of: impl Fn(u64, &Handle) -> T) -> Vec<T> {
        let mut all = Vec::new();
        for slots in self.shards.iter().map(|shard| shard.lock()) {
            let open = slots.handles.iter().flatten();
            all.extend(open.map(|(number, handle)| of(*number, handle)));
        }
        all
    }

    /// Gives open files the numbers that they had. There are none yet.
    pub(crate) fn restore(&self, open: Vec<(u64, Handle)>) {
        for (fh, handle) in open {
            let Some((shard, slot)) = Self::slot_of(fh) else { continue };
            let mut slots = self.shards[shard].lock();
            if slots.handles.len() <= slot {
                slots.handles.resize_with(slot + 1, || None);
            }
            slots.by_ino.insert((handle.inode.ino, slot));
            slots.handles[slot] = Some((fh, Arc::new(handle)));
        }
        for mut slots in self.shards.iter().map(|shard| shard.lock()) {
            let free = |slot: &usize| slots.handles[*slot].is_none();
            slots.free = (0..slots.handles.len()).filter(free).collect();
        }
    }

    /// Takes all of them.
    pub(crate) fn drain(&self) -> Vec<Arc<Handle>> {
        let take = |s: &Mutex<Slots>| std::mem::take(&mut *s.lock()).handles;
        self.shards.iter().flat_map(take).flatten().map(|(_, handle)| handle).collect()
    }

    pub(crate) fn len(&self) -> usize {
        self.shards.iter().map(|s| s.lock()).map(|s| s.handles.len() - s.free.len()).sum()
    }
}
