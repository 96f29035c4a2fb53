//! What a client mounts: `ferry://HOST[:PORT][,HOST[:PORT]…]/[PATH]`.

use std::fmt;
use std::str::FromStr;

use crate::error::NetError;

/// How an address begins.
const SCHEME: &str = "ferry://";
/// The port where none is said.
const PORT: u16 = 7373;

/// A machine on which a server of the volume runs, or stands by.
#[derive(Clone, Debug)]
pub struct Host {
    /// A name or number; an IPv6 address without its brackets.
    pub name: String,
    /// TCP port, if one is said.
    pub port: Option<u16>,
}

impl Host {
    /// The TCP port.
    pub fn port(&self) -> u16 {
        self.port.unwrap_or(PORT)
    }
}

/// The port may be said or not.
impl PartialEq for Host {
    fn eq(&self, other: &Self) -> bool {
        self.name == other.name && self.port() == other.port()
    }
}

impl Eq for Host {}

/// The servers of a volume, one of which has it, and a directory there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Address {
    /// At least one.
    pub hosts: Vec<Host>,
    /// An absolute path.
    pub path: String,
}

impl Address {
    /// Whether `source` means a server, not a volume on this machine.
    pub fn is_meant(source: &str) -> bool {
        source.starts_with(SCHEME)
    }

    /// Of one server.
    pub fn of_host(name: &str, port: Option<u16>, path: &str) -> Self {
        Self { hosts: vec![Host { name: name.into(), port }], path: path.into() }
    }
}

impl FromStr for Host {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        let (name, port) = match text.strip_prefix('[') {
            Some(rest) => {
                let (name, port) = rest.split_once(']').ok_or(())?;
                let port =
                    if port.is_empty() { None } else { Some(port.strip_prefix(':').ok_or(())?) };
                (name, port)
            }
            None => text.split_once(':').map_or((text, None), |(name, port)| (name, Some(port))),
        };
        let port = port.map(str::parse).transpose().map_err(|_| ())?;
        if name.is_empty() { Err(()) } else { Ok(Self { name: name.into(), port }) }
    }
}

impl FromStr for Address {
    type Err = NetError;

    fn from_str(text: &str) -> Result<Self, NetError> {
        let wrong = || NetError::Address(text.into());
        let rest = text.strip_prefix(SCHEME).ok_or_else(wrong)?;
        let (hosts, path) = rest.find('/').map_or((rest, "/"), |at| rest.split_at(at));
        let hosts: Result<Vec<Host>, ()> = hosts.split(',').map(str::parse).collect();
        let hosts = hosts.map_err(|()| wrong())?;
        if path.contains('\0') {
            return Err(wrong());
        }
        Ok(Self { hosts, path: path.into() })
    }
}

impl fmt::Display for Host {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (open, close) = if self.name.contains(':') { ("[", "]") } else { ("", "") };
        write!(f, "{open}{}{close}", self.name)?;
        self.port.map_or(Ok(()), |port| write!(f, ":{port}"))
    }
}

/// The port is there if it was said: mount(8) compares the source that the kernel shows with that
/// of the line in `fstab`.
impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let hosts: Vec<String> = self.hosts.iter().map(Host::to_string).collect();
        write!(f, "{SCHEME}{}{}", hosts.join(","), self.path)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_parsed_and_printed() {
        for (text, printed) in [
            ("ferry://box", "ferry://box/"),
            ("ferry://box:7373/", "ferry://box:7373/"),
            ("ferry://box:1/", "ferry://box:1/"),
            ("ferry://[::1]/a/b", "ferry://[::1]/a/b"),
            ("ferry://[::1]:9/a", "ferry://[::1]:9/a"),
            ("ferry://a,b", "ferry://a,b/"),
            ("ferry://a:1,[::1]:2,b/c,d", "ferry://a:1,[::1]:2,b/c,d"),
        ] {
            assert_eq!(text.parse::<Address>().expect("an address").to_string(), printed);
        }
        for text in [
            "box:/x",
            "ferry://",
            "ferry://:5/",
            "ferry://a:b/",
            "ferry://[::1",
            "ferry://[::1]x/",
            "ferry://a,/",
            "ferry://,a/",
        ] {
            assert!(text.parse::<Address>().is_err(), "{text}");
        }
    }

    #[test]
    fn an_address_is_the_same_with_the_default_port_and_without_it() {
        let address = |text: &str| text.parse::<Address>().expect("an address");
        assert_eq!(address("ferry://box/a"), address("ferry://box:7373/a"));
        assert_ne!(address("ferry://box/a"), address("ferry://box:7374/a"));
        assert_ne!(address("ferry://box/a"), address("ferry://box/b"));
        assert_ne!(address("ferry://box,a"), address("ferry://a,box"));
        assert_eq!(address("ferry://box").hosts[0].port(), 7373);
    }
}
