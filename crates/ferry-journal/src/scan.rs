//! Scans: all layers merged with the home store, as of one moment, without a lock.

use crate::core::Core;
use crate::home::{HomeView, home_error};
use crate::layers::{Changes, Merge, View};
use crate::{JournalError, Value, guard};
use std::cmp::Ordering;
use std::sync::Arc;

/// Changes in a scan's range that are copied; more are frozen instead.
const COPY_MAX: usize = 256;
/// Layers that scans may freeze off one context before the next scan copies after all.
const ROTATED_MAX: usize = 4;

type Bytes = &'static [u8];
type Visit<'a> = &'a mut dyn FnMut(&[u8], &Value) -> bool;

/// What a scan sees: the changes in its range that are not in the view, and the view.
pub struct Moment {
    pub newest: Changes,
    pub view: View,
}

/// The home store's view failed on the way.
struct Interrupted {
    /// All keys before this one were visited, and no others.
    at: Vec<u8>,
    error: JournalError,
}

impl Core {
    /// Calls `visit` for each key in `[from, to)`, ascending, as of one moment, without a lock.
    ///
    /// Where a checkpoint failed and the home store was opened anew meanwhile, the scan goes on with the new view. That
    /// shows the same moment, unless another checkpoint succeeded since: then the rest is as of a later moment.
    pub fn scan(&self, from: &[u8], to: &[u8], visit: Visit<'_>) -> Result<(), JournalError> {
        if from >= to {
            return Ok(());
        }
        let mut moment = self.moment(from, to);
        let Err(mut interrupted) = moment.walk(from, to, visit) else { return Ok(()) };
        loop {
            let Some(home) = self.renewed(&moment.view.home) else { return Err(interrupted.error) };
            if home.point == moment.view.home.point {
                moment.view.home = home;
            } else {
                moment = self.moment(&interrupted.at, to);
            }
            match moment.walk(&interrupted.at, to, visit) {
                Ok(()) => return Ok(()),
                Err(again) => interrupted = again,
            }
        }
    }

    /// After an error of `home`: the view that has taken its place, once the checkpoint that may have ended it is over.
    pub fn renewed(&self, home: &Arc<HomeView>) -> Option<Arc<HomeView>> {
        drop(self.checkpointing.lock());
        let now = self.head.read().view.home.clone();
        (!Arc::ptr_eq(&now, home)).then_some(now)
    }

    pub fn moment(&self, from: &[u8], to: &[u8]) -> Moment {
        let head = self.head.read();
        let limit = if head.rotated < ROTATED_MAX { COPY_MAX } else { usize::MAX - 1 };
        if let Some(copy) = head.copy_range(from, to, limit) {
            return Moment { newest: copy.into_iter().collect(), view: View::clone(&head.view) };
        }
        drop(head);
        let mut head = self.head.write();
        head.rotate();
        Moment { newest: Changes::new(), view: View::clone(&head.view) }
    }
}

impl Moment {
    fn walk(&self, from: &[u8], to: &[u8], visit: Visit<'_>) -> Result<(), Interrupted> {
        let before = |error| Interrupted { at: from.to_vec(), error };
        let maps = std::iter::once(&self.newest).chain(self.view.layers.iter().map(|l| &l.changes));
        let mut above = Merge::range(maps, from, to).peekable();
        let mut home = self.view.home.range(from, to).map_err(before)?;
        let mut below = HomeEntry::next(&mut home).map_err(before)?;
        loop {
            let order = match (above.peek(), &below) {
                (None, None) => return Ok(()),
                (Some(_), None) => Ordering::Less,
                (None, Some(_)) => Ordering::Greater,
                (Some((key, _)), Some(entry)) => (***key).cmp(entry.key.value()),
            };
            let go_on = match &below {
                Some(entry) if order.is_gt() => visit(entry.key.value(), &Value::from(entry.value.value())),
                _ => {
                    let (key, change) = above.next().expect("peeked just now");
                    change.as_ref().is_none_or(|value| visit(key, value))
                }
            };
            if !go_on {
                return Ok(());
            }
            if order.is_ge()
                && let Some(passed) = below
            {
                below = HomeEntry::next(&mut home).map_err(|error| passed.interrupted(error))?;
                if below.as_ref().is_some_and(|next| next.key.value() <= passed.key.value()) {
                    return Err(passed.interrupted(JournalError::Home("its keys are not in order".into())));
                }
            }
        }
    }
}

/// The next key of the home store in a scan.
struct HomeEntry {
    key: redb::AccessGuard<'static, Bytes>,
    value: redb::AccessGuard<'static, Bytes>,
}

impl HomeEntry {
    fn next(range: &mut redb::Range<'static, Bytes, Bytes>) -> Result<Option<Self>, JournalError> {
        guard::reading(|| {
            let Some((key, value)) = range.next().transpose().map_err(home_error)? else { return Ok(None) };
            // What a page that makes no sense panics at, panics here.
            let _ = (key.value(), value.value());
            Ok(Some(Self { key, value }))
        })
    }

    /// The walk ended behind this key.
    fn interrupted(&self, error: JournalError) -> Interrupted {
        let mut at = self.key.value().to_vec();
        at.push(0);
        Interrupted { at, error }
    }
}
