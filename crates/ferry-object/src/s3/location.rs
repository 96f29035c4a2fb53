//! Where a volume is: a bucket and a prefix, and the address of the store.

use crate::error::ObjectError;
use std::fmt;
use std::str::FromStr;
use ureq::http::Uri;

/// `s3://BUCKET/PREFIX`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct S3Location {
    /// The bucket's name.
    pub bucket: String,
    /// What the names of the objects begin with: nothing, or parts that each end with a slash.
    pub prefix: String,
}

impl FromStr for S3Location {
    type Err = ObjectError;

    fn from_str(text: &str) -> Result<Self, ObjectError> {
        let wrong = |what: &str| {
            ObjectError::Setup(format!("{text}: {what}; a volume is named s3://BUCKET/PREFIX"))
        };
        let rest = text.strip_prefix("s3://").ok_or_else(|| wrong("this is no s3 URL"))?;
        let (bucket, prefix) = rest.split_once('/').unwrap_or((rest, ""));
        let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '.' | '_');
        if bucket.is_empty() {
            return Err(wrong("the bucket is missing"));
        }
        if !(3..=63).contains(&bucket.len()) || !bucket.chars().all(plain) {
            return Err(wrong(
                "a bucket has a name of 3 to 63 letters, digits, dots, hyphens and underscores",
            ));
        }
        if bucket.ends_with("--x-s3") {
            return Err(wrong(
                "directory buckets (S3 Express) want sessions, which FerryFS does not open",
            ));
        }
        if prefix.is_empty() {
            return Ok(Self { bucket: bucket.into(), prefix: String::new() });
        }
        let prefix = prefix.strip_suffix('/').unwrap_or(prefix);
        if prefix.split('/').any(|part| matches!(part, "" | "." | "..")) {
            return Err(wrong("no part of the prefix may be empty, . or .."));
        }
        if prefix.chars().any(|c| c.is_control() || matches!(c, '?' | '#' | '\\')) {
            return Err(wrong("the prefix may not have ?, #, \\ or control characters"));
        }
        if prefix.len() > PREFIX_BYTES_MAX {
            return Err(wrong("the prefix is longer than 512 bytes"));
        }
        Ok(Self { bucket: bucket.into(), prefix: format!("{prefix}/") })
    }
}

/// A key has at most 1024 bytes; the rest is for the names of the objects.
const PREFIX_BYTES_MAX: usize = 512;

/// What is shown behind a path: a slash if its last name has an `@`, behind which a snapshot's name
/// would begin.
pub(crate) fn closing_slash(path: &str) -> &'static str {
    let last = path.rsplit('/').next().unwrap_or_default();
    if last.contains('@') { "/" } else { "" }
}

impl fmt::Display for S3Location {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let prefix = self.prefix.strip_suffix('/').unwrap_or(&self.prefix);
        let slash = if prefix.is_empty() { "" } else { "/" };
        let text = format!("s3://{}{slash}{prefix}", self.bucket);
        write!(f, "{text}{}", closing_slash(prefix))
    }
}

/// The address of a store that is not AWS: scheme, host and port. [`fmt::Display`] shows it in one
/// spelling.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Endpoint {
    scheme: &'static str,
    authority: String,
}

impl FromStr for Endpoint {
    type Err = ObjectError;

    fn from_str(text: &str) -> Result<Self, ObjectError> {
        let wrong = |what: &str| {
            ObjectError::Setup(format!(
                "endpoint {text}: {what}; for example https://s3.example.org"
            ))
        };
        let uri: Uri = text.parse().map_err(|_| wrong("this is no URL"))?;
        let scheme = match uri.scheme_str() {
            Some("https") => "https",
            Some("http") => "http",
            _ => return Err(wrong("it must begin with https:// or http://")),
        };
        let authority = uri.authority().ok_or_else(|| wrong("the host is missing"))?;
        if authority.as_str().contains('@') {
            // The text is not repeated: it may hold a secret.
            return Err(ObjectError::Setup(
                "the endpoint may not hold keys; they belong into the environment or a profile"
                    .into(),
            ));
        }
        if !matches!(uri.path(), "" | "/") || uri.query().is_some() {
            return Err(wrong("nothing may follow the host; the bucket stands in the s3 URL"));
        }
        let authority = authority.as_str().to_ascii_lowercase();
        let usual = if scheme == "https" { ":443" } else { ":80" };
        let authority = authority.strip_suffix(usual).unwrap_or(&authority).to_owned();
        Ok(Self { scheme, authority })
    }
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}://{}", self.scheme, self.authority)
    }
}

/// The bucket as requests address it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Address {
    pub scheme: &'static str,
    /// What the header `Host` says.
    pub host: String,
    /// The path of the bucket: nothing, or `/BUCKET`.
    pub path: String,
}

impl Address {
    /// AWS is addressed by a host for each bucket, as it asks for; any other store by path, because
    /// few have a name server that knows their buckets.
    pub fn new(bucket: &str, endpoint: Option<&Endpoint>, region: &str) -> Self {
        let path = format!("/{bucket}");
        if let Some(Endpoint { scheme, authority }) = endpoint {
            return Self { scheme, host: authority.clone(), path };
        }
        let china = if region.starts_with("cn-") { ".cn" } else { "" };
        let host = format!("s3.{region}.amazonaws.com{china}");
        // The certificate's wildcard covers no dots, and a host has no capitals or underscores.
        let is_label = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
        if bucket.chars().all(is_label) {
            return Self { scheme: "https", host: format!("{bucket}.{host}"), path: String::new() };
        }
        Self { scheme: "https", host, path }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_location_is_a_bucket_and_a_prefix() {
        let parse = |text: &str| text.parse::<S3Location>();
        let location = parse("s3://my-bucket/a/b/").expect("it is one");
        assert_eq!((location.bucket.as_str(), location.prefix.as_str()), ("my-bucket", "a/b/"));
        assert_eq!(location.to_string(), "s3://my-bucket/a/b");
        assert_eq!(parse("s3://my-bucket").expect("it is one").prefix, "");
        assert_eq!(parse("s3://my-bucket/").expect("it is one").to_string(), "s3://my-bucket");
        for bad in [
            "my-bucket/a",
            "https://my-bucket/a",
            "s3://",
            "s3:///a",
            "s3://a/b",
            "s3://my bucket/a",
            "s3://key:secret@my-bucket/a",
            "s3://fast--use1-az4--x-s3/a",
            "s3://my-bucket/a//b",
            "s3://my-bucket/../b",
            "s3://my-bucket//",
            "s3://my-bucket/a?versionId=1",
        ] {
            let Err(ObjectError::Setup(text)) = parse(bad) else { panic!("{bad} is refused") };
            assert!(text.contains("a volume is named s3://BUCKET/PREFIX"), "{text}");
        }
    }

    #[test]
    fn aws_is_addressed_by_host_and_other_stores_by_path() {
        let address = |bucket: &str, endpoint: Option<&str>, region: &str| {
            let endpoint = endpoint.map(|text| text.parse().expect("it is one"));
            let Address { scheme, host, path } = Address::new(bucket, endpoint.as_ref(), region);
            format!("{scheme}://{host}{path}")
        };
        assert_eq!(
            address("bucket", None, "eu-west-1"),
            "https://bucket.s3.eu-west-1.amazonaws.com"
        );
        assert_eq!(
            address("a.bucket", None, "cn-north-1"),
            "https://s3.cn-north-1.amazonaws.com.cn/a.bucket"
        );
        assert_eq!(address("bucket", Some("http://[::1]:9000/"), "x"), "http://[::1]:9000/bucket");
    }

    #[test]
    fn an_endpoint_is_a_host_and_says_whether_it_is_encrypted() {
        for bad in ["minio:9000", "ftp://a", "https://a/b", "https://a?b", "https://", ""] {
            assert!(matches!(bad.parse::<Endpoint>(), Err(ObjectError::Setup(_))), "{bad}");
        }
        for (text, printed) in [
            ("https://S3.Example.org/", "https://s3.example.org"),
            ("https://s3.example.org:443", "https://s3.example.org"),
            ("http://s3.example.org:443", "http://s3.example.org:443"),
            ("http://[::1]:80", "http://[::1]"),
        ] {
            assert_eq!(text.parse::<Endpoint>().expect("it is one").to_string(), printed);
        }
        let Err(error) = "https://id:secret@a".parse::<Endpoint>() else { panic!("refused") };
        assert!(!error.to_string().contains("secret"), "{error}");
    }
}
