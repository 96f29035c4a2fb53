//! The objects of the simulated store, and changes of them.

use ferry_object::ObjectError;
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

/// What the names of clones begin with.
pub(super) const CLONES: &str = "clone-";

/// A change of the store.
#[derive(Clone)]
pub(super) enum Effect {
    /// Makes an object, if there is none of this name.
    Create(String, Arc<Vec<u8>>),
    /// Makes an object.
    Put(String, Arc<Vec<u8>>),
    Delete(String),
}

impl Effect {
    pub fn name(&self) -> &str {
        match self {
            Self::Create(name, _) | Self::Put(name, _) | Self::Delete(name) => name,
        }
    }
}

#[derive(Default)]
struct Object {
    bytes: Option<Arc<Vec<u8>>>,
    /// When it was created or deleted the last time: a list may not know of that yet.
    changed: Duration,
}

/// The objects.
#[derive(Default)]
pub(super) struct Objects {
    objects: BTreeMap<String, Object>,
}

impl Objects {
    pub fn apply(&mut self, effect: &Effect, now: Duration) -> Result<(), ObjectError> {
        let object = self.objects.entry(effect.name().to_owned()).or_default();
        match effect {
            Effect::Create(name, _) if object.bytes.is_some() => {
                return Err(ObjectError::Exists(name.clone()));
            }
            Effect::Create(_, bytes) | Effect::Put(_, bytes) => {
                if object.bytes.replace(Arc::clone(bytes)).is_some() {
                    return Ok(());
                }
            }
            Effect::Delete(_) => {
                if object.bytes.take().is_none() {
                    return Ok(());
                }
            }
        }
        object.changed = now;
        Ok(())
    }

    /// Whether an epoch after this one was claimed.
    pub fn has_claim_beyond(&self, epoch: u64) -> bool {
        let claims = self.objects.range(format!("e/{:016x}", epoch + 1)..);
        claims
            .take_while(|(name, _)| name.starts_with("e/"))
            .any(|(_, claim)| claim.bytes.is_some())
    }

    /// Objects that an owner before this epoch wrote and that may be deleted: log objects, data
    /// objects, shards and roots. `docs/format.md` says where a header has kind and epoch.
    pub fn older_than(&self, epoch: u64) -> Vec<String> {
        let is_older = |bytes: &[u8]| {
            let kind = u16::from_le_bytes([bytes[10], bytes[11]]);
            let of = u64::from_le_bytes(bytes[32..40].try_into().expect("eight bytes"));
            matches!(kind, 3 | 5 | 6 | 7) && of < epoch
        };
        let own = self.objects.iter().filter(|(name, _)| !name.starts_with(CLONES));
        let there = own.filter_map(|(name, object)| {
            object.bytes.as_ref().filter(|bytes| is_older(bytes)).map(|_| name.clone())
        });
        there.collect()
    }

    /// Removes all objects whose names begin with `prefix`, as a user does with a volume.
    pub fn remove(&mut self, prefix: &str) {
        self.objects.retain(|name, _| !name.starts_with(prefix));
    }

    /// The number of the volume, once it was made.
    pub fn volume(&self) -> [u8; 16] {
        let object = self.read("super", None).expect("the volume was made");
        object[16..32].try_into().expect("sixteen bytes")
    }

    /// The bytes of an object, or those of `range`.
    pub fn read(&self, name: &str, range: Option<Range<u64>>) -> Result<Vec<u8>, ObjectError> {
        let bytes = self.objects.get(name).and_then(|object| object.bytes.as_ref());
        let bytes = bytes.ok_or_else(|| ObjectError::NotFound(name.to_owned()))?;
        let len = bytes.len() as u64;
        let range = range.unwrap_or(0..len);
        let (start, end) = (range.start.min(len), range.end.min(len));
        Ok(bytes[start as usize..end.max(start) as usize].to_vec())
    }

    /// Names that begin with `prefix`. Where `lags` says so of the time of a name's last change,
    /// the list tells how it was before.
    pub fn names(&self, prefix: &str, mut lags: impl FnMut(Duration) -> bool) -> Vec<String> {
        let found = self.objects.range(prefix.to_owned()..);
        let found = found.take_while(|(name, _)| name.starts_with(prefix));
        let found = found.filter(|(_, object)| object.bytes.is_some() != lags(object.changed));
        found.map(|(name, _)| name.clone()).collect()
    }
}
