//! Keys, region and address of the store, found as the AWS tools find them: in the environment,
//! then in a profile of `~/.aws`.

use super::credentials::Source;
use super::keys::Keys;
use super::location::Endpoint;
use super::profile::{Profile, no_keys};
use crate::error::ObjectError;
use crate::locks::variable;
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
        Self::from_variables(endpoint, &|name| variable(name)?.into_string().ok())
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
        _ => variable(name)?.into_string().ok(),
    }
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
                && profile.has_own_keys
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
