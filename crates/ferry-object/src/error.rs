//! What can go wrong between a volume and the store that it is in.

use ferry_device::LockHolder;
use std::io;
use std::path::PathBuf;

/// Why a request, or the opening of a volume, failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ObjectError {
    /// The store has no object of this name.
    #[error("{0}: the store has no such object")]
    NotFound(String),
    /// An object of this name exists, so it was not created.
    #[error("{0}: the store has an object of this name already")]
    Exists(String),
    /// No answer, or an answer that asks to try again. The request may have been carried out.
    #[error("the store does not answer: {0}")]
    Unavailable(String),
    /// The store answers that it will not do this: no permission, no such bucket, no space.
    #[error("the store refuses: {0}")]
    Refused(String),
    /// What the user gave cannot be used: a name, an address, keys. The text says what to do.
    #[error("{0}")]
    Setup(String),
    /// The object is not what was written under this name.
    #[error("{name} is damaged: {what}")]
    Damaged {
        /// The object.
        name: String,
        /// What is wrong with it.
        what: &'static str,
    },
    /// The object was written by a program that knows a later format.
    #[error("{name} has format version {version}, which this program does not know")]
    Version {
        /// The object.
        name: String,
        /// Its version.
        version: u16,
    },
    /// There is no such store.
    #[error("{}: there is no such directory", .0.display())]
    NoStore(PathBuf),
    /// The store was to become a volume, and holds something else: a file, or an object.
    #[error("{0}: this is no part of a FerryFS volume")]
    Foreign(String),
    /// The store holds no volume.
    #[error("there is no FerryFS volume in this store")]
    NoVolume,
    /// The store holds a volume, and another one was to be made there.
    #[error("there is a FerryFS volume in this store already")]
    VolumeExists,
    /// Another owner has not closed the volume, and nothing proves that it is dead.
    #[error("the volume is in use by {owner} since {since}")]
    InUse {
        /// The host and the process that claimed it.
        owner: String,
        /// When it did, in words.
        since: String,
        /// The process, if it is one of this machine and lives.
        pid: Option<u32>,
    },
    /// The owner had a local log, and may have acknowledged what only that has.
    #[error("the volume was left by {owner}, which may have synced what only its local log has")]
    NotUploaded {
        /// The host and the process that claimed it.
        owner: String,
    },
    /// A process of this machine reads the volume, or is about to own it.
    #[error("the volume is in use by process {}{}", .0.pid, if .0.writing { "" } else { " (reading)" })]
    Locked(LockHolder),
    /// A process of this machine uses the cache on disk.
    #[error("the cache {} is in use by process {pid}: name another directory", path.display())]
    CacheInUse {
        /// The file of the cache.
        path: PathBuf,
        /// The process.
        pid: u32,
    },
    /// Another owner claimed the volume at the same time.
    #[error("another owner claims the volume at this moment (epoch {epoch})")]
    ClaimLost {
        /// The epoch of the newest claim that was seen.
        epoch: u64,
    },
    /// Another owner has taken the volume over. Nothing more is acknowledged here.
    #[error("another owner took the volume over{}", epoch_text(*.epoch))]
    Fenced {
        /// Its epoch, if it is known.
        epoch: Option<u64>,
    },
    /// No backup of it has ended yet.
    #[error("this is a backup that has not ended")]
    UnfinishedBackup,
    /// The volume is encrypted, and nobody gave a passphrase.
    #[error("the volume is encrypted, and its passphrase was not given")]
    PassphraseWanted,
    /// The volume is encrypted with another passphrase.
    #[error("this is not the passphrase of the volume")]
    WrongPassphrase,
    /// The volume has no snapshot of this name.
    #[error("there is no snapshot {name:?}{}", names_text(names))]
    NoSnapshot {
        /// The name.
        name: String,
        /// The names of those that the volume has, in the order in which they were made.
        names: Vec<String>,
    },
    /// The volume has a snapshot of this name.
    #[error("there is a snapshot {0:?} already: choose another name, or delete that one first")]
    SnapshotExists(String),
    /// The volume has as many snapshots as it may have.
    #[error("the volume has {0} snapshots, which is the most: delete some first")]
    TooManySnapshots(usize),
    /// It is the pin of a clone, which is there or may still be made.
    #[error("the clone {0:?} needs this snapshot: remove that volume first, with all its objects")]
    NeededByClone(String),
    /// A clone was not made, and its pin is there.
    #[error(
        "{error}; the clone has its pin already: remove what there is of the clone, then \
         `ferry snapshot delete VOLUME {pin:?}` deletes that"
    )]
    PinLeft {
        /// Why it was not made.
        error: Box<ObjectError>,
        /// The name of the pin.
        pin: String,
    },
    /// A snapshot cannot have this name.
    #[error("{0:?} is no name for a snapshot: {1}")]
    SnapshotName(String, &'static str),
    /// Others make and delete snapshots while this process looks what they hold.
    #[error("the snapshots change while they are measured: try again later")]
    SnapshotsChange,
    /// The volume was opened to be read only.
    #[error("the volume is open for reading only")]
    ReadOnly,
}

/// Names of snapshots that a message has, at most: the newest ones.
const NAMES_MAX: usize = 20;

fn names_text(names: &[String]) -> String {
    let newest = &names[names.len().saturating_sub(NAMES_MAX)..];
    let older = match names.len() - newest.len() {
        0 => String::new(),
        older => format!(" and {older} older ones"),
    };
    match newest {
        [] => ", nor any other".into(),
        // A root may have been written by anybody who can write to the store.
        _ => format!("; there are {}{older}", newest.join(", ").escape_debug()),
    }
}

fn epoch_text(epoch: Option<u64>) -> String {
    epoch.map_or_else(String::new, |epoch| format!(" (epoch {epoch})"))
}

impl ObjectError {
    /// Whether the same request may succeed at once.
    pub fn is_temporary(&self) -> bool {
        matches!(self, Self::Unavailable(_))
    }

    /// Whether the same request may succeed when somebody has mended what is in its way: the store,
    /// the network, a permission, the keys, a quota.
    pub fn may_be_mended(&self) -> bool {
        matches!(self, Self::Unavailable(_) | Self::Refused(_) | Self::Setup(_))
    }
}

impl From<ObjectError> for io::Error {
    /// As a device's user knows errors: by their number.
    fn from(error: ObjectError) -> Self {
        io::Error::from_raw_os_error(match error {
            ObjectError::ReadOnly => libc::EROFS,
            ObjectError::NoSnapshot { .. } => libc::ENOENT,
            ObjectError::SnapshotExists(_) => libc::EEXIST,
            ObjectError::TooManySnapshots(_) => libc::EMLINK,
            ObjectError::SnapshotName(..) => libc::EINVAL,
            ObjectError::NeededByClone(_) => libc::EBUSY,
            _ => libc::EIO,
        })
    }
}
