//! Certificates that are not let in any more: a file in the server's directory, a line each with the certificate's number and its client's
//! name. The server reads it at each handshake, so what is added counts from the next one on.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use tokio_rustls::rustls::client::danger::HandshakeSignatureValid;
use tokio_rustls::rustls::pki_types::{CertificateDer, UnixTime};
use tokio_rustls::rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use tokio_rustls::rustls::{
    CertificateError, DigitallySignedStruct, DistinguishedName, Error, SignatureScheme,
};

use super::certificate;

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

/// Lets in whom the authority has signed, but for those that are revoked.
#[derive(Debug)]
pub(super) struct Unrevoked {
    pub(super) signed: Arc<dyn ClientCertVerifier>,
    pub(super) list: PathBuf,
}

impl ClientCertVerifier for Unrevoked {
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        self.signed.root_hint_subjects()
    }

    fn verify_client_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        let verified = self.signed.verify_client_cert(end_entity, intermediates, now)?;
        let told = certificate::read(end_entity).ok_or(CertificateError::BadEncoding)?;
        // A list that cannot be read lets nobody in.
        let revoked = entries(&self.list).map_err(|error| {
            tracing::error!(path = %self.list.display(), %error, "nobody is let in: the list of revoked certificates cannot be read");
            CertificateError::UnknownRevocationStatus
        })?;
        if revoked.iter().any(|(serial, _)| *serial == told.serial) {
            return Err(CertificateError::Revoked.into());
        }
        Ok(verified)
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.signed.verify_tls12_signature(message, cert, dss)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.signed.verify_tls13_signature(message, cert, dss)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.signed.supported_verify_schemes()
    }
}
