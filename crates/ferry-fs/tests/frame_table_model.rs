//! Models of `Front` under loom: readers that find frames in it, readers that put them in, and
//! eviction (`docs/locking.md`, rules FRAME-1 and FRAME-6).
#![expect(clippy::disallowed_methods, reason = "tests may unwrap")]

/// Here it is always asserted.
macro_rules! checked {
    ($($what:tt)*) => {
        assert!($($what)*)
    };
}

#[allow(dead_code, reason = "the model needs a part of it")]
#[path = "../src/cache/frame.rs"]
mod frame;

#[allow(dead_code, reason = "the model needs a part of it")]
#[path = "../src/cache/frame_table.rs"]
mod frame_table;

#[allow(dead_code, reason = "the model needs a part of it")]
#[path = "../src/cache/node.rs"]
mod node;

/// Where the included files find each other.
mod cache {
    pub(crate) use super::{frame, node};
}

/// What they are compiled against here.
#[allow(dead_code, unused_imports, reason = "the model needs a part of it")]
#[path = "frames/sync.rs"]
mod sync;

use frame::{Frame, copied};
use frame_table::{Front, TableBudget};
use loom::thread;
use std::sync::Arc;
use sync::{AtomicU64, Ordering, RwLock};

const LEN: usize = 8;

/// Folios of the file: its table has one slot, which all folios share.
const FOLIOS: u64 = 1;

/// What a variant of the model leaves out.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Without {
    Nothing,
    /// The page lock while a frame is put in.
    PageLock,
    /// `forget`, when a folio is evicted.
    Forget,
    /// That, and the odd number.
    GiveUp,
}

/// A file: its folios below the page lock, and the table before them.
struct File {
    pages: RwLock<Vec<Arc<Frame>>>,
    front: Front,
    budget: TableBudget,
    /// The newest contents of folio 0 that a finished change has left.
    newest: AtomicU64,
    without: Without,
}

/// A frame of folio `index` with these bytes.
fn filled(index: u64, value: u8) -> Arc<Frame> {
    let frame = Frame::new(index, 0, LEN, Arc::default());
    frame.copy_in(0, &[value; LEN]);
    Arc::new(frame)
}

impl File {
    fn new(without: Without) -> Arc<Self> {
        Arc::new(Self {
            pages: RwLock::new(vec![filled(0, 1), filled(1, 1)]),
            front: Front::default(),
            budget: TableBudget::new(0),
            newest: AtomicU64::new(1),
            without,
        })
    }

    /// A read without the page lock, as `copy_free` in `copy.rs` does it.
    fn read_free(&self, index: u64) -> Option<u8> {
        let frame = self.front.get(index, FOLIOS, &self.budget)?;
        assert_eq!(frame.index, index);
        let seq = frame.sample()?;
        let mut out = [0; LEN];
        frame.copy_out(0, &mut out);
        copied();
        frame.is_still(seq).then_some(out[0])
    }

    /// A read: with the page lock if it must, and then it puts the frame in.
    fn read(&self, index: u64) -> u8 {
        if let Some(value) = self.read_free(index) {
            return value;
        }
        let pages = self.pages.read().unwrap();
        let frame = Arc::clone(&pages[index as usize]);
        let mut out = [0; LEN];
        frame.copy_out(0, &mut out);
        let page_lock = (self.without != Without::PageLock).then_some(pages);
        self.front.put(&frame, FOLIOS, &self.budget);
        drop(page_lock);
        out[0]
    }

    /// Folio 0 is evicted, and brought in again with other contents.
    fn replace(&self, value: u8) {
        let mut pages = self.pages.write().unwrap();
        if self.without != Without::GiveUp {
            pages[0].give_up();
        }
        if !matches!(self.without, Without::Forget | Without::GiveUp) {
            self.front.forget(0);
        }
        pages[0] = filled(0, value);
        drop(pages);
        self.newest.store(value.into(), Ordering::SeqCst);
    }

    /// A read sees what was there when it began, or something newer.
    fn check_read(&self) {
        let newest = self.newest.load(Ordering::SeqCst);
        let seen = u64::from(self.read(0));
        assert!(seen >= newest, "stale: {seen} when {newest} was there");
    }

    /// What stands in the table is what the folios have.
    fn check_table(&self) {
        let pages = self.pages.read().unwrap();
        for index in 0..2 {
            let found = self.front.get(index, FOLIOS, &self.budget);
            let current = &pages[index as usize];
            assert!(
                found.is_none_or(|frame| Arc::ptr_eq(&frame, current)),
                "a frame that was given up stays in the table"
            );
        }
    }
}

fn check(without: Without) {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(3);
    model.check(move || {
        let file = File::new(without);
        // Folio 0 may be in the table already.
        file.read(0);
        let evictor = {
            let file = Arc::clone(&file);
            thread::spawn(move || file.replace(2))
        };
        let other = {
            let file = Arc::clone(&file);
            // It takes the same slot.
            thread::spawn(move || assert_eq!(file.read(1), 1))
        };
        file.check_read();
        file.check_read();
        evictor.join().unwrap();
        other.join().unwrap();
        if without == Without::GiveUp {
            // What the threads saw meanwhile counts.
            return;
        }
        file.check_table();
        assert_eq!(file.read(0), 2);
        assert_eq!(file.read_free(0), Some(2), "the next read needs no lock");
    });
}

#[test]
fn no_read_is_stale_and_no_frame_outlives_its_folio_in_the_table() {
    check(Without::Nothing);
}

#[test]
#[should_panic(expected = "stale")]
fn if_a_frame_is_not_given_up_the_model_finds_a_stale_read() {
    check(Without::GiveUp);
}

#[test]
#[should_panic(expected = "stays in the table")]
fn without_the_page_lock_the_model_finds_a_frame_that_stays() {
    check(Without::PageLock);
}

#[test]
#[should_panic(expected = "stays in the table")]
fn without_forget_the_model_finds_a_frame_that_stays() {
    check(Without::Forget);
}

/// Two readers that want a large table at the same time: one is made, and counted once. A file that
/// comes when the budget is used up makes do with a smaller one.
#[test]
fn a_table_is_counted_once_and_given_back() {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(3);
    model.check(|| {
        let limit = 40 * cache::frame::FOLIO_BYTES;
        let (front, budget) = (Arc::new(Front::default()), Arc::new(TableBudget::new(limit)));
        let put = |index| {
            let (front, budget) = (Arc::clone(&front), Arc::clone(&budget));
            move || front.put(&filled(index, 1), 1000, &budget)
        };
        let other = thread::spawn(put(1));
        let took = put(2)() + other.join().unwrap();
        assert_eq!(took, front.memory());
        assert!(front.get(1, 1000, &budget).is_some() && front.get(2, 1000, &budget).is_some());
        budget.give_back(&front);
        let again = Front::default();
        assert_eq!(again.put(&filled(3, 1), 1000, &budget), took, "all of it was given back");
    });
}
