//! The version of the cache at which a request was made: an answer is cached only if nothing has
//! happened since that makes it stale.

/// Samples of the counters that make an answer stale.
#[derive(Clone, Copy, Debug, Default)]
pub(in crate::client) struct CacheVersion {
    pub(super) returns: u64,
    pub(super) event: u64,
    pub(super) tick: u64,
}
