//! What an answer of the store means.

use super::time::from_http;
use crate::error::ObjectError;
use ureq::http::HeaderMap;

/// An answer with its whole body.
pub(super) struct Answer {
    pub status: u16,
    pub headers: HeaderMap,
    pub body: Vec<u8>,
}

/// What was asked of the store, for errors.
pub(super) struct Asked<'a> {
    /// The object, or the bucket if the request is for it.
    pub name: &'a str,
    /// The permission that the request needs.
    pub permission: &'static str,
    pub bucket: &'a str,
    pub host: &'a str,
    pub region: &'a str,
    pub key_id: &'a str,
    /// Wall time in seconds.
    pub time: u64,
}

/// A text of the store is shown up to here.
const MESSAGE_CHARS_MAX: usize = 200;

impl Answer {
    /// The header, if it is text.
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name)?.to_str().ok()
    }

    /// The text of the first element of this name in the body.
    pub fn element(&self, name: &str) -> Option<String> {
        let text = std::str::from_utf8(&self.body).ok()?;
        let document = roxmltree::Document::parse(text).ok()?;
        let node = document.descendants().find(|node| node.has_tag_name(name))?;
        Some(node.text().unwrap_or_default().to_owned())
    }

    /// The error code that the protocol defines; none if this is no answer of an S3 store.
    pub fn code(&self) -> Option<String> {
        let plain = |c: char| c.is_ascii_alphanumeric() || c == '.';
        let code = self.element("Code").filter(|code| !code.is_empty());
        code.filter(|code| code.len() <= 64 && code.chars().all(plain))
    }

    /// Whether the keys have expired, so that new ones may help.
    pub fn keys_expired(&self) -> bool {
        matches!(self.status, 400 | 401 | 403)
            && self.code().is_some_and(|code| is_expiry(&code) || code == "InvalidAccessKeyId")
    }

    /// The error of an answer that is no success.
    pub fn error(&self, asked: &Asked<'_>) -> ObjectError {
        let code = self.code();
        let code = code.as_deref().unwrap_or("");
        let Asked { name, bucket, host, key_id, permission, .. } = asked;
        let refused = |text: String| ObjectError::Refused(format!("{host}: {text}"));
        match (self.status, code) {
            // Only the store's own word counts: after another 404 (a proxy's, a wrong path's)
            // an owner that follows the log would take it for the end.
            (404, "NoSuchKey") => ObjectError::NotFound((*name).into()),
            (_, "NoSuchBucket") => refused(format!(
                "there is no bucket {bucket} (NoSuchBucket): make it, or correct its name or the \
                 endpoint"
            )),
            (304 | 412, _) => ObjectError::Exists((*name).into()),
            (_, "RequestTimeTooSkewed") => refused(format!(
                "the clock of this machine {} (RequestTimeTooSkewed): set it, for example with \
                 chrony, and try again",
                self.skew(asked)
            )),
            (_, "SignatureDoesNotMatch") => refused(format!(
                "the secret key is not the one of {key_id} (SignatureDoesNotMatch): correct \
                 AWS_SECRET_ACCESS_KEY or the profile; a proxy that changes requests has the same \
                 effect"
            )),
            (_, "InvalidAccessKeyId") => refused(format!(
                "the store does not know the key {key_id} (InvalidAccessKeyId): correct \
                 AWS_ACCESS_KEY_ID or the profile"
            )),
            (_, code) if is_expiry(code) => refused(format!(
                "the session of key {key_id} has ended ({code}): log in again, or use a key that \
                 does not expire"
            )),
            (_, "AccessDenied" | "AllAccessDisabled" | "AccountProblem" | "UnauthorizedAccess") => {
                refused(format!(
                    "key {key_id} may not do this ({code}): its policy must allow {permission} in \
                     bucket {bucket}"
                ))
            }
            (301 | 307 | 308, _) | (_, "AuthorizationHeaderMalformed" | "PermanentRedirect") => {
                refused(self.other_region(asked))
            }
            (501, _) | (_, "NotImplemented") => refused(format!(
                "the store cannot do what a volume needs ({} {code}, {permission})",
                self.status
            )),
            (507, _)
            | (_, "QuotaExceeded" | "XMinioStorageFull" | "XMinioAdminBucketQuotaExceeded") => {
                refused(format!("there is no space left ({} {code})", self.status))
            }
            // The bytes were damaged on the way, or the store asks to try again.
            (400, "BadDigest" | "XAmzContentSHA256Mismatch" | "XAmzContentChecksumMismatch")
            | (400, "IncompleteBody" | "RequestTimeout" | "InvalidDigest")
            | (404 | 408 | 409 | 425 | 429 | 500.., _)
            | (_, "SlowDown" | "ServiceUnavailable" | "InternalError" | "OperationAborted")
            | (
                _,
                "Throttling" | "ThrottlingException" | "RequestLimitExceeded" | "TooManyRequests",
            )
            | (200..=299, _) => ObjectError::Unavailable(format!("{host}: {}", self.said())),
            _ => refused(self.said()),
        }
    }

    /// Status, code and message.
    fn said(&self) -> String {
        let message = self.element("Message").unwrap_or_default();
        let message: String =
            message.chars().filter(|c| !c.is_control()).take(MESSAGE_CHARS_MAX).collect();
        let code = self.code().unwrap_or_else(|| "no S3 error code".into());
        let status = self.status;
        if message.is_empty() {
            format!("status {status} ({code})")
        } else {
            format!("status {status} ({code}: {message})")
        }
    }

    fn skew(&self, asked: &Asked<'_>) -> String {
        match self.header("date").and_then(from_http) {
            Some(there) if there > asked.time => {
                format!("is {} s behind the store's", there - asked.time)
            }
            Some(there) => format!("is {} s ahead of the store's", asked.time - there),
            None => "differs from the store's".into(),
        }
    }

    fn other_region(&self, asked: &Asked<'_>) -> String {
        let Asked { bucket, region, .. } = asked;
        let there = self.header("x-amz-bucket-region").map(str::to_owned);
        match there.or_else(|| self.element("Region")).filter(|there| !there.is_empty()) {
            Some(there) => format!(
                "bucket {bucket} is in region {there}, not {region}: set AWS_REGION={there}"
            ),
            None => format!(
                "bucket {bucket} is not in region {region} ({}): set AWS_REGION",
                self.said()
            ),
        }
    }
}

fn is_expiry(code: &str) -> bool {
    matches!(
        code,
        "ExpiredToken"
            | "ExpiredTokenException"
            | "RequestExpired"
            | "TokenRefreshRequired"
            | "InvalidToken"
    )
}
