//! Answers of the server as replies to the kernel.

use std::time::Duration;

use ferry_fs::{Attr, DirEntry, Entry, Errno, Ino, Listing, Opened, Reply};

use super::cache::View;
use super::remote::RemoteFs;
use super::waiting::Finish;
use crate::message::{Known, Name, Outcome};

/// What the kernel may not keep.
pub(super) const NOT_CACHED: Duration = Duration::ZERO;
/// An entry that the kernel looks up again each time.
pub(super) fn entry(known: Option<&Known>) -> Entry {
    Entry { attr: known.map(|k| k.attr), entry_valid: NOT_CACHED, attr_valid: NOT_CACHED }
}

/// An entry that the kernel may keep as long as the cache says. It is counted as known to the
/// kernel already.
pub(super) fn kernel_cached(fs: &RemoteFs, attr: Attr, name: Option<(Ino, &[u8])>) -> Entry {
    match fs.cache.show(attr.ino, name.filter(|_| fs.kernel.forgets_names())) {
        Some(View { attr, valid, name_valid }) => {
            Entry { attr: Some(attr), entry_valid: name_valid, attr_valid: valid }
        }
        None => Entry {
            attr: Some(fs.cache.newest(attr)),
            entry_valid: NOT_CACHED,
            attr_valid: NOT_CACHED,
        },
    }
}

pub(super) fn is_dir(attr: &Attr) -> bool {
    attr.mode & libc::S_IFMT == libc::S_IFDIR
}

/// How a file is opened: the kernel keeps no contents, and each close is told, for `fcntl` locks
/// end with it.
pub(super) fn opened(fh: u64) -> Opened {
    Opened { fh, direct_io: true, parallel_direct_writes: true, ..Opened::default() }
}

/// What an answer is if it is none of those that fit the request.
pub(super) fn unfit(outcome: Outcome) -> Errno {
    match outcome {
        // The kernel names only files that are open: this one was lost with a session.
        Outcome::Failed { errno: libc::EBADF } => Errno(libc::EIO),
        Outcome::Failed { errno } if errno > 0 => Errno(errno),
        _ => Errno(libc::EPROTO),
    }
}

pub(super) fn done(outcome: Outcome) -> Result<Reply, Errno> {
    match outcome {
        Outcome::Done {} => Ok(Reply::Empty),
        other => Err(unfit(other)),
    }
}

pub(super) fn count(outcome: Outcome) -> Result<Reply, Errno> {
    match outcome {
        Outcome::Count { count } => Ok(Reply::Count(count)),
        other => Err(unfit(other)),
    }
}

pub(super) fn attributes(outcome: Outcome) -> Result<Reply, Errno> {
    match outcome {
        Outcome::Attributes { attr } => Ok(Reply::Attr(attr, NOT_CACHED)),
        other => Err(unfit(other)),
    }
}

pub(super) fn data(outcome: Outcome, most: usize) -> Result<Reply, Errno> {
    match outcome {
        Outcome::Data { bytes } if bytes.len() <= most => Ok(Reply::Data(bytes)),
        other => Err(unfit(other)),
    }
}

/// Not more than was asked for.
pub(super) fn cut_off(reply: Reply, most: usize) -> Reply {
    match reply {
        Reply::Data(mut bytes) => {
            bytes.truncate(most);
            Reply::Data(bytes)
        }
        reply => reply,
    }
}

/// A name that was made in a directory.
pub(super) fn made(parent: Ino, name: &[u8]) -> Finish {
    let name = name.to_vec();
    Box::new(move |fs, outcome| match outcome {
        Outcome::Entry { known: Some(known) } => {
            let mut tables = fs.tables.lock();
            tables.learn(&known);
            tables.name(known.attr.ino, parent, &name);
            drop(tables);
            // The kernel takes what it is told for new, whatever it was told of an inode that it
            // knew: of a link, or a file that was there.
            let fresh =
                known.stamp == 0 && known.attr.nlink == if is_dir(&known.attr) { 2 } else { 1 };
            let entry = if fresh {
                kernel_cached(fs, known.attr, Some((parent, &name)))
            } else {
                entry(Some(&known))
            };
            Ok(Reply::Entry(entry))
        }
        other => Err(unfit(other)),
    })
}

/// A file that was made and opened.
pub(super) fn created(name: Option<(Ino, Vec<u8>)>, fh: u64, flags: i32) -> Finish {
    Box::new(move |fs, outcome| match outcome {
        Outcome::Entry { known: Some(known) } => {
            let ino = known.attr.ino;
            let mut tables = fs.tables.lock();
            tables.learn(&known);
            if let Some((parent, name)) = &name {
                tables.name(ino, *parent, name);
            }
            tables.add_handle(fh, ino, flags);
            drop(tables);
            let entry = if known.stamp == 0 {
                kernel_cached(fs, known.attr, None)
            } else {
                entry(Some(&known))
            };
            Ok(Reply::Created(entry, opened(fh)))
        }
        other => Err(unfit(other)),
    })
}

pub(super) fn dir_entry(name: &Name) -> DirEntry {
    let Name { name, ino, kind, cookie } = name;
    // Attributes would be older than what the kernel has learned since: it asks for those that it
    // wants.
    DirEntry { name: name.as_slice().into(), ino: *ino, kind: *kind, cookie: *cookie, entry: None }
}

/// As many entries as the kernel has room for in any case; the others wait in the tables.
pub(super) fn listing(fs: &RemoteFs, fh: u64, names: Vec<Name>) -> Vec<DirEntry> {
    let mut names = crate::rt::collections::VecDeque::from(names);
    let (mut listing, mut cookie) = (Listing::new(true, Listing::BYTES_MIN), 0);
    while let Some(name) = names.front()
        && listing.push(&dir_entry(name))
    {
        cookie = name.cookie;
        names.pop_front();
    }
    if let Some(dir) = fs.tables.lock().dirs.get_mut(&fh) {
        (dir.cookie, dir.names) = (cookie, names);
    }
    listing.entries
}
