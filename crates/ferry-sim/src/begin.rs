//! What a run begins on: a device with an empty volume, over whatever was there before, or a copy
//! of a prepared one.

use crate::device::SimDevice;
use crate::model::Model;
use crate::ops::Op;
use ferry_fs::Ino;
use std::collections::HashSet;
use std::fmt;
use std::sync::Arc;

/// What a run begins on.
#[derive(Clone, Debug)]
pub enum Begin {
    /// An empty volume on a device of zeros.
    Blank,
    /// An empty volume on a device full of random bytes.
    Scribbled,
    /// An empty volume made, by force, over one with a life behind it: its log, its home store, its
    /// data lie below.
    Over {
        /// What was done in that life.
        ops: Vec<Op>,
        /// That volume had the same id: only what is written over tells the two apart.
        same_id: bool,
    },
    /// A copy of a volume that holds something already.
    Prepared(Arc<Prepared>),
}

impl Begin {
    /// What it begins on, for people.
    pub fn describe(&self) -> String {
        match self {
            Begin::Blank => "a device of zeros".into(),
            Begin::Scribbled => "a device of random bytes".into(),
            Begin::Over { ops, same_id } => {
                let id = if *same_id { "the same id" } else { "another id" };
                format!("a device with an older volume of {id}, after {} operations", ops.len())
            }
            Begin::Prepared(_) => "a prepared volume".into(),
        }
    }
}

/// A volume that was made, filled and closed once, to be copied for many runs.
pub struct Prepared {
    pub(crate) device: SimDevice,
    pub(crate) model: Model,
    pub(crate) seen: HashSet<Ino>,
}

impl Prepared {
    /// What it holds.
    pub fn model(&self) -> &Model {
        &self.model
    }
}

impl fmt::Debug for Prepared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Prepared")
    }
}

/// Where a life starts.
pub(crate) struct Start {
    pub device: Arc<SimDevice>,
    pub model: Model,
    /// Inode numbers that programs were told before.
    pub seen: HashSet<Ino>,
}
