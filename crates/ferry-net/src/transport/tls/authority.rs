//! A small certificate authority, for those who have none: a directory with what the server shows
//! and one directory for each client. The authority's secret key lies apart, in `authority`:
//! anyone that has it can make certificates for everybody, and the server does not need it, so an
//! administrator may take that directory away. Older versions left the key beside the server's;
//! there it is found, too.

use std::fs::{self, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use ferry_env::Env;
use rcgen::string::Ia5String;
use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose, SanType,
};
use x509_parser::time::ASN1Time;

use super::revoked::{REVOKED, entries};
use super::{CA, certificate, certificates, must_be_private, unusable};
use crate::error::NetError;
use crate::limits::Terms;

/// The authority's secret key.
pub(super) const CA_KEY: &str = "ca.key";
/// The directory where it lies.
const AUTHORITY: &str = "authority";
/// A certificate is good for so many days if nobody says otherwise.
pub const DAYS: u32 = 730;
/// The clients' certificates that it has made, in the form of the list of those that are revoked.
const ISSUED: &str = "issued";

/// Where the authority of `dir` is: there itself, or apart.
fn home(dir: &Path) -> PathBuf {
    if dir.join(CA_KEY).exists() { dir.into() } else { dir.join(AUTHORITY) }
}

/// Makes an authority in `dir`, if there is none, and a certificate for the server under the names
/// `hosts`, for so many days.
pub fn init(dir: &Path, hosts: &[String], days: u32) -> Result<(), NetError> {
    fs::create_dir_all(dir).map_err(|e| unusable(dir, &e))?;
    let home = home(dir);
    if !home.join(CA_KEY).exists() {
        if dir.join(CA).exists() {
            return Err(is_away(&home));
        }
        let mut maker = fs::DirBuilder::new();
        maker.recursive(true).mode(0o700).create(&home).map_err(|e| unusable(&home, &e))?;
        found(&home)?;
        copy_ca(&home, dir)?;
    }
    let purpose = ExtendedKeyUsagePurpose::ServerAuth;
    issue_to(&home, dir, "server", (hosts, &Terms::default(), days), purpose).map(drop)
}

fn is_away(home: &Path) -> NetError {
    unusable(
        &home.join(CA_KEY),
        &"the authority's key is not here: bring its directory back, or name that directory",
    )
}

fn copy_ca(from: &Path, to: &Path) -> Result<(), NetError> {
    let ca = from.join(CA);
    let text = fs::read_to_string(&ca).map_err(|e| unusable(&ca, &e))?;
    write(&to.join(CA), &text, 0o644)
}

fn found(dir: &Path) -> Result<(), NetError> {
    let key = KeyPair::generate().map_err(|e| unusable(dir, &e))?;
    let mut params = params(Vec::new(), "FerryFS").map_err(|e| unusable(dir, &e))?;
    params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    let certificate = params.self_signed(&key).map_err(|e| unusable(dir, &e))?;
    write(&dir.join(CA_KEY), &key.serialize_pem(), 0o600)?;
    write(&dir.join(CA), &certificate.pem(), 0o644)
}

/// Makes a certificate for the client `name`, on these terms, for so many days; gives the directory
/// to be brought to its machine.
pub fn issue(dir: &Path, name: &str, terms: &Terms, days: u32) -> Result<PathBuf, NetError> {
    let to = dir.join(name);
    let plain = !name.is_empty() && !name.starts_with('.') && !name.contains('/');
    if !plain || name.contains(char::is_control) || [REVOKED, ISSUED, AUTHORITY].contains(&name) {
        return Err(unusable(&to, &"a client's name is a plain file name"));
    }
    let home = home(dir);
    if !home.join(CA_KEY).exists() {
        let is_there = dir.join(CA).exists();
        let none = || unusable(dir, &"there is no authority: `ferry cert init` makes one");
        return Err(if is_there { is_away(&home) } else { none() });
    }
    fs::create_dir_all(&to).map_err(|e| unusable(&to, &e))?;
    let names = [name.to_owned()];
    let purpose = ExtendedKeyUsagePurpose::ClientAuth;
    let serial = issue_to(&home, &to, "client", (&names, terms, days), purpose)?;
    add(&dir.join(ISSUED), [(serial.as_str(), name)])?;
    copy_ca(&home, &to)?;
    Ok(to)
}

/// Revokes what was issued to the client `name`; gives how many certificates that were. Servers
/// refuse them from now on, and end their sessions.
pub fn revoke(dir: &Path, name: &str) -> Result<usize, NetError> {
    let read = |path: &Path| entries(path).map_err(|e| unusable(path, &e));
    let (issued, revoked) = (dir.join(ISSUED), dir.join(REVOKED));
    let named = read(&issued)?.into_iter().filter(|(_, of)| of == name);
    let mut serials: Vec<String> = named.map(|(serial, _)| serial).collect();
    // One that was issued before there was a list of them.
    let there = dir.join(name).join("client.pem");
    if !name.is_empty() && !name.contains('/') && there.exists() {
        for der in certificates(&there)? {
            let told = certificate::read(&der)
                .ok_or_else(|| unusable(&there, &"no client's certificate"))?;
            serials.push(told.serial);
        }
    }
    serials.sort_unstable();
    serials.dedup();
    if serials.is_empty() {
        return Err(unusable(dir, &format!("no certificate was issued to {name:?}")));
    }
    let already = read(&revoked)?;
    serials.retain(|serial| !already.iter().any(|(old, _)| old == serial));
    add(&revoked, serials.iter().map(|serial| (serial.as_str(), name)))?;
    Ok(serials.len())
}

/// Adds lines to a list.
fn add<'a>(
    path: &Path,
    entries: impl IntoIterator<Item = (&'a str, &'a str)>,
) -> Result<(), NetError> {
    let text: String =
        entries.into_iter().map(|(serial, name)| format!("{serial} {name}\n")).collect();
    let opened = OpenOptions::new().append(true).create(true).mode(0o644).open(path);
    let added =
        opened.and_then(|mut file| file.write_all(text.as_bytes()).and_then(|()| file.sync_all()));
    added.map_err(|e| unusable(path, &e))
}

fn params(names: Vec<String>, common: &str) -> Result<CertificateParams, rcgen::Error> {
    let mut params = CertificateParams::new(names)?;
    params.distinguished_name.push(DnType::CommonName, common);
    Ok(params)
}

fn issue_to(
    home: &Path,
    to: &Path,
    role: &str,
    (names, terms, days): (&[String], &Terms, u32),
    purpose: ExtendedKeyUsagePurpose,
) -> Result<String, NetError> {
    let (ca, ca_key) = (home.join(CA), home.join(CA_KEY));
    must_be_private(&ca_key)?;
    let until = Env::real().clock.wall() + Duration::from_secs(24 * 60 * 60) * days;
    let until =
        i64::try_from(until.as_secs()).ok().and_then(|secs| ASN1Time::from_timestamp(secs).ok());
    let until =
        until.ok_or_else(|| unusable(to, &"no certificate can be good for so long"))?.to_datetime();
    let read = |path: &Path| fs::read_to_string(path).map_err(|e| unusable(path, &e));
    let issuer = KeyPair::from_pem(&read(&ca_key)?).map_err(|e| unusable(&ca_key, &e))?;
    let issuer = Issuer::from_ca_cert_pem(&read(&ca)?, issuer).map_err(|e| unusable(&ca, &e))?;
    let made = (|| {
        let key = KeyPair::generate()?;
        let common = names.first().map_or(role, String::as_str);
        let mut params = params(names.to_vec(), common)?;
        if *terms != Terms::default() {
            params.subject_alt_names.push(SanType::URI(Ia5String::try_from(terms.to_string())?));
        }
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages = vec![purpose];
        params.not_after = until;
        Ok((key.serialize_pem(), params.signed_by(&key, &issuer)?))
    })();
    let (key, made) = made.map_err(|e: rcgen::Error| unusable(to, &e))?;
    write(&to.join(format!("{role}.key")), &key, 0o600)?;
    write(&to.join(format!("{role}.pem")), &made.pem(), 0o644)?;
    let told =
        certificate::read(made.der()).ok_or_else(|| unusable(to, &"it cannot be read again"))?;
    Ok(told.serial)
}

/// A new file: what is there already is somebody's.
fn write(path: &Path, text: &str, mode: u32) -> Result<(), NetError> {
    let made = OpenOptions::new().write(true).create_new(true).mode(mode).open(path);
    made.and_then(|mut file| file.write_all(text.as_bytes())).map_err(|e| match e.kind() {
        io::ErrorKind::AlreadyExists => unusable(path, &"is there already, and not overwritten. To renew it, or to change its names, move it and the .pem beside it away, and give the command again: the authority stays the same, and so do all other certificates"),
        _ => unusable(path, &e),
    })
}
