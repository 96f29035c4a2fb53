//! The client: a file system whose files are a server's.
//!
//! A request of the kernel is answered from the cache, decided here, or sent to the server. Leases
//! make the first two possible: the cache holds attributes, names and small contents for as long as
//! the server's leases last. Under write leases the client decides changes itself, acknowledges
//! them early, and sends them afterwards. After a crash of the server it replays what is not
//! durable.
//!
//! Layers; each uses those below it:
//!
//! ```text
//!  requests                        the implementation of `ferry_fs::Filesystem`
//!  killed                          going on with the mount of a process that was killed
//!  connect                         mounting and unmounting
//!  carried                         what another process needs to go on with the mount
//!  locking  moving  walking  space  deciding   what single requests need
//!  restorer  replay                what a new session is told
//!  waiting                         a request of the kernel that waits for the server
//!  remote                          RemoteFs: the parts of a mount
//!  left                            requests of a process that was killed
//!  link/                           the stream of changes, the connection
//!  tables  losses  walks           inodes and open files; what is lost; threads in trees
//!  replay_log                      applied changes that are not durable
//!  notes/                          what outlives the process
//!  change                          a change and its stages
//!  cache/  kernel                  attributes and names; what the kernel caches
//!  model  names  contents  reservation  server_clock  clock_reading
//! ```

mod answers;
mod cache;
mod carried;
mod change;
mod clock_reading;
mod connect;
mod contents;
mod deciding;
mod kernel;
mod killed;
mod left;
mod link;
mod locking;
mod losses;
mod model;
mod moving;
mod names;
mod notes;
mod remote;
mod replay;
mod replay_log;
mod requests;
mod reservation;
mod restorer;
mod server_clock;
mod space;
mod tables;
mod waiting;
mod walking;
mod walks;

pub use carried::Carried;
pub use connect::ClientOptions;
pub use notes::{Noted, Notes};
pub use remote::RemoteFs;
