//! Reading past damage in the home store: all keys that can be read, in order, and the gaps between
//! them.

use super::layers::Merge;
use crate::home::{Found, Salvage};
use crate::types::{Changes, Key};
use crate::{JournalError, Value};
use std::cmp::Ordering;

/// Keys that cannot be read, if there were any: strictly between two others.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LostKeys {
    /// The readable key before the gap, or where the scan began.
    pub after: Vec<u8>,
    /// The readable key behind the gap, or where the scan ended.
    pub before: Vec<u8>,
    /// Keys between them that were read from pages which are not what they should be. They are
    /// visited as all others are.
    pub doubtful: u64,
    /// The first damaged block, on the device in bytes.
    pub offset: u64,
    /// What is wrong with it.
    pub detail: String,
}

/// Called for each gap.
pub type Lost<'a> = &'a mut dyn FnMut(LostKeys);

/// Keys from `from` on, before `to`.
pub struct Range<'a> {
    pub from: &'a [u8],
    pub to: &'a [u8],
}

/// A gap whose far side is not known yet.
struct Open {
    after: Vec<u8>,
    doubtful: u64,
    offset: u64,
    detail: String,
}

impl Open {
    fn close(self, before: &[u8]) -> LostKeys {
        let Self { after, doubtful, offset, detail } = self;
        LostKeys { after, before: before.to_vec(), doubtful, offset, detail }
    }
}

/// Walks `maps`, newest first, and below them the home store.
pub fn walk(
    maps: &[&Changes],
    salvage: Result<Salvage, JournalError>,
    Range { from, to }: Range<'_>,
    visit: &mut dyn FnMut(&[u8], &Value) -> bool,
    lost: Lost<'_>,
) -> Result<(), JournalError> {
    let mut above = Merge::range(maps.iter().copied(), from, to).peekable();
    let mut below = Below::new(salvage, from, to);
    below.advance(lost);
    loop {
        let order = match (above.peek(), &below.next) {
            (None, None) => return Ok(()),
            (Some(_), None) => Ordering::Less,
            (None, Some(_)) => Ordering::Greater,
            (Some((key, _)), Some((other, _))) => (***key).cmp(other),
        };
        let go_on = match &below.next {
            Some((key, value)) if order.is_gt() => visit(key, value),
            _ => {
                let (key, change) = above.next().expect("peeked just now");
                change.as_ref().is_none_or(|value| visit(key, value))
            }
        };
        if !go_on {
            return Ok(());
        }
        if order.is_ge() {
            below.advance(lost);
        }
    }
}

/// The home store's part of a walk.
struct Below<'a> {
    salvage: Option<Salvage>,
    from: &'a [u8],
    to: &'a [u8],
    /// The key that the walk has come to.
    next: Option<(Key, Value)>,
    gap: Option<Open>,
}

impl<'a> Below<'a> {
    fn new(salvage: Result<Salvage, JournalError>, from: &'a [u8], to: &'a [u8]) -> Self {
        let mut below = Self { salvage: None, from, to, next: None, gap: None };
        match salvage {
            Ok(salvage) => below.salvage = Some(salvage),
            Err(error) => below.damaged(0, error.to_string()),
        }
        below
    }

    fn damaged(&mut self, offset: u64, detail: String) {
        let after = self.next.as_ref().map_or(self.from, |(key, _)| key).to_vec();
        self.gap.get_or_insert(Open { after, doubtful: 0, offset, detail });
    }

    /// Goes to the next key in the range; tells of a gap once its far side is known.
    fn advance(&mut self, lost: Lost<'_>) {
        while let Some(found) = self.salvage.as_mut().and_then(Salvage::next) {
            match found {
                Found::Damage { offset, detail } => self.damaged(offset, detail),
                Found::Key { key, .. } if *key < *self.from => self.gap = None,
                Found::Key { key, .. } if *key >= *self.to => break,
                Found::Key { key, value, doubtful } => {
                    match self.gap.as_mut().filter(|_| doubtful) {
                        Some(gap) => gap.doubtful += 1,
                        None => self.gap.take().into_iter().for_each(|gap| lost(gap.close(&key))),
                    }
                    self.next = Some((key, value));
                    return;
                }
            }
        }
        self.salvage = None;
        if let Some(gap) = self.gap.take() {
            lost(gap.close(self.to));
        }
        self.next = None;
    }
}
