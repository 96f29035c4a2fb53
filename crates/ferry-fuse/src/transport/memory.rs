//! The memory of a mount's queues. The kernel has the addresses of its slots, and reads answers
//! through them in whichever process commits one. So the memory is a file without a name, which the
//! next process of the mount maps at the same address. What was agreed with the kernel is in it,
//! too, because the kernel says INIT only once.
//!
//! The process may be killed between any two stores, and the next one must find what each slot
//! holds ([`RequestSlot::holds`]). The kernel writes the number of a request into the slot last;
//! numbers do not come again. Beside it the slot says which request it has the answer of, and of
//! which that answer was committed. To write an answer destroys the request. So either the answer
//! is in the queue's own page before ([`QueuePage`]), and can be written again; or the request can
//! be restored and replayed, because it has no payload and changes nothing.
#![expect(unsafe_code, reason = "memory that another process has written")]

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use rustix::fs::{FallocateFlags, MemfdFlags, fallocate, ftruncate, memfd_create};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use crate::abi::URING_HEADER;
use crate::init::{Agreed, IO_MAX};

/// Slots that a queue has at most: 16,384 parked requests.
pub(super) const SLOTS_MAX: usize = 1 << 14;
const PAGE: usize = 4096;
/// Bytes of the first part of a slot, which has its headers. Those of all slots lie together: a
/// slot that is not in use takes no page of its own. The payloads follow.
const HEADER: usize = 512;
/// Where in its first part a slot has what the kernel is told of its two buffers, and its words.
const PARTS_AT: usize = 320;
const WORDS_AT: usize = 384;
const _: () = assert!(URING_HEADER <= PARTS_AT && (SLOTS_MAX * HEADER).is_multiple_of(PAGE));
/// Bytes of the page of a queue before the body of an answer.
const BODY_AT: usize = 64;
/// The longest body that has room in it.
const BODY_MAX: usize = PAGE - BODY_AT;
/// Where the memory is mapped, if nothing is there: far from what the system chooses by itself.
const ADDRESSES: std::ops::Range<usize> = 0x2000_0000_0000..0x5000_0000_0000;
/// The next address that is tried.
const ADDRESS_STEP: usize = 0x0100_0000_0000;
/// How many addresses this process has tried. A mount that leaves its address for a moment, to go
/// on in the same process, finds it free.
static STEPS: AtomicUsize = AtomicUsize::new(0);
/// What the front begins with; the number is that of the layout.
const MAGIC: u64 = u64::from_le_bytes(*b"ferryqm3");
/// Where in the front the numbers of slots are, one for each queue.
const COUNTS_AT: usize = 64;
/// Queues that the front has room for.
const QUEUES_MAX: usize = (PAGE - COUNTS_AT) / 8;

/// The front of the memory, in its first page.
#[derive(Clone, Copy, Debug, FromBytes, Immutable, IntoBytes, KnownLayout)]
#[repr(C)]
struct Front {
    magic: u64,
    address: u64,
    queues: u64,
    slot: u64,
    agreed: u64,
}

/// What a slot holds, as a process finds it that goes on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SlotHolds {
    /// Nothing: it was never used, or the kernel has taken its answer.
    Nothing,
    /// A request that was not answered. It may have been served in part.
    Request,
    /// The kind of that request was overwritten by that of its answer: this one.
    RequestOf(u32),
    /// An answer. Whether the kernel has taken it is not known.
    Answer,
}

/// The memory of all queues of a mount.
#[derive(Debug)]
pub(crate) struct QueueMemory {
    file: OwnedFd,
    at: NonNull<u8>,
    len: usize,
    queues: usize,
}

// SAFETY: the mapping is the struct's own. Slots are handed out once each, and the rest is atomic.
unsafe impl Send for QueueMemory {}
// SAFETY: the same.
unsafe impl Sync for QueueMemory {}

/// The number of a slot among those of all queues.
pub(super) fn slot_number(queue: u16, slot: usize) -> usize {
    usize::from(queue) * SLOTS_MAX + slot
}

fn len_of(queues: usize) -> usize {
    PAGE + queues * (PAGE + SLOTS_MAX * (HEADER + IO_MAX))
}

/// Maps the memory of so many queues at this address.
fn map(file: &OwnedFd, address: usize, queues: usize) -> io::Result<NonNull<u8>> {
    let access = ProtFlags::READ | ProtFlags::WRITE;
    let how = MapFlags::SHARED | MapFlags::FIXED_NOREPLACE | MapFlags::NORESERVE;
    // SAFETY: the kernel refuses an address where something is mapped already.
    let at = unsafe { mmap(address as *mut _, len_of(queues), access, how, file, 0) }?;
    NonNull::new(at.cast::<u8>()).ok_or(io::ErrorKind::AddrInUse.into())
}

impl QueueMemory {
    /// For a new mount with so many queues.
    pub(crate) fn new(queues: usize) -> io::Result<Self> {
        if queues > QUEUES_MAX {
            return Err(io::Error::other(
                "there are more cores than the memory of queues has room for",
            ));
        }
        let file = memfd_create("ferry-queues", MemfdFlags::CLOEXEC)?;
        ftruncate(&file, len_of(queues) as u64)?;
        let mut tries = 0..ADDRESSES.len() / ADDRESS_STEP;
        let at = loop {
            tries.next().ok_or(io::ErrorKind::AddrInUse)?;
            let steps = STEPS.fetch_add(1, Ordering::Relaxed) * ADDRESS_STEP;
            match map(&file, ADDRESSES.start + steps % ADDRESSES.len(), queues) {
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                mapped => break mapped?,
            }
        };
        Ok(Self { file, at, len: len_of(queues), queues })
    }

    /// What was agreed with the kernel, by the memory's file.
    pub(crate) fn agreed(file: &OwnedFd) -> io::Result<Agreed> {
        Ok(Agreed::from_bits(Self::front(&file.try_clone()?.into())?.agreed))
    }

    fn front(file: &File) -> io::Result<Front> {
        let other = || io::Error::other("the queues have another layout in this version of ferry");
        let mut front = [0; size_of::<Front>()];
        file.read_exact_at(&mut front, 0)?;
        let front = Front::read_from_bytes(&front).map_err(|_| other())?;
        let queues = front.queues as usize;
        let fits = queues <= QUEUES_MAX && file.metadata()?.len() == len_of(queues) as u64;
        let is_ours = front.magic == MAGIC && front.slot == (HEADER + IO_MAX) as u64 && fits;
        is_ours.then_some(front).ok_or_else(other)
    }

    /// That of the process before, at the same address.
    pub(crate) fn of(file: OwnedFd) -> io::Result<(Self, Agreed)> {
        let file = File::from(file);
        let front = Self::front(&file)?;
        let (address, queues) = (front.address as usize, front.queues as usize);
        let file = OwnedFd::from(file);
        let at = map(&file, address, queues)?;
        Ok((Self { file, at, len: len_of(queues), queues }, Agreed::from_bits(front.agreed)))
    }

    /// Notes what was agreed with the kernel.
    pub(crate) fn set_agreed(&self, agreed: &Agreed) -> io::Result<()> {
        let front = Front {
            magic: MAGIC,
            address: self.at.as_ptr() as u64,
            queues: self.queues as u64,
            slot: (HEADER + IO_MAX) as u64,
            agreed: agreed.bits(),
        };
        File::from(self.file()?).write_all_at(front.as_bytes(), 0)
    }

    /// The file, for the process that goes on.
    pub(crate) fn file(&self) -> io::Result<OwnedFd> {
        self.file.as_fd().try_clone_to_owned()
    }

    /// How many queues it has memory for.
    pub(crate) fn queues(&self) -> u16 {
        self.queues as u16
    }

    /// How many slots a queue has.
    pub(crate) fn slots(&self, queue: u16) -> usize {
        self.count(queue).load(Ordering::Acquire) as usize
    }

    fn count(&self, queue: u16) -> &AtomicU64 {
        assert!(usize::from(queue) < self.queues, "there is such a queue");
        // SAFETY: it lies in the first page, is aligned, and used as an atomic by everybody.
        unsafe { &*self.at.as_ptr().add(COUNTS_AT + usize::from(queue) * 8).cast::<AtomicU64>() }
    }

    /// Where the payload of a slot begins.
    fn payload_at(&self, queue: u16, slot: usize) -> usize {
        let payloads = PAGE + self.queues * (PAGE + SLOTS_MAX * HEADER);
        payloads + slot_number(queue, slot) * IO_MAX
    }

    /// Nobody needs what the payload of this slot has: its memory goes back to the system.
    pub(crate) fn empty_payload(&self, queue: u16, slot: usize) {
        let how = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        let at = self.payload_at(queue, slot) as u64;
        if let Err(error) = fallocate(&self.file, how, at, IO_MAX as u64) {
            tracing::debug!(%error, "memory of a queue stays");
        }
    }

    /// The page of a queue. Only the queue's own thread asks, once.
    pub(crate) fn page(self: &Arc<Self>, queue: u16) -> QueuePage {
        assert!(usize::from(queue) < self.queues, "there is such a queue");
        // SAFETY: it lies in the mapping, whose first byte is not at zero.
        let at = unsafe { self.at.add(PAGE + usize::from(queue) * PAGE) };
        QueuePage { at, _memory: Arc::clone(self) }
    }

    /// A slot of a queue. Only the queue's own thread asks, once for each.
    pub(crate) fn slot(self: &Arc<Self>, queue: u16, slot: usize) -> RequestSlot {
        assert!(usize::from(queue) < self.queues && slot < SLOTS_MAX, "there is such a slot");
        self.count(queue).fetch_max(slot as u64 + 1, Ordering::AcqRel);
        let headers = PAGE + self.queues * PAGE + slot_number(queue, slot) * HEADER;
        // SAFETY: both lie in the mapping, whose first byte is not at zero.
        let (at, payload) =
            unsafe { (self.at.add(headers), self.at.add(self.payload_at(queue, slot))) };
        let slot = RequestSlot { at, payload, _memory: Arc::clone(self) };
        slot.set_parts();
        slot
    }
}

impl Drop for QueueMemory {
    fn drop(&mut self) {
        // SAFETY: the mapping is the struct's own, and no slot is left: each holds the memory.
        let unmapped = unsafe { munmap(self.at.as_ptr().cast(), self.len) };
        debug_assert!(unmapped.is_ok(), "it is mapped");
    }
}

/// The buffers of one ring entry.
pub(crate) struct RequestSlot {
    /// Its first part.
    at: NonNull<u8>,
    payload: NonNull<u8>,
    _memory: Arc<QueueMemory>,
}

impl RequestSlot {
    fn set_parts(&self) {
        let part = |at: NonNull<u8>, len: usize| [at.as_ptr() as u64, len as u64];
        let parts = [part(self.at, URING_HEADER), part(self.payload, IO_MAX)];
        // SAFETY: two pairs of address and length, as `struct iovec` has them, inside the slot.
        unsafe { self.at.as_ptr().add(PARTS_AT).cast::<[[u64; 2]; 2]>().write(parts) }
    }

    /// Where the kernel finds the addresses and lengths of the two buffers.
    pub(crate) fn parts(&self) -> u64 {
        self.at.as_ptr() as u64 + PARTS_AT as u64
    }

    /// The headers and the payload. The kernel uses neither while this process has the slot.
    pub(crate) fn buffers(&mut self) -> (&mut [u8; URING_HEADER], &mut [u8]) {
        // SAFETY: two parts of the slot, which do not overlap, borrowed as `self` is.
        unsafe {
            (
                &mut *self.at.as_ptr().cast::<[u8; URING_HEADER]>(),
                std::slice::from_raw_parts_mut(self.payload.as_ptr(), IO_MAX),
            )
        }
    }

    /// Has so many bytes of the payload in memory, and in this process's tables of pages. While a
    /// process is being killed, the kernel has requests put into its slots still. It ends one with
    /// EINTR whose page it would have to bring in.
    pub(crate) fn bring_in(&mut self, bytes: usize) {
        let (_, payload) = self.buffers();
        let touched = payload[..bytes].iter().step_by(PAGE).fold(0, |all, byte| all ^ byte);
        std::hint::black_box(touched);
    }

    /// Its words: the request of which it has the answer, the one of which that was committed, the
    /// one of which the kind was overwritten, and that kind.
    fn words(&self) -> &[AtomicU64; 4] {
        // SAFETY: they lie in the slot, are aligned, and used as atomics by everybody.
        unsafe { &*self.at.as_ptr().add(WORDS_AT).cast::<[AtomicU64; 4]>() }
    }

    /// What it holds. `unique`: the number of the request that the kernel has put there last.
    pub(crate) fn holds(&self, unique: u64) -> SlotHolds {
        let [answered, committed, overwritten, opcode] =
            self.words().each_ref().map(|word| word.load(Ordering::Acquire));
        if unique == 0 || unique == committed {
            SlotHolds::Nothing
        } else if unique == answered {
            SlotHolds::Answer
        } else if unique == overwritten {
            SlotHolds::RequestOf(opcode as u32)
        } else {
            SlotHolds::Request
        }
    }

    /// The kind of this request is about to be overwritten.
    pub(crate) fn keep_opcode(&self, unique: u64, kind: u32) {
        let [_, _, overwritten, opcode] = self.words();
        opcode.store(u64::from(kind), Ordering::Release);
        overwritten.store(unique, Ordering::Release);
    }

    /// It has the whole answer of this request.
    pub(crate) fn set_answered(&self, unique: u64) {
        self.words()[0].store(unique, Ordering::Release);
    }

    /// The kernel has taken the answer of this request.
    pub(crate) fn set_committed(&self, unique: u64) {
        self.words()[1].store(unique, Ordering::Release);
    }
}

/// A page of a queue's own.
///
/// | bytes | what |
/// |---|---|
/// | 8 | number of the newest request without a meaning |
/// | 8 | the request of which the answer is here |
/// | 8 | its error, and the length of the body |
/// | from `BODY_AT` on | the body |
pub(crate) struct QueuePage {
    at: NonNull<u8>,
    _memory: Arc<QueueMemory>,
}

impl QueuePage {
    fn words(&self) -> &[AtomicU64; 3] {
        // SAFETY: they lie in the page, are aligned, and used as atomics by everybody.
        unsafe { &*self.at.as_ptr().cast::<[AtomicU64; 3]>() }
    }

    /// Room for the body of an answer. What was there before is none any more.
    pub(crate) fn body(&mut self) -> &mut [u8; BODY_MAX] {
        // SAFETY: so many bytes of the page, behind its words, borrowed as `self` is.
        unsafe { &mut *self.at.as_ptr().add(BODY_AT).cast::<[u8; BODY_MAX]>() }
    }

    /// The body is that of the answer to this request.
    pub(crate) fn set_answer(&self, unique: u64, error: i32, len: usize) {
        let [_, request, more] = self.words();
        more.store(u64::from(error as u32) << 32 | len as u64, Ordering::Release);
        request.store(unique, Ordering::Release);
    }

    /// The error and the length of the body of the answer to this request, if it is here.
    pub(crate) fn answer(&self, unique: u64) -> Option<(i32, usize)> {
        let [_, request, more] = self.words().each_ref().map(|word| word.load(Ordering::Acquire));
        let len = (more as u32 as usize).min(BODY_MAX);
        (request == unique).then_some(((more >> 32) as i32, len))
    }

    /// A number that no request without a meaning had.
    pub(crate) fn next_probe(&self) -> u64 {
        self.words()[0].fetch_add(1, Ordering::AcqRel) + 1
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::MetadataExt;

    const AGREED: Agreed = Agreed {
        setxattr_ext: true,
        no_opendir: false,
        io_uring: true,
        expires_names: false,
        forgets_all_names: false,
    };

    #[test]
    fn the_next_process_finds_the_slots_at_the_same_addresses() {
        let before = Arc::new(QueueMemory::new(2).expect("memory"));
        before.set_agreed(&AGREED).expect("it is written");
        let mut slot = before.slot(1, 7);
        let (headers, payload) = slot.buffers();
        headers[0] = 5;
        payload[IO_MAX - 1] = 6;
        slot.set_answered(5);
        let (address, parts) = (slot.at, slot.parts());
        let file = before.file().expect("a descriptor");
        drop((slot, before));
        let (after, agreed) = QueueMemory::of(file).expect("it is mapped");
        assert_eq!(agreed.bits(), AGREED.bits());
        let after = Arc::new(after);
        assert_eq!((after.slots(0), after.slots(1)), (0, 8));
        let mut slot = after.slot(1, 7);
        assert_eq!((slot.at, slot.parts(), slot.holds(5)), (address, parts, SlotHolds::Answer));
        let (headers, payload) = slot.buffers();
        assert_eq!((headers[0], payload[IO_MAX - 1]), (5, 6));
    }

    /// At each step the process may be killed.
    #[test]
    fn a_slot_says_what_it_holds_at_each_step_of_an_answer() {
        let memory = Arc::new(QueueMemory::new(1).expect("memory"));
        let (slot, mut page) = (memory.slot(0, 0), memory.page(0));
        assert_eq!(slot.holds(0), SlotHolds::Nothing, "it was never used");
        for unique in [2, 4] {
            assert_eq!((slot.holds(unique), page.answer(unique)), (SlotHolds::Request, None));
            page.body()[..3].copy_from_slice(b"abc");
            assert_eq!((slot.holds(unique), page.answer(unique)), (SlotHolds::Request, None));
            page.set_answer(unique, -5, 3);
            // From here on it is written again.
            assert_eq!(slot.holds(unique), SlotHolds::Request);
            assert_eq!(page.answer(unique), Some((-5, 3)));
            slot.set_answered(unique);
            assert_eq!(slot.holds(unique), SlotHolds::Answer);
            slot.set_committed(unique);
            assert_eq!(slot.holds(unique), SlotHolds::Nothing);
        }
        // One that is written at once: the request is replayed.
        slot.keep_opcode(6, 15);
        assert_eq!((slot.holds(6), page.answer(6)), (SlotHolds::RequestOf(15), None));
        slot.set_answered(6);
        assert_eq!(slot.holds(6), SlotHolds::Answer);
        // The kernel has taken it, which was not noted, and has put another request there.
        assert_eq!(slot.holds(8), SlotHolds::Request);
        let other = memory.file().expect("a descriptor");
        drop((slot, page));
        memory.set_agreed(&AGREED).expect("it is written");
        let next = memory.page(0).next_probe();
        drop(memory);
        let (after, _) = QueueMemory::of(other).expect("it is mapped");
        assert_eq!(Arc::new(after).page(0).next_probe(), next + 1, "numbers do not come again");
    }

    #[test]
    fn an_emptied_payload_takes_no_memory() {
        let memory = Arc::new(QueueMemory::new(2).expect("memory"));
        let taken = || {
            File::from(memory.file().expect("a descriptor"))
                .metadata()
                .expect("it is there")
                .blocks()
        };
        let (mut slot, mut other, before) = (memory.slot(1, 3), memory.slot(1, 2), taken());
        slot.buffers().1.fill(7);
        other.buffers().1.fill(8);
        assert!(taken() >= before + 2 * IO_MAX as u64 / 512);
        memory.empty_payload(1, 3);
        assert!(taken() < before + 2 * IO_MAX as u64 / 512);
        assert_eq!((slot.buffers().1[IO_MAX - 1], other.buffers().1[IO_MAX - 1]), (0, 8));
    }

    #[test]
    fn memory_of_another_layout_is_refused() {
        let memory = QueueMemory::new(1).expect("memory");
        let other = memory.file().expect("a descriptor");
        assert!(QueueMemory::of(other).is_err(), "nothing was agreed");
        memory.set_agreed(&AGREED).expect("it is written");
        let short = memory.file().expect("a descriptor");
        ftruncate(&short, PAGE as u64).expect("it is cut");
        assert!(QueueMemory::of(short).is_err());
    }

    #[test]
    fn several_mounts_of_one_process_have_their_own_addresses() {
        let all: Vec<_> = (0..3).map(|_| QueueMemory::new(1).expect("memory")).collect();
        assert!(all.iter().enumerate().all(|(n, one)| all[..n].iter().all(|o| o.at != one.at)));
    }
}
