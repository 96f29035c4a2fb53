//! [`StoreUrl`]: where a store is, as users write it.

use crate::error::ObjectError;
use crate::format::is_object_name;
use crate::s3::{Endpoint, S3Location, S3Settings, closing_slash};
use std::ffi::{OsStr, OsString};
use std::fmt;
use std::io;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

/// What the URL of a store in a directory begins with.
const DIR: &str = "dir://";
/// What the URL of a store that speaks S3 begins with.
const S3: &str = "s3://";

/// Where a store is, as users write it. [`fmt::Display`] shows it so. Behind a last name with an
/// `@` it shows a slash: [`StoreUrl::split_snapshot`] finds no snapshot there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StoreUrl {
    /// `dir:///PATH`: a directory.
    Dir(PathBuf),
    /// A prefix of a bucket.
    S3(S3Url),
}

/// `s3://BUCKET/PREFIX[?endpoint=URL&profile=NAME]`. It holds no keys.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct S3Url {
    /// Bucket and prefix.
    pub location: S3Location,
    /// The address of the store; none: what environment and profile say, else AWS.
    pub endpoint: Option<Endpoint>,
    /// The profile that has the keys.
    pub profile: Option<String>,
}

impl StoreUrl {
    /// `None`: the text is no URL of a store. The error is for the user.
    pub fn parse(text: &OsStr) -> Option<Result<Self, String>> {
        if text.as_bytes().starts_with(S3.as_bytes()) {
            let url = text.to_str().map(S3Url::parse);
            let url = url.unwrap_or_else(|| {
                Err(ObjectError::Setup(format!("{}: this is not UTF-8", text.display())))
            });
            return Some(url.map(Self::S3).map_err(|error| error.to_string()));
        }
        let path = text.as_bytes().strip_prefix(DIR.as_bytes())?;
        let path = Path::new(OsStr::from_bytes(path));
        Some(match path.is_absolute() && path.parent().is_some() {
            true => Ok(Self::Dir(path.into())),
            false => Err(format!(
                "{}: {DIR} and the absolute path of a directory is wanted, as in {DIR}/srv/store",
                text.display()
            )),
        })
    }

    /// The URL and the snapshot of a text that names a snapshot: `dir:///PATH@NAME` or
    /// `s3://BUCKET/PREFIX@NAME[?…]`. `None`: it names none.
    pub fn split_snapshot(text: &OsStr) -> Option<(OsString, String)> {
        let bytes = text.as_bytes();
        if !bytes.starts_with(DIR.as_bytes()) && !bytes.starts_with(S3.as_bytes()) {
            return None;
        }
        let path = match bytes.iter().position(|byte| *byte == b'?') {
            Some(end) if bytes.starts_with(S3.as_bytes()) => end,
            _ => bytes.len(),
        };
        let (path, query) = bytes.split_at(path);
        let at = path.iter().rposition(|byte| *byte == b'@')?;
        let name = str::from_utf8(&path[at + 1..]).ok().filter(|name| !name.contains('/'))?;
        Some((OsString::from_vec([&path[..at], query].concat()), name.into()))
    }

    /// The text that names a snapshot of the volume there.
    pub fn with_snapshot(&self, name: &str) -> String {
        let text = self.to_string();
        match text.split_once('?').filter(|_| matches!(self, Self::S3(_))) {
            Some((path, query)) => format!("{path}@{name}?{query}"),
            None => format!("{text}@{name}"),
        }
    }

    /// The one spelling of it: what the table of mounts shows. A directory's path has no symbolic
    /// links. The endpoint of an S3 store is there, wherever it was given.
    pub fn resolved(&self) -> io::Result<Self> {
        match self {
            Self::Dir(path) => Ok(Self::Dir(path.canonicalize()?)),
            Self::S3(url) => url.resolved().map(Self::S3).map_err(io::Error::other),
        }
    }

    /// The URL with an endpoint that was given beside it. The error is for the user.
    pub fn with_endpoint(self, endpoint: &str) -> Result<Self, String> {
        match self {
            Self::Dir(_) => Err(format!("{self}: a store in a directory has no endpoint")),
            Self::S3(S3Url { endpoint: Some(_), .. }) => {
                Err(format!("{self}: the endpoint is given twice"))
            }
            Self::S3(url) => {
                let endpoint = endpoint.parse().map_err(|error: ObjectError| error.to_string())?;
                Ok(Self::S3(S3Url { endpoint: Some(endpoint), ..url }))
            }
        }
    }

    /// The text that tells the store from others, if the URL is resolved: it has no profile, as it
    /// makes no difference whose keys are used.
    pub fn name(&self) -> String {
        match self {
            Self::Dir(path) => format!("{DIR}{}", path.display()),
            Self::S3(url) => url.name(),
        }
    }

    /// How the bucket, or the directory, of this volume calls the one at `other`, which need not be
    /// there. The error is for the user.
    pub(crate) fn name_beside(&self, other: &Self) -> Result<String, ObjectError> {
        let elsewhere = |what: &str| {
            Err(ObjectError::Setup(format!(
                "a clone lies {what} {self}: name a place there, or make a volume and copy"
            )))
        };
        let failed = |error: io::Error| ObjectError::Setup(format!("{self}: {error}"));
        match (self, other) {
            (Self::Dir(path), Self::Dir(new)) => {
                let path = path.canonicalize().map_err(failed)?;
                // It may be a symbolic link that is there.
                let there = new.canonicalize().ok();
                let parent = match &there {
                    Some(there) => there.parent().map(PathBuf::from),
                    None => new.parent().and_then(|parent| parent.canonicalize().ok()),
                };
                if parent.is_none() || parent.as_deref() != path.parent() {
                    return elsewhere("in the same directory as");
                }
                let name = there.as_ref().unwrap_or(new);
                let name = name
                    .file_name()
                    .and_then(OsStr::to_str)
                    .ok_or_else(|| ObjectError::Setup(format!("{other}: its name is not UTF-8")))?;
                if path.file_name() == Some(name.as_ref()) {
                    return Err(ObjectError::VolumeExists);
                }
                Ok(name.into())
            }
            (Self::S3(url), Self::S3(new)) => {
                let (url, new) = (url.resolved()?, new.resolved()?);
                let (source, prefix) = (&url.location.prefix, &new.location.prefix);
                if url.endpoint != new.endpoint || url.location.bucket != new.location.bucket {
                    return elsewhere("in the same bucket as");
                }
                if source == prefix {
                    return Err(ObjectError::VolumeExists);
                }
                if prefix.strip_prefix(source.as_str()).is_some_and(is_object_name) {
                    return Err(ObjectError::Setup(format!(
                        "that is among the objects of {self}: choose another prefix"
                    )));
                }
                Ok(prefix.strip_suffix('/').unwrap_or_default().into())
            }
            (Self::Dir(_), Self::S3(_)) => elsewhere("in the same directory as"),
            (Self::S3(_), Self::Dir(_)) => elsewhere("in the same bucket as"),
        }
    }

    /// The URL without a profile.
    pub fn without_profile(&self) -> Self {
        match self {
            Self::Dir(_) => self.clone(),
            Self::S3(url) => Self::S3(url.without_profile()),
        }
    }
}

impl S3Url {
    fn parse(text: &str) -> Result<Self, ObjectError> {
        let (location, query) = text.split_once('?').unwrap_or((text, ""));
        let mut url = Self { location: location.parse()?, endpoint: None, profile: None };
        for pair in query.split('&').filter(|pair| !pair.is_empty()) {
            let wrong = |what: &str| {
                ObjectError::Setup(format!(
                    "{location}: {what}; s3://BUCKET/PREFIX?endpoint=URL&profile=NAME is wanted"
                ))
            };
            // The text is not repeated: it may hold a secret.
            let (name, value) =
                pair.split_once('=').ok_or_else(|| wrong("a part behind ? has no value"))?;
            match name {
                "endpoint" if url.endpoint.is_none() => url.endpoint = Some(value.parse()?),
                "profile" if url.profile.is_none() && is_profile(value) => {
                    url.profile = Some(value.into());
                }
                "profile" if url.profile.is_none() => {
                    return Err(wrong("a profile's name has no blanks or control characters"));
                }
                "endpoint" | "profile" => return Err(wrong("a part behind ? is given twice")),
                _ => return Err(wrong("only endpoint and profile may stand behind ?")),
            }
        }
        Ok(url)
    }

    pub(crate) fn resolved(&self) -> Result<Self, ObjectError> {
        let endpoint = match &self.endpoint {
            Some(endpoint) => Some(endpoint.clone()),
            None => S3Settings::usual_endpoint(self.profile.as_deref())?,
        };
        Ok(Self { endpoint, ..self.clone() })
    }

    fn without_profile(&self) -> Self {
        Self { profile: None, ..self.clone() }
    }

    /// What tells the store from others, if the URL is resolved.
    pub(crate) fn name(&self) -> String {
        let text = self.without_profile().to_string();
        let (path, query) = text.split_at(text.find('?').unwrap_or(text.len()));
        // Directories of this machine are named by it: it is as it was before snapshots.
        format!("{}{query}", path.strip_suffix('/').unwrap_or(path))
    }
}

fn is_profile(name: &str) -> bool {
    !name.is_empty() && !name.chars().any(|c| c.is_control() || c.is_whitespace())
}

impl fmt::Display for StoreUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Dir(path) => {
                let text = format!("{DIR}{}", path.display());
                write!(f, "{text}{}", closing_slash(&text))
            }
            Self::S3(url) => url.fmt(f),
        }
    }
}

impl fmt::Display for S3Url {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.location.fmt(f)?;
        let endpoint = self.endpoint.as_ref().map(|endpoint| format!("endpoint={endpoint}"));
        let profile = self.profile.as_ref().map(|profile| format!("profile={profile}"));
        let query: Vec<_> = endpoint.into_iter().chain(profile).collect();
        if query.is_empty() { Ok(()) } else { write!(f, "?{}", query.join("&")) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Option<Result<StoreUrl, String>> {
        StoreUrl::parse(OsStr::new(text))
    }

    fn url(text: &str) -> StoreUrl {
        parse(text).and_then(Result::ok).expect("it is one")
    }

    #[test]
    fn a_directory_is_named_by_its_absolute_path() {
        assert_eq!(parse("dir:///srv/store"), Some(Ok(StoreUrl::Dir("/srv/store".into()))));
        assert_eq!(parse("/srv/store"), None);
        assert_eq!(parse("s3:/x"), None);
        for wrong in ["dir://", "dir:///", "dir://srv/store"] {
            assert!(matches!(parse(wrong), Some(Err(_))), "{wrong}");
        }
        assert_eq!(url("dir:///srv/store").to_string(), "dir:///srv/store");
    }

    #[test]
    fn an_s3_url_has_one_spelling() {
        for (text, printed) in [
            ("s3://bucket", "s3://bucket"),
            ("s3://bucket/a/b/", "s3://bucket/a/b"),
            ("s3://bucket/a?", "s3://bucket/a"),
            (
                "s3://bucket/a?profile=work&endpoint=HTTP://Host:80/",
                "s3://bucket/a?endpoint=http://host&profile=work",
            ),
        ] {
            assert_eq!(url(text).to_string(), printed);
            assert_eq!(url(printed), url(text), "what is printed can be read");
        }
    }

    #[test]
    fn what_an_s3_url_may_not_have_is_refused_and_no_secret_repeated() {
        for wrong in [
            "s3://",
            "s3://bucket/a?endpoint=host",
            "s3://bucket/a?endpoint=https://id:secret@host",
            "s3://bucket/a?secret=secret",
            "s3://bucket/a?secret",
            "s3://bucket/a?profile=",
            "s3://bucket/a?profile=a&profile=b",
            "s3://bucket/a?endpoint=https://a&endpoint=https://b",
        ] {
            let Some(Err(text)) = parse(wrong) else { panic!("{wrong} is refused") };
            assert!(!text.contains("secret"), "{text}");
        }
    }

    #[test]
    fn stores_are_told_apart_by_endpoint_and_not_by_profile() {
        let one = url("s3://bucket/a?endpoint=https://one");
        assert_eq!(one.name(), url("s3://bucket/a?endpoint=https://one&profile=b").name());
        assert_ne!(one.name(), url("s3://bucket/a?endpoint=https://two").name());
        assert_ne!(one.name(), url("s3://bucket/b?endpoint=https://one").name());
        // The slash that is shown behind an `@` is not part of the name.
        for (url, name) in [
            (StoreUrl::Dir("/srv/a@b".into()), "dir:///srv/a@b"),
            (url("s3://bucket/a@b/?endpoint=https://one"), "s3://bucket/a@b?endpoint=https://one"),
        ] {
            assert_eq!(url.name().trim_end_matches(":443"), name);
            assert_ne!(url.to_string(), url.name());
        }
        let given = url("s3://bucket/a").with_endpoint("https://one/").expect("it is one");
        assert_eq!(given, one);
        assert_eq!(one.resolved().expect("nothing is missing"), one);
        assert!(one.with_endpoint("https://two").is_err());
        assert!(url("dir:///srv/store").with_endpoint("https://two").is_err());
    }

    #[test]
    fn a_snapshot_is_named_behind_the_path() {
        for (text, volume, name) in [
            ("dir:///srv/store@one", "dir:///srv/store", "one"),
            ("dir:///srv/a?b@one", "dir:///srv/a?b", "one"),
            ("dir:///srv/a@b@one", "dir:///srv/a@b/", "one"),
            ("s3://bucket@one", "s3://bucket", "one"),
            ("s3://bucket/a@one two", "s3://bucket/a", "one two"),
            ("s3://bucket/a@b/@one", "s3://bucket/a@b/", "one"),
            ("s3://bucket/a@one?profile=b@c", "s3://bucket/a?profile=b@c", "one"),
        ] {
            let split = |text: &str| StoreUrl::split_snapshot(OsStr::new(text));
            let (head, found) = split(text).expect(text);
            let parsed = StoreUrl::parse(&head).and_then(Result::ok).expect(text);
            assert_eq!((parsed.to_string().as_str(), found.as_str()), (volume, name), "{text}");
            let (head, again) = split(&parsed.with_snapshot(name)).expect(text);
            assert_eq!(StoreUrl::parse(&head), Some(Ok(parsed)), "what is printed can be read");
            assert_eq!(again, name);
            assert_eq!(split(volume), None, "{volume}");
        }
        for none in ["/srv/a@b", "dir:///srv/a@b/", "dir:///srv/a@b/c", "s3://bucket/a?profile=b@c"]
        {
            assert_eq!(StoreUrl::split_snapshot(OsStr::new(none)), None, "{none}");
        }
    }
}
