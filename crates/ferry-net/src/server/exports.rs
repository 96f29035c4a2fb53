//! Exports, and the bounds that they give to a session: what lies below the directory that its
//! client mounts, and where in it the client may change something.
//!
//! * EXPORT-1: the longest export that covers the mounted path decides whether the client may
//!   change anything. An export below can make what it covers read-only, and never makes it
//!   writable.
//! * EXPORT-2: the server's exports and those of the client's certificate both count: what either
//!   refuses is refused.
//! * EXPORT-3: the client may use a directory as long as it lies below the mounted one. If another
//!   client moves it out, the directory and what this client has found in it are `ESTALE` here. The
//!   client may go on using a file that it has open.
//! * EXPORT-4: a read-only export's directory below, and each directory on the way there, keeps its
//!   location and its name (`EBUSY`, as a mount point). What was found below it gets no name
//!   elsewhere (`EXDEV`).
//!
//! A session that mounts the whole volume, with no read-only export below, has no bounds, and
//! nothing is checked for it.

use crate::rt::collections::HashMap;

use crate::rt::Mutex;
use ferry_fs::{Errno, Filesystem, InProcess, Ino, ROOT};

use crate::limits::Export;

/// Inodes whose location is remembered; beyond that all are looked up again.
const LOCATIONS_MAX: usize = 1 << 16;
const OUTSIDE: Errno = Errno(libc::ESTALE);

/// What a client may do with what it mounts.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Access {
    /// It may change nothing.
    pub(super) read_only: bool,
    /// Directories below the mounted one, by their paths on the volume: it may change nothing below
    /// them.
    pub(super) held: Vec<Vec<u8>>,
}

/// EXPORT-1 and EXPORT-2 for a client that mounts `path`, which is normal. `None`: one of the lists
/// has no export there.
pub(super) fn access(lists: &[&[Export]], path: &[u8]) -> Option<Access> {
    let mut access = Access { read_only: false, held: Vec::new() };
    for list in lists {
        let exports = || list.iter().map(|export| (normal(&export.path), export.read_only));
        let covering = exports().filter(|(base, _)| is_below(path, base));
        // Of two exports of one path the stricter one counts.
        let (_, read_only) = covering.max_by_key(|(base, read_only)| (base.len(), *read_only))?;
        access.read_only |= read_only;
        let held = exports()
            .filter(|(base, read_only)| *read_only && base != path && is_below(base, path));
        access.held.extend(held.map(|(base, _)| base));
    }
    Some(access)
}

/// The path without empty components, `.` and a slash at the end. A path with `..` stays so, and is
/// found nowhere.
pub(super) fn normal(path: &[u8]) -> Vec<u8> {
    let mut normal = Vec::new();
    for name in path.split(|b| *b == b'/').filter(|n| !n.is_empty() && *n != b".") {
        normal.push(b'/');
        normal.extend_from_slice(name);
    }
    if normal.is_empty() { b"/".to_vec() } else { normal }
}

/// Whether `path` is `base` or below it, both normal.
fn is_below(path: &[u8], base: &[u8]) -> bool {
    let climbs = path.split(|b| *b == b'/').any(|name| name == b"..");
    let inside =
        path.strip_prefix(base).is_some_and(|rest| rest.is_empty() || rest.starts_with(b"/"));
    !climbs && (base == b"/" || inside)
}

/// Where an inode lies within the bounds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Location {
    Changeable,
    ReadOnly,
}

/// What the server knows of the locations of inodes.
#[derive(Debug, Default)]
struct Locations {
    /// The number of moves for which `inside` is right.
    moves: u64,
    inside: HashMap<Ino, Location>,
    /// The directory in which the client has found an inode that is no directory.
    found_in: HashMap<Ino, Ino>,
}

/// The bounds of a session.
#[derive(Debug)]
pub(super) struct Bounds {
    root: Ino,
    /// Directories of read-only exports below.
    held: Vec<Ino>,
    /// These, and those between them and the root.
    pub(super) pinned: Vec<Ino>,
    locations: Mutex<Locations>,
}

/// What is above an inode.
enum Above {
    Dir(Ino),
    /// It is no directory.
    Unknown,
    /// It has no name any more: nothing can be put into it.
    Nothing,
}

fn above(fs: &dyn Filesystem, ino: Ino) -> Result<Above, Errno> {
    match InProcess::default().call(|cx| fs.lookup(cx, ino, b"..")) {
        Ok(entry) => Ok(entry.attr.map_or(Above::Nothing, |attr| {
            fs.forget(attr.ino, 1);
            Above::Dir(attr.ino)
        })),
        Err(Errno(libc::ENOTDIR)) => Ok(Above::Unknown),
        Err(Errno(libc::ENOENT | libc::ESTALE)) => Ok(Above::Nothing),
        Err(errno) => Err(errno),
    }
}

impl Bounds {
    pub(super) fn new(root: Ino, held: Vec<Ino>, pinned: Vec<Ino>) -> Self {
        Self { root, held, pinned, locations: Mutex::default() }
    }

    /// The client has found `ino` in `dir`.
    pub(super) fn found(&self, ino: Ino, dir: Ino) {
        let mut locations = self.locations.lock();
        locations.found_in.insert(ino, dir);
        locations.inside.remove(&ino);
    }

    /// The directory in which the client has found it.
    pub(super) fn where_found(&self, ino: Ino) -> Option<Ino> {
        self.locations.lock().found_in.get(&ino).copied()
    }

    /// The client has forgotten it.
    pub(super) fn forget(&self, ino: Ino) {
        let mut locations = self.locations.lock();
        locations.found_in.remove(&ino);
        locations.inside.remove(&ino);
    }

    /// Where an inode lies; `moves` is the number of moves so far.
    pub(super) fn locate(
        &self,
        fs: &dyn Filesystem,
        ino: Ino,
        moves: u64,
    ) -> Result<Location, Errno> {
        let (mut at, mut way, mut held) = (ino, Vec::new(), false);
        let location = loop {
            if at == self.root {
                break Location::Changeable;
            }
            held |= self.held.contains(&at);
            let found_in = {
                let mut locations = self.locations.lock();
                if locations.moves != moves {
                    (locations.moves, locations.inside) = (moves, HashMap::default());
                }
                if let Some(location) = locations.inside.get(&at) {
                    break *location;
                }
                locations.found_in.get(&at).copied()
            };
            way.push(at);
            at = match above(fs, at)? {
                Above::Dir(ROOT) if self.root != ROOT => return Err(OUTSIDE),
                Above::Dir(dir) => dir,
                // The client was told of no directory, so it has made the file itself.
                Above::Unknown => match found_in {
                    Some(dir) => dir,
                    None => break Location::Changeable,
                },
                Above::Nothing => break Location::Changeable,
            };
        };
        let mut locations = self.locations.lock();
        if locations.moves == moves {
            if locations.inside.len() + way.len() > LOCATIONS_MAX {
                locations.inside.clear();
            }
            let mut below = location;
            for dir in way.into_iter().rev() {
                if self.held.contains(&dir) {
                    below = Location::ReadOnly;
                }
                locations.inside.insert(dir, below);
            }
        }
        Ok(if held { Location::ReadOnly } else { location })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_is_below_an_export_or_not() {
        assert_eq!(normal(b"//a/./b/"), b"/a/b");
        assert_eq!(normal(b""), b"/");
        assert!(is_below(b"/a/b", b"/a") && is_below(b"/a", b"/a") && is_below(b"/a", b"/"));
        assert!(!is_below(b"/ab", b"/a") && !is_below(b"/a/../b", b"/a") && !is_below(b"/", b"/a"));
    }

    fn exports(words: &str) -> Vec<Export> {
        words.split(',').map(|word| word.parse().expect(word)).collect()
    }

    #[test]
    fn an_inner_export_takes_rights_away_and_never_gives_any() {
        // What the server exports, what the certificate says, what is mounted: whether it is
        // read-only, and what is inside.
        for (server, certificate, path, expected) in [
            ("/:rw", "/:rw", "/", Some((false, ""))),
            ("/:rw", "/:rw", "/a/b", Some((false, ""))),
            ("/:ro", "/:rw", "/a", Some((true, ""))),
            ("/:rw", "/:ro", "/a", Some((true, ""))),
            ("/a:rw", "/:rw", "/", None),
            ("/:rw", "/a:rw", "/", None),
            ("/:rw", "/a:rw", "/ab", None),
            ("/:rw", "/a:rw", "/a/../b", None),
            ("/a:rw,/a/b:ro", "/:rw", "/a", Some((false, "/a/b"))),
            ("/a:rw,/a/b:ro", "/:rw", "/a/c", Some((false, ""))),
            ("/a:rw,/a/b:ro", "/:rw", "/a/b", Some((true, ""))),
            ("/a:rw,/a/b:ro", "/:rw", "/a/b/c", Some((true, ""))),
            ("/a:ro,/a/b:rw", "/:rw", "/a", Some((true, ""))),
            ("/a:ro,/a/b:rw", "/:rw", "/a/b", Some((false, ""))),
            ("/a:rw,/a/b:ro,/a/b/c:rw", "/:rw", "/a", Some((false, "/a/b"))),
            ("/a:rw,/a/b:ro,/a/b/c:rw", "/:rw", "/a/b/c", Some((false, ""))),
            ("/:rw", "/a:rw,/a/b:ro", "/a", Some((false, "/a/b"))),
            ("/a/c:ro,/:rw", "/a:rw,/a/b:ro", "/a", Some((false, "/a/c,/a/b"))),
            ("/a:rw,/a:ro", "/:rw", "/a", Some((true, ""))),
            ("/a:ro,/a:rw", "/:rw", "/a", Some((true, ""))),
            ("//a/./b/:rw", "/:rw", "/a/b/c", Some((false, ""))),
        ] {
            let found = access(&[&exports(server), &exports(certificate)], path.as_bytes());
            let found = found.map(|access| {
                let held =
                    access.held.iter().map(|path| String::from_utf8_lossy(path).into_owned());
                (access.read_only, held.collect::<Vec<_>>().join(","))
            });
            let expected = expected.map(|(read_only, held)| (read_only, held.to_owned()));
            assert_eq!(found, expected, "{server} {certificate} {path}");
        }
    }
}
