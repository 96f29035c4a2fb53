//! TLS 1.3 with a certificate on both sides, and connections over TCP.

pub mod authority;
mod certificate;
mod revoked;
mod validity;

use std::fs;
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use ferry_env::Env;
use tokio::net::TcpStream;
use tokio_rustls::rustls::crypto::{CryptoProvider, ring};
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use tokio_rustls::rustls::server::{NoServerSessionStorage, WebPkiClientVerifier};
use tokio_rustls::rustls::version::TLS13;
use tokio_rustls::rustls::{
    AlertDescription, CertificateError, ClientConfig, Error, RootCertStore, ServerConfig,
};
use tokio_rustls::{TlsAcceptor, TlsConnector};

use super::{Connecting, Connector};
use crate::address::{Address, Host};
use crate::error::NetError;
use crate::frame::Stream;
use crate::limits::Peer;
use crate::rt::time::timeout;
pub(crate) use revoked::Revocations;
pub use revoked::renewal;
pub use validity::ends_soon;

/// The authority's certificate, in every directory.
const CA: &str = "ca.pem";

fn provider() -> Arc<CryptoProvider> {
    Arc::new(ring::default_provider())
}

/// What a server shows, and whom it lets in: those who show a certificate of the same authority
/// that is not revoked and has not expired.
#[derive(Clone)]
pub struct ServerTls {
    acceptor: TlsAcceptor,
    revoked: PathBuf,
    /// The end of its own certificate.
    until: Option<u64>,
}

impl ServerTls {
    /// From `ca.pem`, `server.pem` and `server.key` in a directory. `revoked` there is read when a
    /// session begins, and while there are any.
    pub fn load(dir: &Path) -> Result<Self, NetError> {
        let roots = Arc::new(roots(dir)?);
        let (certificates, key, until) = identity(dir, "server")?;
        if dir.join(authority::CA_KEY).exists() {
            tracing::warn!(
                "{} holds the authority's secret key, which a server does not need: move ca.key, with a copy of ca.pem, into the directory \
                 `authority` there (mode 700), or take them away",
                dir.display()
            );
        }
        let bad = |path: &Path, e: &dyn std::fmt::Display| unusable(path, e);
        let verifier = WebPkiClientVerifier::builder_with_provider(roots, provider());
        let signed = verifier.build().map_err(|e| bad(&dir.join(CA), &e))?;
        let verifier = Arc::new(revoked::Signed(signed));
        let mut config = ServerConfig::builder_with_provider(provider())
            .with_protocol_versions(&[&TLS13])
            .map_err(|e| bad(dir, &e))?
            .with_client_cert_verifier(verifier)
            .with_single_cert(certificates, key)
            .map_err(|e| bad(&dir.join("server.pem"), &e))?;
        // Each handshake is a whole one: a client that resumes an older one sends no certificate,
        // which may have been revoked since.
        config.session_storage = Arc::new(NoServerSessionStorage {});
        config.send_tls13_tickets = 0;
        let acceptor = TlsAcceptor::from(Arc::new(config));
        Ok(Self { acceptor, revoked: dir.join(revoked::REVOKED), until })
    }

    /// The list of certificates that are not let in any more.
    pub(crate) fn revoked(&self) -> &Path {
        &self.revoked
    }

    /// The second of Unix time up to which the server's own certificate is good.
    pub(crate) fn until(&self) -> Option<u64> {
        self.until
    }

    /// Greets a client; says who it is, too. If that comes to nothing the connection is given back:
    /// the client is still to be told, or has been.
    pub(crate) async fn accept(
        &self,
        stream: TcpStream,
    ) -> Result<(Box<dyn Stream>, Peer), (io::Error, TcpStream)> {
        let stream = self.acceptor.accept(stream).into_fallible().await?;
        let certificate = stream.get_ref().1.peer_certificates().and_then(|chain| chain.first());
        let certificate = certificate.map(|c| c.to_vec()).unwrap_or_default();
        let Some(told) = certificate::read(&certificate) else {
            let error = Error::InvalidCertificate(CertificateError::BadEncoding);
            return Err((io::Error::new(io::ErrorKind::InvalidData, error), stream.into_inner().0));
        };
        let (limits, exports) = (told.terms.limits, told.terms.exports);
        let peer = Peer {
            certificate,
            serial: told.serial,
            until: told.until,
            name: told.name,
            limits,
            exports,
        };
        Ok((Box::new(stream), peer))
    }
}

/// Why a handshake comes to nothing, seen from the server.
pub(crate) enum Fault {
    /// The client has sent no certificate of this authority.
    Certificate,
    /// What came was none.
    Handshake,
}

impl Fault {
    /// `None`: the connection was lost.
    pub(crate) fn of(error: &io::Error) -> Option<Self> {
        match error.get_ref()?.downcast_ref::<Error>()? {
            Error::InvalidCertificate(_) | Error::NoCertificatesPresented => {
                Some(Self::Certificate)
            }
            // The client says that it is the server's certificate that it does not like.
            Error::AlertReceived(_) => None,
            _ => Some(Self::Handshake),
        }
    }
}

/// A TLS error in the words of a person that mounts.
pub(crate) fn in_words(error: io::Error) -> io::Error {
    let Some(tls) = error.get_ref().and_then(|error| error.downcast_ref::<Error>()) else {
        return error;
    };
    let words = match tls {
        Error::InvalidMessage(_) => {
            "the server does not speak TLS: mount with -o insecure if everybody on the way may read and change everything, or serve with --tls"
        }
        Error::AlertReceived(AlertDescription::CertificateRevoked) => {
            "this client's certificate was revoked"
        }
        Error::AlertReceived(AlertDescription::CertificateExpired) => {
            "this client's certificate has expired"
        }
        Error::AlertReceived(
            AlertDescription::UnknownCA
            | AlertDescription::DecryptError
            | AlertDescription::BadCertificate,
        ) => {
            "the server does not know this client's certificate: it is of another authority; `ferry cert issue` at the server makes one"
        }
        Error::InvalidCertificate(
            CertificateError::Expired | CertificateError::ExpiredContext { .. },
        ) => "the server's certificate has expired: `ferry cert init` there makes a new one",
        _ => return error,
    };
    io::Error::new(error.kind(), words)
}

/// What a client shows, and which servers it trusts.
#[derive(Clone)]
pub struct ClientTls {
    connector: TlsConnector,
    until: Option<u64>,
}

impl ClientTls {
    /// From `ca.pem`, `client.pem` and `client.key` in a directory.
    pub fn load(dir: &Path) -> Result<Self, NetError> {
        let (certificates, key, until) = identity(dir, "client")?;
        let config = ClientConfig::builder_with_provider(provider())
            .with_protocol_versions(&[&TLS13])
            .map_err(|e| unusable(dir, &e))?
            .with_root_certificates(roots(dir)?)
            .with_client_auth_cert(certificates, key)
            .map_err(|e| unusable(&dir.join("client.pem"), &e))?;
        Ok(Self { connector: TlsConnector::from(Arc::new(config)), until })
    }

    /// The second of Unix time up to which the certificate is good.
    pub fn until(&self) -> Option<u64> {
        self.until
    }
}

fn unusable(path: &Path, detail: &dyn std::fmt::Display) -> NetError {
    NetError::Certificate { path: path.into(), detail: detail.to_string() }
}

fn roots(dir: &Path) -> Result<RootCertStore, NetError> {
    let path = dir.join(CA);
    let mut roots = RootCertStore::empty();
    for certificate in certificates(&path)? {
        roots.add(certificate).map_err(|e| unusable(&path, &e))?;
    }
    Ok(roots)
}

fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, NetError> {
    must_exist(path, "ferry cert")?;
    let read = CertificateDer::pem_file_iter(path).and_then(Iterator::collect::<Result<Vec<_>, _>>);
    match read {
        Ok(all) if all.is_empty() => Err(unusable(path, &"there is no certificate in it")),
        read => read.map_err(|e| unusable(path, &e)),
    }
}

/// A certificate with those that prove it, its private key, and the second of Unix time up to which
/// it is good.
type Identity = (Vec<CertificateDer<'static>>, PrivateKeyDer<'static>, Option<u64>);

fn identity(dir: &Path, name: &str) -> Result<Identity, NetError> {
    let key = dir.join(format!("{name}.key"));
    let maker = if name == "client" { "issue" } else { "init" };
    must_exist(&key, &format!("ferry cert {maker}"))?;
    must_be_private(&key)?;
    let private = PrivateKeyDer::from_pem_file(&key).map_err(|e| unusable(&key, &e))?;
    let path = dir.join(format!("{name}.pem"));
    let certificates = certificates(&path)?;
    let until = certificates.first().and_then(certificate::until);
    if let Some(until) = until.filter(|until| Env::real().clock.wall().as_secs() > *until) {
        let said = format!(
            "the certificate has expired on {}: move it away, with the .key beside it, and `ferry cert {maker}` at the server makes a new one",
            validity::date(until)
        );
        return Err(unusable(&path, &said));
    }
    Ok((certificates, private, until))
}

/// Refuses a file that is not there: which command makes it.
fn must_exist(path: &Path, command: &str) -> Result<(), NetError> {
    if path.exists() {
        return Ok(());
    }
    Err(unusable(path, &format!("there is no such file: `{command}` makes it")))
}

/// Others that can read a private key may act as its owner.
fn must_be_private(key: &Path) -> Result<(), NetError> {
    let mode = fs::metadata(key).map_err(|e| unusable(key, &e))?.permissions().mode() & 0o7777;
    if mode & 0o077 == 0 {
        return Ok(());
    }
    let said = format!(
        "others may use this private key (its mode is {mode:o}): chmod 600 {}",
        key.display()
    );
    Err(unusable(key, &said))
}

/// Connections over TCP, plain or with TLS.
pub struct TcpConnector {
    address: Address,
    tls: Option<ClientTls>,
    /// The host that is tried first next time: another one than last time.
    next: AtomicUsize,
}

impl TcpConnector {
    /// One host of several is given up after this time, if the whole try is not given up before.
    const HOST_TIME_MAX: Duration = Duration::from_secs(5);

    /// To these servers. Without `tls` nothing is secret and no side proves its identity.
    pub fn new(address: Address, tls: Option<ClientTls>) -> Self {
        Self { address, tls, next: AtomicUsize::new(0) }
    }

    async fn connect_to(&self, host: &Host) -> io::Result<Box<dyn Stream>> {
        let stream = TcpStream::connect((host.name.as_str(), host.port())).await?;
        stream.set_nodelay(true)?;
        let Some(tls) = &self.tls else { return Ok(Box::new(stream)) };
        let name = ServerName::try_from(host.name.clone()).map_err(io::Error::other)?;
        let stream = tls.connector.connect(name, stream).await.map_err(in_words)?;
        Ok(Box::new(stream))
    }
}

impl Connector for TcpConnector {
    fn connect(&self) -> Connecting<'_> {
        Box::pin(async {
            let hosts = &self.address.hosts;
            if let [host] = &hosts[..] {
                return self.connect_to(host).await;
            }
            let first = self.next.load(Ordering::Relaxed);
            let mut failed = io::Error::new(
                io::ErrorKind::ConnectionRefused,
                "none of them serves the volume now",
            );
            for at in first..first + hosts.len() {
                let at = at % hosts.len();
                self.next.store(at + 1, Ordering::Relaxed);
                let connected = timeout(Self::HOST_TIME_MAX, self.connect_to(&hosts[at])).await;
                match connected.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into())) {
                    Ok(stream) => return Ok(stream),
                    // What is wrong with a server says more than that another one stands by.
                    Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {}
                    Err(error) => failed = error,
                }
            }
            Err(failed)
        })
    }

    fn stay(&self) {
        // The last one stands before the next.
        self.next.fetch_sub(1, Ordering::Relaxed);
    }

    fn has_others(&self) -> bool {
        self.address.hosts.len() > 1
    }
}
