//! [`Store`]: what a volume asks of an object store.

use crate::error::ObjectError;
use std::ops::Range;

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
    /// A new owner on this machine has fenced the one before it off: what requests of dead processes
    /// left half done can be removed.
    fn settle(&self) {}
    /// Names that begin with `prefix`, ascending. Names created or deleted a short time ago may be
    /// wrong in it.
    fn list(&self, prefix: &str) -> Result<Vec<String>, ObjectError>;
    /// Some of the names that exist; none if none does.
    fn sample(&self) -> Result<Vec<String>, ObjectError> {
        self.list("")
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
