//! How far the kernel reads ahead on a mount: a FUSE server may only ask for less than the 128 KiB of the kernel's default, its
//! administrator sets what he likes.

use std::path::Path;

use crate::mounts;

/// Two requests of the largest size: one is on its way while the other is used (`docs/performance.md`, reading with dd).
const KIB: &str = "2048";

/// Sets it for the mount at `mountpoint`, where we are allowed to. The mount is not asked anything.
pub fn raise(mountpoint: &Path) {
    let mount = match mounts::find(mountpoint) {
        Ok(Some(mount)) => mount,
        Ok(None) => return,
        Err(error) => return tracing::debug!(%error, "the table of mounts"),
    };
    let setting = format!("/sys/class/bdi/{}/read_ahead_kb", mount.device);
    if let Err(error) = std::fs::write(&setting, KIB) {
        tracing::debug!(%error, setting, "read-ahead of the kernel stays as it is");
    }
}
