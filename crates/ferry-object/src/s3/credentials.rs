//! Keys that sign requests, and where they come from.

use super::keys::Keys;
use super::profile::{Profile, no_keys};
use crate::error::ObjectError;
use ferry_env::Clock;
use parking_lot::Mutex;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::Duration;
use ureq::Agent;

/// Where keys come from.
#[derive(Clone, Debug)]
pub(super) enum Source {
    /// They do not change.
    Fixed(Keys),
    /// A file, or a command that is named there.
    Profile(Profile),
    /// The metadata service of a machine at AWS, version 2.
    Instance { base: String },
}

/// Keys are fetched anew so long before they expire.
const RENEW_BEFORE: Duration = Duration::from_secs(300);
/// The metadata service is on the machine itself; elsewhere nobody answers.
const METADATA_LIMIT: Duration = Duration::from_secs(5);
const METADATA_CONNECT_LIMIT: Duration = Duration::from_secs(1);
/// Answers of credential services are short.
const ANSWER_BYTES_MAX: u64 = 64 << 10;

/// The present keys.
pub(super) struct Credentials {
    source: Source,
    clock: Arc<dyn Clock>,
    current: Mutex<Option<Keys>>,
}

impl Credentials {
    pub fn new(source: Source, clock: Arc<dyn Clock>) -> Self {
        Self { source, clock, current: Mutex::new(None) }
    }

    /// Keys that are valid now. One caller fetches them, others wait for it.
    pub fn keys(&self) -> Result<Keys, ObjectError> {
        let now = self.clock.wall();
        let mut current = self.current.lock();
        let left = |keys: &Keys| keys.expires.map(|expires| expires.saturating_sub(now));
        match current.as_ref() {
            Some(keys) if left(keys).is_none_or(|left| left > RENEW_BEFORE) => Ok(keys.clone()),
            old => match (self.fetch(), old) {
                (Ok(keys), _) => Ok(current.insert(keys).clone()),
                // What is valid yet serves until the service answers again.
                (Err(error), Some(keys)) if left(keys).is_none_or(|left| !left.is_zero()) => {
                    tracing::warn!(%error, "the keys cannot be renewed yet");
                    Ok(keys.clone())
                }
                // There were keys, so there is a source: it answers again some time.
                (Err(error), Some(_)) => Err(ObjectError::Unavailable(error.to_string())),
                (Err(error), None) => Err(error),
            },
        }
    }

    /// The store says that these keys have expired: whether there are others.
    pub fn renew(&self, expired: &Keys) -> bool {
        let mut current = self.current.lock();
        if current.as_ref().is_some_and(|keys| keys != expired) {
            return true;
        }
        match self.fetch() {
            Ok(keys) if keys != *expired => {
                *current = Some(keys);
                true
            }
            Ok(_) => false,
            Err(error) => {
                tracing::warn!(%error, "the keys cannot be renewed");
                false
            }
        }
    }

    fn fetch(&self) -> Result<Keys, ObjectError> {
        match &self.source {
            Source::Fixed(keys) => Ok(keys.clone()),
            Source::Profile(profile) => match profile.command() {
                Some(command) => from_command(command),
                None => profile.keys(),
            },
            Source::Instance { base } => from_instance(base),
        }
    }

    /// The region that the machine is in, if its metadata service says so.
    pub fn region(&self) -> Option<String> {
        let Source::Instance { base } = &self.source else { return None };
        let agent = metadata_agent();
        let token = metadata_token(&agent, base).ok()?;
        metadata(&agent, base, &token, "placement/region").ok()
    }
}

/// The keys that a command prints, as the AWS tools run it. What it says besides is not repeated:
/// it may be a secret, and so may its arguments.
fn from_command(command: &str) -> Result<Keys, ObjectError> {
    let failed = |what: &str| {
        ObjectError::Setup(format!(
            "credential_process of the profile {what}: run the command by hand to see why"
        ))
    };
    let mut shell = Command::new("sh");
    let output = shell.arg("-c").arg(command).stdin(Stdio::null()).stderr(Stdio::null()).output();
    let output = output.map_err(|error| failed(&format!("cannot be run ({error})")))?;
    if !output.status.success() {
        return Err(failed(&format!("failed ({})", output.status)));
    }
    let keys = Keys::from_json(&String::from_utf8_lossy(&output.stdout), "SessionToken");
    keys.ok_or_else(|| failed("does not print keys as JSON"))
}

fn metadata_agent() -> Agent {
    let config = Agent::config_builder()
        .proxy(None)
        .max_redirects(0)
        .timeout_connect(Some(METADATA_CONNECT_LIMIT))
        .timeout_global(Some(METADATA_LIMIT));
    Agent::new_with_config(config.build())
}

fn metadata_token(agent: &Agent, base: &str) -> Result<String, ureq::Error> {
    let request = agent.put(format!("{base}/latest/api/token"));
    let mut answer = request.header("x-aws-ec2-metadata-token-ttl-seconds", "300").send_empty()?;
    answer.body_mut().with_config().limit(ANSWER_BYTES_MAX).read_to_string()
}

fn metadata(agent: &Agent, base: &str, token: &str, path: &str) -> Result<String, ureq::Error> {
    let request = agent.get(format!("{base}/latest/meta-data/{path}"));
    let mut answer = request.header("x-aws-ec2-metadata-token", token).call()?;
    answer.body_mut().with_config().limit(ANSWER_BYTES_MAX).read_to_string()
}

/// The keys of the machine's role.
fn from_instance(base: &str) -> Result<Keys, ObjectError> {
    let agent = metadata_agent();
    let unavailable = |error: &ureq::Error| {
        ObjectError::Unavailable(format!("the machine's metadata service: {error}"))
    };
    let token = metadata_token(&agent, base).map_err(|error| {
        // Where there is no such service, the machine is not at AWS.
        tracing::debug!(%error, "no metadata service");
        no_keys()
    })?;
    let path = "iam/security-credentials/";
    let roles = match metadata(&agent, base, &token, path) {
        Err(ureq::Error::StatusCode(404)) => return Err(no_keys()),
        other => other.map_err(|error| unavailable(&error))?,
    };
    let role = roles.lines().next().map(str::trim).filter(|role| !role.is_empty());
    let role = role.ok_or_else(no_keys)?;
    let keys = metadata(&agent, base, &token, &format!("{path}{role}"));
    let keys = keys.map_err(|error| unavailable(&error))?;
    Keys::from_json(&keys, "Token").ok_or_else(|| {
        ObjectError::Unavailable(format!("the metadata service has no keys for role {role}"))
    })
}
