//! Free space of the file systems on which volumes, caches on disk and local logs lie.

use std::collections::BTreeSet;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use ferry_device::COMPONENTS_MAX;
use ferry_object::StoreUrl;
use rustix::fs::statvfs;

use crate::list::Found;
use crate::location::Location;
use crate::mount::{HOST_LOW_BYTES, is_short};
use crate::size::format_bytes;
use crate::{mounts, replica};

use super::check::{Check, within};

/// With less than this nearly nothing more can be written.
const OUT_BYTES: u64 = 256 << 20;

/// What lies on a file system.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Held {
    Volume,
    Store,
    /// A cache that may take so many bytes more.
    Cache(u64),
    LocalLog,
}

impl Held {
    fn title(&self, path: &Path) -> String {
        let what = match self {
            Self::Volume => "volume",
            Self::Store => "store",
            Self::Cache(_) => "cache",
            Self::LocalLog => "local log",
        };
        format!("space of {what} {}", path.display())
    }
}

/// Checks what daemons have.
pub fn checks<'h>(all: impl Iterator<Item = &'h (PathBuf, Held)>) -> Vec<Check> {
    let all: BTreeSet<_> = all.collect();
    all.into_iter().map(|(path, held)| check(path.clone(), held)).collect()
}

/// What a daemon has on file systems of this machine. It may belong to another user: components
/// that no volume can have are left out, because each may take [`within`] its time.
pub fn held_by(
    found: &Found,
    cache: Option<PathBuf>,
    local_log: Option<PathBuf>,
) -> Vec<(PathBuf, Held)> {
    let mut all = Vec::new();
    let figures = found.figures.as_ref();
    let of_store = |key: &str| figures.and_then(|all| all["store"][key].as_u64()).unwrap_or(0);
    let left = of_store("cache_bytes_max").saturating_sub(of_store("cache_bytes"));
    all.extend(cache.map(|dir| (dir, Held::Cache(left))));
    all.extend(local_log.map(|dir| (dir, Held::LocalLog)));
    let components = figures.and_then(|all| all["devices"].as_object());
    let volume = Path::new(replica::followed(&found.volume));
    if let Some(components) = components {
        let used = components.iter().filter(|(_, component)| component["state"] != "replaced");
        let used = used.take(COMPONENTS_MAX);
        all.extend(used.map(|(path, _)| (path.into(), Held::Volume)));
    } else if volume.is_absolute() {
        all.push((volume.into(), Held::Volume));
    } else if let Some(StoreUrl::Dir(dir)) =
        Location::parse(volume.as_os_str()).ok().as_ref().and_then(Location::store)
    {
        all.push((dir.clone(), Held::Store));
    }
    all
}

fn check(path: PathBuf, held: &Held) -> Check {
    let title = held.title(&path);
    // To look at a path of a mount asks its daemon, which may be the one that hangs.
    if mounts::is_on_fuse(&path) {
        return Check::ok(title, "on a FUSE mount, which is not asked");
    }
    match within(move || look(&path)) {
        Some(Ok(Some(space))) => judged(title, held, &space),
        Some(Ok(None)) => Check::ok(title, "a block device"),
        Some(Err(error)) if error.kind() == io::ErrorKind::PermissionDenied => Check::note(
            title,
            error.to_string(),
            "root, and users who may look at it, see how much is left there".into(),
        ),
        Some(Err(error)) => {
            Check::bad(title, error.to_string(), "see that the file or directory is there".into())
        }
        None => Check::bad(
            title,
            "does not answer",
            "see what has become of the file system on which it lies (`dmesg`)".into(),
        ),
    }
}

struct Space {
    /// Bytes that are left.
    has: u64,
    /// Bytes that a volume may come to need, and its size.
    needs: u64,
    size: u64,
}

/// `None`: a block device has all of its space.
fn look(path: &Path) -> io::Result<Option<Space>> {
    use std::os::unix::fs::FileTypeExt;
    let found = std::fs::metadata(path)?;
    if found.file_type().is_block_device() {
        return Ok(None);
    }
    let host = statvfs(path)?;
    let needs = found.len().saturating_sub(found.blocks() * 512);
    Ok(Some(Space { has: host.f_bavail * host.f_frsize, needs, size: found.len() }))
}

fn judged(title: String, held: &Held, space: &Space) -> Check {
    let has = format!("{} are left", format_bytes(space.has));
    let (short, found, advice) = match held {
        Held::Volume => (
            is_short(space.needs, space.has, space.size),
            format!("{has}, {} may be needed", format_bytes(space.needs)),
            "when the file system is full, nothing more can be written to the volume: make room there",
        ),
        Held::Store => (
            space.has < HOST_LOW_BYTES,
            has,
            "when the file system is full, syncs wait: make room there",
        ),
        Held::Cache(left) => (
            space.has < *left,
            format!("{has}, {} may be taken", format_bytes(*left)),
            "when the disk is full, the cache gets nothing more, and reads ask the store: make room there, or mount with a smaller cache_disk=",
        ),
        Held::LocalLog => (
            space.has < HOST_LOW_BYTES,
            has,
            "when the disk is full, syncs wait for the store: make room there, the log takes up to 1 GiB",
        ),
    };
    match (short, held) {
        (false, _) => Check::ok(title, found),
        (true, Held::Volume | Held::Store) if space.has < OUT_BYTES => {
            Check::bad(title, found, advice.into())
        }
        (true, _) => Check::note(title, found, advice.into()),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::super::check::Outcome;
    use super::*;
    use crate::list::{Kind, State};
    use crate::socket::object;

    fn of_state(state: &str) -> Value {
        object([("state", state.into())])
    }

    fn held(volume: &str, figures: Option<Value>) -> Vec<(PathBuf, Held)> {
        let (kind, state) = (Kind::Mount, State::Fine);
        let (volume, at) = (volume.into(), "/mnt".into());
        held_by(
            &Found { kind, volume, at, pid: None, state, figures, clients: Vec::new() },
            None,
            None,
        )
    }

    #[test]
    fn a_replica_lies_where_its_volume_does() {
        let held = held("dir:///srv/store#replica", None);
        assert_eq!(held, [("/srv/store".into(), Held::Store)]);
    }

    #[test]
    fn a_side_that_was_replaced_is_not_looked_at() {
        let sides = [("/pulled", of_state("replaced")), ("/new", of_state("active"))];
        let held = held("/srv/mirror.ferry", Some(object([("devices", object(sides))])));
        assert_eq!(held, [("/new".into(), Held::Volume)]);
    }

    #[test]
    fn no_more_components_are_looked_at_than_a_volume_can_have() {
        let sides: Value = (0..1000).map(|side| (format!("/{side}"), of_state("active"))).collect();
        let held = held("/srv/mirror.ferry", Some(object([("devices", sides)])));
        assert_eq!(held.len(), COMPONENTS_MAX);
    }

    #[test]
    fn a_sparse_volume_is_bad_only_where_its_host_is_nearly_full() {
        let outcome = |has: u64, needs: u64| {
            let space = Space { has, needs, size: 64 << 30 };
            judged("space".into(), &Held::Volume, &space).outcome
        };
        assert_eq!(outcome(100 << 30, 60 << 30), Outcome::Ok);
        assert_eq!(outcome(10 << 30, 60 << 30), Outcome::Ok, "more than a twentieth is left");
        assert_eq!(outcome(1 << 30, 60 << 30), Outcome::Note);
        assert_eq!(outcome(1 << 20, 60 << 30), Outcome::Bad);
        assert_eq!(outcome(1 << 20, 1 << 19), Outcome::Ok, "it needs no more");
    }

    #[test]
    fn a_cache_without_room_is_never_bad() {
        let space = Space { has: 1 << 20, needs: 0, size: 0 };
        let check = judged("space".into(), &Held::Cache(10 << 30), &space);
        assert_eq!(check.outcome, Outcome::Note);
    }
}
