//! What can go wrong before a client or server runs, as one line that says what to do.

use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;

use tokio_rustls::rustls;

/// Why it does not run.
#[derive(Debug, thiserror::Error)]
pub enum NetError {
    /// No threads or no event queue.
    #[error("cannot start: {0}")]
    Start(io::Error),
    /// The address cannot be served.
    #[error("cannot listen at {addr}: {error}")]
    Listen {
        /// Which.
        addr: SocketAddr,
        /// The kernel's answer.
        error: io::Error,
    },
    /// The server cannot be reached.
    #[error("cannot reach {server}: {error}{}", hint(error))]
    Reach {
        /// Which.
        server: String,
        /// Why.
        error: io::Error,
    },
    /// The server does not want this client.
    #[error("{server} refused: {reason}")]
    Refused {
        /// Which.
        server: String,
        /// Its own words.
        reason: String,
    },
    /// Not an address of a server.
    #[error("{0:?} is no address of a server: ferry://HOST[:PORT]/[PATH]")]
    Address(String),
    /// A key or certificate cannot be used.
    #[error("{}: {detail}", path.display())]
    Certificate {
        /// The file.
        path: PathBuf,
        /// Why.
        detail: String,
    },
}

/// What to do about it, where that is likely.
fn hint(error: &io::Error) -> &'static str {
    let tls = error.get_ref().and_then(|error| error.downcast_ref::<rustls::Error>());
    match (error.kind(), tls) {
        (io::ErrorKind::UnexpectedEof, _) => "; does it want a certificate? -o tls=DIR",
        (_, Some(rustls::Error::InvalidCertificate(_))) => {
            "; with -o tls=DIR, ca.pem there must be that of the authority which has issued the server's certificate (`ferry cert`)"
        }
        _ => "",
    }
}
