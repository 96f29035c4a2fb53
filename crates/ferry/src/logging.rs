//! Where messages go: stderr, a file, or the system log.

use std::io::{self, IsTerminal, Write};
use std::os::unix::net::UnixDatagram;
use std::path::Path;
use std::sync::OnceLock;

use tracing::Metadata;
use tracing_subscriber::EnvFilter;
use tracing_subscriber::fmt::MakeWriter;

/// Where syslogd and journald listen.
const SYSLOG_SOCKET: &str = "/dev/log";
/// The environment's way to say how much is logged.
const ENV_FILTER: &str = "FERRY_LOG";

/// Set once, when a daemon lets go of the terminal.
static SYSLOG: OnceLock<UnixDatagram> = OnceLock::new();

/// Starts logging to stderr. `level` is what `--log-level` said; `default` counts if the environment says nothing either.
/// `stamped`: lines carry the time (not where the system log adds its own).
pub fn start(level: Option<&str>, default: &str, stamped: bool) -> Result<(), String> {
    let text = level
        .map(str::to_owned)
        .or_else(|| std::env::var(ENV_FILTER).ok())
        .unwrap_or_else(|| default.to_owned());
    let filter = EnvFilter::try_new(&text).map_err(|e| {
        format!("log level {text:?} is not understood ({e}); use error, warn, info, debug or trace")
    })?;
    let builder = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(Output)
        .with_ansi(io::stderr().is_terminal() && stamped);
    // A second call in one process (tests) keeps the first.
    let _ = if stamped { builder.try_init() } else { builder.without_time().try_init() };
    Ok(())
}

/// A panic is a bug; its message must reach the log before the process ends. It ends at once and wholly: a daemon that goes on
/// without one of its threads would leave requests without an answer.
pub fn log_panics() {
    std::panic::set_hook(Box::new(|info| {
        if ferry_journal::panic_is_caught() {
            // The home store's database met pages that make no sense. Whoever asked gets an error.
            tracing::error!("the home store is damaged: {info}");
            return;
        }
        tracing::error!("ferry stopped itself: {info}");
        std::process::abort();
    }));
}

/// Lets go of the terminal: stderr becomes `file`, or nothing while messages go to the system log.
/// Returns whether there is a place for messages.
pub fn detach(file: Option<&Path>) -> io::Result<bool> {
    if let Some(file) = file {
        let file = std::fs::OpenOptions::new().create(true).append(true).open(file)?;
        rustix::stdio::dup2_stderr(&file)?;
        return Ok(true);
    }
    let connected = UnixDatagram::unbound().and_then(|socket| socket.connect(SYSLOG_SOCKET).map(|()| socket));
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

/// One message; the formatter hands it over in one `write`.
struct Message {
    /// As syslog(3) counts: 3 error, 4 warning, 6 info, 7 debug.
    severity: u8,
}

impl Write for Message {
    fn write(&mut self, text: &[u8]) -> io::Result<usize> {
        /// syslog(3)'s LOG_DAEMON.
        const FACILITY_DAEMON: u8 = 3;
        let Some(socket) = SYSLOG.get() else {
            return io::stderr().write(text);
        };
        let mut packet =
            format!("<{}>ferry[{}]: ", FACILITY_DAEMON << 3 | self.severity, std::process::id()).into_bytes();
        packet.extend_from_slice(text.trim_ascii_end());
        // A system log that is full or restarting loses the message; the file system must not stop for it.
        let _ = socket.send(&packet);
        Ok(text.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
