//! How a repair changes keys: in ordinary transactions of bounded size, and what it says of each
//! change.

use super::Volume;
use crate::fsck::report::{Code, FINDINGS_MAX, Repair};
use crate::fsck::volume::name_hash;
use ferry_fs::api::{Ino, Timestamp};
use ferry_fs::keys::{self, Dentry};
use ferry_journal::{Credits, Journal, JournalError, Value};
use siphasher::sip::SipHasher13;

/// A transaction of a repair takes so many bytes of log at most, keys and what they cost counted.
const TRANSACTION_BYTES_MAX: u64 = 256 << 10;
/// What a key costs the log beside its bytes, at least.
const KEY_COST: u64 = 64;
/// A name that is taken in `lost+found` gets a number behind it, up to this one.
const SUFFIX_MAX: u32 = 1000;

/// A key to put, or to delete where there is no value.
pub(super) type Change = (Vec<u8>, Option<Vec<u8>>);

/// What was repaired, bounded.
#[derive(Default)]
pub(super) struct Repairs {
    pub(super) list: Vec<Repair>,
    pub(super) count: u64,
    /// What was wrong where something was lost for the first time.
    pub(super) lost: Option<Code>,
}

impl Repairs {
    pub(super) fn add(&mut self, repair: Repair) {
        self.count += 1;
        self.lost = self.lost.or(repair.lost.as_ref().map(|_| repair.code));
        if self.list.len() < FINDINGS_MAX {
            self.list.push(repair);
        }
    }
}

/// Visits the keys in `[from, to)` until a visit fails.
pub(super) fn each_key(
    journal: &Journal,
    from: &[u8],
    to: &[u8],
    mut visit: impl FnMut(&[u8], &[u8]) -> Result<(), JournalError>,
) -> Result<(), JournalError> {
    let mut result = Ok(());
    journal.scan(from, to, &mut |key, value| {
        result = visit(key, value);
        result.is_ok()
    })?;
    result
}

/// Collects changes and commits them.
pub(super) struct Writer<'j> {
    journal: &'j Journal,
    hasher: SipHasher13,
    /// The times of what is made anew.
    pub(super) now: Timestamp,
    pending: Vec<Change>,
    bytes: u64,
    limit: u64,
    pub(super) repairs: &'j mut Repairs,
}

impl<'j> Writer<'j> {
    pub(super) fn new(journal: &'j Journal, volume: Volume<'_>, repairs: &'j mut Repairs) -> Self {
        Self {
            journal,
            hasher: SipHasher13::new_with_key(&volume.sb.hash_key),
            now: Timestamp(volume.env.clock.wall().as_nanos() as i128),
            pending: Vec::new(),
            bytes: 0,
            limit: (journal.max_transaction_bytes() / 2).min(TRANSACTION_BYTES_MAX),
            repairs,
        }
    }

    /// The hash of a name, under which a directory stores it.
    pub(super) fn hash(&self, name: &[u8]) -> u64 {
        name_hash(&self.hasher, name)
    }

    pub(super) fn journal(&self) -> &'j Journal {
        self.journal
    }

    /// Makes these changes in one transaction, where they fit into one; else in several, in this
    /// order.
    pub(super) fn change(&mut self, changes: Vec<Change>) -> Result<(), JournalError> {
        let cost = |change: &Change| {
            KEY_COST + (change.0.len() + change.1.as_ref().map_or(0, Vec::len)) as u64
        };
        if self.bytes + changes.iter().map(cost).sum::<u64>() > self.limit {
            self.flush()?;
        }
        for change in changes {
            if self.bytes + cost(&change) > self.limit {
                self.flush()?;
            }
            self.bytes += cost(&change);
            self.pending.push(change);
        }
        Ok(())
    }

    pub(super) fn put(&mut self, key: Vec<u8>, value: Vec<u8>) -> Result<(), JournalError> {
        self.change(vec![(key, Some(value))])
    }

    pub(super) fn delete(&mut self, key: &[u8]) -> Result<(), JournalError> {
        self.change(vec![(key.to_vec(), None)])
    }

    /// Deletes all keys in `[from, to)`; how many there were.
    pub(super) fn delete_range(&mut self, from: &[u8], to: &[u8]) -> Result<u64, JournalError> {
        self.flush()?;
        let mut count = 0;
        each_key(self.journal, from, to, |key, _| {
            count += 1;
            self.delete(key)
        })?;
        Ok(count)
    }

    /// The newest value of `key`, with what was changed here.
    pub(super) fn get(&mut self, key: &[u8]) -> Result<Option<Value>, JournalError> {
        self.flush()?;
        self.journal.get(key)
    }

    /// Commits what is collected.
    pub(super) fn flush(&mut self) -> Result<(), JournalError> {
        if self.pending.is_empty() {
            return Ok(());
        }
        let keys = self.pending.len() as u32;
        let bytes = self
            .pending
            .iter()
            .map(|(k, v)| k.len() + v.as_ref().map_or(0, Vec::len))
            .sum::<usize>();
        let mut txn = self.journal.begin(Credits { keys, bytes: bytes as u32, urgent: true })?;
        for (key, value) in self.pending.drain(..) {
            match value {
                Some(value) => txn.put(&key, &value),
                None => txn.delete(&key),
            }
        }
        txn.commit();
        self.bytes = 0;
        Ok(())
    }

    pub(super) fn say(&mut self, repair: Repair) {
        self.repairs.add(repair);
    }

    /// The key under which `name` can be put into `dir`.
    pub(super) fn room_for(&mut self, dir: Ino, name: &[u8]) -> Result<Room, JournalError> {
        self.flush()?;
        let base = self.hash(name) << 8;
        let (mut taken, mut same) = ([false; 256], None);
        self.journal.scan(
            &keys::dentry_from(dir, base),
            &keys::dentry_from(dir, base + 256),
            &mut |key, value| {
                if let Some(keys::Key::Dentry(_, cookie, other)) = keys::parse(key) {
                    taken[(cookie & 0xff) as usize] = true;
                    if other == name {
                        same = Some(Dentry::decode(value).map_or(0, |dentry| dentry.ino));
                    }
                }
                true
            },
        )?;
        Ok(match (same, (base..).zip(taken).find(|(_, taken)| !taken)) {
            (Some(ino), _) => Room::Exists(ino),
            (None, Some((cookie, _))) => Room::Free(keys::dentry(dir, cookie, name)),
            (None, None) => Room::Full,
        })
    }

    /// A free key in `dir` for `name`, or for `name` with a number behind it. `None`: there are too
    /// many such names.
    pub(super) fn free_name(
        &mut self,
        dir: Ino,
        name: &str,
    ) -> Result<Option<Vec<u8>>, JournalError> {
        for suffix in 0..SUFFIX_MAX {
            let name = if suffix == 0 { name.to_owned() } else { format!("{name}.{suffix}") };
            if let Room::Free(key) = self.room_for(dir, name.as_bytes())? {
                return Ok(Some(key));
            }
        }
        Ok(None)
    }
}

/// Whether a directory can take a name.
pub(super) enum Room {
    /// It can, under this key.
    Free(Vec<u8>),
    /// The name is there, and leads to this inode.
    Exists(Ino),
    /// Every position for a name of this hash is taken.
    Full,
}
