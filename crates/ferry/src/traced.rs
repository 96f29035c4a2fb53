//! The daemon's side of `ferry trace`: answers the questions for requests and for names of inodes.

use std::collections::BTreeSet;
use std::sync::Weak;

use ferry_fs::{CachedName, Filesystem, Ino};
use ferry_fuse::MountHandle;
use serde_json::Value;

use crate::socket::object;

/// The question for requests; the number of the first that is wanted follows.
pub const REQUESTS: &str = "trace:";
/// The question for names of inodes, which follow as a JSON list.
pub const NAMES: &str = "names:";

/// The daemon's answer to a question of this module. `None`: it is none.
pub fn answer(handle: &MountHandle, fs: &Weak<dyn Filesystem>, question: &str) -> Option<Value> {
    if let Some(after) = question.strip_prefix(REQUESTS) {
        return Some(handle.trace(after.parse().ok()));
    }
    let inodes: BTreeSet<Ino> = serde_json::from_str(question.strip_prefix(NAMES)?).ok()?;
    let names = fs.upgrade()?.cached_names(&inodes).into_iter();
    let text = |name: &[u8]| String::from_utf8_lossy(name).into_owned();
    let one = |(ino, dir, name): CachedName| -> Value {
        [ino.into(), dir.into(), text(&name).into()].into_iter().collect::<Vec<Value>>().into()
    };
    Some(object([("names", names.map(one).collect())]))
}
