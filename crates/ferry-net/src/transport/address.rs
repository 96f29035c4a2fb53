//! What a client mounts: `ferry://HOST[:PORT]/[PATH]`.

use std::fmt;
use std::str::FromStr;

use crate::error::NetError;

/// How an address begins.
const SCHEME: &str = "ferry://";
/// The port where none is said.
const PORT: u16 = 7373;

/// A server, and a directory on its volume.
#[derive(Clone, Debug)]
pub struct Address {
    /// A name or number; an IPv6 address without its brackets.
    pub host: String,
    /// TCP port, if one is said.
    pub port: Option<u16>,
    /// An absolute path.
    pub path: String,
}

impl Address {
    /// The TCP port.
    pub fn port(&self) -> u16 {
        self.port.unwrap_or(PORT)
    }

    /// Whether `source` means a server, not a volume on this machine.
    pub fn is_meant(source: &str) -> bool {
        source.starts_with(SCHEME)
    }
}

/// The port may be said or not.
impl PartialEq for Address {
    fn eq(&self, other: &Self) -> bool {
        self.host == other.host && self.port() == other.port() && self.path == other.path
    }
}

impl Eq for Address {}

impl FromStr for Address {
    type Err = NetError;

    fn from_str(text: &str) -> Result<Self, NetError> {
        let wrong = || NetError::Address(text.into());
        let rest = text.strip_prefix(SCHEME).ok_or_else(wrong)?;
        let (authority, path) = rest.find('/').map_or((rest, "/"), |at| rest.split_at(at));
        let (host, port) = match authority.strip_prefix('[') {
            Some(rest) => {
                let (host, port) = rest.split_once(']').ok_or_else(wrong)?;
                let port = if port.is_empty() {
                    None
                } else {
                    Some(port.strip_prefix(':').ok_or_else(wrong)?)
                };
                (host, port)
            }
            None => authority
                .split_once(':')
                .map_or((authority, None), |(host, port)| (host, Some(port))),
        };
        let port = port.map(str::parse).transpose().map_err(|_| wrong())?;
        if host.is_empty() || path.contains('\0') {
            return Err(wrong());
        }
        Ok(Self { host: host.into(), port, path: path.into() })
    }
}

/// The port is there if it was said: mount(8) compares the source that the kernel shows with that
/// of the line in `fstab`.
impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (open, close) = if self.host.contains(':') { ("[", "]") } else { ("", "") };
        write!(f, "{SCHEME}{open}{}{close}", self.host)?;
        if let Some(port) = self.port {
            write!(f, ":{port}")?;
        }
        f.write_str(&self.path)
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
        ] {
            assert_eq!(text.parse::<Address>().expect("an address").to_string(), printed);
        }
        for text in
            ["box:/x", "ferry://", "ferry://:5/", "ferry://a:b/", "ferry://[::1", "ferry://[::1]x/"]
        {
            assert!(text.parse::<Address>().is_err(), "{text}");
        }
    }

    #[test]
    fn an_address_is_the_same_with_the_default_port_and_without_it() {
        let address = |text: &str| text.parse::<Address>().expect("an address");
        assert_eq!(address("ferry://box/a"), address("ferry://box:7373/a"));
        assert_ne!(address("ferry://box/a"), address("ferry://box:7374/a"));
        assert_ne!(address("ferry://box/a"), address("ferry://box/b"));
        assert_eq!(address("ferry://box").port(), 7373);
    }
}
