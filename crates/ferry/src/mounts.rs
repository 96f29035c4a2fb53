//! Reads the kernel's table of mounts: which FerryFS is mounted where.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::io;
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};

use ferry_net::Address;

use crate::error::CliError;
use crate::location::{Location, resolve};
use crate::socket::printable;

/// The type that the kernel shows for a mounted volume.
pub const FS_TYPE: &str = "fuse.ferry";

/// A line of `/proc/self/mountinfo`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mount {
    /// The number of the mount.
    pub id: u64,
    /// The number of the mount on which this one is mounted.
    pub parent: u64,
    /// The mount point.
    pub target: PathBuf,
    /// The source: for FerryFS the volume's path.
    pub source: PathBuf,
    /// The file system's type.
    pub fs_type: String,
    /// The device number, `major:minor`; of a FUSE mount, `minor` is also its connection's number.
    pub device: String,
    /// The user who runs the daemon of a FUSE mount.
    pub owner: Option<u32>,
    /// The mount is read-only: its daemon writes nothing.
    pub read_only: bool,
}

impl Mount {
    /// Whether it is a FerryFS mount.
    pub fn is_ferry(&self) -> bool {
        self.fs_type == FS_TYPE
    }

    /// Whether it mounts a volume of this machine; `ferry bench null` has no volume.
    pub fn is_local(&self) -> bool {
        !self.is_remote() && (self.source.is_absolute() || self.volume().path().is_none())
    }

    /// Whether its source is this one, which has no symbolic links in it.
    pub fn has_source(&self, source: &Path) -> bool {
        let of = |path: &Path| Location::parse(path.as_os_str()).ok();
        self.source == source
            || match (of(&self.source), of(source)) {
                (Some(Location::Server(one)), Some(Location::Server(other))) => one == other,
                (Some(one), Some(other)) => {
                    one.name_in_store().is_some_and(|name| other.name_in_store() == Some(name))
                }
                _ => false,
            }
    }

    /// Where the volume lies.
    pub fn volume(&self) -> Location {
        Location::parse(self.source.as_os_str()).unwrap_or_else(|_| Location::from(&self.source))
    }

    /// Whether it mounts a server's volume: no daemon of this machine has that open.
    pub fn is_remote(&self) -> bool {
        self.is_ferry() && self.source.to_str().is_some_and(Address::is_meant)
    }
}

/// What a user is called in a message.
pub fn user(uid: u32) -> String {
    if uid == 0 { "root".into() } else { format!("user {uid}") }
}

/// The error of a request to a mount whose daemon has died.
pub fn died(target: &Path) -> CliError {
    CliError::Failed(format!(
        "{}: the daemon behind this mount has died; `ferry umount {0}` clears it, then mount again",
        target.display()
    ))
}

/// Whether the error of a request to a mount means that its daemon has died. When a daemon dies,
/// the kernel cancels the requests in its queues.
pub fn says_dead(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::ENOTCONN | libc::ECONNABORTED | libc::ECANCELED))
}

/// All mounts that this process sees, in the order in which they were made.
pub fn list() -> io::Result<Vec<Mount>> {
    Ok(parse(&std::fs::read("/proc/self/mountinfo")?))
}

/// The topmost mount at exactly this mount point.
pub fn at(target: &Path) -> io::Result<Option<Mount>> {
    Ok(list()?.into_iter().rev().find(|m| m.target == target))
}

/// Finds a mount by its mount point, or else by its volume (the last mount of it, preferably one
/// that is not hidden). Sends no request to the mount, whose daemon may hang.
pub fn find(target_or_volume: &Location) -> io::Result<Option<Mount>> {
    let mut mounts = list()?;
    let position = |path: &Path| {
        let of_volume = |m: &Mount| m.is_ferry() && m.has_source(path);
        let target = mounts.iter().rposition(|m| m.target == path);
        target
            .or_else(|| mounts.iter().rposition(|m| of_volume(m) && cover(m, &mounts).is_none()))
            .or_else(|| mounts.iter().rposition(of_volume))
    };
    let found = match target_or_volume.path() {
        Some(path) => position(&std::path::absolute(path)?),
        None => None,
    };
    let resolved = || target_or_volume.resolved().ok();
    let found = found.or_else(|| position(&resolved()?));
    Ok(found.map(|i| mounts.swap_remove(i)))
}

/// The FerryFS mount that `target` means: its mount point, its volume, or a directory in it. A file
/// on a mount may be a volume that is not mounted, and means no mount.
pub fn of(target: &Location) -> Result<Option<Mount>, CliError> {
    let unreadable = CliError::path(target.to_string(), "cannot read the table of mounts");
    let found = find(target).map_err(unreadable)?;
    let on = || target.path().filter(|path| path.is_dir()).and_then(above);
    Ok(found.or_else(on).filter(Mount::is_ferry))
}

/// The mount that a file or directory is on, by its path.
pub fn above(path: &Path) -> Option<Mount> {
    let (absolute, mounts) = (std::path::absolute(path).ok()?, list().ok()?);
    // A mount point itself is not resolved: its daemon or server may not answer.
    let is_mount = mounts.iter().any(|mount| mount.target == absolute);
    let path = if is_mount { absolute } else { resolve(path).ok()? };
    let id = holding(&path, &mounts)?.id;
    mounts.into_iter().find(|mount| mount.id == id)
}

/// The mount that a path without symbolic links is on.
fn holding<'m>(path: &Path, mounts: &'m [Mount]) -> Option<&'m Mount> {
    let above = mounts.iter().filter(|mount| path.starts_with(&mount.target));
    // Of several mounts at one mount point the newest is visible, which is the last.
    above.max_by_key(|mount| mount.target.as_os_str().len())
}

/// Whether a path without symbolic links is on a FUSE mount, whose daemon may hang. Sends no
/// request to the mount.
pub fn is_on_fuse(path: &Path) -> bool {
    let mounts = list().unwrap_or_default();
    holding(path, &mounts).is_some_and(|mount| mount.fs_type.starts_with("fuse"))
}

/// As [`of`]; it is an error if `target` means no mount.
pub fn meant(target: &Location) -> Result<Mount, CliError> {
    of(target)?.ok_or_else(|| match target.path().and_then(above) {
        Some(on) if on.is_ferry() => {
            CliError::Failed(format!("{target}: it is no directory, and no mounted volume"))
        }
        _ => CliError::NotMounted(target.to_string().into()),
    })
}

/// As [`find_ferry`]; it is an error, too, if a volume is meant that has several mounts which are
/// not hidden.
pub fn find_only(target_or_volume: &Location) -> Result<Mount, CliError> {
    let found = find_ferry(target_or_volume)?;
    let mounts =
        list().map_err(CliError::path(&found.target, "cannot read the table of mounts"))?;
    let absolute = target_or_volume.path().and_then(|path| std::path::absolute(path).ok());
    // Its daemon may hang: a mount point is not resolved, which would ask that.
    if absolute.as_ref() == Some(&found.target) {
        return Ok(found);
    }
    let is_volume = absolute.is_some_and(|path| found.has_source(&path));
    if !is_volume && target_or_volume.resolved().is_ok_and(|path| path == found.target) {
        return Ok(found);
    }
    match &several(&found, &mounts)[..] {
        [] => Ok(found),
        names => Err(CliError::Usage(format!(
            "{target_or_volume}: there are several mounts of it: name one of {}",
            names.join(", ")
        ))),
    }
}

/// The mount points of all mounts of the same volume that are not hidden, if there are several.
fn several(mount: &Mount, mounts: &[Mount]) -> Vec<String> {
    let of_volume = |m: &&Mount| m.is_ferry() && m.has_source(&mount.source);
    let open = mounts.iter().filter(of_volume).filter(|m| cover(m, mounts).is_none());
    let targets: BTreeSet<&Path> = open.map(|m| &*m.target).collect();
    if targets.len() < 2 {
        return Vec::new();
    }
    targets.into_iter().map(|target| printable(&target.display().to_string())).collect()
}

/// As [`find`]; it is an error if that is no FerryFS mount.
pub fn find_ferry(target: &Location) -> Result<Mount, CliError> {
    let name = || PathBuf::from(target.to_string());
    let mount = find(target).map_err(CliError::path(name(), "cannot read the table of mounts"))?;
    mount.filter(Mount::is_ferry).ok_or_else(|| CliError::NotMounted(name()))
}

/// Refuses a mount that another mount at the same mount point hides: every path there leads to the
/// other.
pub fn must_be_reached(mount: &Mount) -> Result<(), CliError> {
    let mounts =
        list().map_err(CliError::path(&mount.target, "cannot read the table of mounts"))?;
    match cover(mount, &mounts) {
        None => Ok(()),
        Some(over) => Err(CliError::Failed(format!(
            "{}: mounted on {}, but hidden there by {} ({}): unmount that first",
            mount.source.display(),
            mount.target.display(),
            over.source.display(),
            over.fs_type
        ))),
    }
}

/// One mount of each FerryFS that can be reached. What is mounted at several places has one daemon.
pub fn one_of_each(mounts: &[Mount]) -> Vec<&Mount> {
    let mut devices = BTreeSet::new();
    let reached = mounts.iter().filter(|m| m.is_ferry() && cover(m, mounts).is_none());
    reached.filter(|m| devices.insert(&m.device)).collect()
}

/// The mount at the same mount point that hides this one.
pub fn cover<'m>(mount: &Mount, mounts: &'m [Mount]) -> Option<&'m Mount> {
    mounts.iter().find(|m| m.parent == mount.id && m.id != mount.id && m.target == mount.target)
}

fn parse(text: &[u8]) -> Vec<Mount> {
    text.split(|b| *b == b'\n').filter_map(parse_line).collect()
}

/// Parses lines such as `36 35 98:0 /root /target options… - type source superoptions`, with blanks
/// in names written as `\040`.
fn parse_line(line: &[u8]) -> Option<Mount> {
    let mut fields = line.split(|b| *b == b' ');
    let number = |field: &[u8]| std::str::from_utf8(field).ok()?.parse().ok();
    let (id, parent) = (number(fields.next()?)?, number(fields.next()?)?);
    let device = String::from_utf8_lossy(fields.next()?).into_owned();
    let target = unescape(fields.nth(1)?);
    fields.find(|f| *f == b"-")?;
    let fs_type = String::from_utf8_lossy(fields.next()?).into_owned();
    let source = unescape(fields.next()?);
    let options = String::from_utf8_lossy(fields.next().unwrap_or_default()).into_owned();
    let owner = options.split(',').find_map(|option| option.strip_prefix("user_id=")?.parse().ok());
    let read_only = options.split(',').any(|option| option == "ro");
    Some(Mount { id, parent, target, source, fs_type, device, owner, read_only })
}

fn unescape(field: &[u8]) -> PathBuf {
    let mut out = Vec::with_capacity(field.len());
    let mut rest = field;
    while let Some((&first, tail)) = rest.split_first() {
        let octal =
            tail.get(..3).filter(|d| first == b'\\' && d.iter().all(|b| (b'0'..=b'7').contains(b)));
        if let Some(digits) = octal {
            out.push(digits.iter().fold(0u8, |n, d| n.wrapping_mul(8).wrapping_add(d - b'0')));
            rest = &tail[3..];
        } else {
            out.push(first);
            rest = tail;
        }
    }
    OsString::from_vec(out).into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mountinfo_line_is_parsed() {
        let text = b"36 35 0:52 / /mnt/my\\040data rw,nosuid shared:1 master:2 - fuse.ferry /srv/a\\134b.vol ro,user_id=70,group_id=0\n\nbroken\n";
        let mounts = parse(text);
        assert_eq!(
            mounts,
            [Mount {
                id: 36,
                parent: 35,
                target: "/mnt/my data".into(),
                source: "/srv/a\\b.vol".into(),
                fs_type: "fuse.ferry".into(),
                device: "0:52".into(),
                owner: Some(70),
                read_only: true,
            }]
        );
        assert!(mounts[0].is_ferry());
    }

    #[test]
    fn a_mount_is_hidden_by_the_one_on_top_of_it() {
        let text = b"36 35 0:52 / /mnt rw - fuse.ferry /a rw\n37 36 0:53 / /mnt/below rw - tmpfs none rw\n38 36 0:54 / /mnt rw - tmpfs none rw\n";
        let mounts = parse(text);
        assert_eq!(cover(&mounts[0], &mounts), Some(&mounts[2]));
        assert_eq!(cover(&mounts[1], &mounts), None);
        assert_eq!(cover(&mounts[2], &mounts), None);
    }

    #[test]
    fn a_servers_volume_has_its_name_with_the_default_port_and_without_it() {
        let text = b"36 35 0:52 / /a rw - fuse.ferry ferry://box:7373/ rw\n37 35 0:53 / /b rw - fuse.ferry ferry://box/ rw\n";
        for mount in parse(text) {
            assert!(mount.has_source(Path::new("ferry://box/")), "{mount:?}");
            assert!(mount.has_source(Path::new("ferry://box:7373/")), "{mount:?}");
            assert!(!mount.has_source(Path::new("ferry://box:7374/")), "{mount:?}");
        }
    }

    #[test]
    fn a_volume_means_no_mount_if_it_has_several_that_are_not_hidden() {
        let text = b"36 35 0:52 / /a rw - fuse.ferry ferry://box:7373/ rw\n37 35 0:53 / /b rw - fuse.ferry ferry://box/ rw\n38 35 0:54 / /c rw - fuse.ferry /v rw\n";
        let mut mounts = parse(text);
        assert_eq!(several(&mounts[0], &mounts), ["/a", "/b"]);
        assert!(several(&mounts[2], &mounts).is_empty());
        mounts.extend(parse(b"39 36 0:55 / /a rw - tmpfs none rw\n"));
        assert!(several(&mounts[1], &mounts).is_empty(), "the other one is hidden");
    }

    #[test]
    fn of_each_daemon_one_mount_is_taken_that_can_be_reached() {
        let text = b"36 35 0:52 / /a rw - fuse.ferry /v rw\n37 36 0:53 / /a rw - fuse.ferry /w rw\n38 35 0:52 / /b rw - fuse.ferry /v rw\n39 35 0:53 /d /c rw - fuse.ferry /w rw\n40 35 0:54 / /e rw - tmpfs none rw\n";
        let mounts = parse(text);
        let taken: Vec<_> = one_of_each(&mounts).into_iter().map(|mount| mount.id).collect();
        assert_eq!(taken, [37, 38], "36 is hidden, 39 has the daemon of 37");
    }

    #[test]
    fn the_root_is_a_mount() {
        assert!(at(Path::new("/")).expect("proc is mounted").is_some());
        assert!(at(Path::new("/no/such/place")).expect("proc is mounted").is_none());
    }

    #[test]
    fn a_path_is_resolved_through_its_parents_links() {
        let dir = tempfile::tempdir().expect("a directory");
        let base = dir.path().canonicalize().expect("it exists");
        std::fs::create_dir(base.join("real")).expect("mkdir");
        std::os::unix::fs::symlink("real", base.join("link")).expect("symlink");
        assert_eq!(resolve(&base.join("link/new")).expect("parent exists"), base.join("real/new"));
        assert_eq!(resolve(&base.join("link")).expect("exists"), base.join("real"));
        assert!(resolve(&base.join("absent/new")).is_err());
    }
}
