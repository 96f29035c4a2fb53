//! The daemons of this machine: how each is, what it was started with, and where it logs.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::os::unix::ffi::OsStringExt;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::PathBuf;
use std::time::Duration;

use clap::Parser;
use ferry_net::{ends_soon, renewal};
use serde_json::Value;

use crate::cli::{Cli, Command};
use crate::list::{Found, Kind, State};
use crate::mounts;
use crate::options::MountOptions;

use super::check::{Check, Outcome, quoted, within};
use super::space::{Held, held_by};

/// The most that is read of a log, from its end.
const LOG_MAX: u64 = 256 << 10;

/// The daemon of a mount, or a server.
pub struct Daemon {
    pub found: Found,
    /// What it has on file systems of this machine, and where.
    pub holds: Vec<(PathBuf, Held)>,
}

impl Daemon {
    pub fn of(found: Found) -> Self {
        let command = found.pid.and_then(command_of);
        let (cache, local_log) = match command {
            Some(Command::Mount(args)) => MountOptions::parse(&args.options, true)
                .map_or((None, None), |options| (options.cache_dir, options.local_log)),
            Some(Command::Serve(args)) => (args.cache, args.local_log),
            _ => (None, None),
        };
        // A server may have been given a path below its own directory.
        let base = found.pid.and_then(|pid| std::fs::read_link(format!("/proc/{pid}/cwd")).ok());
        let absolute = |dir: PathBuf| base.as_ref().map(|base| base.join(dir));
        let holds = held_by(&found, cache.and_then(absolute), local_log.and_then(absolute));
        Self { found, holds }
    }

    /// What the table calls it.
    fn title(&self) -> String {
        let Found { kind, volume, at, .. } = &self.found;
        match (kind, self.found.pid) {
            (Kind::Mount, _) => format!("mount {at}"),
            (Kind::Server, Some(pid)) if at == "-" => format!("server, process {pid}"),
            (Kind::Server, _) => format!("server of {volume}"),
        }
    }

    /// How it is, and what it has counted that is bad in any state.
    pub fn checks(&self, now: Duration) -> Vec<Check> {
        let (title, state) = (self.title(), self.found.state.to_string());
        let how = match self.advice() {
            (Outcome::Ok, _) => Check::ok(title, state),
            (Outcome::Note, advice) => Check::note(title, state, advice),
            (Outcome::Bad, advice) => Check::bad(title, state, advice),
        };
        [vec![how], self.losses(now)].concat()
    }

    /// Damage, losses, a replica that does not follow, and a certificate that ends soon.
    fn losses(&self, now: Duration) -> Vec<Check> {
        let Some(figures) = &self.found.figures else { return Vec::new() };
        let at = quoted(&self.found.at);
        let count = |at: &str| figures.pointer(at).and_then(Value::as_u64).unwrap_or_default();
        let mut found = Vec::new();
        let damaged = count("/data/damaged_blocks").max(count("/scrub/damaged_blocks"));
        if damaged > 0 {
            let advice = match self.found.kind {
                Kind::Mount => format!("`ferry scrub {at}` lists the files: restore them"),
                Kind::Server => "`ferry scrub VOLUME` lists the files: restore them".into(),
            };
            found.push(("damage", format!("{damaged} blocks were found damaged"), advice));
        }
        let lost = count("/connection/lost_changes");
        if lost > 0 {
            let advice =
                "its log names the files, up to 10,000 of each loss: make the changes again".into();
            let lost = format!("{lost} changes that were acknowledged are lost");
            found.push(("losses", lost, advice));
        }
        if let Some(error) = figures.pointer("/replica/error").and_then(Value::as_str) {
            let advice = "it shows an older state: see that this machine reaches the store, and that the volume is there".into();
            found.push(("replica", format!("does not follow: {error}"), advice));
        }
        let until = figures.pointer("/server/certificate_until_secs");
        let until = until.or_else(|| figures.pointer("/connection/certificate_until_secs"));
        if let Some(ending) = until.and_then(Value::as_u64).and_then(|until| ends_soon(until, now))
        {
            let advice = match self.found.kind {
                Kind::Mount => renewal(None),
                Kind::Server => {
                    "move server.pem and server.key away, and `ferry cert init` makes new ones"
                        .into()
                }
            };
            found.push(("certificate", ending, advice));
        }
        let title = self.title();
        let check = |(what, found, advice)| Check::bad(format!("{what}, {title}"), found, advice);
        found.into_iter().map(check).collect()
    }

    /// What to do about its state.
    fn advice(&self) -> (Outcome, String) {
        let at = quoted(&self.found.at);
        let pid = self.found.pid.map_or_else(|| "?".into(), |pid| pid.to_string());
        match (&self.found.state, self.found.kind) {
            (State::Clients(..), _) if self.found.figures.is_none() => (
                Outcome::Note,
                "it has not said in time how its volume is: ask again, and see `ferry stats`".into(),
            ),
            (
                State::Fine | State::ReadOnly | State::Clients(..) | State::StandsBy(Some(_)),
                _,
            ) => (Outcome::Ok, String::new()),
            (State::StandsBy(None), _) => (
                Outcome::Note,
                "it takes the volume within seconds; if it does not, its log says why".into(),
            ),
            (State::Hidden(_), _) => (
                Outcome::Note,
                format!("every path there leads to the mount on top: `umount {at}` takes that away"),
            ),
            (State::Closed, Kind::Mount) => (
                Outcome::Note,
                "root and the user who has mounted it may ask, with the same version of ferry".into(),
            ),
            (State::Closed, Kind::Server) => (
                Outcome::Note,
                "it is another user's: its own user may ask".into(),
            ),
            (State::Silent, Kind::Server) if self.found.pid.is_none() => {
                (Outcome::Note, "it has just ended: ask again".into())
            }
            (State::Dead, _) => (
                Outcome::Bad,
                format!("if it has died, its log says why; `ferry umount {at}` clears the mount, then mount again"),
            ),
            (State::Silent, kind) => {
                let end = match kind {
                    Kind::Mount => format!("`ferry umount --force {at}` ends it"),
                    Kind::Server => "otherwise end it, and serve again".into(),
                };
                let advice = format!(
                    "process {pid} is stopped, or hangs: `kill -CONT {pid}` lets a stopped one go on, {end}"
                );
                (Outcome::Bad, advice)
            }
            (State::ServerAway, _) => (
                Outcome::Bad,
                "see that the server runs (`ferry list` there) and that this machine reaches it: operations wait, and \
                 fail after the mount's timeout"
                    .into(),
            ),
            (State::Refused(_), _) => (
                Outcome::Bad,
                format!("operations fail: `ferry umount {at}`; a mount works again when the server lets this client in"),
            ),
            (State::Failed(_), kind) => {
                let (end, begin) = match kind {
                    Kind::Mount => (format!("`ferry umount {at}`"), "mount it"),
                    Kind::Server => (format!("end it (process {pid})"), "serve it"),
                };
                let advice = format!(
                    "files can be read, and nothing can be changed any more: its log says what has happened. See that what the \
                     volume lies on works, {end}, check the volume (`ferry fsck`) and {begin} again"
                );
                (Outcome::Bad, advice)
            }
            (State::StoreHeld(_), _) => (
                Outcome::Bad,
                "see that this machine reaches the store and that its keys are good: syncs and reads wait until then"
                    .into(),
            ),
            (State::Components(_), _) => (
                Outcome::Bad,
                "see what has happened to it (`dmesg`): `ferry replace VOLUME OLD NEW` builds a new side of a mirror, and \
                 `ferry stats` shows how far that is"
                    .into(),
            ),
        }
    }

    /// The end of its log: of what its stderr leads to. `None`: that is no file.
    pub fn log_end(&self) -> Option<io::Result<String>> {
        let pid = self.found.pid?;
        let read = within(move || log_of(pid).and_then(|log| log.map(end_of).transpose()));
        read.unwrap_or_else(|| Err(io::ErrorKind::TimedOut.into())).transpose()
    }
}

/// The file to which the stderr of a process leads. `None`: that is no file.
///
/// To open the link gives this process's own rights, not those of the other process. So it must be
/// root or this user who runs that, and it must have opened the file for writing: with `O_PATH` it
/// may have any file.
fn log_of(pid: u64) -> io::Result<Option<File>> {
    let process = PathBuf::from(format!("/proc/{pid}"));
    let user = std::fs::metadata(&process)?.uid();
    if user != 0 && user != rustix::process::geteuid().as_raw() {
        return Err(io::ErrorKind::PermissionDenied.into());
    }
    let stderr = process.join("fd/2");
    if mounts::is_on_fuse(&std::fs::read_link(&stderr)?) {
        return Err(io::ErrorKind::Unsupported.into());
    }
    let facts = std::fs::read_to_string(process.join("fdinfo/2"))?;
    let flags = facts.lines().find_map(|line| line.strip_prefix("flags:"));
    let flags = flags.and_then(|flags| i32::from_str_radix(flags.trim(), 8).ok());
    if flags.is_none_or(|flags| flags & libc::O_PATH != 0 || flags & libc::O_ACCMODE == 0) {
        return Err(io::ErrorKind::PermissionDenied.into());
    }
    let mut options = File::options();
    let file = options.read(true).custom_flags(libc::O_NONBLOCK | libc::O_NOCTTY).open(&stderr);
    match file {
        Ok(file) => Ok(Some(file).filter(|file| file.metadata().is_ok_and(|is| is.is_file()))),
        // A socket cannot be opened.
        Err(error) if error.raw_os_error() == Some(libc::ENXIO) => Ok(None),
        Err(error) => Err(error),
    }
}

/// The command line that a process was started with.
fn command_of(pid: u64) -> Option<Command> {
    let line = within(move || std::fs::read(format!("/proc/{pid}/cmdline")))?.ok()?;
    let words = line.split(|byte| *byte == 0).map(|word| std::ffi::OsString::from_vec(word.into()));
    let mut words: Vec<_> = words.collect();
    // A zero byte ends each word.
    words.pop();
    Cli::try_parse_from(words).ok().map(|cli| cli.command)
}

fn end_of(mut file: File) -> io::Result<String> {
    let length = file.metadata()?.len();
    file.seek(SeekFrom::Start(length.saturating_sub(LOG_MAX)))?;
    let mut end = Vec::new();
    file.take(LOG_MAX).read_to_end(&mut end)?;
    Ok(String::from_utf8_lossy(&end).into_owned())
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::CommandExt;

    use rustix::process::geteuid;

    use super::*;

    fn daemon(kind: Kind, state: State) -> Daemon {
        let (volume, at) = ("/srv/a.ferry".into(), "/mnt".into());
        Daemon::of(Found { kind, volume, at, pid: None, state, figures: None, clients: Vec::new() })
    }

    #[test]
    fn a_server_that_does_not_say_how_its_volume_is_is_a_note() {
        let mut server = daemon(Kind::Server, State::Clients(1, 1));
        let outcomes = |server: &Daemon| -> Vec<Outcome> {
            server.checks(Duration::ZERO).iter().map(|check| check.outcome).collect()
        };
        assert_eq!(outcomes(&server), [Outcome::Note]);
        server.found.figures = Some(Value::Null);
        assert_eq!(outcomes(&server), [Outcome::Ok]);
    }

    #[test]
    fn another_users_server_is_a_note_and_not_said_to_hang() {
        let mut server = daemon(Kind::Server, State::Closed);
        server.found.pid = Some(1);
        let (outcome, advice) = server.advice();
        assert_eq!(outcome, Outcome::Note);
        assert!(advice.contains("another user's") && !advice.contains("kill"), "{advice}");
        server.found.state = State::Silent;
        assert_eq!(server.advice().0, Outcome::Bad);
    }

    #[test]
    fn operations_of_a_mount_that_its_server_refuses_fail() {
        let (outcome, advice) = daemon(Kind::Mount, State::Refused("evicted".into())).advice();
        assert_eq!(outcome, Outcome::Bad);
        assert!(advice.contains("fail") && advice.contains("ferry umount /mnt"), "{advice}");
    }

    #[test]
    fn damage_losses_an_end_of_a_certificate_and_a_replica_that_does_not_follow_are_bad() {
        let mut mount = daemon(Kind::Mount, State::Fine);
        let of = |text: &str| serde_json::from_str(text).expect("JSON");
        let fine = r#"{"data": {"damaged_blocks": 0}, "connection": {"lost_changes": 0, "certificate_until_secs": 9000000}, "replica": {"error": null}}"#;
        mount.found.figures = Some(of(fine));
        let now = Duration::from_secs(1_000_000);
        assert_eq!(mount.checks(now).len(), 1);
        mount.found.figures = Some(of(&fine
            .replace("9000000", "1800000")
            .replace(": 0", ": 2")
            .replace("null", "\"away\"")));
        let checks = mount.checks(now);
        assert!(checks[1..].iter().all(|check| check.outcome == Outcome::Bad));
        let whats: Vec<&str> = checks.iter().map(|check| &*check.what).collect();
        let each = ["damage", "losses", "replica", "certificate"]
            .map(|what| format!("{what}, mount /mnt"));
        assert_eq!(whats[1..], each);
    }

    #[test]
    fn a_log_is_a_file_that_a_process_of_root_or_this_user_writes() {
        let dir = tempfile::tempdir().expect("a directory");
        let file = dir.path().join("log");
        std::fs::write(&file, "the end").expect("it fits");
        // What the doctor reads if a process has this as its stderr.
        let read = |options: &mut std::fs::OpenOptions, user: Option<u32>| {
            let stderr = options.open(&file).expect("it exists");
            let mut process = std::process::Command::new("sleep");
            process.arg("60").stderr(stderr).uid(user.unwrap_or(geteuid().as_raw()));
            let mut process = process.spawn().expect("it runs");
            let read = log_of(process.id().into()).map(|log| log.map(end_of));
            process.kill().and_then(|()| process.wait()).expect("it is ours");
            read.map(|end| end.expect("it is a file").expect("it is readable"))
        };
        let written = || File::options().append(true).clone();
        assert_eq!(read(&mut written(), None).expect("it is a log"), "the end");
        let refused = |read: io::Result<String>| {
            assert_eq!(read.expect_err("no log").kind(), io::ErrorKind::PermissionDenied);
        };
        refused(read(File::options().read(true), None));
        refused(read(File::options().read(true).custom_flags(libc::O_PATH), None));
        if geteuid().is_root() {
            refused(read(&mut written(), Some(65534)));
        }
    }

    #[test]
    fn a_pipe_is_no_log() {
        use std::process::{Command, Stdio};
        let piped = Command::new("sleep").arg("60").stderr(Stdio::piped()).spawn();
        let mut process = piped.expect("it runs");
        let log = log_of(process.id().into());
        process.kill().and_then(|()| process.wait()).expect("it is ours");
        assert!(log.expect("it may be looked at").is_none());
    }
}
