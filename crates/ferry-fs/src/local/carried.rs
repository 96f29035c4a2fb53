//! What a process that goes on with a mount needs of the one before: the files that programs have
//! open, and the inodes that the kernel knows. All else is on the volume, which the one before has
//! closed in order.

use crate::api::{Errno, Ino, ROOT, Timestamp};
use crate::cache::frame::FOLIO_BYTES;
use crate::cache::memory::LeftFrame;
use crate::error::FsError;
use crate::errseq::ErrorCursor;
use crate::file::read::Misses;
use crate::file::stream::Stream;
use crate::in_order::LeftInOrder;
use crate::inode::incore::Inode;
use crate::inode::residency::Remembered;
use crate::keys::BLOCK;
use crate::known::{Known, KnownFile, KnownInode, LeftBehind, LeftWords, inode_flag};
use crate::local::handles::Handle;
use crate::local::local_fs::LocalFs;
use crate::local::lost_names;
use crate::posix::is_dir;
use crate::session_store::SessionStore;
use crate::store::data_store::{At, Touch};
use ferry_journal::{RequestId, Seq};
use std::collections::HashSet;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// What the encoded form begins with; the number is that of the form.
const MAGIC: u64 = u64::from_le_bytes(*b"ferrygo2");

/// Where [`Carried::last`] is in that form.
const LAST_AT: u64 = 8 * (1 + 4 + 2);

/// An open file.
#[derive(Clone, Copy, Debug, Default, FromBytes, Immutable, IntoBytes, KnownLayout, PartialEq)]
#[repr(C)]
pub(crate) struct CarriedFile {
    fh: u64,
    ino: Ino,
    error_cursor: u64,
    error_closed: u64,
    kernel_write_errors: u64,
    uid: u32,
    flags: u32,
}

/// Flags of a [`CarriedFile`].
mod file_flag {
    pub(super) const NOATIME: u32 = 1;
    pub(super) const UNCACHED: u32 = 2;
    pub(super) const DIRECT: u32 = 4;
    pub(super) const BYPASSING: u32 = 8;
    pub(super) const WRITES: u32 = 16;
}

/// An inode that the kernel knows.
#[derive(Clone, Copy, Debug, Default, FromBytes, Immutable, IntoBytes, KnownLayout, PartialEq)]
#[repr(C)]
struct CarriedInode {
    ino: Ino,
    lookups: u32,
    /// Those flags of [`Inode`] that the volume does not have.
    flags: u32,
}

/// The flags that are carried.
const INODE_FLAGS: u32 = Inode::MAPPED | Inode::LINKABLE | Inode::NAMELESS;

/// An inode of which writes have failed.
#[derive(Clone, Copy, Debug, Default, FromBytes, Immutable, IntoBytes, KnownLayout, PartialEq)]
#[repr(C)]
struct CarriedErrors {
    ino: Ino,
    of_contents: u64,
    of_kernel: u64,
}

/// What is carried from one process to the next.
#[derive(Debug, Default, PartialEq)]
pub struct Carried {
    files: Vec<CarriedFile>,
    inodes: Vec<CarriedInode>,
    errors: Vec<CarriedErrors>,
    snapshots: CarriedTrees,
    losses: CarriedLosses,
    /// The newest context of the volume when it was closed. 0: unknown.
    last: u64,
}

/// What a process before the one that carries has lost, because it was killed.
#[derive(Clone, Debug, Default, PartialEq)]
struct CarriedLosses {
    /// Inodes, each with its flags of [`inode_flag`].
    inodes: Vec<[u64; 2]>,
    /// As [`LostNames::carry`](crate::local::lost_names::LostNames::carry) gives it.
    names: Vec<u64>,
    /// The number of the volume.
    volume: [u64; 2],
}

/// The trees of the snapshots that programs have looked up.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct CarriedTrees {
    /// Trees begin here.
    pub first: u64,
    /// The numbers of the snapshots, by their trees.
    pub numbers: Vec<u64>,
}

impl Carried {
    /// With the trees of snapshots.
    pub(crate) fn with_snapshots(self, snapshots: CarriedTrees) -> Self {
        Self { snapshots, ..self }
    }

    pub(crate) fn snapshots(&self) -> &CarriedTrees {
        &self.snapshots
    }

    /// For the process that goes on. `memory` has it encoded, for all who do so in turn.
    pub fn in_order(&self, memory: OwnedFd) -> LeftInOrder {
        LeftInOrder::new(Seq(self.last), memory, LAST_AT)
    }

    /// How many open files and known inodes it has.
    pub fn counts(&self) -> (usize, usize) {
        (self.files.len(), self.inodes.len())
    }

    /// As bytes.
    pub fn encode(&self) -> Vec<u8> {
        let CarriedTrees { first, numbers } = &self.snapshots;
        let CarriedLosses { inodes: lost, names, volume } = &self.losses;
        let counts = [self.files.len(), self.inodes.len(), self.errors.len(), numbers.len()];
        let counts = [counts, [lost.len(), names.len(), self.last as usize, 0]];
        let counts = counts.map(|part| part.map(|n| n as u64));
        let mut bytes = MAGIC.to_le_bytes().to_vec();
        bytes.extend_from_slice(counts.as_bytes());
        bytes.extend_from_slice(self.files.as_bytes());
        bytes.extend_from_slice(self.inodes.as_bytes());
        bytes.extend_from_slice(self.errors.as_bytes());
        bytes.extend_from_slice(numbers.as_bytes());
        bytes.extend_from_slice(lost.as_bytes());
        bytes.extend_from_slice(names.as_bytes());
        bytes.extend_from_slice(volume.as_bytes());
        bytes.extend_from_slice(first.as_bytes());
        bytes
    }

    /// From bytes; `None`: another form, or not whole.
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        let (magic, rest) = u64::read_from_prefix(bytes).ok()?;
        let ([files, inodes, errors, numbers], rest) = <[u64; 4]>::read_from_prefix(rest).ok()?;
        let ([lost, names, last, _], rest) = <[u64; 4]>::read_from_prefix(rest).ok()?;
        let (files, rest) = entries(rest, files)?;
        let (inodes, rest) = entries(rest, inodes)?;
        let (errors, rest) = entries(rest, errors)?;
        let (numbers, rest) = entries(rest, numbers)?;
        let (lost, rest) = entries(rest, lost)?;
        let (names, rest) = entries(rest, names)?;
        let (volume, rest) = <[u64; 2]>::read_from_prefix(rest).ok()?;
        let losses = CarriedLosses { inodes: lost, names, volume };
        let snapshots = CarriedTrees { first: u64::read_from_bytes(rest).ok()?, numbers };
        (magic == MAGIC).then_some(Self { files, inodes, errors, snapshots, losses, last })
    }
}

/// The first bit at or behind `from`.
fn next_bit(bits: u16, from: u32) -> Option<u32> {
    let behind = u32::from(bits).checked_shr(from).filter(|bits| *bits != 0)?;
    Some(from + behind.trailing_zeros())
}

/// So many entries, and the bytes behind them.
fn entries<T: FromBytes>(bytes: &[u8], count: u64) -> Option<(Vec<T>, &[u8])> {
    let len = usize::try_from(count).ok()?.checked_mul(size_of::<T>())?;
    let (entries, rest) = bytes.split_at_checked(len)?;
    let entries = entries.chunks_exact(size_of::<T>()).map(|entry| T::read_from_bytes(entry).ok());
    Some((entries.collect::<Option<_>>()?, rest))
}

/// An open file, as it is carried.
pub(crate) fn carried_file(fh: u64, handle: &Handle) -> CarriedFile {
    let flag = |is_set: bool, flag: u32| if is_set { flag } else { 0 };
    CarriedFile {
        fh,
        ino: handle.inode.ino,
        error_cursor: handle.error_cursor.value(),
        error_closed: handle.error_closed.value(),
        kernel_write_errors: handle.kernel_write_errors.value(),
        uid: handle.uid,
        flags: flag(handle.noatime, file_flag::NOATIME)
            | flag(handle.misses == Misses::Uncached, file_flag::UNCACHED)
            | flag(handle.direct, file_flag::DIRECT)
            | flag(handle.bypassing, file_flag::BYPASSING)
            | flag(handle.writes, file_flag::WRITES),
    }
}

impl CarriedFile {
    /// What outlives a process that is killed. All errors that came before were told, or are told
    /// again.
    pub(crate) fn known(&self) -> KnownFile {
        KnownFile { fh: self.fh, ino: self.ino, uid: self.uid, flags: self.flags }
    }
}

impl LocalFs {
    /// What the next process needs. No request is under way, and none comes any more. From now on
    /// nothing that has lost its last name is reclaimed here.
    pub fn carry(&self) -> Carried {
        self.keep_removed();
        let files = self.handles.map(carried_file);
        let (mut inodes, mut errors) = (Vec::new(), Vec::new());
        for (ino, known) in self.table.remembered() {
            let flags = if known.is_mapped() { Inode::MAPPED } else { 0 };
            inodes.push(CarriedInode { ino, lookups: known.lookups() as u32, flags });
        }
        for inode in self.table.all().into_iter().filter(|inode| inode.is_known()) {
            let lookups = u32::try_from(inode.lookups.load(Ordering::Acquire)).unwrap_or(u32::MAX);
            let flags = INODE_FLAGS & inode.flags();
            inodes.push(CarriedInode { ino: inode.ino, lookups, flags });
            let all = [&inode.file.errors, &inode.kernel_write_errors];
            let [of_contents, of_kernel] = all.map(|errors| errors.value());
            if of_contents | of_kernel != 0 {
                errors.push(CarriedErrors { ino: inode.ino, of_contents, of_kernel });
            }
        }
        let lost = self.options.known.as_ref().map(|known| known.lost()).unwrap_or_default();
        let losses = CarriedLosses {
            inodes: lost.into_iter().map(|(ino, flags)| [ino, u64::from(flags)]).collect(),
            names: self.lost_names.carry(),
            volume: self.sb.number(),
        };
        Carried { files, inodes, errors, losses, ..Carried::default() }
    }

    /// The same, once the volume is closed.
    pub fn closed(&self, carried: Carried) -> Carried {
        let last = if self.options.read_only { 0 } else { self.journal.durable().0 };
        Carried { last, ..carried }
    }

    /// Goes on only with the volume that the process before had.
    fn must_be(&self, volume: [u64; 2]) -> Result<(), FsError> {
        if volume == self.sb.number() {
            return Ok(());
        }
        tracing::error!(volume = self.name, "that is another volume than the one that is mounted");
        Err(FsError::Errno(Errno(libc::ESTALE)))
    }

    /// Notes all that the kernel knows where it outlives this process.
    fn note_known(&self, carried: &Carried) {
        let Some(known) = &self.options.known else { return };
        for CarriedInode { ino, lookups, flags } in &carried.inodes {
            known.count(*ino, *lookups);
            if flags & Inode::LINKABLE != 0 {
                self.note_linkable(*ino, true);
            }
        }
        for [ino, flags] in &carried.losses.inodes {
            known.lose(*ino, *flags as u32);
        }
        carried.files.iter().for_each(|file| known.opened(&file.known()));
        known.trees_begin(carried.snapshots.first);
        carried.snapshots.numbers.iter().for_each(|number| known.add_tree(*number));
    }

    /// Takes over what a process has left that was killed: [`FsOptions::left`]. No request was
    /// served yet. `None`: there is nothing, or not all of it had room.
    ///
    /// An error: it is of another volume. What is not on the volume is lost. Files that have lost
    /// changes say `EIO`, directories too. Requests that name an inode or a file that is not there
    /// any more get `ESTALE`. The kernel is told to forget what it has cached of these, when it can
    /// be.
    ///
    /// [`FsOptions::left`]: crate::FsOptions::left
    pub fn take_over_left(&self) -> Result<Option<Carried>, FsError> {
        let Some(LeftBehind { words, had_others }) = self.left.lock().take() else {
            return Ok(None);
        };
        // Of a store that is known already, by its epochs.
        let is_ours = self.options.read_only || self.recovered.is_ours || self.data.is_far();
        let had_others = had_others || !is_ours;
        // The numbers of contexts that were lost may be those of others now, so each inode that was
        // changed counts as one that has lost changes.
        let mut recovered = self.recovered.clone();
        if had_others {
            recovered.last = Seq(0);
        }
        let Some(left) = words.known(&recovered, had_others) else { return Ok(None) };
        self.must_be(left.volume)?;
        let nameless = self.reclaimer.queue.lock().leftovers.clone();
        let mut carried = Carried::default();
        // The kernel knows the root without a lookup.
        let by_kernel = |it: &&KnownInode| it.ino != ROOT && it.lookups > 0;
        for KnownInode { ino, lookups, flags, .. } in left.inodes.iter().filter(by_kernel) {
            // What is not there any more stays known, too: its number means nothing else.
            let is_nameless = nameless.contains(ino);
            let is_linkable = is_nameless && flags & inode_flag::LINKABLE != 0;
            // The kernel may have pages of any file.
            let flags = Inode::MAPPED
                | if is_nameless { Inode::NAMELESS } else { 0 }
                | if is_linkable { Inode::LINKABLE } else { 0 };
            carried.inodes.push(CarriedInode { ino: *ino, lookups: *lookups, flags });
        }
        let is_there = |file: &&KnownFile| matches!(self.table.get(file.ino), Ok(Some(_)));
        let carried_file = |&KnownFile { fh, ino, uid, flags }: &KnownFile| CarriedFile {
            fh,
            ino,
            uid,
            flags,
            ..CarriedFile::default()
        };
        carried.files = left.files.iter().filter(is_there).map(carried_file).collect();
        let (first, numbers) = left.trees;
        carried.snapshots = CarriedTrees { first, numbers };
        let has_lost = |inode: &&KnownInode| inode.flags & inode_flag::LOST != 0;
        let lost = left.inodes.iter().filter(has_lost).map(|inode| inode.ino);
        // Whatever is open may have lost its path.
        let moved = carried.files.iter().filter(|_| left.has_lost_move).map(|file| file.ino);
        // Also in the memory of the processes behind this one: any directory has lost its path.
        let any = left.has_lost_move.then_some(lost_names::VOLUME);
        let mut lost: HashSet<Ino> = lost.chain(moved).chain(any).collect();
        let flags = u64::from(inode_flag::LOST | inode_flag::RESIZED);
        carried.losses.inodes = lost.iter().map(|ino| [*ino, flags]).collect();
        // The kernel has their old sizes yet, though programs were told of what they have lost.
        let is_told =
            |it: &&KnownInode| it.flags & inode_flag::RESIZED != 0 && !lost.contains(&it.ino);
        let told = left.inodes.iter().filter(is_told);
        carried.losses.inodes.extend(told.map(|it| [it.ino, inode_flag::RESIZED.into()]));
        carried.losses.volume = left.volume;
        self.adopt_all(&carried)?;
        self.note_made(&left.made);
        // The space of what has no name is on its way back, if the kernel does not know it.
        let is_unsaved = |it: &&KnownInode| {
            it.flags & (inode_flag::UNSAVED | inode_flag::LOST) == inode_flag::UNSAVED
                && (it.lookups > 0 || !nameless.contains(&it.ino))
        };
        let mut restored = 0;
        for inode in left.inodes.iter().filter(is_unsaved) {
            let frames = left.contents.get(&inode.ino).map_or(&[][..], Vec::as_slice);
            match self.restore(&words, inode, frames) {
                Ok(()) => restored += 1,
                Err(error) => {
                    tracing::warn!(inode = inode.ino, %error, "contents are lost");
                    lost.insert(inode.ino);
                    self.has_losses.store(true, Ordering::Release);
                    if let Some(known) = &self.options.known {
                        known.lose(inode.ino, inode_flag::LOST | inode_flag::RESIZED);
                    }
                }
            }
        }
        let has_lost_move = lost.remove(&lost_names::VOLUME);
        let mut directories: HashSet<Ino> = HashSet::new();
        for ino in &lost {
            directories.insert(lost_names::VOLUME);
            let Some(inode) = self.table.get(*ino)? else { continue };
            if is_dir(inode.state.read().rec.mode) {
                directories.insert(*ino);
            } else {
                inode.file.errors.add(Errno(libc::EIO));
            }
        }
        self.lost_names.note(directories, has_lost_move);
        tracing::warn!(
            volume = self.name,
            open = carried.files.len(),
            closed = left.files.len() - carried.files.len(),
            lost = lost.len(),
            restored,
            known = left.inodes.len(),
            "a process was killed: this one goes on from what was durable"
        );
        // What is not lost is as the kernel has it, but for what is only read: somebody else may
        // have changed that since.
        let is_changed = self.options.read_only && left.opened != self.recovered.last.0;
        let all = left.inodes.iter().map(|inode| inode.ino);
        *self.stale.lock() =
            Some(if is_changed { all.collect() } else { lost.into_iter().collect() });
        Ok(Some(carried))
    }

    /// Writes contents again that the process before had, and that no context has.
    fn restore(
        &self,
        words: &LeftWords,
        left: &KnownInode,
        frames: &[LeftFrame],
    ) -> Result<(), FsError> {
        let Some(inode) = self.table.get(left.ino)? else { return Ok(()) };
        let known = self.options.known.as_deref();
        // It is noted that contents are unsaved only of what has a record.
        known.inspect(|known| known.count(left.ino, 1));
        let changed = Timestamp(left.changed.into());
        let written = frames.iter().try_for_each(|frame| {
            let mut at = 0;
            while let Some(block) = next_bit(frame.blocks, at) {
                let blocks = (frame.blocks >> block).trailing_ones();
                at = block + blocks;
                let inside = block as usize * BLOCK as usize;
                let from = frame.index * FOLIO_BYTES as u64 + inside as u64;
                let len = (u64::from(blocks) * BLOCK).min(left.size.saturating_sub(from));
                let mut bytes = vec![0; len as usize];
                words.copy_out(frame, inside, &mut bytes);
                if !bytes.is_empty() {
                    let touch = Touch::Edit(&mut |record| {
                        record.mtime = changed;
                        record.ctime = record.ctime.max(changed);
                    });
                    self.data.write(&inode, At::Offset(from), &bytes, touch)?;
                }
            }
            Ok::<(), FsError>(())
        });
        let size = inode.state.share().rec.size;
        let written = written.and_then(|()| match size < left.size {
            true => self.data.grow(&inode, left.size).map(drop),
            false => Ok(()),
        });
        known.inspect(|known| known.uncount(left.ino, 1, self.journal.durable().0));
        written
    }

    /// The next process must know of them, too, should this one be killed before they are answered.
    fn note_made(&self, made: &[RequestId]) {
        if let Some(known) = &self.options.known {
            made.iter().for_each(|request| known.joins(*request, 0));
        }
        let first = self.made_before.set(made.iter().map(|request| request.unique).collect());
        debug_assert!(first.is_ok(), "a process takes over once");
    }

    /// Takes over what the process before knew. The volume was opened with
    /// [`goes_on`](crate::FsOptions::goes_on), and no request was served yet.
    pub fn take_over(&self, carried: &Carried) -> Result<(), FsError> {
        self.must_be(carried.losses.volume)?;
        self.lost_names.take_over(&carried.losses.names);
        self.adopt_all(carried)
    }

    fn adopt_all(&self, carried: &Carried) -> Result<(), FsError> {
        self.has_losses.store(!carried.losses.inodes.is_empty(), Ordering::Release);
        self.note_known(carried);
        for CarriedInode { ino, lookups, flags } in &carried.inodes {
            // Beyond that it counts as known until the mount ends.
            let lookups = u64::from(*lookups).min(Remembered::MOST);
            let known = Remembered::new(lookups, flags & Inode::MAPPED != 0);
            self.table.adopt(*ino, known.unwrap_or_default());
            if flags & (Inode::LINKABLE | Inode::NAMELESS) != 0 {
                self.table.need(*ino)?.set_flag(*flags);
            }
        }
        for CarriedErrors { ino, of_contents, of_kernel } in &carried.errors {
            let inode = self.table.need(*ino)?;
            inode.file.errors.restore(*of_contents);
            inode.kernel_write_errors.restore(*of_kernel);
        }
        let open = carried.files.iter().map(|file| Ok((file.fh, self.reopened(file)?)));
        self.handles.restore(open.collect::<Result<_, FsError>>()?);
        self.handles.count_from(self.env.entropy.next_u64() as u32);
        self.reclaim_leftovers();
        Ok(())
    }

    /// Whether a process before has left this flag, one of what is lost, with the inode.
    pub(crate) fn has_lost(&self, ino: Ino, flag: u32) -> bool {
        let has = |known: &Known| known.flags(ino) & flag != 0;
        self.has_losses.load(Ordering::Acquire) && self.options.known.as_deref().is_some_and(has)
    }

    /// Somebody was told that changes of the inode are lost. The next process need not say so
    /// again, unless a descriptor is open that was not told.
    pub(crate) fn note_told(&self, inode: &Inode) {
        if !self.has_lost(inode.ino, inode_flag::LOST) {
            return;
        }
        let is_untold = |_, handle: &Handle| {
            handle.inode.ino == inode.ino
                && inode.file.errors.untold(&handle.error_cursor).is_some()
        };
        if let Some(known) = &self.options.known
            && !self.handles.map(is_untold).contains(&true)
        {
            known.change_flags(inode.ino, inode_flag::LOST, 0);
        }
    }

    /// The inode of a file that is about to be opened may have left memory since its changes were
    /// lost.
    pub(crate) fn recall_loss(&self, inode: &Inode) {
        if inode.file.errors.is_empty() && self.has_lost(inode.ino, inode_flag::LOST) {
            inode.file.errors.add(Errno(libc::EIO));
        }
    }

    fn reopened(&self, file: &CarriedFile) -> Result<Handle, FsError> {
        let is_set = |flag: u32| file.flags & flag != 0;
        let inode: Arc<Inode> = self.table.need(file.ino)?;
        inode.opens.fetch_add(1, Ordering::AcqRel);
        let bypassing = is_set(file_flag::BYPASSING);
        inode.bypassing.fetch_add(u32::from(bypassing), Ordering::AcqRel);
        Ok(Handle {
            inode,
            uid: file.uid,
            error_cursor: ErrorCursor::at(file.error_cursor),
            error_closed: ErrorCursor::at(file.error_closed),
            noatime: is_set(file_flag::NOATIME),
            misses: if is_set(file_flag::UNCACHED) { Misses::Uncached } else { Misses::Cached },
            stream: Stream::default(),
            direct: is_set(file_flag::DIRECT),
            bypassing,
            writes: is_set(file_flag::WRITES),
            kernel_write_errors: ErrorCursor::at(file.kernel_write_errors),
        })
    }
}
