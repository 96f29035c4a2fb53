//! Which users and groups a client's certificate may act as.

use std::fmt;
use std::str::FromStr;

/// Ranges that one list may have: a certificate is small.
const RANGES_MAX: usize = 64;
/// No id: what `chown` takes for "as it is".
const NO_ID: u32 = u32::MAX;

/// User or group ids, written as `1000,2000-2999`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IdSet(Vec<(u32, u32)>);

impl IdSet {
    /// All that there are.
    pub fn all() -> Self {
        Self(vec![(0, NO_ID - 1)])
    }

    /// Whether `id` is one of them.
    pub fn has(&self, id: u32) -> bool {
        self.0.iter().any(|(first, last)| (*first..=*last).contains(&id))
    }
}

impl FromStr for IdSet {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let id = |text: &str| {
            let digits = !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
            text.parse().ok().filter(|id| digits && *id != NO_ID)
        };
        let range = |text: &str| {
            let (first, last) = text.split_once('-').unwrap_or((text, text));
            let (first, last) = (id(first)?, id(last)?);
            (first <= last).then_some((first, last))
        };
        let ranges: Option<Vec<_>> = text.split(',').map(range).collect();
        match ranges {
            Some(ranges) if ranges.len() <= RANGES_MAX => Ok(Self(ranges)),
            Some(_) => Err(format!("more than {RANGES_MAX} ranges")),
            None => Err("numbers and ranges of them are wanted, as 1000,2000-2999".into()),
        }
    }
}

impl fmt::Display for IdSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (at, (first, last)) in self.0.iter().enumerate() {
            f.write_str(if at == 0 { "" } else { "," })?;
            if first == last { write!(f, "{first}")? } else { write!(f, "{first}-{last}")? }
        }
        Ok(())
    }
}

/// Whom a certificate may act as: `ferryfs:users=1000;groups=1000`, a part of its [`Terms`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Users.
    pub users: IdSet,
    /// Groups.
    pub groups: IdSet,
}

/// What begins the names of which this is one.
pub(crate) const SCHEME: &str = "ferryfs:";

impl FromStr for Limits {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let sets = text.strip_prefix(SCHEME).and_then(|rest| rest.strip_prefix("users="));
        let sets = sets.and_then(|rest| rest.split_once(";groups="));
        let (users, groups) = sets.ok_or("not users and groups")?;
        Ok(Self { users: users.parse()?, groups: groups.parse()? })
    }
}

impl fmt::Display for Limits {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{SCHEME}users={};groups={}", self.users, self.groups)
    }
}

/// A directory that clients may mount, with all that is below it; written as `/path:ro` or
/// `/path:rw`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Export {
    /// Its path on the volume, `/` for all of it.
    pub path: Vec<u8>,
    /// Clients can change nothing.
    pub read_only: bool,
}

impl FromStr for Export {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (path, mode) = text.rsplit_once(':').ok_or("PATH:ro or PATH:rw is wanted")?;
        let read_only = match mode {
            "ro" => true,
            "rw" => false,
            _ => return Err("PATH:ro or PATH:rw is wanted".into()),
        };
        if !path.starts_with('/') {
            return Err("the path begins at the volume's root: /…".into());
        }
        Ok(Self { path: path.as_bytes().to_vec(), read_only })
    }
}

impl fmt::Display for Export {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mode = if self.read_only { "ro" } else { "rw" };
        write!(f, "{}:{mode}", String::from_utf8_lossy(&self.path))
    }
}

/// What a certificate says of its client, in a name of the form
/// `ferryfs:users=1000;groups=1000;exports=/a:rw,/b:ro`. Each of the two parts may be missing; a
/// certificate without such a name is for everything.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Terms {
    /// Whom it may act as; `None`: anybody.
    pub limits: Option<Limits>,
    /// What it may mount; none: whatever the server exports.
    pub exports: Vec<Export>,
}

/// In a name each byte of a path that could mean something else there is written as `%` and two
/// hexadecimal digits.
fn is_plain(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || b"/._-".contains(&byte)
}

fn export_from_name(text: &str) -> Option<Export> {
    let (path, mode) = text.rsplit_once(':')?;
    let (mut bytes, mut rest) = (Vec::new(), path.as_bytes());
    while let Some((&first, behind)) = rest.split_first() {
        rest = behind;
        if first != b'%' {
            bytes.push(Some(first).filter(|byte| is_plain(*byte))?);
            continue;
        }
        let (digits, behind) = rest.split_first_chunk::<2>()?;
        let byte = std::str::from_utf8(digits)
            .ok()
            .and_then(|digits| u8::from_str_radix(digits, 16).ok())?;
        bytes.push(Some(byte).filter(|byte| !is_plain(*byte) && *byte != 0)?);
        rest = behind;
    }
    let read_only = ["rw", "ro"].iter().position(|known| *known == mode)? == 1;
    bytes.starts_with(b"/").then_some(Export { path: bytes, read_only })
}

impl FromStr for Terms {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        const EXPORTS: &str = "exports=";
        let rest = text.strip_prefix(SCHEME).ok_or("not terms of a certificate")?;
        let (limits, exports) = match rest.rsplit_once(&format!(";{EXPORTS}")) {
            Some((limits, exports)) => (Some(limits), Some(exports)),
            None => match rest.strip_prefix(EXPORTS) {
                Some(exports) => (None, Some(exports)),
                None => (Some(rest), None),
            },
        };
        let limits = limits.map(|limits| format!("{SCHEME}{limits}").parse()).transpose()?;
        let exports =
            exports.map(|all| all.split(',').map(export_from_name).collect::<Option<Vec<_>>>());
        let exports = exports.unwrap_or_else(|| Some(Vec::new())).ok_or("not exports")?;
        Ok(Self { limits, exports })
    }
}

impl fmt::Display for Terms {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.limits {
            Some(limits) => {
                write!(f, "{limits}{}", if self.exports.is_empty() { "" } else { ";" })?
            }
            None => f.write_str(SCHEME)?,
        }
        for (at, Export { path, read_only }) in self.exports.iter().enumerate() {
            f.write_str(if at == 0 { "exports=" } else { "," })?;
            for byte in path {
                if is_plain(*byte) {
                    write!(f, "{}", char::from(*byte))?
                } else {
                    write!(f, "%{byte:02x}")?
                }
            }
            f.write_str(if *read_only { ":ro" } else { ":rw" })?;
        }
        Ok(())
    }
}

/// The other end of a connection, as its certificate names it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Peer {
    /// The certificate that it has sent, empty if none.
    pub(crate) certificate: Vec<u8>,
    /// Its number, in hexadecimal digits.
    pub(crate) serial: String,
    /// It is good up to this second of Unix time.
    pub(crate) until: Option<u64>,
    /// Whom that was issued to.
    pub(crate) name: Option<String>,
    /// `None`: it may act as anybody.
    pub(crate) limits: Option<Limits>,
    /// What it may mount; none: whatever the server exports.
    pub(crate) exports: Vec<Export>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_are_read_as_they_are_written() {
        for text in ["0", "1000", "1000,2000-2999", "0-4294967294"] {
            let set: IdSet = text.parse().expect(text);
            assert_eq!(set.to_string(), text);
        }
        let set: IdSet = "1000,2000-2999".parse().expect("a set");
        for (id, has) in
            [(0, false), (1000, true), (1001, false), (2000, true), (2999, true), (3000, false)]
        {
            assert_eq!(set.has(id), has, "{id}");
        }
        for text in
            ["", ",", "1,", "-", "1-", "2-1", "+1", " 1", "4294967295", "4294967296", "a", "1-2-3"]
        {
            assert!(text.parse::<IdSet>().is_err(), "{text:?}");
        }
        assert!(["1"; RANGES_MAX + 1].join(",").parse::<IdSet>().is_err());
        assert!(IdSet::all().has(0) && !IdSet::all().has(NO_ID));
    }

    #[test]
    fn limits_are_read_as_they_are_written() {
        let limits = Limits {
            users: "1000-1003".parse().expect("users"),
            groups: "7".parse().expect("groups"),
        };
        assert_eq!(limits.to_string(), "ferryfs:users=1000-1003;groups=7");
        assert_eq!(limits.to_string().parse(), Ok(limits));
        for text in [
            "ferryfs:",
            "ferryfs:users=1",
            "ferryfs:users=;groups=1",
            "ferryfs:users=1;groups=1;more=2",
        ] {
            assert!(text.parse::<Limits>().is_err(), "{text}");
        }
    }

    #[test]
    fn terms_are_read_as_they_are_written() {
        let limits = || "ferryfs:users=1000;groups=7".parse::<Limits>().ok();
        let export = |path: &str, read_only| Export { path: path.into(), read_only };
        for (limits, exports, text) in [
            (limits(), vec![], "ferryfs:users=1000;groups=7"),
            (None, vec![export("/", false)], "ferryfs:exports=/:rw"),
            (
                limits(),
                vec![export("/a b;c,d:e%", true), export("/\u{e4}", false)],
                "ferryfs:users=1000;groups=7;exports=/a%20b%3bc%2cd%3ae%25:ro,/%c3%a4:rw",
            ),
        ] {
            let terms = Terms { limits, exports };
            assert_eq!(terms.to_string(), text);
            assert_eq!(text.parse(), Ok(terms));
        }
        for text in [
            "ferryfs:",
            "ferryfs:exports=",
            "ferryfs:exports=/a",
            "ferryfs:exports=a:ro",
            "ferryfs:exports=/a:rx",
            "ferryfs:exports=/a b:ro",
            "ferryfs:exports=/%61:ro",
            "ferryfs:exports=/%00:ro",
            "ferryfs:exports=/%6:ro",
            "ferryfs:exports=/a:ro;users=1;groups=1",
            "ferryfs:users=1;groups=1;exports=/a:ro;exports=/b:ro",
        ] {
            assert!(text.parse::<Terms>().is_err(), "{text}");
        }
    }
}
