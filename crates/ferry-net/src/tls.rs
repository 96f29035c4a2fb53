//! TLS 1.3 with a certificate on both sides, and connections over TCP.

pub mod authority;
mod certificate;
mod revoked;

use std::io;
use std::path::Path;
use std::sync::Arc;

use tokio::net::TcpStream;
use tokio_rustls::rustls::crypto::{CryptoProvider, ring};
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use tokio_rustls::rustls::server::{NoServerSessionStorage, WebPkiClientVerifier};
use tokio_rustls::rustls::version::TLS13;
use tokio_rustls::rustls::{ClientConfig, RootCertStore, ServerConfig};
use tokio_rustls::{TlsAcceptor, TlsConnector};

use crate::address::Address;
use crate::client::{Connecting, Connector};
use crate::error::NetError;
use crate::frame::Stream;
use crate::limits::Peer;

/// The authority's certificate, in every directory.
const CA: &str = "ca.pem";

fn provider() -> Arc<CryptoProvider> {
    Arc::new(ring::default_provider())
}

/// What a server shows, and whom it lets in: those who show a certificate of the same authority that is not revoked.
#[derive(Clone)]
pub struct ServerTls(TlsAcceptor);

impl ServerTls {
    /// From `ca.pem`, `server.pem` and `server.key` in a directory. `revoked` there is read at each handshake.
    pub fn load(dir: &Path) -> Result<Self, NetError> {
        let roots = Arc::new(roots(dir)?);
        let (certificates, key) = identity(dir, "server")?;
        let bad = |path: &Path, e: &dyn std::fmt::Display| unusable(path, e);
        let verifier = WebPkiClientVerifier::builder_with_provider(roots, provider());
        let signed = verifier.build().map_err(|e| bad(&dir.join(CA), &e))?;
        let verifier = Arc::new(revoked::Unrevoked { signed, list: dir.join(revoked::REVOKED) });
        let mut config = ServerConfig::builder_with_provider(provider())
            .with_protocol_versions(&[&TLS13])
            .map_err(|e| bad(dir, &e))?
            .with_client_cert_verifier(verifier)
            .with_single_cert(certificates, key)
            .map_err(|e| bad(&dir.join("server.pem"), &e))?;
        // Each handshake is a whole one: who resumes an older one shows no certificate, which may have been revoked since.
        config.session_storage = Arc::new(NoServerSessionStorage {});
        config.send_tls13_tickets = 0;
        Ok(Self(TlsAcceptor::from(Arc::new(config))))
    }

    /// Greets a client; says who it is, too.
    pub(crate) async fn accept(&self, stream: TcpStream) -> io::Result<(Box<dyn Stream>, Peer)> {
        let stream = self.0.accept(stream).await?;
        let certificate = stream.get_ref().1.peer_certificates().and_then(|chain| chain.first());
        let certificate = certificate.map(|c| c.to_vec()).ok_or(io::ErrorKind::PermissionDenied)?;
        let told = certificate::read(&certificate).ok_or(io::ErrorKind::PermissionDenied)?;
        let peer = Peer { certificate, name: told.name, limits: told.limits };
        Ok((Box::new(stream), peer))
    }
}

/// What a client shows, and which servers it trusts.
#[derive(Clone)]
pub struct ClientTls(TlsConnector);

impl ClientTls {
    /// From `ca.pem`, `client.pem` and `client.key` in a directory.
    pub fn load(dir: &Path) -> Result<Self, NetError> {
        let (certificates, key) = identity(dir, "client")?;
        let config = ClientConfig::builder_with_provider(provider())
            .with_protocol_versions(&[&TLS13])
            .map_err(|e| unusable(dir, &e))?
            .with_root_certificates(roots(dir)?)
            .with_client_auth_cert(certificates, key)
            .map_err(|e| unusable(&dir.join("client.pem"), &e))?;
        Ok(Self(TlsConnector::from(Arc::new(config))))
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
    let read = CertificateDer::pem_file_iter(path).and_then(Iterator::collect::<Result<Vec<_>, _>>);
    match read {
        Ok(all) if all.is_empty() => Err(unusable(path, &"there is no certificate in it")),
        read => read.map_err(|e| unusable(path, &e)),
    }
}

fn identity(
    dir: &Path,
    name: &str,
) -> Result<(Vec<CertificateDer<'static>>, PrivateKeyDer<'static>), NetError> {
    let key = dir.join(format!("{name}.key"));
    if !key.exists() {
        let maker = if name == "client" { "issue" } else { "init" };
        return Err(unusable(&key, &format!("there is no such file: `ferry cert {maker}` makes it")));
    }
    let private = PrivateKeyDer::from_pem_file(&key).map_err(|e| unusable(&key, &e))?;
    Ok((certificates(&dir.join(format!("{name}.pem")))?, private))
}

/// Connections over TCP, plain or with TLS.
pub struct TcpConnector {
    address: Address,
    tls: Option<ClientTls>,
}

impl TcpConnector {
    /// To this server. Without `tls` nothing is secret and nobody proves who they are.
    pub fn new(address: Address, tls: Option<ClientTls>) -> Self {
        Self { address, tls }
    }
}

impl Connector for TcpConnector {
    fn connect(&self) -> Connecting<'_> {
        Box::pin(async {
            let Address { host, port, .. } = &self.address;
            let stream = TcpStream::connect((host.as_str(), *port)).await?;
            stream.set_nodelay(true)?;
            let Some(ClientTls(tls)) = &self.tls else { return Ok(Box::new(stream) as Box<dyn Stream>) };
            let name = ServerName::try_from(host.clone()).map_err(io::Error::other)?;
            Ok(Box::new(tls.connect(name, stream).await?) as Box<dyn Stream>)
        })
    }
}
