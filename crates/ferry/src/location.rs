//! [`Location`]: where a volume lies, as the user says it.

use std::ffi::OsStr;
use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

use ferry_net::Address;
use ferry_object::{StoreUrl, check_snapshot_name};

use crate::error::CliError;
use crate::snappath;

/// Where a volume lies. Where a command takes a mount point, too, that is a path.
#[derive(Clone, Debug)]
pub enum Location {
    /// A file, a block device, or the description of several.
    Path(PathBuf),
    /// An object store.
    Store(StoreUrl),
    /// A snapshot of the volume in an object store, by its name.
    Snapshot(StoreUrl, String),
    /// A server of it.
    Server(Address),
}

impl Location {
    /// From a word of `fstab` or of the table of mounts, or of the command line, where there are
    /// other names beside (`named`).
    pub fn parse(text: &OsStr) -> Result<Self, String> {
        if let Some((volume, name)) = StoreUrl::split_snapshot(text)
            && let Some(url) = StoreUrl::parse(&volume)
        {
            return Self::Store(url?).with_snapshot(&name).map_err(|error| error.to_string());
        }
        if let Some(url) = StoreUrl::parse(text) {
            return url.map(Self::Store);
        }
        match text.to_str().filter(|text| Address::is_meant(text)) {
            Some(text) => {
                text.parse().map(Self::Server).map_err(|e: ferry_net::NetError| e.to_string())
            }
            None => {
                let path = Path::new(text);
                Ok(Self::Path(snappath::named(path).unwrap_or_else(|| path.into())))
            }
        }
    }

    /// The name that it has as the source of a mount. A path has no symbolic links in it; what has
    /// the name need not exist.
    pub fn resolved(&self) -> io::Result<PathBuf> {
        Ok(match self {
            Self::Path(path) => match snappath::by_name(path) {
                Some((volume, name)) => snappath::path_of(&volume, &name),
                None => resolve(path)?,
            },
            Self::Store(url) => resolved_url(url).to_string().into(),
            Self::Snapshot(url, name) => resolved_url(url).with_snapshot(name).into(),
            Self::Server(address) => address.to_string().into(),
        })
    }

    /// The text that tells the volume from others on this machine. A path has no symbolic links in
    /// it.
    pub fn identity(&self) -> io::Result<PathBuf> {
        let resolved = match self {
            Self::Store(url) => Self::Store(resolved_url(url)),
            Self::Snapshot(url, name) => Self::Snapshot(resolved_url(url), name.clone()),
            other => other.clone(),
        };
        resolved.name_in_store().map_or_else(|| self.resolved(), |name| Ok(name.into()))
    }

    /// The same of what is in a store, if its URL is resolved.
    pub fn name_in_store(&self) -> Option<String> {
        match self {
            Self::Store(url) => Some(url.without_profile().to_string()),
            Self::Snapshot(url, name) => Some(url.without_profile().with_snapshot(name)),
            Self::Path(_) | Self::Server(_) => None,
        }
    }

    /// The snapshot of this name of a volume.
    pub fn with_snapshot(&self, name: &str) -> Result<Self, CliError> {
        check_snapshot_name(name).map_err(|error| CliError::Usage(error.to_string()))?;
        match self {
            Self::Store(url) => Ok(Self::Snapshot(url.clone(), name.into())),
            Self::Snapshot(_, one) if one == name => Ok(self.clone()),
            Self::Snapshot(..) => Err(self.already(name)),
            Self::Path(path) => match snappath::split(path) {
                Some((_, one)) if one == name => Ok(self.clone()),
                Some(_) => Err(self.already(name)),
                None => Ok(Self::Path(snappath::path_of(path, name))),
            },
            Self::Server(_) => Err(self.not_the_volume()),
        }
    }

    fn already(&self, name: &str) -> CliError {
        CliError::Usage(format!(
            "{self}: this is a snapshot already, and snapshot={name} names another one"
        ))
    }

    /// The store that the volume, or the snapshot, is in.
    pub fn store(&self) -> Option<&StoreUrl> {
        match self {
            Self::Store(url) | Self::Snapshot(url, _) => Some(url),
            Self::Path(_) | Self::Server(_) => None,
        }
    }

    /// The name of the snapshot that it is, if it is one.
    pub fn snapshot(&self) -> Option<String> {
        match self {
            Self::Snapshot(_, name) => Some(name.clone()),
            Self::Path(path) => snappath::split(path).map(|(_, name)| name),
            Self::Store(_) | Self::Server(_) => None,
        }
    }

    /// The path of a volume that is not in a store.
    pub fn path(&self) -> Option<&Path> {
        match self {
            Self::Path(path) => Some(path),
            Self::Store(_) | Self::Snapshot(..) | Self::Server(_) => None,
        }
    }

    /// The name of a server's volume, if this is a path of the form HOST:/PATH, which NFS uses.
    pub fn as_server(&self) -> Option<Self> {
        let (host, path) = self.path()?.to_str()?.split_once(":/")?;
        let is_host = !host.is_empty() && !host.contains('/');
        is_host.then(|| {
            let path = format!("/{path}");
            Self::Server(Address::of_host(host, None, &path))
        })
    }

    /// The error of a command that needs the volume itself.
    pub fn not_the_volume(&self) -> CliError {
        CliError::Usage(match self {
            Self::Snapshot(url, _) => format!(
                "{self}: that is a snapshot, which never changes: name the volume, {url}. If its own name has the @, write a slash behind it"
            ),
            Self::Path(_) => {
                format!("{self}: that is a snapshot, which never changes: name the volume")
            }
            _ => format!("{self}: that is for the machine that has the volume"),
        })
    }

    /// The error for a volume that is not in a store.
    pub fn no_snapshots(&self) -> CliError {
        CliError::Usage(format!(
            "{self}: only volumes in a store (s3://, dir://) can do that. `ferry copy` copies any volume, and a snapshot of one"
        ))
    }
}

impl fmt::Display for Location {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Path(path) => path.display().fmt(f),
            Self::Store(url) => url.fmt(f),
            Self::Snapshot(url, name) => url.with_snapshot(name).fmt(f),
            Self::Server(address) => address.fmt(f),
        }
    }
}

impl<P: AsRef<Path> + ?Sized> From<&P> for Location {
    fn from(path: &P) -> Self {
        Self::Path(path.as_ref().into())
    }
}

/// The one spelling of a URL, if it can be found out.
pub fn resolved_url(url: &StoreUrl) -> StoreUrl {
    url.resolved().unwrap_or_else(|_| url.clone())
}

/// The absolute path without symbolic links. The last component is not opened: it may be a mount
/// whose daemon has died.
pub fn resolve(path: &Path) -> io::Result<PathBuf> {
    if path.file_name().is_none() {
        return path.canonicalize();
    }
    // The last component may be a symbolic link. A dead mount answers readlink(2) with an error,
    // and is no link.
    if path.symlink_metadata().is_ok_and(|m| m.is_symlink()) {
        return path.canonicalize();
    }
    let absolute = std::path::absolute(path)?;
    match (absolute.parent(), absolute.file_name()) {
        (Some(parent), Some(name)) => Ok(parent.canonicalize()?.join(name)),
        _ => Ok(absolute),
    }
}
