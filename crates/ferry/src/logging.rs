//! Logging: messages go to stderr, a file, or the system log.

use std::fs::File;
use std::io::{self, IsTerminal, Write};
use std::os::unix::net::UnixDatagram;
use std::path::Path;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

use tracing::Metadata;
use tracing::level_filters::LevelFilter;
use tracing_subscriber::filter::Targets;
use tracing_subscriber::fmt::{self, MakeWriter};
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;

use crate::execute;

/// Where syslogd and journald listen.
const SYSLOG_SOCKET: &str = "/dev/log";
/// The environment variable that says how much is logged.
const ENV_FILTER: &str = "FERRY_LOG";

/// Set once, when a daemon detaches from the terminal.
static SYSLOG: OnceLock<UnixDatagram> = OnceLock::new();

/// Where a daemon's messages below the level of warnings go while it is attached to its starter's
/// terminal.
static EARLY: OnceLock<Early> = OnceLock::new();
/// The daemon has detached from the terminal.
static DETACHED: AtomicBool = AtomicBool::new(false);

enum Early {
    File(File),
    Syslog(UnixDatagram),
    Nowhere,
}

/// A mount that succeeds prints nothing: until [`detach`] only warnings are printed, and other
/// messages go where all messages will go.
pub fn show_warnings_only(file: Option<&Path>) {
    let early = match file {
        // Another check reports a file that cannot be written.
        Some(file) => open_log(file).map_or(Early::Nowhere, Early::File),
        None => system_log().map_or(Early::Nowhere, Early::Syslog),
    };
    // A second call keeps the first.
    let _ = EARLY.set(early);
}

fn open_log(file: &Path) -> io::Result<File> {
    std::fs::OpenOptions::new().create(true).append(true).open(file)
}

fn system_log() -> io::Result<UnixDatagram> {
    let socket = UnixDatagram::unbound()?;
    socket.connect(SYSLOG_SOCKET)?;
    Ok(socket)
}

/// Starts logging to stderr. `level` is the value of `--log-level`; `default` is used if the
/// environment sets no level either. `stamped`: lines have the time (not if the system log adds its
/// own).
pub fn start(level: Option<&str>, default: &str, stamped: bool) -> Result<(), String> {
    let text = level
        .map(str::to_owned)
        .or_else(|| std::env::var(ENV_FILTER).ok())
        .unwrap_or_else(|| default.to_owned());
    let filter = filter(&text)?;
    let lines = fmt::layer().with_writer(Output).with_ansi(io::stderr().is_terminal() && stamped);
    let registry = tracing_subscriber::registry().with(filter);
    // A second call in one process (tests) keeps the first.
    let _ = if stamped {
        registry.with(lines).try_init()
    } else {
        registry.with(lines.without_time()).try_init()
    };
    Ok(())
}

/// A level, or levels by module (`ferry_net=debug,warn`). A word that is neither is refused: it
/// would be taken for the name of a module that does not exist, and log nothing.
fn filter(text: &str) -> Result<Targets, String> {
    let wrong = |why: &dyn std::fmt::Display| {
        format!(
            "log level {text:?} is not understood ({why}); use error, warn, info, debug or trace"
        )
    };
    let is_level = |word: &str| word.parse::<LevelFilter>().is_ok();
    let words = text.split(',').map(str::trim).filter(|word| !word.is_empty());
    if let Some(odd) = words.clone().find(|word| !word.contains('=') && !is_level(word)) {
        return Err(wrong(&format_args!("{odd:?} is no level")));
    }
    words.collect::<Vec<_>>().join(",").parse().map_err(|error| wrong(&error))
}

/// Logged after a panic. Nothing is written to the volume afterwards, so its state is that after
/// any crash of the process.
const WHAT_A_PANIC_MEANS: &str = "this is a bug in ferry, and the volume is safe: it is as after a power failure, with everything that fsync or \
     `ferry sync` has called durable. Start the same command again, which recovers the volume (clients of a server go on by themselves), and \
     report the line above with `ferry --version`";

/// Logs panics, and ends the process at once: a panic is a bug, and a daemon without one of its
/// threads would leave requests without an answer. A server first answers the client whose change
/// or request it was ([`ferry_net::Server::on_panic`]); otherwise the client would send it to the
/// next server, which would panic, too. A thread that panics while the process becomes another
/// program ([`execute`]) ends with it.
pub fn log_panics() {
    std::panic::set_hook(Box::new(|info| {
        while execute::is_under_way() {
            std::thread::park();
        }
        if ferry_journal::panic_is_caught() {
            // The home store's database has read damaged pages. The caller gets an error.
            tracing::error!("the home store is damaged: {info}");
            return;
        }
        tracing::error!("ferry stopped itself: {info}");
        // The log must explain the panic to its reader.
        tracing::error!("{WHAT_A_PANIC_MEANS}");
        if !ferry_net::panic_is_answered() {
            std::process::abort();
        }
    }));
}

/// Detaches from the terminal: stderr becomes `file`, or /dev/null while messages go to the system
/// log. Returns whether messages have somewhere to go.
pub fn detach(file: Option<&Path>) -> io::Result<bool> {
    DETACHED.store(true, Ordering::Relaxed);
    if let Some(file) = file {
        rustix::stdio::dup2_stderr(open_log(file)?)?;
        return Ok(true);
    }
    let connected = system_log();
    let null = std::fs::OpenOptions::new().write(true).open("/dev/null")?;
    rustix::stdio::dup2_stderr(&null)?;
    match connected {
        Ok(socket) => Ok(SYSLOG.set(socket).is_ok()),
        Err(_) => Ok(false),
    }
}

/// Whether a daemon's messages have somewhere to go.
pub fn has_syslog() -> bool {
    Path::new(SYSLOG_SOCKET).exists()
}

/// Makes the writer of each message.
struct Output;

impl<'a> MakeWriter<'a> for Output {
    type Writer = Message;

    fn make_writer(&'a self) -> Message {
        Message { severity: 6 }
    }

    fn make_writer_for(&'a self, meta: &Metadata<'_>) -> Message {
        let severity = match *meta.level() {
            tracing::Level::ERROR => 3,
            tracing::Level::WARN => 4,
            tracing::Level::INFO => 6,
            _ => 7,
        };
        Message { severity }
    }
}

/// One message; the formatter passes it in one `write`.
struct Message {
    /// The severity of syslog(3): 3 error, 4 warning, 6 info, 7 debug.
    severity: u8,
}

impl Write for Message {
    fn write(&mut self, text: &[u8]) -> io::Result<usize> {
        /// LOG_DAEMON of syslog(3).
        const FACILITY_DAEMON: u8 = 3;
        /// LOG_WARNING of syslog(3).
        const WARNING: u8 = 4;
        let early =
            EARLY.get().filter(|_| self.severity > WARNING && !DETACHED.load(Ordering::Relaxed));
        let socket = match (early, SYSLOG.get()) {
            (Some(Early::Nowhere), _) => return Ok(text.len()),
            (Some(Early::File(file)), _) => return (&*file).write(text),
            (Some(Early::Syslog(socket)), _) | (None, Some(socket)) => socket,
            (None, None) => return io::stderr().write(text),
        };
        let mut packet =
            format!("<{}>ferry[{}]: ", FACILITY_DAEMON << 3 | self.severity, std::process::id())
                .into_bytes();
        packet.extend_from_slice(text.trim_ascii_end());
        // If the system log is full or restarting, the message is lost; the file system must not
        // wait for it.
        let _ = socket.send(&packet);
        Ok(text.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unknown_log_level_is_refused() {
        for good in ["info", "WARN", "off", "ferry_net=debug,warn", "ferry_net=trace"] {
            assert!(filter(good).is_ok(), "{good}");
        }
        for odd in ["foo", "info,foo", "ferry_net=foo"] {
            let error = filter(odd).expect_err("no level");
            assert!(error.contains(odd) && error.contains("use error, warn, info"), "{error}");
        }
    }
}
