//! What a certificate says of its client: its number, whom it may act as and what it may mount.

use tokio_rustls::rustls::pki_types::CertificateDer;
use x509_parser::prelude::{FromDer, GeneralName, X509Certificate};

use crate::limits::{SCHEME, Terms};

/// What the server reads of a client's certificate.
pub(super) struct Told {
    /// Its number, in hexadecimal digits.
    pub(super) serial: String,
    /// It is good up to this second of Unix time.
    pub(super) until: Option<u64>,
    /// Whom it was issued to.
    pub(super) name: Option<String>,
    /// For whom it is, and what it may mount.
    pub(super) terms: Terms,
}

/// Up to which second of Unix time a certificate is valid, of a client or a server.
pub(super) fn until(der: &CertificateDer<'_>) -> Option<u64> {
    let (_, certificate) = X509Certificate::from_der(der).ok()?;
    u64::try_from(certificate.validity().not_after.timestamp()).ok()
}

/// Reads it; `None`: it is no certificate, or limits its client in a way that is not understood.
/// Such a one lets nobody in.
pub(super) fn read(der: &[u8]) -> Option<Told> {
    let (_, certificate) = X509Certificate::from_der(der).ok()?;
    let serial = certificate.raw_serial().iter().map(|byte| format!("{byte:02x}")).collect();
    let until = u64::try_from(certificate.validity().not_after.timestamp()).ok();
    let common =
        certificate.subject().iter_common_name().next().and_then(|name| name.as_str().ok());
    let name = common.map(str::to_owned);
    let names = certificate.subject_alternative_name().ok()?;
    let names = names.iter().flat_map(|names| &names.value.general_names);
    let mut ours = names.filter_map(|name| match name {
        GeneralName::URI(uri) if uri.starts_with(SCHEME) => Some(uri.parse::<Terms>().ok()),
        GeneralName::Invalid(..) => Some(None),
        _ => None,
    });
    let terms = match ours.next() {
        None => Terms::default(),
        Some(terms) => terms?,
    };
    ours.next().is_none().then_some(Told { serial, until, name, terms })
}
