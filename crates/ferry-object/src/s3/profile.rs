//! Profiles of the files that the AWS tools read.

use super::keys::Keys;
use crate::error::ObjectError;
use std::collections::HashMap;
use std::fmt;
use std::path::PathBuf;

/// Nothing holds keys.
pub(super) fn no_keys() -> ObjectError {
    ObjectError::Setup(
        "no keys for the store were found: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or \
         name a profile of ~/.aws/credentials in AWS_PROFILE, or give the machine an instance role"
            .into(),
    )
}

/// One profile of the files that the AWS tools read. Its secrets are read when they are needed.
#[derive(Clone)]
pub(super) struct Profile {
    name: String,
    /// Whether the user asked for it.
    pub named: bool,
    credentials_file: PathBuf,
    config_file: PathBuf,
    /// All but the secrets.
    values: HashMap<String, String>,
    pub has_own_keys: bool,
}

impl fmt::Debug for Profile {
    /// Without its values: a command may have a secret as its argument.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Profile").field("name", &self.name).finish_non_exhaustive()
    }
}

/// What says that a profile gets its keys in a way that only the AWS tools know.
const FOREIGN: [&str; 5] =
    ["role_arn", "sso_session", "sso_start_url", "web_identity_token_file", "login_session"];

impl Profile {
    pub fn read(variable: &dyn Fn(&str) -> Option<String>) -> Result<Self, ObjectError> {
        let name = variable("AWS_PROFILE").or_else(|| variable("AWS_DEFAULT_PROFILE"));
        let home = PathBuf::from(variable("HOME").unwrap_or_else(|| "/".into()));
        let file = |name: &str, usual: &str| {
            variable(name).map_or_else(|| home.join(".aws").join(usual), PathBuf::from)
        };
        let mut profile = Self {
            named: name.is_some(),
            name: name.unwrap_or_else(|| "default".into()),
            credentials_file: file("AWS_SHARED_CREDENTIALS_FILE", "credentials"),
            config_file: file("AWS_CONFIG_FILE", "config"),
            values: HashMap::new(),
            has_own_keys: false,
        };
        let (values, found) = profile.load()?;
        if profile.named && !found {
            return Err(ObjectError::Setup(format!(
                "there is no profile {} in {} or {}; AWS_PROFILE or the URL names it",
                profile.name,
                profile.credentials_file.display(),
                profile.config_file.display()
            )));
        }
        profile.has_own_keys = values.contains_key("aws_access_key_id");
        let secret = ["aws_secret_access_key", "aws_session_token"];
        profile.values =
            values.into_iter().filter(|(key, _)| !secret.contains(&key.as_str())).collect();
        Ok(profile)
    }

    /// All values of the profile, those of the credentials file first, and whether there is one.
    fn load(&self) -> Result<(HashMap<String, String>, bool), ObjectError> {
        let mut values = HashMap::new();
        let mut found = false;
        let in_config = match self.name.as_str() {
            "default" => "default".to_owned(),
            name => format!("profile {name}"),
        };
        for (file, section) in
            [(&self.config_file, &in_config), (&self.credentials_file, &self.name)]
        {
            let text = match std::fs::read_to_string(file) {
                Ok(text) => text,
                Err(error) if error.kind() == std::io::ErrorKind::NotFound => continue,
                Err(error) => {
                    return Err(ObjectError::Setup(format!(
                        "{} cannot be read: {error}",
                        file.display()
                    )));
                }
            };
            if let Some(found_values) = section_of(&text, section) {
                found = true;
                values.extend(found_values);
            }
        }
        Ok((values, found))
    }

    pub fn get(&self, key: &str) -> Option<String> {
        self.values.get(key).cloned()
    }

    pub fn has_keys(&self) -> bool {
        self.has_own_keys || self.command().is_some()
    }

    /// The command that prints keys.
    pub fn command(&self) -> Option<&str> {
        self.values.get("credential_process").map(String::as_str).filter(|_| !self.has_own_keys)
    }

    /// Reads the keys that stand in the file, which may have changed.
    pub fn keys(&self) -> Result<Keys, ObjectError> {
        let (values, _) = self.load()?;
        let get = |key: &str| values.get(key).cloned();
        match (get("aws_access_key_id"), get("aws_secret_access_key")) {
            (Some(id), Some(secret)) => {
                Ok(Keys { id, secret, token: get("aws_session_token"), expires: None })
            }
            _ => Err(self.lacks_keys()),
        }
    }

    pub fn lacks_keys(&self) -> ObjectError {
        let name = &self.name;
        let other = FOREIGN.iter().find(|key| self.values.contains_key(**key));
        ObjectError::Setup(match other {
            Some(key) => format!(
                "profile {name} gets its keys by {key}, which FerryFS does not follow; add this \
                 line to a profile of its own: credential_process = aws configure \
                 export-credentials --profile {name}"
            ),
            None => format!(
                "profile {name} has no keys: it needs aws_access_key_id and aws_secret_access_key"
            ),
        })
    }
}

/// The values of a section. Lines that are indented belong to the value above and are left out.
fn section_of(text: &str, section: &str) -> Option<HashMap<String, String>> {
    let mut values = None;
    let mut inside = false;
    for line in text.lines() {
        if line.trim().is_empty() || line.starts_with(['#', ';', ' ', '\t']) {
            continue;
        }
        if let Some(name) = line.strip_prefix('[').and_then(|line| line.split(']').next()) {
            inside = name.split_whitespace().eq(section.split_whitespace());
            if inside {
                values.get_or_insert_with(HashMap::new);
            }
        } else if let (Some(values), true, Some((key, value))) =
            (&mut values, inside, line.split_once('='))
        {
            let value = value.split(" #").next().unwrap_or(value).trim();
            values.insert(key.trim().to_ascii_lowercase(), value.to_owned());
        }
    }
    values
}
