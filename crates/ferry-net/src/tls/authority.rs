//! A small certificate authority, for those who have none: a directory with its key, the server's, and one directory for each client.

use std::fs::{self, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose,
};

use super::{CA, unusable};
use crate::error::NetError;

/// The authority's secret key.
const CA_KEY: &str = "ca.key";

/// Makes an authority in `dir`, and a certificate for the server under the names `hosts`.
pub fn init(dir: &Path, hosts: &[String]) -> Result<(), NetError> {
    fs::create_dir_all(dir).map_err(|e| unusable(dir, &e))?;
    let key = KeyPair::generate().map_err(|e| unusable(dir, &e))?;
    let mut params = params(Vec::new(), "FerryFS").map_err(|e| unusable(dir, &e))?;
    params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    let certificate = params.self_signed(&key).map_err(|e| unusable(dir, &e))?;
    write(&dir.join(CA_KEY), &key.serialize_pem(), 0o600)?;
    write(&dir.join(CA), &certificate.pem(), 0o644)?;
    issue_to(dir, dir, "server", hosts, ExtendedKeyUsagePurpose::ServerAuth)
}

/// Makes a certificate for the client `name`; gives the directory to be brought to its machine.
pub fn issue(dir: &Path, name: &str) -> Result<PathBuf, NetError> {
    let to = dir.join(name);
    if name.is_empty() || name.starts_with('.') || name.contains(['/', '\0']) {
        return Err(unusable(&to, &"a client's name is a plain file name"));
    }
    fs::create_dir_all(&to).map_err(|e| unusable(&to, &e))?;
    issue_to(dir, &to, "client", &[name.to_owned()], ExtendedKeyUsagePurpose::ClientAuth)?;
    let ca = dir.join(CA);
    let text = fs::read_to_string(&ca).map_err(|e| unusable(&ca, &e))?;
    write(&to.join(CA), &text, 0o644)?;
    Ok(to)
}

fn params(names: Vec<String>, common: &str) -> Result<CertificateParams, rcgen::Error> {
    let mut params = CertificateParams::new(names)?;
    params.distinguished_name.push(DnType::CommonName, common);
    Ok(params)
}

fn issue_to(
    dir: &Path,
    to: &Path,
    role: &str,
    names: &[String],
    purpose: ExtendedKeyUsagePurpose,
) -> Result<(), NetError> {
    let (ca, ca_key) = (dir.join(CA), dir.join(CA_KEY));
    let read = |path: &Path| fs::read_to_string(path).map_err(|e| unusable(path, &e));
    let issuer = KeyPair::from_pem(&read(&ca_key)?).map_err(|e| unusable(&ca_key, &e))?;
    let issuer = Issuer::from_ca_cert_pem(&read(&ca)?, issuer).map_err(|e| unusable(&ca, &e))?;
    let made = (|| {
        let key = KeyPair::generate()?;
        let common = names.first().map_or(role, String::as_str);
        let mut params = params(names.to_vec(), common)?;
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages = vec![purpose];
        Ok((key.serialize_pem(), params.signed_by(&key, &issuer)?.pem()))
    })();
    let (key, certificate) = made.map_err(|e: rcgen::Error| unusable(to, &e))?;
    write(&to.join(format!("{role}.key")), &key, 0o600)?;
    write(&to.join(format!("{role}.pem")), &certificate, 0o644)
}

/// A new file: what is there already is somebody's.
fn write(path: &Path, text: &str, mode: u32) -> Result<(), NetError> {
    let made = OpenOptions::new().write(true).create_new(true).mode(mode).open(path);
    made.and_then(|mut file| file.write_all(text.as_bytes())).map_err(|e| match e.kind() {
        io::ErrorKind::AlreadyExists => unusable(path, &"is there already: nothing is overwritten"),
        _ => unusable(path, &e),
    })
}
