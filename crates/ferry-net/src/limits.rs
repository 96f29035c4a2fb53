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

/// What a certificate may act as. It stands in the certificate itself, as a name of the form `ferryfs:users=1000;groups=1000`; one
/// without such a name may act as anybody.
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

/// Who is at the other end of a connection.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Peer {
    /// The certificate that was shown, empty if none was.
    pub(crate) certificate: Vec<u8>,
    /// Whom that was issued to.
    pub(crate) name: Option<String>,
    /// `None`: it may act as anybody.
    pub(crate) limits: Option<Limits>,
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
        for (id, has) in [(0, false), (1000, true), (1001, false), (2000, true), (2999, true), (3000, false)]
        {
            assert_eq!(set.has(id), has, "{id}");
        }
        for text in ["", ",", "1,", "-", "1-", "2-1", "+1", " 1", "4294967295", "4294967296", "a", "1-2-3"] {
            assert!(text.parse::<IdSet>().is_err(), "{text:?}");
        }
        assert!(["1"; RANGES_MAX + 1].join(",").parse::<IdSet>().is_err());
        assert!(IdSet::all().has(0) && !IdSet::all().has(NO_ID));
    }

    #[test]
    fn limits_are_read_as_they_are_written() {
        let limits =
            Limits { users: "1000-1003".parse().expect("users"), groups: "7".parse().expect("groups") };
        assert_eq!(limits.to_string(), "ferryfs:users=1000-1003;groups=7");
        assert_eq!(limits.to_string().parse(), Ok(limits));
        for text in
            ["ferryfs:", "ferryfs:users=1", "ferryfs:users=;groups=1", "ferryfs:users=1;groups=1;more=2"]
        {
            assert!(text.parse::<Limits>().is_err(), "{text}");
        }
    }
}
