//! Checks of the machine: its kernel, FUSE, limits, memory and clock.

use std::fs::{self, OpenOptions};
use std::io::{self, Read};
use std::path::Path;
use std::process::{Command, Stdio};

use ferry_sync::release_at_least;
use rustix::process::{Resource, geteuid, getrlimit};

use crate::cache_size::{CACHE_SIZE_MIN, SHARE, allowed_bytes, machine_bytes};
use crate::daemon::OPEN_FILES;
use crate::size::format_bytes;
use crate::uring;

use super::check::{Check, within};
use super::daemons::Daemon;

/// The oldest kernel on which FerryFS is tested: that of Debian 12.
const KERNEL_MIN: (u32, u32) = (6, 1);
/// The first kernel in which `ferry sync` waits for what the kernel writes back by itself.
const KERNEL_SYNC: (u32, u32) = (6, 16);
const FUSE: &str = "/dev/fuse";
const FUSE_CONF: &str = "/etc/fuse.conf";
const RINGS: &str = "/proc/sys/kernel/io_uring_disabled";
/// The file that systemd-timesyncd makes when it has set the clock.
const TIMESYNC: &str = "/run/systemd/timesync/synchronized";

pub fn checks(daemons: &[Daemon]) -> Vec<Check> {
    let mut checks = vec![kernel(&release()), device()];
    checks.extend(users());
    checks.extend([fuse_rings(), rings(), open_files(), memory(daemons), clock()]);
    checks
}

/// The release of the running kernel.
pub fn release() -> String {
    rustix::system::uname().release().to_string_lossy().into_owned()
}

fn kernel(release: &str) -> Check {
    if !release_at_least(release, KERNEL_MIN) {
        let advice =
            "Linux 6.1 is the oldest that FerryFS is tested on (Debian 12): use a newer kernel";
        return Check::bad("kernel", release, advice.into());
    }
    if !release_at_least(release, KERNEL_SYNC) {
        let advice = "Linux 6.14 brings FUSE over io_uring, which answers in about half of the time, and since 6.16 `ferry sync` waits for all \
                      that the kernel writes back";
        return Check::note("kernel", release, advice.into());
    }
    Check::ok("kernel", release)
}

fn device() -> Check {
    match within(|| OpenOptions::new().read(true).write(true).open(FUSE)) {
        Some(Ok(_)) => Check::ok(FUSE, "can be opened"),
        Some(Err(error)) => {
            let advice = match error.kind() {
                io::ErrorKind::NotFound => {
                    "`modprobe fuse` makes it; a container must be given it (`--device /dev/fuse`)"
                }
                io::ErrorKind::PermissionDenied => {
                    "root or `chmod 666 /dev/fuse` lets this user open it; a container must be given it"
                }
                _ => "`modprobe fuse` loads the kernel's part of it",
            };
            Check::bad(
                FUSE,
                error.to_string(),
                format!(
                    "{advice}. Without it nothing can be mounted; `ferry serve` does not need it"
                ),
            )
        }
        None => {
            Check::bad(FUSE, "does not open in time", "see what the kernel says (`dmesg`)".into())
        }
    }
}

/// What users who are not root need to mount.
fn users() -> Vec<Check> {
    let helper = ferry_fuse::HELPER;
    if geteuid().is_root() {
        return vec![Check::ok(helper, "not needed: root mounts")];
    }
    let path = std::env::var_os("PATH").unwrap_or_default();
    let found =
        std::env::split_paths(&path).map(|dir| dir.join(helper)).find(|file| file.is_file());
    let helper = match found {
        Some(file) => Check::ok(helper, file.display().to_string()),
        None => Check::bad(
            helper,
            "absent",
            "users who are not root mount with it: install the package fuse3".into(),
        ),
    };
    let conf = fs::read_to_string(FUSE_CONF).unwrap_or_default();
    let allowed = conf.lines().any(|line| line.trim() == "user_allow_other");
    let others = "user_allow_other";
    vec![
        helper,
        if allowed {
            Check::ok(others, format!("in {FUSE_CONF}"))
        } else {
            let advice = format!(
                "-o allow_other is refused to users who are not root; the line {others} in {FUSE_CONF} permits it"
            );
            Check::note(others, format!("not in {FUSE_CONF}"), advice)
        },
    ]
}

fn fuse_rings() -> Check {
    const WHAT: &str = "FUSE over io_uring";
    let switch = uring::SWITCH;
    match uring::is_on() {
        Some(true) => Check::ok(WHAT, "on"),
        Some(false) => {
            let advice = format!(
                "mounts work, and are slower than they could be: the next mount by root switches it on, or `echo Y > {switch}`"
            );
            Check::note(WHAT, "off", advice)
        }
        None => {
            let advice = "mounts work through /dev/fuse, and are slower than they could be: Linux 6.14 and newer have it, with CONFIG_FUSE_IO_URING";
            Check::note(WHAT, "not in this kernel", advice.into())
        }
    }
}

/// Whether processes may use io_uring at all.
fn rings() -> Check {
    const WHAT: &str = "io_uring";
    let disabled = fs::read_to_string(RINGS).unwrap_or_default();
    let advice = || {
        "`sysctl kernel.io_uring_disabled=0` permits it: without it requests to the disk are executed one by one".into()
    };
    match disabled.trim() {
        "2" => Check::note(WHAT, "switched off for all", advice()),
        "1" if !geteuid().is_root() => {
            Check::note(WHAT, "switched off for users who are not root", advice())
        }
        _ => Check::ok(WHAT, "allowed"),
    }
}

fn open_files() -> Check {
    const WHAT: &str = "open files";
    let most = getrlimit(Resource::Nofile).maximum;
    let found = most.map_or_else(|| "unlimited".into(), |files| format!("at most {files}"));
    if most.is_none_or(|most| most >= OPEN_FILES) {
        return Check::ok(WHAT, found);
    }
    let advice = format!(
        "a daemon wants {OPEN_FILES}: raise the hard limit (LimitNOFILE= of a unit, nofile in /etc/security/limits.conf)"
    );
    Check::note(WHAT, found, advice)
}

/// What the control groups allow the daemons, or if there are none this process.
fn memory(daemons: &[Daemon]) -> Check {
    const WHAT: &str = "memory";
    let processes = daemons.iter().filter_map(|daemon| Some(daemon.found.pid?.to_string()));
    let allowed = processes.chain(["self".to_owned()]).map(|process| allowed_bytes(&process));
    let (allowed, machine) = (allowed.min().unwrap_or(u64::MAX), machine_bytes());
    let found = match allowed < machine {
        true => format!("{} of {} are allowed", format_bytes(allowed), format_bytes(machine)),
        false => format!("{}, no limit of a control group", format_bytes(machine)),
    };
    let enough = CACHE_SIZE_MIN * SHARE;
    if allowed >= enough {
        return Check::ok(WHAT, found);
    }
    let advice = format!(
        "a mount uses at least {} of it: {} or more leave room for programs (MemoryMax= of a unit)",
        format_bytes(CACHE_SIZE_MIN),
        format_bytes(enough)
    );
    // The kernel would kill a daemon that has no more than its caches.
    if allowed < CACHE_SIZE_MIN * 2 {
        Check::bad(WHAT, found, advice)
    } else {
        Check::note(WHAT, found, advice)
    }
}

fn clock() -> Check {
    const WHAT: &str = "clock";
    let synchronized = match said_by_timedatectl().as_deref() {
        Some("yes") => Some(true),
        Some("no") => Some(false),
        _ => Path::new(TIMESYNC).exists().then_some(true),
    };
    match synchronized {
        Some(true) => Check::ok(WHAT, "synchronized"),
        Some(false) => {
            let advice = "certificates are judged by it, and S3 refuses requests of a clock that is 15 minutes wrong: start chrony or \
                          systemd-timesyncd";
            Check::note(WHAT, "not synchronized", advice.into())
        }
        None => {
            let advice = "nothing here tells (timedatectl): compare `date -u` with another machine's; S3 refuses requests of a clock that is \
                          15 minutes wrong";
            Check::note(WHAT, "not known", advice.into())
        }
    }
}

/// What the kernel knows of the clock, which timedatectl reads with adjtimex(2): `yes` or `no`.
/// `None`: it does not run here, or not in time.
fn said_by_timedatectl() -> Option<String> {
    let mut asked = Command::new("timedatectl")
        .args(["show", "--property=NTPSynchronized", "--value"])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .ok()?;
    let mut stdout = asked.stdout.take()?;
    let said = within(move || {
        let mut said = String::new();
        stdout.read_to_string(&mut said).map(|_| said)
    });
    // If it has ended, this does nothing.
    let _ = asked.kill();
    let _ = asked.wait();
    said?.ok().map(|said| said.trim().to_owned())
}

#[cfg(test)]
mod tests {
    use super::super::check::Outcome;
    use super::*;

    #[test]
    fn a_kernel_is_judged_by_its_number() {
        for (release, outcome) in [
            ("5.15.0-91-generic", Outcome::Bad),
            ("6.1.0-18-amd64", Outcome::Note),
            ("6.15.2", Outcome::Note),
            ("6.16.0", Outcome::Ok),
            ("7.0-rc1", Outcome::Ok),
        ] {
            let check = kernel(release);
            assert_eq!(check.outcome, outcome, "{release}");
            assert_eq!(check.advice.is_some(), outcome != Outcome::Ok, "{release}");
        }
    }
}
