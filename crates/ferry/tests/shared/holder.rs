//! The process behind a mount that starts its daemons.

use rustix::process::Pid;

/// The process that starts the daemons of a mount, one after the other. If it is killed, the mount
/// ends with it.
pub fn holder_of(daemon: Pid) -> Pid {
    let status = std::fs::read_to_string(format!("/proc/{daemon}/status")).expect("it lives");
    let parent = status.lines().find_map(|line| line.strip_prefix("PPid:")).expect("a parent");
    parent.trim().parse().ok().and_then(Pid::from_raw).expect("a number")
}
