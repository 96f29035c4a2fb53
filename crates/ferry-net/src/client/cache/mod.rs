//! What this client caches of inodes on which it has a lease: attributes, and names in directories.
//!
//! * CACHE-1: nothing cached is used after the term. The term ends a fixed time after the last
//!   answered ping was *sent*. What was cached then is dropped, even if a later ping is answered.
//! * CACHE-2: an answer is cached only if no lease was returned (recalled, evicted, or lost with a
//!   connection) since its request was made. `returns` counts that, before and after the server is
//!   told: an answer to a request between the two may rest on a lease that has ended.
//! * CACHE-3: when the client sends a change, it drops what it has cached of the inodes that the
//!   change touches. An answer is not cached if a change of this client touched the inode
//!   meanwhile. `slots` record that by a hash of the inode number: two inodes that share a slot are
//!   cached less often.
//! * CACHE-4: a directory that is `complete` has no names but the cached ones. A name that is known
//!   to be absent is cached as absent.
//! * CACHE-5: what is under a write lease is in the `model` and not here. The server's answers do
//!   not overwrite it: changes of this client may be in flight.
//! * CACHE-6: this lock comes before the link's, and that one before the tables'. So decisions have
//!   the same order as the changes in the ordered stream.
//! * CACHE-7: a read lease covers contents, too: no other client changes a file before its readers
//!   have returned their leases. Contents follow the same rules as attributes and are dropped with
//!   them, unless only the access time has moved.
//!
//! Layers; each uses those below it:
//!
//! ```text
//!  changes   questions   kernel_view   walk_answers    what happens to the cache
//!  state                                              all that the lock protects
//!  asking    kernel_cached   ahead                     leases that were requested; what the kernel
//!  version                                            caches; walks
//! ```

mod ahead;
mod asking;
mod changes;
mod kernel_cached;
mod kernel_view;
mod questions;
mod state;
mod version;
mod walk_answers;

pub(super) use changes::PendingEffect;
pub(super) use kernel_cached::{ATTR_VALID_MAX, FullName, NAME_VALID_MAX, View, rename_all};
pub(super) use state::{Cache, State};
pub(super) use version::CacheVersion;

#[cfg(test)]
mod tests;
