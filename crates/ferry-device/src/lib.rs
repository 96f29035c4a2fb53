//! Block devices: where bytes live and how they become durable.
//!
//! The crate knows nothing of transactions or files. It has the trait [`BlockDevice`], its
//! implementations, and the [`FlushCoordinator`], through which every flush of the log, the
//! segments and the home store goes.
//!
//! The modules form layers. Each uses those below it and none above:
//!
//! ```text
//! composite/   linear, stripe, mirror; a composite volume by the path of its descriptor
//!   volume        CompositeVolume: descriptor, components, device
//!   mirror/       MirrorDevice > recover > rebuild, resize > worker > shared > map, regions
//!   span          SpanDevice: linear and stripe
//!   length        another length for components
//!   component     one device of a composite > gather
//!   descriptor, header > error > kind; layout > kind
//! flush/       FlushCoordinator > waiter
//! file/        FileDevice > engine > ring > inbox > host > cached, lock > sys
//! memory       MemDevice                hooked  HookedDevice, for tests
//! device       BlockDevice, Io          error   DeviceError
//! started      FileRead, ReadRing
//! left_buffers > buffer (AlignedBuf) > shared_buffers > mapping
//! timing       FlushTimer, FlushTiming
//! shared       SharedWords > mapping
//! sync         locks and atomics that a model checker can take the place of
//! ```

mod buffer;
mod composite;
mod device;
mod error;
mod file;
mod flush;
mod hooked;
mod left_buffers;
mod mapping;
mod memory;
mod shared;
mod shared_buffers;
mod started;
mod sync;
mod timing;

pub use buffer::{AlignedBuf, BLOCK_SIZE};
pub use composite::{
    COMPONENTS_MAX, ComponentHeader, CompositeError, CompositeOptions, CompositeVolume, HEAD_LEN,
    Kind, MirrorDevice, Observer, SIDES_MAX, STRIPE_CHUNK, Side, SpanDevice,
};
pub use device::{
    BlockDevice, ComponentState, ComponentStats, HeldRequests, Io, IoDone, Longest, Snapshot,
    WarmDone, Warmed,
};
pub use error::DeviceError;
pub use file::{FileDevice, FileLock, LockHolder, OpenMode};
pub use flush::{FlushCoordinator, FlushStats, Target};
pub use hooked::{Asked, HookedDevice, Op, Request, Serve};
pub use left_buffers::LeftBuffers;
pub use memory::MemDevice;
pub use shared::{SharedWords, Words};
pub use shared_buffers::{SHARED_BUFFERS_BYTES, SLOT_BYTES as SHARED_BUFFER_MAX, SharedBuffers};
pub use started::{FileRead, ReadDone, ReadRing};
pub use timing::{FlushTimer, FlushTiming};
