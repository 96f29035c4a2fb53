//! What a certificate says of its client: its number, and whom it may act as.

use x509_parser::prelude::{FromDer, GeneralName, X509Certificate};

use crate::limits::{Limits, SCHEME};

/// What the server reads of a client's certificate.
pub(super) struct Told {
    /// Its number, in hexadecimal digits.
    pub(super) serial: String,
    /// Whom it was issued to.
    pub(super) name: Option<String>,
    pub(super) limits: Option<Limits>,
}

/// Reads it; `None`: it is no certificate, or limits its client in a way that is not understood. Such a one lets nobody in.
pub(super) fn read(der: &[u8]) -> Option<Told> {
    let (_, certificate) = X509Certificate::from_der(der).ok()?;
    let serial = certificate.raw_serial().iter().map(|byte| format!("{byte:02x}")).collect();
    let common = certificate.subject().iter_common_name().next().and_then(|name| name.as_str().ok());
    let name = common.map(str::to_owned);
    let names = certificate.subject_alternative_name().ok()?;
    let names = names.iter().flat_map(|names| &names.value.general_names);
    let mut ours = names.filter_map(|name| match name {
        GeneralName::URI(uri) if uri.starts_with(SCHEME) => Some(uri.parse::<Limits>().ok()),
        GeneralName::Invalid(..) => Some(None),
        _ => None,
    });
    let limits = match ours.next() {
        None => None,
        Some(limits) => Some(limits?),
    };
    ours.next().is_none().then_some(Told { serial, name, limits })
}
