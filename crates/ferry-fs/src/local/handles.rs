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
    handles: Vec<Option<Arc<Handle>>>,
    free: Vec<usize>,
    /// The same by inode.
    by_ino: BTreeSet<(Ino, usize)>,
}

/// All open files. A handle's number is never 0, which stands for none.
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
        slots.handles[slot] = Some(handle);
        Self::number(shard, slot)
    }

    fn number(shard: usize, slot: usize) -> u64 {
        ((slot + 1) * SHARDS + shard) as u64
    }

    fn slot_of(fh: u64) -> Option<(usize, usize)> {
        let fh = usize::try_from(fh).ok()?;
        Some((fh % SHARDS, (fh / SHARDS).checked_sub(1)?))
    }

    /// The handle, if it is one of this inode.
    pub(crate) fn get(&self, ino: Ino, fh: u64) -> Option<Arc<Handle>> {
        let (shard, slot) = Self::slot_of(fh)?;
        let handle = self.shards[shard].lock().handles.get(slot)?.clone()?;
        (handle.inode.ino == ino).then_some(handle)
    }

    pub(crate) fn remove(&self, fh: u64) -> Option<Arc<Handle>> {
        let (shard, slot) = Self::slot_of(fh)?;
        let mut slots = self.shards[shard].lock();
        let handle = slots.handles.get_mut(slot)?.take()?;
        slots.free.push(slot);
        slots.by_ino.remove(&(handle.inode.ino, slot));
        Some(handle)
    }

    /// The inode's handles that `uid` opened; all of them for root.
    pub(crate) fn of(&self, ino: Ino, uid: u32) -> Vec<Arc<Handle>> {
        let slots = self.shards[ino as usize % SHARDS].lock();
        let all = slots.by_ino.range((ino, 0)..=(ino, usize::MAX));
        let all = all.filter_map(|(_, slot)| slots.handles[*slot].as_ref());
        all.filter(|handle| uid == 0 || handle.uid == uid).cloned().collect()
    }

    /// The inodes with a handle that writes, each once.
    pub(crate) fn open_for_writing(&self) -> Vec<Ino> {
        let mut open = Vec::new();
        for slots in self.shards.iter().map(|shard| shard.lock()) {
            let all = slots.handles.iter().flatten();
            open.extend(all.filter(|handle| handle.writes).map(|handle| handle.inode.ino));
        }
        open.sort_unstable();
        open.dedup();
        open
    }

    /// What `of` makes of each, with its number.
    pub(crate) fn map<T>(&self, of: impl Fn(u64, &Handle) -> T) -> Vec<T> {
        let mut all = Vec::new();
        for (shard, slots) in self.shards.iter().map(|shard| shard.lock()).enumerate() {
            let open = slots.handles.iter().enumerate();
            let open = open.filter_map(|(slot, handle)| Some((slot, handle.as_deref()?)));
            all.extend(open.map(|(slot, handle)| of(Self::number(shard, slot), handle)));
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
            slots.handles[slot] = Some(Arc::new(handle));
        }
        for mut slots in self.shards.iter().map(|shard| shard.lock()) {
            let free = |slot: &usize| slots.handles[*slot].is_none();
            slots.free = (0..slots.handles.len()).filter(free).collect();
        }
    }

    /// Takes all of them.
    pub(crate) fn drain(&self) -> Vec<Arc<Handle>> {
        let take = |s: &Mutex<Slots>| std::mem::take(&mut *s.lock()).handles;
        self.shards.iter().flat_map(take).flatten().collect()
    }

    pub(crate) fn len(&self) -> usize {
        self.shards.iter().map(|s| s.lock()).map(|s| s.handles.len() - s.free.len()).sum()
    }
}
