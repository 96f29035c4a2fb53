//! [`StoreUrl`]: where a store is, as users write it.

use std::ffi::OsStr;
use std::fmt;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

/// What the URL of a store in a directory begins with.
const DIR: &str = "dir://";

/// Where a store is, as users write it. [`fmt::Display`] shows it so.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StoreUrl {
    /// `dir:///PATH`: a directory.
    Dir(PathBuf),
}

impl StoreUrl {
    /// `None`: the text is no URL of a store. The error is for the user.
    pub fn parse(text: &OsStr) -> Option<Result<Self, String>> {
        let path = text.as_bytes().strip_prefix(DIR.as_bytes())?;
        let path = Path::new(OsStr::from_bytes(path));
        Some(match path.is_absolute() && path.parent().is_some() {
            true => Ok(Self::Dir(path.into())),
            false => Err(format!(
                "{}: {DIR} and the absolute path of a directory is wanted, as in {DIR}/srv/store",
                text.display()
            )),
        })
    }

    /// The one spelling of it: what the table of mounts shows. A directory's path has no symbolic
    /// links.
    pub fn resolved(&self) -> io::Result<Self> {
        match self {
            Self::Dir(path) => Ok(Self::Dir(path.canonicalize()?)),
        }
    }
}

impl fmt::Display for StoreUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Dir(path) => write!(f, "{DIR}{}", path.display()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_directory_is_named_by_its_absolute_path() {
        let parse = |text: &str| StoreUrl::parse(OsStr::new(text));
        assert_eq!(parse("dir:///srv/store"), Some(Ok(StoreUrl::Dir("/srv/store".into()))));
        assert_eq!(parse("/srv/store"), None);
        assert_eq!(parse("s3:/x"), None);
        for wrong in ["dir://", "dir:///", "dir://srv/store"] {
            assert!(matches!(parse(wrong), Some(Err(_))), "{wrong}");
        }
        let url = parse("dir:///srv/store").and_then(Result::ok).expect("it is one");
        assert_eq!(url.to_string(), "dir:///srv/store");
    }
}
