//! A volume in an object store: a block device that is a log of objects.
//!
//! The store holds everything. Each object is written once and never changes. What was written
//! since the last flush is one log object and the data objects that it names; the longest prefix of
//! the log without a gap is what is durable, and nothing else has to be written to commit it.
//! `docs/format.md` describes the objects.
//!
//! The modules form layers. Each uses those below it and none above:
//!
//! ```text
//! open       a volume by the URL of its store; url: StoreUrl
//! local_dir  local logs in directories of this machine; local_note: which directories those are
//! prove      whether a store keeps what a volume relies on
//! roots      roots of an ObjectDevice, and what is deleted; reads: its reads, also ahead;
//!            sweep: what nothing names; repack: what is mostly dead; warm: fills the cache
//! backup     a volume that has snapshots of another one
//! standby    waits until the owner has closed it, or is silent
//! follow     what the volume is while its owner goes on
//! rollback   going back to one of the snapshots
//! clone      volumes that begin as a snapshot of another one
//! snapshots  roots that stay
//! device     ObjectDevice
//! state      what it knows; victims: which objects are mostly dead; inherited: what older owners
//!            left that is needed
//! volume     making a volume, claiming it, fencing its owner off
//! beats      the heartbeat of an owner
//! local      LocalStore: a local log in front of a store
//! keys       the key of an encrypted volume
//! access     requests that are repeated until they are carried out
//! batch      changes in memory, and the objects made of them
//! ahead      Ahead: parts of objects that will be read soon, in memory
//! warming    what is to be brought into the cache
//! cache      DiskCache: parts of objects on a disk of the machine
//! local_log  LocalLog: objects that the store lacks, on a disk of the machine
//! retained   names that only snapshots need    runs       runs of blocks with a value
//! small      objects that came as a whole, in memory
//! pins       snapshots, for users
//! format     the objects, byte by byte
//! codec      compression and encryption of what objects store
//! dir        DirStore                          executor   Executor, ThreadExecutor
//! s3         S3Store
//! locks      Locks, DirLocks
//! store      Store                             error      ObjectError
//! ```

mod access;
mod ahead;
mod backup;
mod batch;
mod beats;
mod cache;
mod clone;
mod codec;
mod device;
mod dir;
mod error;
mod executor;
mod follow;
mod format;
mod inherited;
mod keys;
mod local;
mod local_dir;
mod local_log;
mod local_note;
mod locks;
mod open;
mod pins;
mod prove;
mod reads;
mod repack;
mod retained;
mod rollback;
mod roots;
mod runs;
mod s3;
mod small;
mod snapshots;
mod space;
mod standby;
mod state;
mod store;
mod sweep;
mod url;
mod victims;
mod volume;
mod warm;
mod warming;

pub use backup::{BackedUp, BackupError, BackupSource, Copying};
pub use cache::{CacheOptions, CacheStats};
pub use clone::Cloned;
pub use codec::Compression;
pub use device::{Limits, ObjectDevice, ObjectStats};
pub use dir::DirStore;
pub use error::ObjectError;
pub use executor::{Answer, Executor, Job, ThreadExecutor, Upload};
pub use ferry_device::Snapshot;
pub use follow::{Follower, Version};
pub use format::{Kdf, Owner};
pub use keys::{Encryption, Passphrase};
pub use local::{LocalStore, Lost, NotTaken};
pub use local_dir::Tell;
pub use locks::{DirLocks, Locks};
pub use open::{
    Made, NewClone, OnDisk, Opening, backup_source, change_passphrase, compression_of,
    follow_volume, has_volume, is_encrypted, lock_files, make_volume, open_backup, open_to_copy,
    open_volume, owner_here, prepare_clone, remove_volume, snapshot_sizes, snapshots_of, stand_by,
};
pub use pins::CloneName;
pub use prove::prove;
pub use rollback::{Replaced, RolledBack, name_before_rollback};
pub use s3::{Endpoint, S3Location, S3Settings, S3Store, TimeLimits};
pub use snapshots::{SNAPSHOTS_MAX, check_snapshot_name};
pub use space::SnapshotSizes;
pub use standby::{Found, Standby};
pub use store::{Held, RequestCosts, Store, Waiting};
pub use url::{S3Url, StoreUrl};
pub use volume::{Claimant, Followed, VolumeOptions};
