//! [`Ahead`]: bytes of objects that will be read soon, in memory or on their way from the store.
//!
//! The file system says what a sequential reader wants next. That is cut into spans, each of which
//! one request fetches, several at a time. A reader that comes before a span waits for it. If its
//! request has not begun, the reader makes it: threads that are busy with uploads hold up no read.
//! What is here is as it was fetched; a reader verifies it.

use crate::cache::PART;
use crate::format::ObjectRef;
use parking_lot::{Condvar, Mutex, MutexGuard};
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::ops::{Deref, Range};
use std::sync::Arc;
use std::time::Duration;

/// Bytes of a span, at most: one request. Each of the requests under way takes a share of the
/// store's rate, and a reader waits for a whole one.
const SPAN_BYTES_MAX: u64 = 4 << 20;
/// Requests under way at a time. The executor has threads left for uploads.
const FETCHES_MAX: usize = 8;
/// So many of the newest small reads that went to the store are remembered.
const MISSES_MAX: usize = 64;
/// What nobody has read for so long may leave before it was read.
const IDLE: Duration = Duration::from_secs(5);

/// A span, by its age.
type Id = u64;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    /// No request has begun.
    Queued,
    /// A request is under way.
    Fetching,
    /// It has been fetched.
    Here,
}

struct Span {
    object: ObjectRef,
    /// Parts of the object, each of [`PART`] bytes.
    parts: Range<u64>,
    stage: Stage,
    /// They may end before the parts do: the object ends there.
    bytes: Arc<Vec<u8>>,
    /// Its last byte was read. (Reads beside each other may end in any order, so it stays until its
    /// room is needed.)
    used: bool,
    /// When it was added, or read last.
    touched: Duration,
}

impl Span {
    fn room(&self) -> u64 {
        (self.parts.end - self.parts.start) * PART
    }

    fn start(&self) -> u64 {
        self.parts.start * PART
    }
}

#[derive(Default)]
struct Table {
    spans: BTreeMap<Id, Span>,
    by_part: HashMap<(ObjectRef, u64), Id>,
    /// Those whose requests have not begun.
    queue: VecDeque<Id>,
    /// Bytes of all spans, as if they had come.
    room: u64,
    /// Jobs that fetch spans.
    fetchers: usize,
    next: Id,
    /// The newest small reads that went to the store.
    misses: VecDeque<(ObjectRef, u64)>,
    /// Ranges of contents whose offset in the object is not known until its front has come.
    unresolved: HashMap<ObjectRef, Vec<Range<u64>>>,
}

/// What is to be requested.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Fetch {
    id: Id,
    pub object: ObjectRef,
    pub range: Range<u64>,
}

/// Bytes of one span, or a copy of those of several.
#[derive(Debug)]
pub(crate) enum Bytes {
    Shared(Arc<Vec<u8>>, Range<usize>),
    Copied(Vec<u8>),
}

impl Deref for Bytes {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match self {
            Self::Shared(bytes, range) => &bytes[range.clone()],
            Self::Copied(bytes) => bytes,
        }
    }
}

/// What a reader finds.
#[derive(Debug)]
pub(crate) enum Found {
    /// Not all of it is here or on its way.
    Nothing,
    /// Bytes, which may end where the object does.
    Bytes(Bytes),
    /// The reader has to make this request, and look again.
    Fetch(Fetch),
}

/// Spans that were fetched ahead of their readers, or are to be.
pub(crate) struct Ahead {
    table: Mutex<Table>,
    fetched: Condvar,
    bytes_max: u64,
}

impl Ahead {
    /// It holds so many bytes at most.
    pub fn new(bytes_max: u64) -> Self {
        Self { table: Mutex::default(), fetched: Condvar::new(), bytes_max }
    }

    /// Bytes that it has, or has requested.
    pub fn bytes(&self) -> u64 {
        self.table.lock().room
    }

    /// Adds a range of an object, except what is there, or what `cached` says is elsewhere. What
    /// there is no room for is left to its reader.
    pub fn add(
        &self,
        object: ObjectRef,
        range: &Range<u64>,
        now: Duration,
        cached: impl Fn(&Range<u64>) -> bool,
    ) {
        let mut table = self.table.lock();
        let mut from = range.start / PART;
        let end = range.end.div_ceil(PART);
        while from < end {
            let wanted = |part: u64, table: &Table| {
                let bytes = part * PART..(part + 1) * PART;
                !table.by_part.contains_key(&(object, part)) && !cached(&bytes)
            };
            if !wanted(from, &table) {
                from += 1;
                continue;
            }
            let most = end.min(from + SPAN_BYTES_MAX / PART);
            let to = (from + 1..most).find(|part| !wanted(*part, &table)).unwrap_or(most);
            if !table.make_room((to - from) * PART, self.bytes_max, now) {
                return;
            }
            table.add(object, from..to, now);
            from = to;
        }
    }

    /// Whether the begin of an object is here or on its way.
    pub fn has_begin(&self, object: ObjectRef) -> bool {
        self.table.lock().by_part.contains_key(&(object, 0))
    }

    /// Notes a small read that goes to the store. Whether it is near one of the newest before it:
    /// then more will follow, as where the pages of a tree are read one by one, and its whole parts
    /// are worth fetching.
    pub fn is_near_another(&self, object: ObjectRef, range: &Range<u64>) -> bool {
        // The front is read before what is wanted of the object.
        if range.start == 0 || range.end - range.start > PART {
            return false;
        }
        let mut table = self.table.lock();
        let part = range.start / PART;
        let near = |miss: &(ObjectRef, u64)| miss.0 == object && miss.1.abs_diff(part) <= 1;
        let found = table.misses.iter().any(near);
        if !table.misses.contains(&(object, part)) {
            table.misses.push_front((object, part));
            table.misses.truncate(MISSES_MAX);
        }
        found
    }

    /// Takes whole parts of an object that somebody has fetched, if there is room.
    pub fn insert(&self, object: ObjectRef, start: u64, bytes: Vec<u8>, now: Duration) {
        let mut table = self.table.lock();
        let from = start / PART;
        let parts = from..from + (bytes.len() as u64).div_ceil(PART);
        let is_new = |part: u64| !table.by_part.contains_key(&(object, part));
        if parts.is_empty() || !parts.clone().all(is_new) {
            return;
        }
        if table.make_room((parts.end - parts.start) * PART, self.bytes_max, now) {
            let id = table.add(object, parts, now);
            let fetch = table.begin(id);
            drop(table);
            self.ended(&fetch, Some(Arc::new(bytes)));
        }
    }

    /// Notes a range of an object's contents until its front has come. Whether the front must be
    /// asked for: nobody did.
    pub fn add_unresolved(&self, object: ObjectRef, contents: Range<u64>) -> bool {
        let mut table = self.table.lock();
        let waiting = table.unresolved.entry(object).or_default();
        waiting.push(contents);
        waiting.len() == 1
    }

    /// The front has come, or never will: what was noted.
    pub fn take_unresolved(&self, object: ObjectRef) -> Vec<Range<u64>> {
        self.table.lock().unresolved.remove(&object).unwrap_or_default()
    }

    /// Whether one more job should fetch spans. If so, it is counted, and calls
    /// [`Ahead::fetcher_ended`].
    pub fn wants_fetcher(&self) -> bool {
        let mut table = self.table.lock();
        let wanted = table.queue.len().min(FETCHES_MAX) > table.fetchers;
        table.fetchers += usize::from(wanted);
        wanted
    }

    /// A job that was counted has ended.
    pub fn fetcher_ended(&self) {
        self.table.lock().fetchers -= 1;
    }

    /// The next request.
    pub fn next_fetch(&self) -> Option<Fetch> {
        let mut table = self.table.lock();
        let id = *table.queue.front()?;
        Some(table.begin(id))
    }

    /// A request was answered, or failed: then its readers make requests of their own.
    pub fn ended(&self, fetch: &Fetch, bytes: Option<Arc<Vec<u8>>>) {
        let mut table = self.table.lock();
        match (table.spans.get_mut(&fetch.id), bytes) {
            (Some(span), Some(bytes)) => (span.stage, span.bytes) = (Stage::Here, bytes),
            _ => table.remove(fetch.id),
        }
        drop(table);
        self.fetched.notify_all();
    }

    /// Bytes of an object. It waits for requests that are under way; `step` says whether another
    /// one has to run a part of them (as [`crate::Executor::step`]).
    pub fn read(
        &self,
        object: ObjectRef,
        range: &Range<u64>,
        now: Duration,
        step: impl Fn() -> bool,
    ) -> Found {
        let mut table = self.table.lock();
        loop {
            match table.find(object, range) {
                None => return Found::Nothing,
                Some(ids) => match table.stage(&ids) {
                    (Stage::Queued, id) => return Found::Fetch(table.begin(id)),
                    (Stage::Here, _) => return Found::Bytes(table.bytes(&ids, range, now)),
                    (Stage::Fetching, id) => {
                        let stepped = MutexGuard::unlocked(&mut table, &step);
                        // It may have come meanwhile.
                        let waits = |span: &Span| span.stage == Stage::Fetching;
                        if !stepped && table.spans.get(&id).is_some_and(waits) {
                            self.fetched.wait(&mut table);
                        }
                    }
                },
            }
        }
    }

    /// Forgets what is here of a range: that is not what was written.
    pub fn forget(&self, object: ObjectRef, range: &Range<u64>) {
        let mut table = self.table.lock();
        for part in range.start / PART..range.end.div_ceil(PART) {
            if let Some(id) = table.by_part.get(&(object, part)).copied()
                && table.spans.get(&id).is_some_and(|span| span.stage == Stage::Here)
            {
                table.remove(id);
            }
        }
    }

    /// Gives back the memory of what nobody reads.
    pub fn drop_idle(&self, now: Duration) {
        let mut table = self.table.lock();
        let idle = |span: &Span| span.stage == Stage::Here && span.touched + IDLE <= now;
        let ids: Vec<Id> =
            table.spans.iter().filter(|(_, span)| idle(span)).map(|(id, _)| *id).collect();
        ids.into_iter().for_each(|id| table.remove(id));
    }
}

impl Table {
    fn add(&mut self, object: ObjectRef, parts: Range<u64>, now: Duration) -> Id {
        let id = self.next;
        self.next += 1;
        self.by_part.extend(parts.clone().map(|part| ((object, part), id)));
        let span = Span {
            object,
            parts,
            stage: Stage::Queued,
            bytes: Arc::default(),
            used: false,
            touched: now,
        };
        self.room += span.room();
        self.spans.insert(id, span);
        self.queue.push_back(id);
        id
    }

    fn remove(&mut self, id: Id) {
        let Some(span) = self.spans.remove(&id) else { return };
        self.room -= span.room();
        for part in span.parts {
            self.by_part.remove(&(span.object, part));
        }
        self.queue.retain(|queued| *queued != id);
    }

    /// Makes room for so many bytes: what was read leaves first, then what nobody has read for
    /// long. What a reader is on its way to stays.
    fn make_room(&mut self, bytes: u64, bytes_max: u64, now: Duration) -> bool {
        let used = |span: &Span| span.stage == Stage::Here && span.used;
        let idle = |span: &Span| span.stage == Stage::Here && span.touched + IDLE <= now;
        for leaves in [&used as &dyn Fn(&Span) -> bool, &idle] {
            while self.room + bytes > bytes_max {
                let oldest = self.spans.iter().find(|(_, span)| leaves(span));
                let Some(id) = oldest.map(|(id, _)| *id) else { break };
                self.remove(id);
            }
        }
        self.room + bytes <= bytes_max
    }

    fn begin(&mut self, id: Id) -> Fetch {
        self.queue.retain(|queued| *queued != id);
        let span = self.spans.get_mut(&id).expect("a queued span is there");
        assert_eq!(span.stage, Stage::Queued, "one request fetches a span");
        span.stage = Stage::Fetching;
        Fetch { id, object: span.object, range: span.start()..span.parts.end * PART }
    }

    /// The spans that have the range, if all of it is in some.
    fn find(&self, object: ObjectRef, range: &Range<u64>) -> Option<Vec<Id>> {
        let mut ids: Vec<Id> = Vec::new();
        for part in range.start / PART..range.end.div_ceil(PART) {
            let id = *self.by_part.get(&(object, part))?;
            if ids.last() != Some(&id) {
                ids.push(id);
            }
        }
        (!ids.is_empty()).then_some(ids)
    }

    /// How far the least of them is, and which that is.
    fn stage(&self, ids: &[Id]) -> (Stage, Id) {
        let stages = ids.iter().map(|id| (self.spans[id].stage, *id));
        let rank = |(stage, _): &(Stage, Id)| match stage {
            Stage::Queued => 0,
            Stage::Fetching => 1,
            Stage::Here => 2,
        };
        stages.min_by_key(rank).expect("there is one")
    }

    fn bytes(&mut self, ids: &[Id], range: &Range<u64>, now: Duration) -> Bytes {
        let mut copied = Vec::new();
        for id in ids {
            let span = self.spans.get_mut(id).expect("it was found");
            span.touched = now;
            let end = span.start() + span.bytes.len() as u64;
            span.used |= range.end >= end;
            let within = |at: u64| (at.clamp(span.start(), end) - span.start()) as usize;
            let found = within(range.start)..within(range.end);
            if ids.len() == 1 {
                return Bytes::Shared(Arc::clone(&span.bytes), found);
            }
            copied.reserve_exact((range.end - range.start) as usize - copied.len());
            copied.extend_from_slice(&span.bytes[found]);
        }
        Bytes::Copied(copied)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const OBJECT: ObjectRef = ObjectRef { epoch: 3, number: 5 };
    const MIB: u64 = 1 << 20;
    const NOW: Duration = Duration::from_secs(100);

    fn stored(range: &Range<u64>) -> Arc<Vec<u8>> {
        Arc::new((range.start / 8..range.end / 8).flat_map(u64::to_le_bytes).collect())
    }

    fn add(ahead: &Ahead, object: u64, range: Range<u64>) {
        ahead.add(ObjectRef { number: object, ..OBJECT }, &range, NOW, |_| false);
    }

    fn fetch_all(ahead: &Ahead) -> Vec<Range<u64>> {
        let mut ranges = Vec::new();
        while let Some(fetch) = ahead.next_fetch() {
            ahead.ended(&fetch, Some(stored(&fetch.range)));
            ranges.push(fetch.range);
        }
        ranges
    }

    fn read(ahead: &Ahead, range: Range<u64>) -> Option<Vec<u8>> {
        match ahead.read(OBJECT, &range, NOW, || panic!("nothing is under way")) {
            Found::Bytes(bytes) => Some(bytes.to_vec()),
            Found::Nothing => None,
            Found::Fetch(fetch) => panic!("{fetch:?}"),
        }
    }

    #[test]
    fn what_was_fetched_is_read_in_any_range_and_fetched_once() {
        let ahead = Ahead::new(64 * MIB);
        add(&ahead, 5, 10..9 * MIB + 10);
        add(&ahead, 5, 2 * MIB..5 * MIB);
        let ranges = fetch_all(&ahead);
        assert_eq!(ranges, [0..4 * MIB, 4 * MIB..8 * MIB, 8 * MIB..9 * MIB + PART]);
        for range in [0..8, 16..MIB, 4 * MIB - 8..4 * MIB + 8, 0..9 * MIB] {
            assert_eq!(read(&ahead, range.clone()), Some(stored(&range).to_vec()), "{range:?}");
        }
        assert_eq!(read(&ahead, 9 * MIB..9 * MIB + 2 * PART), None);
        ahead.forget(OBJECT, &(0..1));
        assert_eq!(read(&ahead, 0..8), None);
        assert!(read(&ahead, 4 * MIB..4 * MIB + 8).is_some(), "the next span is another one");
    }

    #[test]
    fn a_range_that_is_cached_elsewhere_is_not_fetched() {
        let ahead = Ahead::new(64 * MIB);
        ahead.add(OBJECT, &(0..4 * PART), NOW, |part| part.start == PART);
        assert_eq!(fetch_all(&ahead), [0..PART, 2 * PART..4 * PART]);
    }

    #[test]
    fn where_the_object_ends_so_do_the_bytes() {
        let ahead = Ahead::new(64 * MIB);
        add(&ahead, 5, 0..MIB);
        let fetch = ahead.next_fetch().expect("it is queued");
        ahead.ended(&fetch, Some(stored(&(0..1000))));
        assert_eq!(read(&ahead, 0..8192).map(|bytes| bytes.len()), Some(1000));
        assert_eq!(read(&ahead, 2000..8192), Some(vec![]));
    }

    #[test]
    fn what_a_reader_is_on_its_way_to_stays_and_what_was_read_makes_room() {
        let ahead = Ahead::new(8 * MIB);
        add(&ahead, 5, 0..8 * MIB);
        add(&ahead, 6, 0..MIB);
        assert_eq!(ahead.bytes(), 8 * MIB);
        fetch_all(&ahead);
        add(&ahead, 6, 0..MIB);
        assert!(ahead.next_fetch().is_none(), "there is no room");
        assert!(read(&ahead, 0..4 * MIB - 8).is_some());
        add(&ahead, 6, 0..MIB);
        assert!(ahead.next_fetch().is_none(), "it was not read to its end");
        assert!(read(&ahead, 3 * MIB..4 * MIB).is_some());
        assert!(read(&ahead, 0..8).is_some(), "nobody needs the room");
        add(&ahead, 6, 0..MIB);
        assert_eq!(fetch_all(&ahead), std::slice::from_ref(&(0..MIB)));
        assert!(read(&ahead, 0..8).is_none() && read(&ahead, 4 * MIB..8 * MIB).is_some());
        ahead.drop_idle(NOW + IDLE / 2);
        assert_eq!(ahead.bytes(), 5 * MIB);
        ahead.drop_idle(NOW + IDLE);
        assert_eq!(ahead.bytes(), 0);
    }

    #[test]
    fn a_reader_makes_a_request_that_has_not_begun_and_waits_for_one_that_has() {
        let ahead = Ahead::new(8 * MIB);
        add(&ahead, 5, 0..8 * MIB);
        let first = ahead.next_fetch().expect("it is queued");
        let Found::Fetch(second) = ahead.read(OBJECT, &(5 * MIB..6 * MIB), NOW, || false) else {
            panic!("its request has not begun");
        };
        assert!(ahead.next_fetch().is_none());
        std::thread::scope(|scope| {
            let reader = scope.spawn(|| read_waiting(&ahead, 4 * MIB - 8..4 * MIB + 8));
            ahead.ended(&second, Some(stored(&second.range)));
            ahead.ended(&first, Some(stored(&first.range)));
            let range = 4 * MIB - 8..4 * MIB + 8;
            assert_eq!(reader.join().expect("a reader"), Some(stored(&range).to_vec()));
        });
        // A request that failed is its reader's.
        ahead.drop_idle(NOW + IDLE);
        add(&ahead, 5, 0..MIB);
        let fetch = ahead.next_fetch().expect("it is queued");
        std::thread::scope(|scope| {
            let reader = scope.spawn(|| read_waiting(&ahead, 0..8));
            ahead.ended(&fetch, None);
            assert_eq!(reader.join().expect("a reader"), None);
        });
        assert_eq!(ahead.bytes(), 0);
    }

    fn read_waiting(ahead: &Ahead, range: Range<u64>) -> Option<Vec<u8>> {
        match ahead.read(OBJECT, &range, NOW, || false) {
            Found::Bytes(bytes) => Some(bytes.to_vec()),
            _ => None,
        }
    }

    #[test]
    fn so_many_requests_are_under_way_at_a_time() {
        let ahead = Ahead::new(64 * MIB);
        assert!(!ahead.wants_fetcher(), "nothing is queued");
        add(&ahead, 5, 0..48 * MIB);
        let fetchers = (0..20).filter(|_| ahead.wants_fetcher()).count();
        assert_eq!(fetchers, FETCHES_MAX);
        ahead.fetcher_ended();
        assert!(ahead.wants_fetcher());
        fetch_all(&ahead);
        ahead.fetcher_ended();
        assert!(!ahead.wants_fetcher());
    }

    #[test]
    fn small_reads_near_each_other_are_worth_whole_parts_and_random_ones_are_not() {
        let ahead = Ahead::new(8 * MIB);
        for n in 0..1000 {
            let at = n * 7919 % 1000 * 2 * PART;
            assert!(!ahead.is_near_another(OBJECT, &(at..at + 4096)), "{n}");
        }
        let at = 5000 * PART;
        assert!(!ahead.is_near_another(OBJECT, &(at..at + 4096)));
        assert!(!ahead.is_near_another(ObjectRef { number: 6, ..OBJECT }, &(at..at + 4096)));
        assert!(!ahead.is_near_another(OBJECT, &(at..at + MIB)), "a large read");
        assert!(ahead.is_near_another(OBJECT, &(at + 8192..at + 12_288)));
        assert!(ahead.is_near_another(OBJECT, &(at + PART..at + PART + 4096)));
        ahead.insert(OBJECT, PART, stored(&(PART..2 * PART)).to_vec(), NOW);
        ahead.insert(OBJECT, PART, vec![0; PART as usize], NOW);
        let range = PART + 8..PART + 16;
        assert_eq!(read(&ahead, range.clone()), Some(stored(&range).to_vec()));
        assert!(!ahead.wants_fetcher());
        ahead.insert(OBJECT, 16 * MIB, vec![0; 8 << 20], NOW);
        assert_eq!(ahead.bytes(), PART, "there is no room");
    }

    #[test]
    fn ranges_without_an_offset_wait_for_the_front_together() {
        let ahead = Ahead::new(64 * MIB);
        assert!(ahead.add_unresolved(OBJECT, 0..10));
        assert!(!ahead.add_unresolved(OBJECT, 10..30));
        assert_eq!(ahead.take_unresolved(OBJECT), [0..10, 10..30]);
        assert_eq!(ahead.take_unresolved(OBJECT), [] as [Range<u64>; 0]);
        assert!(ahead.add_unresolved(OBJECT, 0..10));
    }
}
