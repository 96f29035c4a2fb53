//! FUSE over io_uring: the kernel offers it only if its administrator has enabled it.

use std::fs;
use std::io;

/// The switch, for all FUSE servers of the machine; `N` by default. It permits io_uring, and
/// changes nothing for servers that do not ask for it.
pub const SWITCH: &str = "/sys/module/fuse/parameters/enable_uring";

/// Sets the switch, if it is off and this process may. A request over io_uring is answered on the
/// core that made it, which is about twice as fast on a machine with few cores
/// (`docs/decisions.md`). Without it the mount works through /dev/fuse.
pub fn offer() {
    if is_on() != Some(false) {
        return;
    }
    match fs::write(SWITCH, "Y") {
        Ok(()) => {
            tracing::info!("FUSE over io_uring was off in this kernel: switched on ({SWITCH})")
        }
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
            tracing::info!(
                "FUSE over io_uring is off in this kernel; root can make mounts faster: echo Y > {SWITCH}"
            );
        }
        Err(error) => tracing::info!(%error, "FUSE over io_uring stays off in this kernel"),
    }
}

/// Whether the switch is set. `None`: a kernel before 6.14 has none.
pub fn is_on() -> Option<bool> {
    fs::read_to_string(SWITCH).ok().map(|state| state.trim() != "N")
}
