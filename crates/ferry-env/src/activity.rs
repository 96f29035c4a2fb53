//! What this process works on at the moment, for `ferry profile`.
//!
//! Each thread has a word of its own: the operation that it works for ([`begin`]), and the layers
//! that it is in, one inside the other ([`enter`]). A change of the word is a relaxed store to the
//! thread's own cache line: no clock, no lock, no shared counter. The word is 0 while the thread
//! waits for work.
//!
//! What waits without a thread (a parked request, a write that the device has) is counted by the
//! operation and the layer that it waits in ([`Waiting`]).
//!
//! Nothing is recorded until somebody samples: a [`Profile`] reads all words and counts. It changes
//! none of them, so any number of profiles may be taken at the same time.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::marker::PhantomData;
use std::sync::atomic::{AtomicI32, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Defines an enum whose variants have names for people, and a list of all of them.
macro_rules! named {
    ($(#[$doc:meta])* $enum:ident { $($(#[$about:meta])* $variant:ident = $name:literal,)* }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
        #[repr(u8)]
        pub enum $enum { $($(#[$about])* $variant,)* }

        impl $enum {
            /// All of them, in the order of their numbers.
            pub const ALL: &[Self] = &[$(Self::$variant,)*];

            /// The name that people see.
            pub const fn name(self) -> &'static str {
                match self { $(Self::$variant => $name,)* }
            }
        }
    };
}

named! {
    /// What a thread works for: a request of a program or a client, or work of the daemon's own.
    #[expect(missing_docs, reason = "the names of requests say it")]
    Operation {
        /// None: a thread with this operation waits for work, unless it is in a layer.
        None = "other",
        Lookup = "lookup",
        Forget = "forget",
        Getattr = "getattr",
        Setattr = "setattr",
        Readlink = "readlink",
        Symlink = "symlink",
        Mknod = "mknod",
        Mkdir = "mkdir",
        Unlink = "unlink",
        Rmdir = "rmdir",
        Rename = "rename",
        Link = "link",
        Open = "open",
        Read = "read",
        Write = "write",
        Statfs = "statfs",
        Release = "release",
        Fsync = "fsync",
        Setxattr = "setxattr",
        Getxattr = "getxattr",
        Listxattr = "listxattr",
        Removexattr = "removexattr",
        Flush = "flush",
        Init = "init",
        Opendir = "opendir",
        Readdir = "readdir",
        Releasedir = "releasedir",
        Fsyncdir = "fsyncdir",
        Getlk = "getlk",
        Setlk = "setlk",
        Setlkw = "setlkw",
        Access = "access",
        Create = "create",
        Interrupt = "interrupt",
        Bmap = "bmap",
        Destroy = "destroy",
        Ioctl = "ioctl",
        Poll = "poll",
        NotifyReply = "notify_reply",
        BatchForget = "batch_forget",
        Fallocate = "fallocate",
        Readdirplus = "readdirplus",
        Rename2 = "rename2",
        Lseek = "lseek",
        CopyFileRange = "copy_file_range",
        Syncfs = "syncfs",
        Tmpfile = "tmpfile",
        Statx = "statx",
        CopyFileRange64 = "copy_file_range_64",
        Unknown = "unknown",
        /// A server: changes of a client, applied in their order.
        Changes = "client changes",
        /// A server: a request of a client that changes nothing.
        Requests = "client requests",
        /// Data of files is written to the device.
        WriteBack = "write-back",
        /// Blocks are read that a sequential reader will want.
        ReadAhead = "read-ahead",
        /// The journal's own thread: seals in time, checkpoints, merges.
        Journal = "journal",
        /// What the device has completed: commits go on, callers are answered.
        Completion = "completions",
        /// Requests that the device has, and on which no thread waits.
        Device = "device",
        /// Space of removed files becomes free.
        Reclaim = "reclaim",
        /// Everything on the volume is verified.
        Scrub = "scrub",
        /// Requests to an object store.
        Store = "store",
    }
}

named! {
    /// Where a thread is, or what something waits for.
    Layer {
        /// Operations on files, names and attributes.
        FileSystem = "file system",
        /// The answer is handed to the kernel.
        Answer = "answer",
        /// Another operation has the lock of the inode or file.
        Lock = "wait for a lock",
        /// A change joins the open context of the journal.
        Journal = "journal",
        /// The log is full: a checkpoint must make room.
        LogSpace = "wait for log space",
        /// Too much is dirty, or space is short: write-back must get on.
        WriteBack = "wait for write-back",
        /// All threads of a pool are busy.
        Pool = "wait for a thread",
        /// A commit is under way, or gathers callers.
        Commit = "commit",
        /// A record of the log is encoded and handed to the device.
        LogWrite = "log record",
        /// Committed changes are written to the home store.
        Checkpoint = "checkpoint",
        /// The device reads.
        DeviceRead = "device read",
        /// The device writes.
        DeviceWrite = "device write",
        /// The device makes writes durable.
        DeviceFlush = "device flush",
        /// An object store answers a request.
        StoreRequest = "store request",
        /// A server answers a request.
        Server = "wait for the server",
    }
}

impl Operation {
    /// Work that no program or client has asked for.
    pub fn is_background(self) -> bool {
        self >= Self::WriteBack || self == Self::None
    }
}

const OPERATION_AT: u32 = 56;
const LAYER_BITS: u32 = 8;
const LAYERS_MASK: u64 = (1 << OPERATION_AT) - 1;

/// An operation, and the layers that it is in: as one word, the operation in the highest byte, the
/// layers (each one more than its number) below it, the innermost in the lowest byte. Seven fit: of
/// more the outermost are left out.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Activity(u64);

impl Activity {
    fn of(operation: Operation) -> Self {
        Self((operation as u64) << OPERATION_AT)
    }

    fn inside(self, layer: Layer) -> Self {
        let layers = (self.0 << LAYER_BITS) & LAYERS_MASK | (layer as u64 + 1);
        Self(self.0 & !LAYERS_MASK | layers)
    }

    /// What it is done for.
    pub fn operation(self) -> Operation {
        Operation::ALL[(self.0 >> OPERATION_AT) as usize]
    }

    /// The layers, the outermost first.
    pub fn layers(self) -> impl Iterator<Item = Layer> {
        let all = (0..OPERATION_AT / LAYER_BITS).rev();
        all.filter_map(move |at| Self(self.0 >> (at * LAYER_BITS)).innermost())
    }

    fn innermost(self) -> Option<Layer> {
        let number = (self.0 & ((1 << LAYER_BITS) - 1)) as usize;
        number.checked_sub(1).map(|at| Layer::ALL[at])
    }
}

/// The word of one thread. No other one shares its cache line.
#[repr(align(128))]
struct Slot(AtomicU64);

impl Slot {
    fn get(&self) -> Activity {
        // Relaxed: the word carries all there is; nothing else is published by it.
        Activity(self.0.load(Ordering::Relaxed))
    }

    fn set(&self, activity: Activity) {
        self.0.store(activity.0, Ordering::Relaxed);
    }
}

/// All slots. They live as long as the process, so that a profile never reads freed memory; a
/// thread that begins reuses the slot of one that has ended.
struct Slots {
    all: Vec<&'static Slot>,
    free: Vec<&'static Slot>,
}

static SLOTS: Mutex<Slots> = Mutex::new(Slots { all: Vec::new(), free: Vec::new() });

fn slots() -> MutexGuard<'static, Slots> {
    SLOTS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A thread's share in a slot, which ends with the thread.
struct Owner(&'static Slot);

impl Owner {
    fn new() -> Self {
        let mut slots = slots();
        Self(slots.free.pop().unwrap_or_else(|| {
            let slot = Box::leak(Box::new(Slot(AtomicU64::new(0))));
            slots.all.push(slot);
            slot
        }))
    }
}

impl Drop for Owner {
    fn drop(&mut self) {
        SLOT.set(None);
        self.0.set(Activity::default());
        slots().free.push(self.0);
    }
}

thread_local! {
    static SLOT: Cell<Option<&'static Slot>> = const { Cell::new(None) };
    static OWNER: Owner = Owner::new();
}

/// This thread's slot. `None`: the thread is ending.
fn slot() -> Option<&'static Slot> {
    SLOT.get().or_else(take_slot)
}

#[cold]
fn take_slot() -> Option<&'static Slot> {
    let slot = OWNER.try_with(|owner| owner.0).ok();
    SLOT.set(slot);
    slot
}

/// The thread does something until this is dropped; then it does again what it did before. Drop
/// them in the opposite order in which they were made.
#[must_use]
pub struct Doing {
    slot: Option<&'static Slot>,
    before: Activity,
    /// It belongs to its thread.
    here: PhantomData<*const ()>,
}

impl Doing {
    fn change(change: impl FnOnce(Activity) -> Activity) -> Self {
        let slot = slot();
        let before = slot.map(Slot::get).unwrap_or_default();
        if let Some(slot) = slot {
            slot.set(change(before));
        }
        Self { slot, before, here: PhantomData }
    }
}

impl Drop for Doing {
    fn drop(&mut self) {
        if let Some(slot) = self.slot {
            slot.set(self.before);
        }
    }
}

/// This thread works for an operation.
pub fn begin(operation: Operation) -> Doing {
    Doing::change(|_| Activity::of(operation))
}

/// This thread is in a layer.
pub fn enter(layer: Layer) -> Doing {
    Doing::change(|activity| activity.inside(layer))
}

/// The operation that this thread works for.
pub fn operation() -> Operation {
    slot().map(Slot::get).unwrap_or_default().operation()
}

/// How many things wait without a thread, by operation and layer. A count may be below 0 for a
/// moment: see [`resume`].
static WAITING: [[AtomicI32; Layer::ALL.len()]; Operation::ALL.len()] =
    [const { [const { AtomicI32::new(0) }; Layer::ALL.len()] }; Operation::ALL.len()];

fn waiting(operation: Operation, layer: Layer) -> &'static AtomicI32 {
    &WAITING[operation as usize][layer as usize]
}

/// Something that waits without a thread, until this is dropped.
#[derive(Debug)]
pub struct Waiting(&'static AtomicI32);

impl Waiting {
    /// It waits in this layer.
    pub fn new(operation: Operation, layer: Layer) -> Self {
        let count = waiting(operation, layer);
        count.fetch_add(1, Ordering::Relaxed);
        Self(count)
    }

    /// What this thread works for waits from now on, in the layer that the thread is in.
    pub fn here() -> Self {
        let activity = slot().map(Slot::get).unwrap_or_default();
        Self::new(activity.operation(), activity.innermost().unwrap_or(Layer::FileSystem))
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// This thread goes on, until this is dropped, with something that waits in [`Layer::Pool`]. It is
/// not counted as waiting meanwhile. If it ends during that time, which drops its [`Waiting`], the
/// count is one too low until this is dropped, too.
#[must_use]
pub struct Resumed {
    count: &'static AtomicI32,
    _doing: Doing,
}

/// This thread goes on with what waits for a thread.
pub fn resume(operation: Operation) -> Resumed {
    let count = waiting(operation, Layer::Pool);
    count.fetch_sub(1, Ordering::Relaxed);
    Resumed { count, _doing: begin(operation) }
}

impl Drop for Resumed {
    fn drop(&mut self) {
        self.count.fetch_add(1, Ordering::Relaxed);
    }
}

/// What was seen at some moments.
#[derive(Debug, Default)]
pub struct Profile {
    /// How many moments.
    pub samples: u64,
    /// Threads that waited for work, added up over all moments.
    pub idle: u64,
    /// How often each activity was seen.
    pub seen: BTreeMap<Activity, u64>,
}

impl Profile {
    /// Looks at what this process does now.
    pub fn sample(&mut self) {
        self.samples += 1;
        for slot in &slots().all {
            match slot.get() {
                idle if idle == Activity::default() => self.idle += 1,
                activity => *self.seen.entry(activity).or_default() += 1,
            }
        }
        let count = |operation, layer| {
            let count = waiting(operation, layer).load(Ordering::Relaxed);
            u64::try_from(count).unwrap_or(0)
        };
        // What waits for a commit waits for what the device does for it, if it does anything.
        let device = [Layer::DeviceFlush, Layer::DeviceWrite]
            .into_iter()
            .find(|layer| count(Operation::Device, *layer) > 0);
        for operation in Operation::ALL {
            for layer in Layer::ALL {
                let waiting = count(*operation, *layer);
                if waiting == 0 {
                    continue;
                }
                let mut activity = Activity::of(*operation).inside(*layer);
                if let (Layer::Commit, Some(device)) = (layer, device) {
                    activity = activity.inside(device);
                }
                *self.seen.entry(activity).or_default() += waiting;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::{Arc, Barrier};

    /// The tests share the slots and the counts of this process: each has operations of its own.
    fn seen(operation: Operation) -> Vec<(Vec<Layer>, u64)> {
        let mut profile = Profile::default();
        profile.sample();
        let of = profile.seen.iter().filter(|(activity, _)| activity.operation() == operation);
        of.map(|(activity, count)| (activity.layers().collect(), *count)).collect()
    }

    #[test]
    fn layers_are_one_inside_the_other_and_end_in_turn() {
        let begun = begin(Operation::Mkdir);
        assert_eq!(seen(Operation::Mkdir), [(vec![], 1)]);
        let outer = enter(Layer::FileSystem);
        let inner = enter(Layer::DeviceRead);
        let both = vec![Layer::FileSystem, Layer::DeviceRead];
        assert_eq!(seen(Operation::Mkdir), [(both, 1)]);
        drop(inner);
        assert_eq!(seen(Operation::Mkdir), [(vec![Layer::FileSystem], 1)]);
        let other = begin(Operation::Rmdir);
        assert_eq!(seen(Operation::Mkdir), []);
        assert_eq!(seen(Operation::Rmdir), [(vec![], 1)]);
        drop(other);
        drop(outer);
        assert_eq!((operation(), seen(Operation::Mkdir)), (Operation::Mkdir, vec![(vec![], 1)]));
        drop(begun);
        assert_eq!((operation(), seen(Operation::Mkdir)), (Operation::None, vec![]));
    }

    #[test]
    fn an_activity_keeps_its_operation_however_deep_it_is() {
        let deep = (0..20).fold(Activity::of(Operation::Store), |at, _| at.inside(Layer::Lock));
        assert_eq!(deep.operation(), Operation::Store);
        assert_eq!(deep.layers().collect::<Vec<_>>(), [Layer::Lock; 7]);
        let last = *Operation::ALL.last().expect("there are some");
        assert_eq!(Activity::of(last).operation(), last);
    }

    #[test]
    fn the_slot_of_an_ended_thread_is_idle_and_is_used_again() {
        let count = || slots().all.len();
        let one_more = || {
            let thread = std::thread::spawn(|| {
                // It never ends by itself.
                std::mem::forget(begin(Operation::Symlink));
                assert_eq!(seen(Operation::Symlink), [(vec![], 1)]);
            });
            thread.join().expect("it does not panic");
            assert_eq!(seen(Operation::Symlink), []);
        };
        one_more();
        let before = count();
        (0..50).for_each(|_| one_more());
        // Other tests may have begun threads meanwhile.
        assert!(count() < before + 25, "{} slots, {before} before", count());
    }

    #[test]
    fn threads_have_a_slot_each() {
        let (begun, looked) = (Arc::new(Barrier::new(9)), Arc::new(Barrier::new(9)));
        let threads: Vec<_> = (0..8)
            .map(|_| {
                let (begun, looked) = (Arc::clone(&begun), Arc::clone(&looked));
                std::thread::spawn(move || {
                    let _doing = begin(Operation::Link);
                    begun.wait();
                    looked.wait();
                })
            })
            .collect();
        begun.wait();
        assert_eq!(seen(Operation::Link), [(vec![], 8)]);
        looked.wait();
        threads.into_iter().for_each(|thread| thread.join().expect("it does not panic"));
        assert_eq!(seen(Operation::Link), []);
    }

    #[test]
    fn what_waits_without_a_thread_is_counted_where_it_waits() {
        let begun = begin(Operation::Mknod);
        let inside = enter(Layer::Server);
        let two = [Waiting::here(), Waiting::here()];
        drop((inside, begun));
        assert_eq!(seen(Operation::Mknod), [(vec![Layer::Server], 2)]);
        drop(two);
        assert_eq!(seen(Operation::Mknod), []);
    }

    #[test]
    fn what_a_thread_goes_on_with_is_counted_once() {
        let waiting = [0, 1].map(|_| Waiting::new(Operation::Readlink, Layer::Pool));
        assert_eq!(seen(Operation::Readlink), [(vec![Layer::Pool], 2)]);
        let resumed = resume(Operation::Readlink);
        assert_eq!(seen(Operation::Readlink), [(vec![], 1), (vec![Layer::Pool], 1)]);
        drop(resumed);
        assert_eq!(seen(Operation::Readlink), [(vec![Layer::Pool], 2)]);
        drop(waiting);
        assert_eq!(seen(Operation::Readlink), []);
    }

    #[test]
    fn what_waits_for_a_commit_waits_for_what_the_device_does_for_it() {
        let _caller = Waiting::new(Operation::Fsync, Layer::Commit);
        assert_eq!(seen(Operation::Fsync), [(vec![Layer::Commit], 1)]);
        let _write = Waiting::new(Operation::Device, Layer::DeviceWrite);
        assert_eq!(seen(Operation::Fsync), [(vec![Layer::Commit, Layer::DeviceWrite], 1)]);
        let flush = Waiting::new(Operation::Device, Layer::DeviceFlush);
        assert_eq!(seen(Operation::Fsync), [(vec![Layer::Commit, Layer::DeviceFlush], 1)]);
        drop(flush);
        assert_eq!(seen(Operation::Fsync), [(vec![Layer::Commit, Layer::DeviceWrite], 1)]);
    }
}
