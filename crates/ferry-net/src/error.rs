//! What can go wrong before a client or server runs, as one line that says what to do.

use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;

use tokio_rustls::rustls::CertificateError::{NotValidForName, NotValidForNameContext};
use tokio_rustls::rustls::Error;

/// Why it does not run.
#[derive(Debug, thiserror::Error)]
pub enum NetError {
    /// No threads or no event queue.
    #[error("cannot start: {0}")]
    Start(io::Error),
    /// The address cannot be served.
    #[error("cannot listen at {addr}: {error}{}", hint(error))]
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
    let tls = error.get_ref().and_then(|error| error.downcast_ref::<Error>());
    match (error.kind(), tls) {
        (io::ErrorKind::UnexpectedEof, _) => "; does it want a certificate? -o tls=DIR",
        (io::ErrorKind::ConnectionRefused, _) => {
            "; does `ferry serve` run there, and listen at that address and port? Without --listen it answers its own machine alone"
        }
        (io::ErrorKind::AddrInUse, _) => {
            "; `ferry list` shows the servers of this machine, and --listen ADDRESS:PORT takes another port"
        }
        (io::ErrorKind::AddrNotAvailable, _) => "; is it an address of this machine?",
        (io::ErrorKind::TimedOut, _) => {
            "; is it `ferry serve` that listens at that port, and does no firewall keep it away?"
        }
        (_, Some(Error::InvalidCertificate(NotValidForName | NotValidForNameContext { .. }))) => {
            "; name the server as its certificate does, or have one made for this name, too (`ferry cert init DIR --host NAME --host NAME`)"
        }
        (_, Some(Error::InvalidCertificate(_))) => {
            "; with -o tls=DIR, ca.pem there must be that of the authority which has issued the server's certificate (`ferry cert`)"
        }
        _ => "",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn where_nobody_answers_it_says_what_to_look_for() {
        for kind in [io::ErrorKind::ConnectionRefused, io::ErrorKind::TimedOut] {
            let error = NetError::Reach { server: "ferry://host/".into(), error: kind.into() };
            let said = error.to_string();
            assert!(
                said.starts_with("cannot reach ferry://host/: ") && said.contains("`ferry serve`"),
                "{said}"
            );
        }
        for (kind, advice) in [
            (io::ErrorKind::AddrInUse, "takes another port"),
            (io::ErrorKind::AddrNotAvailable, "an address of this machine?"),
        ] {
            let error = NetError::Listen { addr: ([10, 0, 0, 1], 7373).into(), error: kind.into() };
            assert!(error.to_string().ends_with(advice), "{error}");
        }
        let wrong_name = io::Error::other(Error::InvalidCertificate(NotValidForName));
        assert!(hint(&wrong_name).contains("name the server as its certificate does"));
        let error = NetError::Reach {
            server: "ferry://host/".into(),
            error: io::ErrorKind::NotFound.into(),
        };
        assert!(error.to_string().ends_with("not found"), "{error}");
    }
}
