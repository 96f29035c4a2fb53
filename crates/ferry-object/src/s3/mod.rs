//! A store that speaks the S3 protocol: AWS, MinIO, versitygw, Ceph RGW, R2.
//!
//! A request is sent once. What comes of it is said as [`Store`] asks: an answer that asks to try
//! again, and no answer, are [`ObjectError::Unavailable`], and the volume's own code repeats it
//! (with its back-off, its counters and its clock). No error text and no log line holds a secret.
//!
//! ```text
//! S3Store
//! client        requests, connections, time limits      rules   what a bucket does by itself
//! answer        what an answer means
//! settings      what the environment and profiles say
//! credentials   where keys come from, and new ones       sign    signatures
//! profile       profiles                                keys    a pair of keys
//! location      s3://BUCKET/PREFIX, endpoints           time    times as text
//! ```

mod answer;
mod client;
mod credentials;
mod keys;
mod location;
mod profile;
mod rules;
mod settings;
mod sign;
mod time;
mod whole;

pub(crate) use location::closing_slash;
pub use location::{Endpoint, S3Location};
pub use settings::{S3Settings, TimeLimits};

use crate::error::ObjectError;
use crate::store::{RequestCosts, Store};
use answer::Answer;
use client::{Client, Request};
use ferry_env::Env;
use rules::Word;
use std::ops::Range;
use std::sync::Arc;

/// A prefix in a bucket.
pub struct S3Store {
    client: Arc<Client>,
    prefix: String,
}

/// The permissions that requests need, as policies name them.
const GET: &str = "s3:GetObject and s3:ListBucket";
const PUT: &str = "s3:PutObject";
const DELETE: &str = "s3:DeleteObject";
const LIST: &str = "s3:ListBucket";

impl S3Store {
    /// The store at this location. Nothing is asked of it yet.
    pub fn open(
        location: &S3Location,
        settings: &S3Settings,
        env: &Env,
    ) -> Result<Self, ObjectError> {
        let client = Client::new(&location.bucket, settings, Arc::clone(&env.clock))?;
        Ok(Self { client: Arc::new(client), prefix: location.prefix.clone() })
    }

    fn key(&self, name: &str) -> String {
        format!("{}{name}", self.prefix)
    }

    /// A write, and what its answer means.
    fn write(
        &self,
        name: &str,
        bytes: &[u8],
        headers: Vec<(&'static str, String)>,
        unanswered: impl FnOnce(ObjectError) -> Result<(), ObjectError>,
    ) -> Result<(), ObjectError> {
        let key = self.key(name);
        let request = Request {
            method: "PUT",
            key: Some(&key),
            query: &[],
            headers,
            body: bytes,
            permission: PUT,
        };
        let answer = match self.client.send(&request) {
            Ok(answer) => answer,
            Err(error) => return unanswered(error),
        };
        match (answer.status, answer.code()) {
            (200..300, _) => Ok(()),
            // A deletion at the same time; nothing was written.
            (404, Some(code)) if code == "NoSuchKey" => {
                Err(ObjectError::Unavailable(format!("{name} was deleted at the same time")))
            }
            _ => Err(self.client.error(&request, name, &answer)),
        }
    }

    /// One part of a list: names and sizes are added, and the token of the next part is returned.
    fn list_part(
        &self,
        prefix: &str,
        token: Option<&str>,
        found: &mut Vec<Listed>,
    ) -> Result<Option<String>, ObjectError> {
        let mut query = vec![("list-type", "2"), ("prefix", prefix), ("encoding-type", "url")];
        query.extend(token.map(|token| ("continuation-token", token)));
        let request = Request {
            method: "GET",
            key: None,
            query: &query,
            headers: vec![],
            body: &[],
            permission: LIST,
        };
        let answer = self.client.send(&request)?;
        if answer.status != 200 {
            return Err(self.client.error(&request, prefix, &answer));
        }
        parse_list(&answer, &self.prefix, found)
            .ok_or_else(|| ObjectError::Unavailable("the answer is no list of objects".into()))
    }

    /// All parts of a list, ascending.
    fn list_all(&self, prefix: &str) -> Result<Vec<Listed>, ObjectError> {
        let prefix = self.key(prefix);
        let (mut found, mut token) = (Vec::new(), None);
        loop {
            let next = self.list_part(&prefix, token.as_deref(), &mut found)?;
            if next.is_none() {
                break;
            }
            if next == token {
                return Err(ObjectError::Unavailable("the list of objects does not end".into()));
            }
            token = next;
        }
        found.sort_unstable();
        Ok(found)
    }

    /// What the bucket says about versions or lifecycle rules; `None` if it does not say.
    fn ask(
        &self,
        about: &'static str,
        permission: &'static str,
    ) -> Result<Option<String>, ObjectError> {
        let query = [(about, "")];
        let (headers, body) = (vec![], &[][..]);
        let request =
            Request { method: "GET", key: None, query: &query, headers, body, permission };
        let answer = self.client.send(&request)?;
        match Word::of(&answer) {
            Word::Silent => Ok(None),
            Word::Says(text) => Ok(Some(text)),
            Word::Error => Err(self.client.error(&request, "", &answer)),
        }
    }
}

/// A name, and the size of its object if the store tells it.
type Listed = (String, Option<u64>);

/// Adds the names of an answer, without the prefix, and the sizes of their objects. The result is
/// the token of the next part, if there is one. `None`: the answer is not whole.
fn parse_list(answer: &Answer, prefix: &str, found: &mut Vec<Listed>) -> Option<Option<String>> {
    let text = std::str::from_utf8(&answer.body).ok()?;
    let document = roxmltree::Document::parse(text).ok()?;
    let root = document.root_element();
    if !root.has_tag_name("ListBucketResult") {
        return None;
    }
    let text_of = |node: roxmltree::Node<'_, '_>, name: &str| {
        let node = node.children().find(|node| node.has_tag_name(name))?;
        Some(node.text().unwrap_or_default().to_owned())
    };
    let encoded = text_of(root, "EncodingType").as_deref() == Some("url");
    for entry in root.children().filter(|node| node.has_tag_name("Contents")) {
        let key = text_of(entry, "Key")?;
        let key = if encoded { decode(&key)? } else { key };
        // The prefix alone is a "directory" that a browser of buckets made.
        if let Some(name) = key.strip_prefix(prefix).filter(|name| !name.is_empty()) {
            let size = text_of(entry, "Size").and_then(|size| size.parse().ok());
            found.push((name.to_owned(), size));
        }
    }
    match text_of(root, "IsTruncated").as_deref() {
        Some("true") => text_of(root, "NextContinuationToken").filter(|t| !t.is_empty()).map(Some),
        Some("false") => Some(None),
        _ => None,
    }
}

/// The inverse of the encoding of URLs, in which a blank may be a `+`.
fn decode(text: &str) -> Option<String> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.bytes();
    while let Some(byte) = rest.next() {
        bytes.push(match byte {
            b'%' => {
                let digit = |byte: Option<u8>| char::from(byte?).to_digit(16);
                (digit(rest.next())? * 16 + digit(rest.next())?) as u8
            }
            b'+' => b' ',
            byte => byte,
        });
    }
    String::from_utf8(bytes).ok()
}

/// First byte and length of the object that the header `Content-Range` of an answer names.
fn content_range(answer: &Answer) -> Option<(u64, u64)> {
    let (range, total) = answer.header("content-range")?.strip_prefix("bytes ")?.split_once('/')?;
    let (start, _) = range.split_once('-')?;
    Some((start.parse().ok()?, total.parse().ok()?))
}

impl Store for S3Store {
    /// What AWS lists, whatever store answers.
    fn request_costs(&self) -> Option<RequestCosts> {
        Some(RequestCosts::S3_STANDARD)
    }

    fn get(&self, name: &str, range: Option<Range<u64>>) -> Result<Vec<u8>, ObjectError> {
        let key = self.key(name);
        let mut headers = vec![];
        if let Some(Range { start, end }) = &range {
            // The protocol has no empty ranges.
            let last = (*end).max(start + 1) - 1;
            headers.push(("range", format!("bytes={start}-{last}")));
        }
        let request = Request {
            method: "GET",
            key: Some(&key),
            query: &[],
            headers,
            body: &[],
            permission: GET,
        };
        let answer = self.client.send(&request)?;
        let wanted = range.as_ref().map(|range| range.end.saturating_sub(range.start));
        match (answer.status, range) {
            (200, None) => Ok(answer.body),
            (206, Some(range)) => {
                let part = content_range(&answer);
                let mut bytes = answer.body;
                let whole = part.is_some_and(|(start, total)| {
                    let end = range.end.max(range.start + 1).min(total);
                    start == range.start && bytes.len() as u64 == end.saturating_sub(start)
                });
                if !whole {
                    return Err(ObjectError::Unavailable(format!(
                        "{name}: the store answers with another range than was asked for"
                    )));
                }
                bytes.truncate(wanted.unwrap_or(0) as usize);
                Ok(bytes)
            }
            // Some stores and proxies send the whole object.
            (200, Some(range)) => {
                let length = answer.body.len() as u64;
                let (start, end) = (range.start.min(length), range.end.min(length));
                Ok(answer.body.get(start as usize..end as usize).unwrap_or_default().to_vec())
            }
            (416, Some(_)) => Ok(vec![]),
            _ => Err(self.client.error(&request, name, &answer)),
        }
    }

    fn create(&self, name: &str, bytes: &[u8]) -> Result<(), ObjectError> {
        let exclusive = vec![("if-none-match", "*".into())];
        // versitygw refuses a name that exists before it has read the body, and its answer goes
        // down with the connection. Each repetition would end so: the object itself tells.
        self.write(name, bytes, exclusive, |unanswered| {
            match self.get(name, Some(0..bytes.len() as u64 + 1)) {
                Ok(found) if found == bytes => Ok(()),
                Ok(_) => Err(ObjectError::Exists(name.into())),
                Err(_) => Err(unanswered),
            }
        })
    }

    fn put(&self, name: &str, bytes: &[u8]) -> Result<(), ObjectError> {
        self.write(name, bytes, vec![], Err)
    }

    fn delete(&self, name: &str) -> Result<(), ObjectError> {
        let key = self.key(name);
        let request = Request {
            method: "DELETE",
            key: Some(&key),
            query: &[],
            headers: vec![],
            body: &[],
            permission: DELETE,
        };
        let answer = self.client.send(&request)?;
        if (200..300).contains(&answer.status) {
            return Ok(());
        }
        match self.client.error(&request, name, &answer) {
            ObjectError::NotFound(_) => Ok(()),
            error => Err(error),
        }
    }

    fn list(&self, prefix: &str) -> Result<Vec<String>, ObjectError> {
        Ok(self.list_all(prefix)?.into_iter().map(|(name, _)| name).collect())
    }

    fn list_sizes(&self, prefix: &str) -> Result<Vec<(String, u64)>, ObjectError> {
        let unknown = || ObjectError::Refused("a list of objects has no sizes".into());
        let sized = |(name, size): Listed| Ok((name, size.ok_or_else(unknown)?));
        self.list_all(prefix)?.into_iter().map(sized).collect()
    }

    /// The prefix, without the slash at its end.
    fn name(&self) -> Result<String, ObjectError> {
        Ok(self.prefix.strip_suffix('/').unwrap_or_default().into())
    }

    fn beside(&self, name: &str) -> Result<Arc<dyn Store>, ObjectError> {
        let prefix = if name.is_empty() { String::new() } else { format!("{name}/") };
        Ok(Arc::new(Self { client: Arc::clone(&self.client), prefix }))
    }

    fn sample(&self) -> Result<Vec<String>, ObjectError> {
        let mut found = Vec::new();
        self.list_part(&self.prefix, None, &mut found)?;
        Ok(found.into_iter().map(|(name, _)| name).collect())
    }

    fn check_rules(&self) -> Result<Vec<String>, ObjectError> {
        let mut unknown = Vec::new();
        let mut ask = |about: &'static str, permission: &'static str| {
            let answer = self.ask(about, permission)?;
            if answer.is_none() {
                unknown.push(format!(
                    "the store does not say whether the bucket has {about} rules ({permission}): \
                     they could lose objects, or keep what is deleted"
                ));
            }
            Ok::<_, ObjectError>(answer.unwrap_or_default())
        };
        let versioning = ask("versioning", "s3:GetBucketVersioning")?;
        let lifecycle = ask("lifecycle", "s3:GetLifecycleConfiguration")?;
        let mut warnings = rules::judge(&versioning, &lifecycle, &self.prefix)?;
        warnings.extend(unknown);
        Ok(warnings)
    }
}
