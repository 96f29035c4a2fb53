//! Scans: all layers merged with the home store, as of one moment, without a lock.

use super::core::Core;
use crate::home::HomeView;
use crate::types::Changes;
use crate::view::layers::View;
use crate::view::salvage::{Lost, Range, walk};
use crate::view::snapshot::Snapshot;
use crate::{JournalError, Value};
use std::sync::Arc;

/// Changes in a scan's range that are copied; more are frozen instead.
const COPY_MAX: usize = 256;
/// Layers that scans may freeze off one context before the next scan copies after all.
const ROTATED_MAX: usize = 4;

type Visit<'a> = &'a mut dyn FnMut(&[u8], &Value) -> bool;

impl Core {
    /// Calls `visit` for each key in `[from, to)`, ascending, as of one moment, without a lock.
    ///
    /// Where a checkpoint failed and the home store was opened anew meanwhile, the scan goes on
    /// with the new view. That shows the same moment, unless another checkpoint succeeded since:
    /// then the rest is as of a later snapshot.
    pub fn scan(&self, from: &[u8], to: &[u8], visit: Visit<'_>) -> Result<(), JournalError> {
        if from >= to {
            return Ok(());
        }
        let mut snapshot = self.snapshot(from, to);
        let Err(mut interrupted) = snapshot.walk(from, to, visit) else { return Ok(()) };
        loop {
            let Some(home) = self.renewed(&snapshot.view.home) else {
                return Err(interrupted.error);
            };
            if home.point == snapshot.view.home.point {
                snapshot.view.home = home;
            } else {
                snapshot = self.snapshot(&interrupted.at, to);
            }
            match snapshot.walk(&interrupted.at, to, visit) {
                Ok(()) => return Ok(()),
                Err(again) => interrupted = again,
            }
        }
    }

    /// After an error of `home`: the view that has taken its place, once the checkpoint that may
    /// have ended it is over.
    pub fn renewed(&self, home: &Arc<HomeView>) -> Option<Arc<HomeView>> {
        drop(self.checkpointing.lock());
        let now = self.head.read().view.home.clone();
        (!Arc::ptr_eq(&now, home)).then_some(now)
    }

    pub fn snapshot(&self, from: &[u8], to: &[u8]) -> Snapshot {
        let head = self.head.read();
        let limit = if head.rotated < ROTATED_MAX { COPY_MAX } else { usize::MAX - 1 };
        if let Some(copy) = head.copy_range(from, to, limit) {
            return Snapshot { newest: copy.into_iter().collect(), view: View::clone(&head.view) };
        }
        drop(head);
        let mut head = self.head.write();
        head.rotate();
        Snapshot { newest: Changes::new(), view: View::clone(&head.view) }
    }
}

impl Core {
    /// Calls `visit` for each readable key in `[from, to)`, ascending, as of one moment, and `lost`
    /// for each gap.
    pub fn scan_readable(
        &self,
        from: &[u8],
        to: &[u8],
        visit: &mut dyn FnMut(&[u8], &Value) -> bool,
        lost: Lost<'_>,
    ) -> Result<(), JournalError> {
        if from >= to {
            return Ok(());
        }
        let (newest, view, salvage) = {
            // No checkpoint: the view and what is opened here are of the same one. The view then
            // keeps its pages.
            let _checkpointing = self.checkpointing.lock();
            let snapshot = self.snapshot(from, to);
            (snapshot.newest, snapshot.view, self.home.salvage())
        };
        let mut maps = vec![&newest];
        maps.extend(view.layers.iter().map(|l| &l.changes));
        walk(&maps, salvage, Range { from, to }, visit, lost)
    }
}
