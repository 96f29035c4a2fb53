//! [`Location`]: where a volume lies, as the user says it.

use std::ffi::{OsStr, OsString};
use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

use clap::builder::{OsStringValueParser, TypedValueParser, ValueParser, ValueParserFactory};
use ferry_net::Address;
use ferry_object::StoreUrl;

use crate::error::CliError;

/// Where a volume lies. Where a command takes a mount point, too, that is a path.
#[derive(Clone, Debug)]
pub enum Location {
    /// A file, a block device, or the description of several.
    Path(PathBuf),
    /// An object store.
    Store(StoreUrl),
    /// A server of it.
    Server(Address),
}

impl Location {
    /// From a word of the command line, of `fstab`, or of the table of mounts.
    pub fn parse(text: &OsStr) -> Result<Self, String> {
        if let Some(url) = StoreUrl::parse(text) {
            return url.map(Self::Store);
        }
        match text.to_str().filter(|text| Address::is_meant(text)) {
            Some(text) => {
                text.parse().map(Self::Server).map_err(|e: ferry_net::NetError| e.to_string())
            }
            None => Ok(Self::Path(text.into())),
        }
    }

    /// The name that it has as the source of a mount. A path has no symbolic links in it; what has
    /// the name need not exist.
    pub fn resolved(&self) -> io::Result<PathBuf> {
        Ok(match self {
            Self::Path(path) => resolve(path)?,
            Self::Store(url) => url.resolved().unwrap_or_else(|_| url.clone()).to_string().into(),
            Self::Server(address) => address.to_string().into(),
        })
    }

    /// The text that tells the volume from others on this machine. A path has no symbolic links in
    /// it.
    pub fn identity(&self) -> io::Result<PathBuf> {
        match self {
            Self::Store(url) => Ok(url.resolved().unwrap_or_else(|_| url.clone()).name().into()),
            _ => self.resolved(),
        }
    }

    /// The path of a volume that is not in a store.
    pub fn path(&self) -> Option<&Path> {
        match self {
            Self::Path(path) => Some(path),
            Self::Store(_) | Self::Server(_) => None,
        }
    }

    /// The error of a command that needs the volume itself.
    pub fn not_served(&self) -> CliError {
        CliError::Usage(format!("{self}: that is for the machine that has the volume"))
    }
}

impl fmt::Display for Location {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Path(path) => path.display().fmt(f),
            Self::Store(url) => url.fmt(f),
            Self::Server(address) => address.fmt(f),
        }
    }
}

impl<P: AsRef<Path> + ?Sized> From<&P> for Location {
    fn from(path: &P) -> Self {
        Self::Path(path.as_ref().into())
    }
}

impl ValueParserFactory for Location {
    type Parser = ValueParser;

    fn value_parser() -> ValueParser {
        let parse = |text: OsString| Self::parse(&text);
        ValueParser::new(OsStringValueParser::new().try_map(parse))
    }
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
