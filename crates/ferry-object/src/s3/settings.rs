//! Keys, region and address of the store, found as the AWS tools find them: in the environment, then
//! in a profile of `~/.aws`.

use super::credentials::{Keys, Source};
use super::location::Endpoint;
use crate::error::ObjectError;
use std::collections::HashMap;
use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

/// How long the parts of a request may take. A store that is slow but goes on is left alone.
#[derive(Clone, Copy, Debug)]
pub struct TimeLimits {
    /// To look the host up, and again to connect and agree on encryption.
    pub connect: Duration,
    /// In which no byte comes or goes.
    pub idle: Duration,
    /// For a whole request with its answer.
    pub request: Duration,
}

impl Default for TimeLimits {
    /// A server behind a full queue answers within a minute; 16 MiB at 64 KiB/s take 4 minutes.
    fn default() -> Self {
        Self {
            connect: Duration::from_secs(10),
            idle: Duration::from_secs(60),
            request: Duration::from_secs(600),
        }
    }
}

/// What a store is reached with.
#[derive(Clone, Debug)]
pub struct S3Settings {
    pub(super) endpoint: Option<Endpoint>,
    pub(super) region: Option<String>,
    pub(super) source: Source,
    /// Certificates to trust instead of the system's.
    pub(super) ca_bundle: Option<PathBuf>,
    /// Time limits of requests.
    pub limits: TimeLimits,
}

/// The variables that name the endpoint.
const ENDPOINT: [&str; 2] = ["AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"];
/// Where the metadata service of a machine at AWS is.
const METADATA: &str = "http://169.254.169.254";

impl S3Settings {
    /// From the process's environment, and the files of `~/.aws`. `endpoint` is what the user gave
    /// beside.
    pub fn from_environment(endpoint: Option<&str>) -> Result<Self, ObjectError> {
        Self::from_variables(endpoint, &|name| std::env::var(name).ok())
    }

    /// As [`S3Settings::from_environment`], for a store whose URL may name the endpoint and the
    /// profile. As with the AWS tools, keys of a profile that is named come before those of the
    /// environment.
    pub(crate) fn of_url(
        endpoint: Option<&Endpoint>,
        profile: Option<&str>,
    ) -> Result<Self, ObjectError> {
        let mut settings = Self::from_variables(None, &of_profile(profile))?;
        if let Some(endpoint) = endpoint {
            settings.endpoint = Some(endpoint.clone());
        }
        Ok(settings)
    }

    /// The endpoint that a store has whose URL names none. No keys are needed.
    pub(crate) fn usual_endpoint(profile: Option<&str>) -> Result<Option<Endpoint>, ObjectError> {
        let variable = of_profile(profile);
        let variable = |name: &str| variable(name).filter(|value| !value.is_empty());
        let profile = Profile::read(&variable)?;
        let text = ENDPOINT.iter().find_map(|name| variable(name));
        text.or_else(|| profile.get("endpoint_url")).map(|text| text.parse()).transpose()
    }

    /// As [`S3Settings::from_environment`], with the values of the variables.
    pub fn from_variables(
        endpoint: Option<&str>,
        variable: &dyn Fn(&str) -> Option<String>,
    ) -> Result<Self, ObjectError> {
        let variable = |name: &str| variable(name).filter(|value| !value.is_empty());
        let profile = Profile::read(&variable)?;
        let first = |names: &[&str], key: &str| {
            names.iter().find_map(|name| variable(name)).or_else(|| profile.get(key))
        };
        let endpoint = match endpoint {
            Some(text) => Some(text.to_owned()),
            None => first(&ENDPOINT, "endpoint_url"),
        };
        let metadata_off = variable("AWS_EC2_METADATA_DISABLED")
            .is_some_and(|value| value.eq_ignore_ascii_case("true"));
        let source = match Keys::from_environment(&variable)? {
            Some(keys) => Source::Fixed(keys),
            None if profile.has_keys() => Source::Profile(profile.clone()),
            // A profile that was asked for by name is meant.
            None if profile.named => return Err(profile.lacks_keys()),
            None if metadata_off => return Err(no_keys()),
            None => {
                let base = variable("AWS_EC2_METADATA_SERVICE_ENDPOINT");
                let base = base.as_deref().unwrap_or(METADATA).trim_end_matches('/').to_owned();
                Source::Instance { base }
            }
        };
        Ok(Self {
            endpoint: endpoint.as_deref().map(str::parse).transpose()?,
            region: first(&["AWS_REGION", "AWS_DEFAULT_REGION"], "region"),
            source,
            ca_bundle: first(&["AWS_CA_BUNDLE"], "ca_bundle").map(PathBuf::from),
            limits: TimeLimits::default(),
        })
    }
}

/// The variables of the process, as if the user had named this profile and given no keys beside.
fn of_profile(profile: Option<&str>) -> impl Fn(&str) -> Option<String> {
    move |name| match (profile, name) {
        (Some(profile), "AWS_PROFILE") => Some(profile.to_owned()),
        (Some(_), "AWS_ACCESS_KEY_ID" | "AWS_SECRET_ACCESS_KEY" | "AWS_SESSION_TOKEN") => None,
        _ => std::env::var(name).ok(),
    }
}

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
    named: bool,
    credentials_file: PathBuf,
    config_file: PathBuf,
    /// All but the secrets.
    values: HashMap<String, String>,
    keys: bool,
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
    fn read(variable: &dyn Fn(&str) -> Option<String>) -> Result<Self, ObjectError> {
        let name = variable("AWS_PROFILE").or_else(|| variable("AWS_DEFAULT_PROFILE"));
        let home = PathBuf::from(variable("HOME").unwrap_or_else(|| "/root".into()));
        let file = |name: &str, usual: &str| {
            variable(name).map_or_else(|| home.join(".aws").join(usual), PathBuf::from)
        };
        let mut profile = Self {
            named: name.is_some(),
            name: name.unwrap_or_else(|| "default".into()),
            credentials_file: file("AWS_SHARED_CREDENTIALS_FILE", "credentials"),
            config_file: file("AWS_CONFIG_FILE", "config"),
            values: HashMap::new(),
            keys: false,
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
        profile.keys = values.contains_key("aws_access_key_id");
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

    fn get(&self, key: &str) -> Option<String> {
        self.values.get(key).cloned()
    }

    fn has_keys(&self) -> bool {
        self.keys || self.command().is_some()
    }

    /// The command that prints keys.
    pub fn command(&self) -> Option<&str> {
        self.values.get("credential_process").map(String::as_str).filter(|_| !self.keys)
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

    fn lacks_keys(&self) -> ObjectError {
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

#[cfg(test)]
mod tests {
    use super::*;

    /// Settings from variables and the two files.
    fn settings(
        variables: &[(&str, &str)],
        config: &str,
        credentials: &str,
    ) -> Result<S3Settings, ObjectError> {
        let home = tempfile::tempdir().expect("a directory");
        let directory = home.path().join(".aws");
        std::fs::create_dir(&directory).expect("it can be made");
        std::fs::write(directory.join("config"), config).expect("it can be written");
        std::fs::write(directory.join("credentials"), credentials).expect("it can be written");
        let result = S3Settings::from_variables(None, &|name| match name {
            "HOME" => Some(home.path().to_str().expect("it is text").to_owned()),
            _ => variables.iter().find(|(key, _)| *key == name).map(|(_, v)| (*v).to_owned()),
        });
        // Keys of a profile are read from the files, which are about to vanish.
        result.map(|mut settings| {
            if let Source::Profile(profile) = &settings.source
                && profile.keys
            {
                settings.source = Source::Fixed(profile.keys().expect("they are there"));
            }
            settings
        })
    }

    fn keys(settings: &S3Settings) -> (&str, &str, Option<&str>) {
        let Source::Fixed(keys) = &settings.source else { panic!("{settings:?}") };
        (&keys.id, &keys.secret, keys.token.as_deref())
    }

    const CONFIG: &str = "[default]\nregion = eu-west-1\n# a comment\n\n[profile work]\n\
         region=eu-central-1 # Frankfurt\nendpoint_url = https://s3.example.org\n\
         s3 =\n  addressing_style = path\n[profile sso]\nsso_session = x\n\
         [profile tool]\ncredential_process = print-keys\n";
    const CREDENTIALS: &str = "[default]\naws_access_key_id = ID1\naws_secret_access_key = S/1=\n\
         [work]\naws_access_key_id=ID2\naws_secret_access_key=S2\naws_session_token=T2\n";

    #[test]
    fn the_environment_comes_before_the_profile() {
        let found = settings(
            &[
                ("AWS_ACCESS_KEY_ID", "ID"),
                ("AWS_SECRET_ACCESS_KEY", "S"),
                ("AWS_SESSION_TOKEN", "T"),
                ("AWS_REGION", "r"),
                ("AWS_ENDPOINT_URL", "http://localhost:9000"),
            ],
            CONFIG,
            CREDENTIALS,
        );
        let found = found.expect("it is complete");
        assert_eq!(keys(&found), ("ID", "S", Some("T")));
        assert_eq!(found.region.as_deref(), Some("r"));
        assert_eq!(found.endpoint, "http://localhost:9000".parse().ok());

        let found = settings(&[], CONFIG, CREDENTIALS).expect("it is complete");
        assert_eq!(keys(&found), ("ID1", "S/1=", None));
        assert_eq!((found.region.as_deref(), found.endpoint), (Some("eu-west-1"), None));

        let found = settings(&[("AWS_PROFILE", "work")], CONFIG, CREDENTIALS);
        let found = found.expect("it is complete");
        assert_eq!(keys(&found), ("ID2", "S2", Some("T2")));
        assert_eq!(found.region.as_deref(), Some("eu-central-1"));
        assert_eq!(found.endpoint, "https://s3.example.org".parse().ok());
    }

    #[test]
    fn what_is_missing_is_said() {
        let said = |variables: &[(&str, &str)], config: &str, credentials: &str| {
            let Err(ObjectError::Setup(text)) = settings(variables, config, credentials) else {
                panic!("{variables:?} are refused");
            };
            text
        };
        let text = said(&[("AWS_ACCESS_KEY_ID", "ID")], CONFIG, CREDENTIALS);
        assert!(text.contains("AWS_SECRET_ACCESS_KEY is not set"), "{text}");
        let text = said(&[("AWS_PROFILE", "other")], CONFIG, CREDENTIALS);
        assert!(text.contains("there is no profile other"), "{text}");
        let text = said(&[("AWS_PROFILE", "sso")], CONFIG, CREDENTIALS);
        assert!(text.contains("export-credentials --profile sso"), "{text}");
        let text = said(&[("AWS_EC2_METADATA_DISABLED", "true")], "", "");
        assert!(text.contains("set AWS_ACCESS_KEY_ID"), "{text}");
        let text = said(&[("AWS_PROFILE", "p")], "[profile p]\nregion = x\n", "");
        assert!(text.contains("has no keys"), "{text}");
    }

    #[test]
    fn without_keys_the_machine_is_asked() {
        let found = settings(&[], "", "").expect("the machine may have a role");
        assert!(matches!(found.source, Source::Instance { base } if base == METADATA));
        let found = settings(&[("AWS_PROFILE", "tool")], CONFIG, "").expect("a tool has keys");
        let Source::Profile(profile) = found.source else { panic!("it is a profile's") };
        assert_eq!(profile.command(), Some("print-keys"));
    }

    #[test]
    fn no_secret_is_printed() {
        let found = settings(&[("AWS_PROFILE", "work")], CONFIG, CREDENTIALS).expect("complete");
        let printed = format!("{found:?}");
        assert!(
            printed.contains("ID2") && !printed.contains("S2") && !printed.contains("T2"),
            "{printed}"
        );
    }
}
