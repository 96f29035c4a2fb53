//! An address at which a process serves pages over HTTP: TCP, or a Unix socket.

use std::fmt;
use std::io::PipeWriter;
use std::net::TcpListener;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::mpsc::{self, Receiver};
use std::time::Duration;

use ferry_env::Env;

use crate::error::CliError;
use crate::http::{self, Request, Response};

/// What a path of a Unix socket begins with.
const UNIX: &str = "unix:";
/// How long the end waits for the thread that serves.
const STOP_MAX: Duration = Duration::from_secs(2);

/// Where pages are served.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Address {
    /// `HOST:PORT`.
    Tcp(String),
    /// The absolute path of a Unix socket.
    Unix(PathBuf),
}

impl FromStr for Address {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if let Some(path) = text.strip_prefix(UNIX).filter(|path| !path.is_empty()) {
            let absolute = std::path::absolute(path);
            return Ok(Self::Unix(absolute.map_err(|error| format!("{text}: {error}"))?));
        }
        match text.rsplit_once(':') {
            Some((host, port)) if !host.is_empty() && port.parse::<u16>().is_ok() => {
                Ok(Self::Tcp(text.into()))
            }
            _ => Err(format!("{text}: HOST:PORT or unix:PATH is wanted")),
        }
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp(address) => f.write_str(address),
            Self::Unix(path) => write!(f, "{UNIX}{}", path.display()),
        }
    }
}

impl Address {
    /// Takes the address, which `option` has given. Clients that connect wait until
    /// [`Bound::serve`].
    pub fn bind(&self, option: &str) -> Result<Bound, CliError> {
        let bound = match self {
            Self::Tcp(address) => TcpListener::bind(address).map(|listener| {
                let named = listener.local_addr().map_or(address.clone(), |at| at.to_string());
                (named, OwnedFd::from(listener), None)
            }),
            Self::Unix(path) => {
                remove_unused(path);
                UnixListener::bind(path).map(|listener| {
                    (self.to_string(), OwnedFd::from(listener), Some(SocketFile(path.clone())))
                })
            }
        };
        let (address, listener, file) = bound.map_err(|error| {
            let in_use = error.kind() == std::io::ErrorKind::AddrInUse;
            let advice = if in_use { ": give another address, or end what has it" } else { "" };
            CliError::Failed(format!("{option}{self}: cannot listen there: {error}{advice}"))
        })?;
        Ok(Bound { address, listener, file })
    }
}

/// Removes the socket that a killed process has left.
fn remove_unused(path: &Path) {
    let is_socket =
        std::fs::symlink_metadata(path).is_ok_and(|found| found.file_type().is_socket());
    let refused = |error: std::io::Error| error.kind() == std::io::ErrorKind::ConnectionRefused;
    if is_socket && UnixStream::connect(path).is_err_and(refused) {
        // If it stays, to bind it fails and says why.
        let _ = std::fs::remove_file(path);
    }
}

/// An address that this process has.
pub struct Bound {
    address: String,
    listener: OwnedFd,
    file: Option<SocketFile>,
}

/// A Unix socket, which is removed when this is dropped.
struct SocketFile(PathBuf);

impl Drop for SocketFile {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

impl Bound {
    /// The address, with the port that the kernel has chosen.
    pub fn address(&self) -> &str {
        &self.address
    }

    /// Serves `pages` in a thread of this name, until the returned value is dropped.
    pub fn serve(
        self,
        thread: &str,
        pages: impl Fn(&Request<'_>) -> Response + Send + 'static,
    ) -> Result<Endpoint, CliError> {
        let Self { address, listener, file } = self;
        let failed = |e| CliError::Failed(format!("cannot serve at {address}: {e}"));
        let clock = Env::real().clock;
        let (stopped, stop) = std::io::pipe().map_err(failed)?;
        let (ends, ended) = mpsc::channel();
        let serve = move || {
            http::serve(&listener, stopped.as_fd(), &*clock, pages);
            drop((listener, ends));
        };
        std::thread::Builder::new().name(thread.into()).spawn(serve).map_err(failed)?;
        Ok(Endpoint { stop: Some(stop), ended, _file: file })
    }
}

/// Pages that are served until this is dropped. The address is free then: the next process may use
/// it at once.
pub struct Endpoint {
    stop: Option<PipeWriter>,
    /// Disconnected when the thread has ended.
    ended: Receiver<()>,
    _file: Option<SocketFile>,
}

impl Drop for Endpoint {
    fn drop(&mut self) {
        drop(self.stop.take());
        // Figures that cannot be read must not keep the process from its end.
        let _ = self.ended.recv_timeout(STOP_MAX);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_has_a_host_and_a_port_or_is_a_path() {
        for text in ["127.0.0.1:9100", "[::1]:9100", "localhost:80", "unix:/run/ferry.sock"] {
            let address: Address = text.parse().expect(text);
            assert_eq!(address.to_string(), text);
        }
        let here = std::env::current_dir().expect("a directory").join("ferry.sock");
        assert_eq!("unix:ferry.sock".parse(), Ok(Address::Unix(here)), "a daemon has another one");
        for text in ["", "9100", ":9100", "localhost", "localhost:", "localhost:65536", "unix:"] {
            let error = text.parse::<Address>().expect_err(text);
            assert!(error.contains("HOST:PORT or unix:PATH"), "{error}");
        }
    }

    #[test]
    fn only_a_socket_that_nobody_listens_to_is_replaced() {
        let dir = tempfile::tempdir().expect("a directory");
        let address = Address::Unix(dir.path().join("socket"));
        let Address::Unix(path) = &address else { unreachable!("it was made of a path") };
        std::fs::write(path, "mine").expect("writable");
        assert!(address.bind("").is_err());
        assert_eq!(std::fs::read(path).expect("it is left"), b"mine");
        std::fs::remove_file(path).expect("it is there");
        let listening = UnixListener::bind(path).expect("free");
        assert!(address.bind("").is_err(), "a process has it");
        drop(listening);
        let bound = address.bind("").expect("the process has ended");
        drop(bound);
        assert!(!path.exists());
    }
}
