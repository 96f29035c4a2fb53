//! Sets how far the kernel reads ahead on a mount, and how much dirty data it gathers. A FUSE
//! server may only ask for less than the kernel's default; an administrator may set any value.

use std::path::Path;

use crate::location::Location;
use crate::mounts;

/// Two requests of the largest size: one is in flight while the program uses the other
/// (`docs/performance.md`, reading with dd).
const READ_AHEAD: (&str, &str) = ("read_ahead_kb", "2048");
/// With `cache=writeback`, dirty data may use all of the limit for all file systems
/// (`vm.dirty_ratio`), as a local disk's may. FUSE's default is a hundredth of it: a random writer
/// then waits for FerryFS as if nothing were gathered.
const WRITE_BACK: [(&str, &str); 2] = [("strict_limit", "0"), ("max_ratio", "100")];

/// Sets the values for the mount at `mountpoint`, if this process may. Sends no request to the
/// mount.
pub fn raise(mountpoint: &Path, writeback: bool) {
    let mount = match mounts::find(&Location::from(mountpoint)) {
        Ok(Some(mount)) => mount,
        Ok(None) => return,
        Err(error) => return tracing::debug!(%error, "the table of mounts"),
    };
    let gathered: &[_] = if writeback { &WRITE_BACK } else { &[] };
    for (name, value) in [READ_AHEAD].iter().chain(gathered) {
        let setting = format!("/sys/class/bdi/{}/{name}", mount.device);
        if let Err(error) = std::fs::write(&setting, value) {
            tracing::debug!(%error, setting, "stays as it is");
        }
    }
}
