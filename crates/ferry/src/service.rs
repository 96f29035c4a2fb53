//! A unit of systemd that restarts: its processes end, and systemd has the mount's connection to
//! the kernel until the next start goes on with it. Programs wait meanwhile.
//!
//! systemd ends a unit in the same way whether it restarts or stops. Which of both it does is in
//! its list of jobs.

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use ferry_fuse::Unmount;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::process::{Pid, getpid};

use crate::error::CliError;
use crate::held::{self, HeldThings};
use crate::mounts;
use crate::starter;
use crate::waiting::timespec;

/// Stands for the program that goes on with a mount: what the unit starts next.
pub const NEXT_START: &str = "systemd:next-start";

/// The first descriptor that systemd gives a process.
const FIRST: i32 = 3;
/// The variable with the name of the unit.
const UNIT: &str = "FERRY_UNIT";
/// The variable with the unit's main process, which systemd sets for `ExecStop=`.
const MAIN_PROCESS: &str = "MAINPID";
/// All that has no descriptor of its own: lengths, names and contents.
const WORDS: &str = "words";
/// The arguments of the process that has left the mount.
const ARGUMENTS: &str = "arguments";
/// So many descriptors are left, at most.
const STORED_MAX: u32 = 16;
/// systemd may take so long to list a job, or to take a descriptor.
const ANSWERS: Duration = Duration::from_secs(10);

/// This process has what systemd had.
static TOOK: AtomicBool = AtomicBool::new(false);

/// The arguments of this process, each with a zero behind it.
fn own_arguments() -> Vec<u8> {
    std::env::args_os().skip(1).flat_map(|word| [word.into_vec(), vec![0]].concat()).collect()
}

fn encode<'w>(words: impl Iterator<Item = (&'w [u8], &'w [u8])>) -> Vec<u8> {
    let mut bytes = Vec::new();
    for part in words.flat_map(|(name, word)| [name, word]) {
        bytes.extend_from_slice(&(part.len() as u64).to_le_bytes());
        bytes.extend_from_slice(part);
    }
    bytes
}

fn decode(mut bytes: &[u8]) -> Option<BTreeMap<Vec<u8>, Vec<u8>>> {
    let mut words = BTreeMap::new();
    while !bytes.is_empty() {
        let (name, rest) = first_part(bytes)?;
        let (word, rest) = first_part(rest)?;
        words.insert(name.to_vec(), word.to_vec());
        bytes = rest;
    }
    Some(words)
}

fn first_part(bytes: &[u8]) -> Option<(&[u8], &[u8])> {
    let (len, rest) = bytes.split_first_chunk::<8>()?;
    rest.split_at_checked(usize::try_from(u64::from_le_bytes(*len)).ok()?)
}

/// Gives systemd what the next start needs to go on with a mount. It has all of it when this
/// returns.
pub fn leave(things: &HeldThings) -> Result<(), CliError> {
    // A start that has failed may have left others. What is refused now, systemd may take later.
    forget_all(things);
    store(things).inspect_err(|_| forget_all(things))
}

fn store(things: &HeldThings) -> Result<(), CliError> {
    let failed = |error: io::Error| CliError::Failed(format!("systemd: {error}"));
    let socket = starter::systemd()
        .map_err(failed)?
        .ok_or_else(|| failed(io::ErrorKind::NotConnected.into()))?;
    let socket = OwnedFd::from(socket);
    let say = |message: &str, descriptor: &OwnedFd| {
        held::send(&socket, &[message.as_bytes()], Some(descriptor)).map_err(failed)
    };
    let keep = |name: &str, descriptor: &OwnedFd| {
        say(&format!("FDSTORE=1\nFDPOLL=0\nFDNAME={name}"), descriptor)
    };
    let arguments = own_arguments();
    let words = things.iter().filter(|(_, (_, descriptor))| descriptor.is_none());
    let words = words.map(|(name, (word, _))| (&name[..], &word[..]));
    let words = encode(words.chain([(ARGUMENTS.as_bytes(), &arguments[..])]));
    keep(WORDS, &held::memory("ferry-words", &words)?)?;
    for (name, (_, descriptor)) in things {
        if let Some(descriptor) = descriptor {
            keep(&String::from_utf8_lossy(name), descriptor)?;
        }
    }
    // It closes this one when it has taken the others.
    let (reader, writer) = io::pipe().map_err(failed)?;
    say("BARRIER=1", &writer.into())?;
    let mut taken = [PollFd::new(&reader, PollFlags::empty())];
    match poll(&mut taken, Some(&timespec(ANSWERS))) {
        Ok(1) => Ok(()),
        Ok(_) => Err(failed(io::ErrorKind::TimedOut.into())),
        Err(error) => Err(failed(error.into())),
    }
}

fn forget_all(things: &HeldThings) {
    let names = things.keys().map(|name| String::from_utf8_lossy(name));
    names.chain([WORDS.into()]).for_each(|name| forget(&name));
}

/// systemd need not have a descriptor any more.
fn forget(name: &str) {
    starter::notify_systemd(&format!("FDSTOREREMOVE=1\nFDNAME={name}"));
}

/// What the start before has left: this process goes on with its mount. If that had other
/// arguments, its mount ends. So does what is not mounted any more.
pub fn take() -> Result<HeldThings, CliError> {
    let failed =
        |error: io::Error| CliError::Failed(format!("what systemd has of the mount: {error}"));
    let variable = |name| std::env::var(name).unwrap_or_default();
    if variable("LISTEN_PID") != getpid().to_string() {
        return Ok(HeldThings::default());
    }
    let mut things = HeldThings::default();
    for (number, name) in (FIRST..).zip(variable("LISTEN_FDNAMES").split(':')) {
        let descriptor = ferry_fuse::inherited(number).map_err(failed)?;
        things.insert(name.into(), (Vec::new(), Some(descriptor)));
    }
    TOOK.store(true, Ordering::Relaxed);
    let words = things.remove(WORDS.as_bytes()).and_then(|(_, words)| words);
    let words = words.map(held::read_all).transpose().map_err(failed)?;
    // Without them nothing is known of a mount, so it is not there.
    let mut words = words.and_then(|words| decode(&words)).unwrap_or_default();
    let arguments = words.remove(ARGUMENTS.as_bytes());
    things.extend(words.into_iter().map(|(name, word)| (name, (word, None))));
    let mounted = held::mounted(&things).map_err(failed)?;
    let why = match &mounted {
        None => "the mount that was left to this start is not there any more",
        Some(_) if arguments == Some(own_arguments()) => return Ok(things),
        Some(_) => "the mount that was left to this start has other arguments",
    };
    tracing::warn!("{why}: it is made anew");
    held::end(&things);
    took();
    // Not what somebody has mounted on top.
    if let Some(mount) = mounted
        && matches!(mounts::at(&mount.target), Ok(Some(top)) if top.id == mount.id)
        && let Err(error) = ferry_fuse::unmount(&mount.target, Unmount::Lazy)
    {
        tracing::warn!(%error, "the mount before");
    }
    Ok(HeldThings::default())
}

/// systemd need not have any more what this process has taken.
pub fn took() {
    if TOOK.swap(false, Ordering::Relaxed) {
        let names = std::env::var("LISTEN_FDNAMES").unwrap_or_default();
        names.split(':').for_each(forget);
    }
}

/// Whether systemd has all that this process has taken, and would give it to the next start.
pub fn has_all() -> bool {
    TOOK.load(Ordering::Relaxed)
}

/// The main process of a unit, for a command that ends the unit.
pub fn main_process() -> Option<Pid> {
    std::env::var(MAIN_PROCESS).ok()?.parse().ok().and_then(Pid::from_raw)
}

/// Whether this unit ends to start again. `false`: it does not say its name.
pub fn restarts_now() -> bool {
    std::env::var(UNIT).is_ok_and(|unit| restarts(&unit))
}

/// What this unit runs as `ExecStop=`, for its main process. `None`: it does not say its name.
pub fn exec_stop(mountpoint: &OsStr) -> Option<Command> {
    let mut command = Command::new("/proc/self/exe");
    command.args(["upgrade-mount", "--next-start"]).arg(std::env::var_os(UNIT)?).arg(mountpoint);
    command.arg("--").args(std::env::args_os().skip(1));
    command.env(MAIN_PROCESS, getpid().to_string());
    Some(command)
}

/// The process that has started this one.
pub fn parent_of(process: u32) -> Option<Pid> {
    let status = std::fs::read_to_string(format!("/proc/{process}/status")).ok()?;
    let parent = status.lines().find_map(|line| line.strip_prefix("PPid:"))?;
    Pid::from_raw(parent.trim().parse().ok()?)
}

/// The arguments of a process, without its name.
pub fn arguments_of(process: Pid) -> io::Result<Vec<OsString>> {
    let all = std::fs::read(format!("/proc/{}/cmdline", process.as_raw_nonzero()))?;
    let words = all.strip_suffix(b"\0").unwrap_or(&all).split(|byte| *byte == 0);
    Ok(words.skip(1).map(|word| OsStr::from_bytes(word).to_owned()).collect())
}

/// Whether systemd ends the unit to start it again. If that cannot be found, the unit stops.
pub fn restarts(unit: &str) -> bool {
    // JOB UNIT TYPE STATE
    let job = first_line(&["list-jobs", "--no-legend", "--plain", "--", unit]);
    job.is_some_and(|job| job.split_whitespace().nth(2) == Some("restart"))
}

/// Whether systemd stores so many descriptors for the unit. It closes others without a word.
pub fn has_room(unit: &str) -> bool {
    let most = first_line(&["show", "--property=FileDescriptorStoreMax", "--value", "--", unit]);
    most.and_then(|most| most.trim().parse().ok()).is_some_and(|most: u32| most >= STORED_MAX)
}

fn first_line(arguments: &[&str]) -> Option<String> {
    let line = starter::first_line(Command::new("systemctl").args(arguments), ANSWERS);
    let line = line.inspect_err(|error| tracing::warn!(%error, "systemctl: the unit stops"));
    line.ok().filter(|(_, succeeded)| *succeeded).map(|(line, _)| line)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_what_they_were_and_damaged_ones_are_none() {
        let words = [("arguments", &b"mount\0/a b\0"[..]), ("mountpoint", b"/mnt"), ("none", b"")];
        let bytes = encode(words.iter().map(|(name, word)| (name.as_bytes(), *word)));
        let found = decode(&bytes);
        let expected = words.map(|(name, word)| (name.as_bytes().to_vec(), word.to_vec()));
        assert_eq!(found, Some(expected.into()));
        assert!(
            (0..bytes.len())
                .all(|len| { decode(&bytes[..len]).is_none_or(|some| some.len() < words.len()) })
        );
    }
}
