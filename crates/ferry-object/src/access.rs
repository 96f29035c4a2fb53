//! Requests to the store that are repeated until they are answered, and their counters.

use crate::codec::{Codec, VolumeKey};
use crate::error::ObjectError;
use crate::executor::Executor;
use crate::format::{Front, HEADER_LEN, Header, header};
use crate::store::{Store, exists};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// The pause before the second try of a request; each later one is twice as long.
const BACKOFF_MIN: Duration = Duration::from_millis(100);
const BACKOFF_MAX: Duration = Duration::from_secs(5);
/// So many bytes are read of an object whose table is wanted: most objects have no more.
const TABLE_READ: u64 = 64 << 10;

/// The list is asked so often for objects that exist: it may lag.
pub(crate) const LISTS_MAX: u32 = 20;
/// The pause before the list is asked again.
pub(crate) const LIST_AGAIN: Duration = Duration::from_millis(500);

/// The pause after `tries` requests that failed.
pub(crate) fn backoff(tries: u32) -> Duration {
    BACKOFF_MAX.min(BACKOFF_MIN * 2_u32.pow(tries.min(10)))
}

/// Requests to the store, counted.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    pub puts: AtomicU64,
    pub put_bytes: AtomicU64,
    pub gets: AtomicU64,
    pub get_bytes: AtomicU64,
    pub deletes: AtomicU64,
    pub retries: AtomicU64,
}

/// The store, as a device uses it.
#[derive(Clone)]
pub(crate) struct Access {
    pub store: Arc<dyn Store>,
    pub executor: Arc<dyn Executor>,
    pub counters: Arc<Counters>,
    /// How the volume's objects are stored.
    pub codec: Codec,
}

impl Access {
    pub fn new(store: Arc<dyn Store>, executor: Arc<dyn Executor>) -> Self {
        Self { store, executor, counters: Arc::default(), codec: Codec::default() }
    }

    /// The same, to an encrypted volume.
    pub fn with_key(mut self, key: VolumeKey) -> Self {
        self.codec.key = Some(Arc::new(key));
        self
    }

    /// Repeats a request until the store has answered it.
    pub fn insist<T>(
        &self,
        request: impl Fn(&dyn Store) -> Result<T, ObjectError>,
    ) -> Result<T, ObjectError> {
        let mut tries = 0;
        loop {
            match request(&*self.store) {
                Err(error) if error.is_temporary() => {
                    if tries == 0 {
                        tracing::warn!(%error, "a request to the store is repeated");
                    }
                    self.counters.retries.fetch_add(1, Ordering::Relaxed);
                    self.executor.pause(backoff(tries));
                    tries += 1;
                }
                other => return other,
            }
        }
    }

    /// The bytes of an object.
    pub fn get(&self, name: &str, range: Option<Range<u64>>) -> Result<Vec<u8>, ObjectError> {
        let bytes = self.insist(|store| store.get(name, range.clone()))?;
        self.counters.gets.fetch_add(1, Ordering::Relaxed);
        self.counters.get_bytes.fetch_add(bytes.len() as u64, Ordering::Relaxed);
        Ok(bytes)
    }

    /// Front and table of an object.
    pub fn table(&self, name: &str) -> Result<(Front, Vec<u8>), ObjectError> {
        let mut bytes = self.get(name, Some(0..TABLE_READ))?;
        let front = Front::decode(&self.codec, name, &bytes)?;
        let end = front.table_end();
        if end > TABLE_READ && bytes.len() as u64 == TABLE_READ {
            bytes.extend(self.get(name, Some(TABLE_READ..end))?);
        }
        let table = front.table(&bytes)?;
        Ok((front, table))
    }

    /// Whether the object exists.
    pub fn exists(&self, name: &str) -> Result<bool, ObjectError> {
        self.counters.gets.fetch_add(1, Ordering::Relaxed);
        self.insist(|store| exists(store, name))
    }

    /// Puts an object once, with no repetition.
    pub fn put_once(&self, name: &str, bytes: &[u8]) -> Result<(), ObjectError> {
        self.count_put(bytes);
        self.store.put(name, bytes)
    }

    /// Creates an object once. If the name is taken, the header tells whether an earlier try had
    /// taken it: then that one succeeded.
    pub fn create_once(&self, name: &str, bytes: &[u8]) -> Result<Created, ObjectError> {
        self.count_put(bytes);
        match self.store.create(name, bytes) {
            Ok(()) => return Ok(Created::Ours),
            Err(ObjectError::Exists(_)) => {}
            Err(error) => return Err(error),
        }
        let own = header(name, bytes)?;
        match self.store.get(name, Some(0..HEADER_LEN as u64)) {
            Ok(found) => match header(name, &found)? {
                found if found.id == own.id => Ok(Created::Ours),
                found => Ok(Created::Foreign(found)),
            },
            // Another owner has written an object here, and a collector has deleted it since.
            Err(ObjectError::NotFound(_)) => Ok(Created::Vanished),
            Err(error) => Err(error),
        }
    }

    /// Creates an object, as [`Access::create_once`], and insists on an answer.
    pub fn create(&self, name: &str, bytes: &[u8]) -> Result<Created, ObjectError> {
        self.insist(|_| self.create_once(name, bytes))
    }

    fn count_put(&self, bytes: &[u8]) {
        self.counters.puts.fetch_add(1, Ordering::Relaxed);
        self.counters.put_bytes.fetch_add(bytes.len() as u64, Ordering::Relaxed);
    }
}

/// Whose object has the name after a create.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Created {
    /// The one that was to be created.
    Ours,
    /// Another one, with this header.
    Foreign(Header),
    /// There was another one, which is deleted now.
    Vanished,
}

impl Created {
    /// For an owner: anything but its own object means that another owner is there.
    pub fn or_fenced(self) -> Result<(), ObjectError> {
        match self {
            Self::Ours => Ok(()),
            Self::Foreign(header) => Err(ObjectError::Fenced { epoch: Some(header.epoch) }),
            Self::Vanished => Err(ObjectError::Fenced { epoch: None }),
        }
    }
}
