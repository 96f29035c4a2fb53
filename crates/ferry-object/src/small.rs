//! [`SmallObjects`]: objects that came as a whole with their beginning, in memory.

use crate::format::ObjectRef;
use std::collections::BTreeMap;
use std::sync::Arc;

/// Small objects, of which a request for the beginning brought all bytes. The log of the file
/// system has one for each flush.
#[derive(Clone)]
pub(crate) struct SmallObjects {
    objects: BTreeMap<ObjectRef, Arc<Vec<u8>>>,
    len: usize,
    bytes_max: usize,
}

impl Default for SmallObjects {
    fn default() -> Self {
        Self::of_at_most(Self::BYTES_MAX)
    }
}

impl SmallObjects {
    /// Bytes, at most, where nobody needs more.
    pub const BYTES_MAX: usize = 16 << 20;

    pub fn of_at_most(bytes_max: usize) -> Self {
        Self { objects: BTreeMap::new(), len: 0, bytes_max }
    }

    /// Adds all bytes of an object. Where there is no room, the oldest of the log leave.
    pub fn add(&mut self, object: ObjectRef, bytes: Arc<Vec<u8>>) {
        self.len += bytes.len();
        if let Some(before) = self.objects.insert(object, bytes) {
            self.len -= before.len();
        }
        while self.len > self.bytes_max
            && let Some((_, oldest)) = self.objects.pop_first()
        {
            self.len -= oldest.len();
        }
    }

    /// All bytes of an object, if they are here.
    pub fn of(&self, object: ObjectRef) -> Option<&Arc<Vec<u8>>> {
        self.objects.get(&object)
    }

    /// Nothing here is read any more, or it was damaged on its way.
    pub fn clear(&mut self) {
        *self = Self::of_at_most(self.bytes_max);
    }
}
