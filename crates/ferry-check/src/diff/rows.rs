//! The keys of a volume in order, some of them in memory at a time: a scan calls its visitor, and
//! two scans cannot be followed side by side.

use crate::inspect::Inspector;
use ferry_journal::{JournalError, Value};
use std::cmp::Ordering;
use std::collections::VecDeque;

/// Keys and values that are read at once at most.
const WINDOW_KEYS: usize = 4096;
/// Bytes of values after which no more are read at once.
const WINDOW_BYTES: usize = 1 << 20;

/// A key and its value.
pub(super) type Row = (Vec<u8>, Value);

/// What the old and the new side have under a key.
pub(super) type Values = [Option<Value>; 2];

/// The keys of a range.
pub(super) struct Rows<'v> {
    volume: &'v Inspector,
    /// Where the scan goes on; `None`: it has come to the end.
    from: Option<Vec<u8>>,
    end: Vec<u8>,
    window: VecDeque<Row>,
}

impl<'v> Rows<'v> {
    /// Of the keys in `[from, end)`.
    pub(super) fn new(volume: &'v Inspector, from: Vec<u8>, end: Vec<u8>) -> Self {
        Self { volume, from: Some(from), end, window: VecDeque::new() }
    }

    /// The next one, which stays the next one.
    fn peek(&mut self) -> Result<Option<&Row>, JournalError> {
        if self.window.is_empty() {
            self.fill()?;
        }
        Ok(self.window.front())
    }

    pub(super) fn next(&mut self) -> Result<Option<Row>, JournalError> {
        self.peek()?;
        Ok(self.window.pop_front())
    }

    fn fill(&mut self) -> Result<(), JournalError> {
        let Some(from) = self.from.take() else { return Ok(()) };
        let (window, mut bytes, mut next) = (&mut self.window, 0, None);
        self.volume.keys(&from, &self.end, &mut |key, value| {
            window.push_back((key.to_vec(), value.clone()));
            bytes += value.len();
            if window.len() >= WINDOW_KEYS || bytes >= WINDOW_BYTES {
                next = Some([key, &[0]].concat());
            }
            next.is_none()
        })?;
        self.from = next;
        Ok(())
    }
}

/// Visits the keys of two volumes in order: each key once, with the values that the sides have.
pub(super) fn side_by_side(
    mut old: Rows<'_>,
    mut new: Rows<'_>,
    visit: &mut dyn FnMut(&[u8], Values),
) -> Result<(), JournalError> {
    loop {
        let order = match (old.peek()?, new.peek()?) {
            (None, None) => return Ok(()),
            (Some(_), None) => Ordering::Less,
            (None, Some(_)) => Ordering::Greater,
            (Some((old, _)), Some((new, _))) => old.cmp(new),
        };
        let old = if order.is_le() { old.next()? } else { None };
        let new = if order.is_ge() { new.next()? } else { None };
        let key = old.as_ref().or(new.as_ref()).map(|(key, _)| key.clone()).unwrap_or_default();
        visit(&key, [old.map(|(_, value)| value), new.map(|(_, value)| value)]);
    }
}
