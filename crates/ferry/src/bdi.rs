//! How far the kernel reads ahead on a mount, and how much it holds back of what was written: a FUSE server may only ask for less than
//! the kernel's default, its administrator sets what he likes.

use std::path::Path;

use crate::mounts;

/// Two requests of the largest size: one is on its way while the other is used (`docs/performance.md`, reading with dd).
const READ_AHEAD: (&str, &str) = ("read_ahead_kb", "2048");
/// What `cache=writeback` gathers counts among what all file systems may hold back (`vm.dirty_ratio`), as a local disk's does. The
/// default for FUSE is a hundredth of that: a writer at random waits for FerryFS as if nothing were gathered.
const WRITE_BACK: [(&str, &str); 2] = [("strict_limit", "0"), ("max_ratio", "100")];

/// Sets it for the mount at `mountpoint`, where we are allowed to. The mount is not asked anything.
pub fn raise(mountpoint: &Path, writeback: bool) {
    let mount = match mounts::find(mountpoint) {
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
