//! Where the snapshots of a volume in one file are: `VOLUME.snapshots/NAME`, beside the file.

use std::path::{Path, PathBuf};

use ferry_object::check_snapshot_name;

/// What the directory's name ends with.
const SUFFIX: &str = ".snapshots";

/// The directory for the snapshots of a volume.
pub fn directory(volume: &Path) -> PathBuf {
    let mut name = volume.as_os_str().to_owned();
    name.push(SUFFIX);
    name.into()
}

/// Where the snapshot of this name of a volume is, or would be.
pub fn path_of(volume: &Path, name: &str) -> PathBuf {
    directory(&real(volume)).join(name)
}

/// The volume without symbolic links: its snapshots are beside the file itself.
pub fn real(volume: &Path) -> PathBuf {
    volume.canonicalize().unwrap_or_else(|_| volume.into())
}

/// What `VOLUME@NAME` names, if there is no file of that name and the volume has had snapshots.
pub fn named(text: &Path) -> Option<PathBuf> {
    let (volume, name) = text.to_str()?.rsplit_once('@')?;
    let path = path_of(Path::new(volume), name);
    let is_one = check_snapshot_name(name).is_ok() && snapshot_at(&path).is_some();
    // Last: the text may be a mount point whose daemon does not answer.
    (is_one && text.symlink_metadata().is_err()).then_some(path)
}

/// The name of the snapshot whose file this is, whichever way leads there. Where the volume is
/// missing, it is a volume.
pub fn snapshot_at(path: &Path) -> Option<String> {
    let path = real(path);
    let name = path.file_name()?.to_str()?;
    let parent = path.parent()?;
    let volume = parent.to_str()?.strip_suffix(SUFFIX)?;
    (parent.is_dir() && Path::new(volume).is_file()).then(|| name.to_owned())
}
