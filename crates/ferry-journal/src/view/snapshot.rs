//! All layers merged with the home store, as of one moment.

use super::layers::{Merge, View};
use crate::home::HomeEntry;
use crate::types::Changes;
use crate::{JournalError, Value};
use std::cmp::Ordering;

type Visit<'a> = &'a mut dyn FnMut(&[u8], &Value) -> bool;

/// What a scan sees: the changes in its range that are not in the view, and the view.
pub struct Snapshot {
    pub newest: Changes,
    pub view: View,
}

/// The home store's view failed on the way.
pub struct Interrupted {
    /// All keys before this one were visited, and no others.
    pub at: Vec<u8>,
    pub error: JournalError,
}

impl Interrupted {
    fn after(passed: &HomeEntry, error: JournalError) -> Self {
        let mut at = passed.key.value().to_vec();
        at.push(0);
        Self { at, error }
    }
}

impl Snapshot {
    pub fn walk(&self, from: &[u8], to: &[u8], visit: Visit<'_>) -> Result<(), Interrupted> {
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
                Some(entry) if order.is_gt() => {
                    visit(entry.key.value(), &Value::from(entry.value.value()))
                }
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
                below = HomeEntry::next(&mut home)
                    .map_err(|error| Interrupted::after(&passed, error))?;
                if below.as_ref().is_some_and(|next| next.key.value() <= passed.key.value()) {
                    return Err(Interrupted::after(
                        &passed,
                        JournalError::Home("its keys are not in order".into()),
                    ));
                }
            }
        }
    }
}
