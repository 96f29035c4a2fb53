//! Certificates that are not let in any more: revoked ones stand in a file in the server's
//! directory, a line each with the certificate's number and its client's name; others have expired.
//!
//! * REVOCATION-1: the handshake lets in whom the authority has signed. Whether the certificate is
//!   still good is looked at when the session begins, and the client is told in words. So nobody
//!   gains anything by being slow between the two.
//! * REVOCATION-2: the sessions of a certificate that is revoked end within a second or two. One
//!   that expires keeps its connection, and gets no next one.

use crate::rt::collections::HashSet;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use crate::rt::Mutex;
use tokio_rustls::rustls::client::danger::HandshakeSignatureValid;
use tokio_rustls::rustls::pki_types::{CertificateDer, UnixTime};
use tokio_rustls::rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use tokio_rustls::rustls::{
    CertificateError, DigitallySignedStruct, DistinguishedName, Error, SignatureScheme,
};

use super::certificate;
use super::validity::date;
use crate::limits::Peer;
use crate::refusal::{Cause, Refusal};

/// The file, in the server's directory.
pub(super) const REVOKED: &str = "revoked";

/// The lines of a list: number and name. No file is an empty list.
pub(super) fn entries(path: &Path) -> io::Result<Vec<(String, String)>> {
    let text = match fs::read_to_string(path) {
        Ok(text) => text,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(error),
    };
    let entry = |line: &str| {
        let (serial, name) = line.split_once(' ').unwrap_or((line, ""));
        (serial.to_ascii_lowercase(), name.to_owned())
    };
    Ok(text.lines().map(str::trim).filter(|line| !line.is_empty()).map(entry).collect())
}

/// How a client gets a new certificate of the same name.
pub fn renewal(name: Option<&str>) -> String {
    let name = name.unwrap_or("NAME");
    format!(
        "at the server, move DIR/{name} away or remove it, then `ferry cert issue DIR {name}` makes a new one"
    )
}

/// The lists of a server.
#[derive(Default)]
pub(crate) struct Revocations(Mutex<Vec<PathBuf>>);

impl Revocations {
    /// One more list.
    pub(crate) fn add(&self, list: PathBuf) {
        let mut lists = self.0.lock();
        if !lists.contains(&list) {
            lists.push(list);
        }
    }

    /// Whether this client is let in at this time of day. A list that cannot be read lets nobody
    /// in.
    pub(crate) fn standing(&self, peer: &Peer, wall: Duration) -> Result<(), Refusal> {
        if peer.certificate.is_empty() {
            return Ok(());
        }
        let name = peer.name.as_deref().unwrap_or("without a name");
        for list in self.0.lock().iter() {
            let revoked = entries(list).map_err(|error| {
                tracing::error!(path = %list.display(), %error, "nobody is let in: the list of revoked certificates cannot be read");
                Refusal::new(Cause::Server, "the server cannot read its list of revoked certificates: its log says more")
            })?;
            if revoked.iter().any(|(serial, _)| *serial == peer.serial) {
                let reason = format!(
                    "the client's certificate ({name}) was revoked: {}",
                    renewal(peer.name.as_deref())
                );
                return Err(Refusal::new(Cause::Revoked, reason));
            }
        }
        match peer.until.filter(|until| wall.as_secs() > *until) {
            Some(until) => {
                let until = date(until);
                let reason = format!(
                    "the client's certificate ({name}) has expired on {until}: {}",
                    renewal(peer.name.as_deref())
                );
                Err(Refusal::new(Cause::Expired, reason))
            }
            None => Ok(()),
        }
    }

    /// The numbers of those certificates that were revoked. A list that cannot be read ends nothing
    /// that has begun.
    pub(crate) fn revoked<'a>(&self, peers: impl Iterator<Item = &'a Peer>) -> HashSet<String> {
        let mut serials: HashSet<String> = peers.map(|peer| peer.serial.clone()).collect();
        serials.remove("");
        if serials.is_empty() {
            return serials;
        }
        let lists = self.0.lock();
        let revoked = lists.iter().filter_map(|list| entries(list).ok()).flatten();
        let revoked: HashSet<String> = revoked.map(|(serial, _)| serial).collect();
        serials.retain(|serial| revoked.contains(serial));
        serials
    }
}

/// Lets in whom the authority has signed, at whatever time.
#[derive(Debug)]
pub(super) struct Signed(pub(super) Arc<dyn ClientCertVerifier>);

impl ClientCertVerifier for Signed {
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        self.0.root_hint_subjects()
    }

    fn verify_client_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        let told = certificate::read(end_entity).ok_or(CertificateError::BadEncoding)?;
        // If it has expired, was it good once?
        let until = told.until.map(|until| UnixTime::since_unix_epoch(Duration::from_secs(until)));
        let at = until.filter(|until| until.as_secs() < now.as_secs()).unwrap_or(now);
        self.0.verify_client_cert(end_entity, intermediates, at)
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.0.verify_tls12_signature(message, cert, dss)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.0.verify_tls13_signature(message, cert, dss)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.supported_verify_schemes()
    }
}
