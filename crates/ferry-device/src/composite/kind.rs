//! The kinds of composites.

use std::fmt;
use std::str::FromStr;

/// How the components make one device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// One behind the other.
    Linear,
    /// In turns, a chunk each.
    Stripe,
    /// A copy on each.
    Mirror,
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Linear => "linear",
            Self::Stripe => "stripe",
            Self::Mirror => "mirror",
        })
    }
}

impl FromStr for Kind {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "linear" => Ok(Self::Linear),
            "stripe" => Ok(Self::Stripe),
            "mirror" => Ok(Self::Mirror),
            _ => Err(format!("{text:?} is none of linear, stripe, mirror")),
        }
    }
}
