//! A pair of keys.

use super::time::from_iso;
use crate::error::ObjectError;
use std::fmt;
use std::time::Duration;

/// A pair of keys. The secret one is shown nowhere.
#[derive(Clone, PartialEq, Eq)]
pub(super) struct Keys {
    pub id: String,
    pub secret: String,
    pub token: Option<String>,
    /// Wall time.
    pub expires: Option<Duration>,
}

impl fmt::Debug for Keys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Keys").field("id", &self.id).finish_non_exhaustive()
    }
}

impl Keys {
    /// The keys of the environment, if it has any.
    pub fn from_environment(
        variable: &dyn Fn(&str) -> Option<String>,
    ) -> Result<Option<Self>, ObjectError> {
        let missing = |name: &str, other: &str| {
            ObjectError::Setup(format!("{name} is not set, but {other} is: set both or none"))
        };
        let (id, secret) = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY");
        match (variable(id), variable(secret)) {
            (Some(id), Some(secret)) => {
                let token = variable("AWS_SESSION_TOKEN");
                Ok(Some(Self { id, secret, token, expires: None }))
            }
            (None, None) => Ok(None),
            (Some(_), None) => Err(missing(secret, id)),
            (None, Some(_)) => Err(missing(id, secret)),
        }
    }

    /// As the metadata service and the commands of profiles print them.
    pub fn from_json(text: &str, token: &str) -> Option<Self> {
        let json: serde_json::Value = serde_json::from_str(text).ok()?;
        let get = |name: &str| json.get(name)?.as_str().map(str::to_owned);
        let expires = match get("Expiration") {
            Some(text) => Some(Duration::from_secs(from_iso(&text)?)),
            None => None,
        };
        Some(Self {
            id: get("AccessKeyId")?,
            secret: get("SecretAccessKey")?,
            token: get(token),
            expires,
        })
    }
}
