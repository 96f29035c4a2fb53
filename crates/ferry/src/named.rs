//! What a word of the command line names: a [`Location`], or by `MOUNTPOINT@NAME` a snapshot of the
//! volume that is mounted there.

use std::ffi::{OsStr, OsString};
use std::path::Path;

use clap::builder::{OsStringValueParser, TypedValueParser, ValueParser, ValueParserFactory};

use crate::location::Location;
use crate::mounts::{self, Mount};
use crate::snappath;

impl ValueParserFactory for Location {
    type Parser = ValueParser;

    fn value_parser() -> ValueParser {
        let parse = |text: OsString| parse(&text);
        ValueParser::new(OsStringValueParser::new().try_map(parse))
    }
}

fn parse(text: &OsStr) -> Result<Location, String> {
    let location = Location::parse(text)?;
    location.path().and_then(of_mount).unwrap_or(Ok(location))
}

/// The snapshot that `MOUNTPOINT@NAME` names. `None`: the path is something else.
fn of_mount(path: &Path) -> Option<Result<Location, String>> {
    let (target, name) = snappath::spelled(path)?;
    let absolute = |path: &Path| std::path::absolute(path).ok();
    let mount = mounts::at(&absolute(&target)?).ok()?.filter(Mount::is_ferry)?;
    // A mount whose daemon does not answer is not looked at.
    let is_mount = mounts::at(&absolute(path)?).ok()?.is_some();
    if is_mount || path.symlink_metadata().is_ok() {
        return None;
    }
    let volume = Location::parse(mount.source.as_os_str());
    Some(volume.and_then(|volume| volume.with_snapshot(&name).map_err(|error| error.to_string())))
}
