//! [`Store`]: what a volume asks of an object store.

use crate::error::ObjectError;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

/// Objects that were acknowledged and that the store does not have yet: this machine has them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Waiting {
    /// How many.
    pub objects: u64,
    /// Their bytes.
    pub bytes: u64,
    /// For how long the oldest waits.
    pub oldest: Duration,
}

/// Requests that the store does not carry out now. They are tried again until it does.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Held {
    /// How many.
    pub requests: u64,
    /// For how long there was one at any time.
    pub time: Duration,
    /// What the store said last.
    pub reason: String,
}

/// What a store asks for requests, in millionths of a millionth of a dollar. A deletion is free.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RequestCosts {
    /// For an object that is created, put or listed.
    pub put_picodollars: u64,
    /// For an object, or a part of one, that is read.
    pub get_picodollars: u64,
}

impl RequestCosts {
    /// What AWS lists for S3 Standard in us-east-1: $0.005 for 1,000 PUTs and $0.0004 for
    /// 1,000 GETs (<https://aws.amazon.com/s3/pricing/>, as of November 2026).
    pub const S3_STANDARD: Self = Self { put_picodollars: 5_000_000, get_picodollars: 400_000 };

    /// What so many requests cost, in millionths of a dollar.
    pub fn microdollars(self, puts: u64, gets: u64) -> u64 {
        let of = |requests: u64, each: u64| u128::from(requests) * u128::from(each);
        let cost = of(puts, self.put_picodollars) + of(gets, self.get_picodollars);
        u64::try_from(cost / 1_000_000).unwrap_or(u64::MAX)
    }
}

/// A store of objects. An object is written once, as a whole, and never changes. All methods may be
/// called from any thread, and wait for the answer.
///
/// After [`ObjectError::Unavailable`] nobody knows whether the request was carried out, or will be.
pub trait Store: Send + Sync {
    /// The bytes of an object, or those of `range`. What lies beyond its end is left out.
    fn get(&self, name: &str, range: Option<Range<u64>>) -> Result<Vec<u8>, ObjectError>;
    /// Makes an object if there is none of this name. Of two callers one fails with
    /// [`ObjectError::Exists`], whatever happens between them. No two callers have the same bytes:
    /// if a create was not answered, a store may compare them to find out what came of it.
    fn create(&self, name: &str, bytes: &[u8]) -> Result<(), ObjectError>;
    /// Makes an object whose name nobody else uses. It may be repeated with the same bytes.
    fn put(&self, name: &str, bytes: &[u8]) -> Result<(), ObjectError>;
    /// Removes an object. There may be none.
    fn delete(&self, name: &str) -> Result<(), ObjectError>;
    /// A new owner on this machine has fenced the one before it off: what requests of dead
    /// processes left half done can be removed.
    fn settle(&self) {}
    /// Makes names durable of objects that are there. A process that was killed may have made one
    /// without hearing so.
    fn make_durable(&self, _names: &mut dyn Iterator<Item = String>) -> Result<(), ObjectError> {
        Ok(())
    }
    /// Names that begin with `prefix`, ascending. Names created or deleted a short time ago may be
    /// wrong in it.
    fn list(&self, prefix: &str) -> Result<Vec<String>, ObjectError>;
    /// The same, each with the bytes of its object.
    fn list_sizes(&self, prefix: &str) -> Result<Vec<(String, u64)>, ObjectError> {
        let mut sizes = Vec::new();
        for name in self.list(prefix)? {
            match self.get(&name, None) {
                Err(ObjectError::NotFound(_)) => {}
                found => sizes.push((name, found?.len() as u64)),
            }
        }
        Ok(sizes)
    }
    /// Some of the names that exist; none if none does.
    fn sample(&self) -> Result<Vec<String>, ObjectError> {
        self.list("")
    }
    /// How its bucket, or the directory that it is in, calls it.
    fn name(&self) -> Result<String, ObjectError> {
        Err(ObjectError::Setup("this store is beside no others".into()))
    }
    /// The store of another volume in the same bucket or directory, by its name. It need not be
    /// there.
    fn beside(&self, _name: &str) -> Result<Arc<dyn Store>, ObjectError> {
        Err(ObjectError::Setup("this store is beside no others".into()))
    }
    /// What its requests cost, for an estimate; `None`: nothing.
    fn request_costs(&self) -> Option<RequestCosts> {
        None
    }
    /// What waits to be uploaded; `None`: nothing is acknowledged before the store has it.
    fn waiting(&self) -> Option<Waiting> {
        None
    }
    /// Uploads that are held.
    fn held(&self) -> Option<Held> {
        None
    }
    /// What the store does with its objects by itself. The result is what a user should know; what
    /// would lose objects is an error.
    fn check_rules(&self) -> Result<Vec<String>, ObjectError> {
        Ok(vec![])
    }
}

/// Whether the object exists. Only a read by its name tells; a list may lag.
pub(crate) fn exists(store: &dyn Store, name: &str) -> Result<bool, ObjectError> {
    match store.get(name, Some(0..1)) {
        Ok(_) => Ok(true),
        Err(ObjectError::NotFound(_)) => Ok(false),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flush_every_tenth_of_a_second_costs_130_dollars_a_month() {
        let month = 30 * 24 * 3600;
        assert_eq!(RequestCosts::S3_STANDARD.microdollars(10 * month, 0) / 1_000_000, 129);
        assert_eq!(
            RequestCosts::S3_STANDARD.microdollars(0, month) / 10_000,
            103,
            "a look each second"
        );
        assert_eq!(RequestCosts::S3_STANDARD.microdollars(0, 0), 0);
        assert_eq!(RequestCosts::S3_STANDARD.microdollars(1, 3), 6);
    }
}
