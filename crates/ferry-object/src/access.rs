//! Requests to the store that are repeated until they are answered, and their counters.

use crate::codec::{Codec, VolumeKey};
use crate::error::ObjectError;
use crate::executor::{Answer, Executor, Job};
use crate::format::{Front, HEADER_LEN, Header, ObjectRef, Super, header};
pub(crate) use crate::store::Held;
use crate::store::{Store, exists};
use ferry_env::{Clock, Env};
use parking_lot::Mutex;
use std::borrow::Cow;
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc;
use std::time::Duration;
use zeroize::Zeroizing;

/// The pause before the second try of a request; each later one is twice as long.
const BACKOFF_MIN: Duration = Duration::from_millis(100);
const BACKOFF_MAX: Duration = Duration::from_secs(5);
/// So many bytes are read of an object whose table is wanted: most objects have no more.
const TABLE_READ: u64 = 64 << 10;

/// So many objects are asked for together.
pub(crate) const AT_ONCE: usize = 16;
/// One that waits for jobs looks so often whether it should go on waiting.
const LOOK_AGAIN: Duration = Duration::from_millis(200);

/// The list is asked so often for objects that exist: it may lag.
pub(crate) const LISTS_MAX: u32 = 20;
/// The pause before the list is asked again.
pub(crate) const LIST_AGAIN: Duration = Duration::from_millis(500);

/// The pause after `tries` requests that failed.
pub(crate) fn backoff(tries: u32) -> Duration {
    BACKOFF_MAX.min(BACKOFF_MIN * 2_u32.pow(tries.min(10)))
}

/// A request that fails so often is held: the log and the statistics say so. One that the store
/// refuses is held at once.
const HELD_TRIES: u32 = 3;

/// What is held, and since when.
#[derive(Default)]
struct Holding {
    requests: u64,
    since: Duration,
    reason: String,
}

/// One held request, until it is dropped.
pub(crate) struct HeldRequest(Access);

impl Drop for HeldRequest {
    fn drop(&mut self) {
        let mut holding = self.0.holding.lock();
        holding.requests -= 1;
        if holding.requests == 0 {
            let secs = self.0.clock.monotonic().saturating_sub(holding.since).as_secs();
            tracing::info!("no request to the store is held any more, after {secs} s");
        }
    }
}

/// For how long a request is repeated that the store does not carry out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Patience {
    /// While a volume is made or opened: for this time if it was not answered. A refusal is an
    /// error, so that the user hears it.
    Opening(Duration),
    /// While a volume is served: without end, also if the store refuses it.
    Serving,
}

/// How often a request failed, and since when.
#[derive(Default)]
pub(crate) struct Tries {
    count: u32,
    begun: Option<Duration>,
    held: Option<HeldRequest>,
}

impl Tries {
    /// The pause before the next try; none before the first one.
    pub fn pause(&self) -> Duration {
        self.count.checked_sub(1).map_or(Duration::ZERO, backoff)
    }
}

/// Requests to the store, counted.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    pub puts: AtomicU64,
    pub put_bytes: AtomicU64,
    pub gets: AtomicU64,
    pub get_bytes: AtomicU64,
    pub deletes: AtomicU64,
    pub orphans: AtomicU64,
    pub repacked_bytes: AtomicU64,
    pub retries: AtomicU64,
}

/// The store, as a device uses it.
#[derive(Clone)]
pub(crate) struct Access {
    pub store: Arc<dyn Store>,
    pub executor: Arc<dyn Executor>,
    pub counters: Arc<Counters>,
    pub clock: Arc<dyn Clock>,
    pub patience: Patience,
    holding: Arc<Mutex<Holding>>,
    /// No request that fails is repeated any more.
    pub given_up: Arc<AtomicBool>,
    /// How the volume's objects are stored.
    pub codec: Codec,
    /// Of a clone: the volumes that it refers to, as `super` lists them.
    pub parents: Arc<[Origin]>,
}

/// A volume that a clone refers to: where its objects are, and how they are stored.
#[derive(Clone)]
pub(crate) struct Origin {
    pub store: Arc<dyn Store>,
    pub codec: Codec,
}

/// The beginning of an object.
pub(crate) struct Begun {
    pub front: Front,
    pub table: Vec<u8>,
    /// All of a small object.
    pub whole: Option<Arc<Vec<u8>>>,
}

impl Access {
    /// The key of an encrypted volume, for [`Passphrase::of_key`](crate::Passphrase::of_key).
    pub fn key(&self) -> Option<Zeroizing<Vec<u8>>> {
        self.codec.key.as_ref().map(|key| Zeroizing::new(key.secret().to_vec()))
    }

    /// Access to a store, for one that makes or opens a volume.
    pub fn new(
        store: Arc<dyn Store>,
        executor: Arc<dyn Executor>,
        patience: Patience,
        env: &Env,
    ) -> Self {
        Self {
            store,
            executor,
            counters: Arc::default(),
            clock: Arc::clone(&env.clock),
            patience,
            holding: Arc::default(),
            given_up: Arc::default(),
            codec: Codec::default(),
            parents: Arc::default(),
        }
    }

    /// Access to the volume that has an object: this one, or one that it refers to.
    pub fn of(&self, info: &Super, object: ObjectRef) -> Cow<'_, Self> {
        match info.parent_of(object) {
            None => Cow::Borrowed(self),
            Some(parent) => Cow::Owned(self.at(&self.parents[parent])),
        }
    }

    /// The same, but a request that fails is not repeated.
    pub fn once(&self) -> Self {
        Self { patience: Patience::Opening(Duration::ZERO), ..self.clone() }
    }

    /// Access to another volume.
    pub fn at(&self, origin: &Origin) -> Self {
        let Origin { store, codec } = origin.clone();
        Self { store, codec, parents: Arc::default(), ..self.clone() }
    }

    /// The same, to an encrypted volume.
    pub fn with_key(mut self, key: VolumeKey) -> Self {
        self.codec.key = Some(Arc::new(key));
        self
    }

    /// Repeats a request until the store has carried it out.
    pub fn insist<T>(
        &self,
        mut request: impl FnMut(&dyn Store) -> Result<T, ObjectError>,
    ) -> Result<T, ObjectError> {
        let mut tries = Tries::default();
        loop {
            match request(&*self.store) {
                Err(error) if self.repeats(&error, &mut tries) => {
                    self.executor.pause(tries.pause());
                }
                other => return other,
            }
        }
    }

    /// Whether a request that failed so is tried again; if so, the try is counted.
    pub fn repeats(&self, error: &ObjectError, tries: &mut Tries) -> bool {
        let now = self.clock.monotonic();
        let begun = *tries.begun.get_or_insert(now);
        let repeats = match self.patience {
            Patience::Opening(time) => error.is_temporary() && now.saturating_sub(begun) < time,
            Patience::Serving => error.may_be_mended(),
        };
        if !repeats || self.given_up.load(Ordering::Relaxed) {
            return false;
        }
        tries.count += 1;
        self.counters.retries.fetch_add(1, Ordering::Relaxed);
        if self.patience == Patience::Serving {
            if let Some(HeldRequest(access)) = &tries.held {
                access.holding.lock().reason = error.to_string();
            } else if tries.count >= HELD_TRIES || !error.is_temporary() {
                tries.held = Some(self.hold(error));
            }
        } else if tries.count == 1 {
            tracing::warn!(%error, "a request to the store is repeated");
        }
        true
    }

    /// Counts a request as held. The log has a line for the first one.
    fn hold(&self, error: &ObjectError) -> HeldRequest {
        let mut holding = self.holding.lock();
        if holding.requests == 0 {
            holding.since = self.clock.monotonic();
            tracing::warn!(%error, "requests to the store are held, and tried again until it carries them out");
        }
        holding.requests += 1;
        holding.reason = error.to_string();
        HeldRequest(self.clone())
    }

    /// What is held now.
    pub fn held(&self) -> Option<Held> {
        let holding = self.holding.lock();
        (holding.requests > 0).then(|| Held {
            requests: holding.requests,
            time: self.clock.monotonic().saturating_sub(holding.since),
            reason: holding.reason.clone(),
        })
    }

    /// What a job says that has ended; `None`: none has for some time, or this thread ran a part of
    /// one.
    pub fn ended<T>(&self, end: &mpsc::Receiver<T>) -> Option<T> {
        match end.try_recv() {
            Ok(found) => Some(found),
            Err(_) if self.executor.step() => None,
            Err(_) => end.recv_timeout(LOOK_AGAIN).ok(),
        }
    }

    /// Asks for each of the items, several at a time, and returns the answers in the order of the
    /// items. A single item is asked for by this thread.
    pub fn ask_all<I: Send + 'static, T: Send + 'static>(
        &self,
        items: Vec<I>,
        ask: impl Fn(&Self, I) -> Result<T, ObjectError> + Send + Sync + 'static,
    ) -> Result<Vec<T>, ObjectError> {
        if items.len() < 2 {
            return items.into_iter().map(|item| ask(self, item)).collect();
        }
        let mut answers: Vec<Option<T>> = items.iter().map(|_| None).collect();
        let numbered = items.into_iter().enumerate();
        self.ask_each(
            numbered,
            move |access, (n, item)| Ok((n, ask(access, item)?)),
            |(n, answer)| answers[n] = Some(answer),
        )?;
        Ok(answers.into_iter().flatten().collect())
    }

    /// Asks for each of the items, several at a time, and hands over the answers as they come.
    /// After an error nothing more is asked for.
    pub fn ask_each<I: Send + 'static, T: Send + 'static>(
        &self,
        items: impl IntoIterator<Item = I>,
        ask: impl Fn(&Self, I) -> Result<T, ObjectError> + Send + Sync + 'static,
        mut take: impl FnMut(T),
    ) -> Result<(), ObjectError> {
        let ask = Arc::new(ask);
        let (ended, end) = mpsc::channel();
        let mut left = items.into_iter();
        let (mut under_way, mut failed) = (0, None);
        loop {
            while under_way < AT_ONCE
                && failed.is_none()
                && let Some(item) = left.next()
            {
                let (me, ask, ended) = (self.clone(), Arc::clone(&ask), ended.clone());
                let run = move || -> Answer {
                    let answer = ask(&me, item);
                    Box::new(move || drop(ended.send(answer)))
                };
                under_way += 1;
                let job = Job { upload: None, after: Duration::ZERO, run: Box::new(run) };
                self.executor.start(job);
            }
            // Also behind an error, for those under way.
            if under_way == 0 {
                return failed.map_or(Ok(()), Err);
            }
            let Some(answer) = self.ended(&end) else { continue };
            under_way -= 1;
            match answer {
                Ok(answer) => take(answer),
                Err(error) => {
                    failed.get_or_insert(error);
                }
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

    /// The same of a part of an object, with no repetition.
    pub fn get_once(&self, name: &str, range: Range<u64>) -> Result<Vec<u8>, ObjectError> {
        let bytes = self.store.get(name, Some(range))?;
        self.counters.gets.fetch_add(1, Ordering::Relaxed);
        self.counters.get_bytes.fetch_add(bytes.len() as u64, Ordering::Relaxed);
        Ok(bytes)
    }

    /// The header of an object; `None` if it is not there.
    pub fn header(&self, name: &str) -> Result<Option<Header>, ObjectError> {
        match self.get(name, Some(0..HEADER_LEN as u64)) {
            Err(ObjectError::NotFound(_)) => Ok(None),
            found => header(name, &found?).map(Some),
        }
    }

    /// Front and table of an object.
    pub fn table(&self, name: &str) -> Result<(Front, Vec<u8>), ObjectError> {
        self.read_table(name).map(|Begun { front, table, .. }| (front, table))
    }

    /// The same, and the whole object if it is small.
    pub fn read_table(&self, name: &str) -> Result<Begun, ObjectError> {
        let mut bytes = self.get(name, Some(0..TABLE_READ))?;
        let front = Front::decode(&self.codec, name, &bytes)?;
        let end = front.table_end();
        if end > TABLE_READ && bytes.len() as u64 == TABLE_READ {
            bytes.extend(self.get(name, Some(TABLE_READ..end))?);
        }
        let table = front.table(&bytes)?;
        bytes.shrink_to_fit();
        let whole = ((bytes.len() as u64) < TABLE_READ).then(|| Arc::new(bytes));
        Ok(Begun { front, table, whole })
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

/// The names of all objects below these prefixes, with their sizes.
pub(crate) fn sizes(
    access: &Access,
    prefixes: &[&str],
) -> Result<BTreeMap<String, u64>, ObjectError> {
    let mut all = BTreeMap::new();
    for prefix in prefixes {
        all.extend(access.insist(|store| store.list_sizes(prefix))?);
    }
    Ok(all)
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
