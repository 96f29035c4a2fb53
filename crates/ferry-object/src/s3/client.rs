//! Requests to a bucket: signed, sent over connections that are kept, and answered within limits.

use super::answer::{Answer, Asked};
use super::credentials::Credentials;
use super::location::Address;
use super::settings::{S3Settings, TimeLimits};
use super::sign::{Unsigned, encode, query, sign};
use super::whole::SendsWhole;
use crate::error::ObjectError;
use ferry_env::Clock;
use ferry_env::activity::{self, Layer};
use std::io::Read;
use std::path::Path;
use std::sync::Arc;
use ureq::http::Request as HttpRequest;
use ureq::tls::{Certificate, PemItem, RootCerts, TlsConfig, parse_pem};
use ureq::unversioned::resolver::DefaultResolver;
use ureq::unversioned::transport::{Connector, DefaultConnector};
use ureq::{Agent, Error};

/// Connections that wait for the next request; one for each of the threads that talk to the store.
const IDLE_CONNECTIONS_MAX: usize = 64;
/// No object is longer.
const BODY_BYTES_MAX: u64 = 256 << 20;
/// From here on the store is asked before the bytes are sent: what it refuses is not sent, and its
/// reason is heard. Shorter bodies are sent at once, which saves a round trip.
const ASK_FIRST_BYTES: usize = 1 << 20;

/// What is asked.
pub(super) struct Request<'a> {
    pub method: &'static str,
    /// The key; none for the bucket itself.
    pub key: Option<&'a str>,
    pub query: &'a [(&'a str, &'a str)],
    /// Names in lower case.
    pub headers: Vec<(&'static str, String)>,
    pub body: &'a [u8],
    /// The permission that it needs, for errors.
    pub permission: &'static str,
}

pub(super) struct Client {
    agent: Agent,
    bucket: String,
    address: Address,
    region: String,
    credentials: Credentials,
    limits: TimeLimits,
    clock: Arc<dyn Clock>,
}

impl Client {
    pub fn new(
        bucket: &str,
        settings: &S3Settings,
        clock: Arc<dyn Clock>,
    ) -> Result<Self, ObjectError> {
        let credentials = Credentials::new(settings.source.clone(), Arc::clone(&clock));
        let region = settings.region.clone().or_else(|| credentials.region());
        // The region that stores without regions expect, and AWS's oldest.
        let region = region.unwrap_or_else(|| "us-east-1".into());
        let plain = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
        if settings.endpoint.is_none() && !region.chars().all(plain) {
            return Err(ObjectError::Setup(format!("AWS has no region {region}: set AWS_REGION")));
        }
        let address = Address::new(bucket, settings.endpoint.as_ref(), &region);
        let limits = settings.limits;
        let mut config = Agent::config_builder()
            .http_status_as_error(false)
            .max_redirects(0)
            .max_redirects_will_error(false)
            .user_agent("ferry")
            .accept_encoding("identity")
            .max_idle_connections(IDLE_CONNECTIONS_MAX)
            .max_idle_connections_per_host(IDLE_CONNECTIONS_MAX)
            .timeout_resolve(Some(limits.connect))
            .timeout_connect(Some(limits.connect))
            .timeout_per_read(Some(limits.idle))
            .timeout_per_write(Some(limits.idle))
            .timeout_global(Some(limits.request));
        if address.scheme == "https" {
            let provider = Arc::new(rustls::crypto::ring::default_provider());
            let tls = TlsConfig::builder()
                .root_certs(root_certificates(settings.ca_bundle.as_deref())?)
                .unversioned_rustls_crypto_provider(provider);
            config = config.https_only(true).tls_config(tls.build());
        }
        let connector = DefaultConnector::default().chain(SendsWhole);
        let agent = Agent::with_parts(config.build(), connector, DefaultResolver::default());
        Ok(Self { agent, bucket: bucket.into(), address, region, credentials, limits, clock })
    }

    /// Sends a request. Any answer of the store is a result; the error says why there is none. If
    /// the store says that the keys have expired and there are others, it is sent once more.
    pub fn send(&self, request: &Request<'_>) -> Result<Answer, ObjectError> {
        let _inside = activity::enter(Layer::StoreRequest);
        let keys = self.credentials.keys()?;
        let answer = self.send_with(request, &keys)?;
        if answer.keys_expired() && self.credentials.renew(&keys) {
            return self.send_with(request, &self.credentials.keys()?);
        }
        Ok(answer)
    }

    fn send_with(
        &self,
        request: &Request<'_>,
        keys: &super::keys::Keys,
    ) -> Result<Answer, ObjectError> {
        let Address { scheme, host, path } = &self.address;
        let key = request.key.map(|key| encode(key, true));
        let path = match &key {
            Some(key) => format!("{path}/{key}"),
            None if path.is_empty() => "/".into(),
            None => path.clone(),
        };
        let mut headers = sign(
            &Unsigned {
                method: request.method,
                host,
                path: &path,
                query: request.query,
                headers: &request.headers,
                body: request.body,
                time: self.clock.wall().as_secs(),
                region: &self.region,
            },
            keys,
        );
        if request.body.len() >= ASK_FIRST_BYTES {
            headers.push(("expect", "100-continue".into()));
        }
        let mut url = format!("{scheme}://{host}{path}");
        if !request.query.is_empty() {
            url = format!("{url}?{}", query(request.query));
        }
        let mut http = HttpRequest::builder().method(request.method).uri(url);
        for (name, value) in headers {
            http = http.header(name, value);
        }
        let sent = match request.method {
            "PUT" => http.body(request.body).map(|http| self.agent.run(http)),
            _ => http.body(()).map(|http| self.agent.run(http)),
        };
        // What the header cannot hold is a key that was pasted with a line feed, for example.
        let sent = sent.map_err(|error| {
            ObjectError::Setup(format!("keys or endpoint cannot be sent in a request: {error}"))
        })?;
        let answer = sent.map_err(|error| self.no_answer(&error))?;
        let (parts, body) = answer.into_parts();
        let length = body.content_length();
        let reader = body.into_with_config().limit(BODY_BYTES_MAX).reader();
        let body =
            read_body(reader, length).map_err(|error| self.no_answer(&Error::from(error)))?;
        Ok(Answer { status: parts.status.as_u16(), headers: parts.headers, body })
    }

    /// The error of an answer that is no success.
    pub fn error(&self, request: &Request<'_>, name: &str, answer: &Answer) -> ObjectError {
        let keys = self.credentials.keys();
        answer.error(&Asked {
            name,
            permission: request.permission,
            bucket: &self.bucket,
            host: &self.address.host,
            region: &self.region,
            key_id: keys.as_ref().map_or("", |keys| &keys.id),
            time: self.clock.wall().as_secs(),
        })
    }

    fn no_answer(&self, error: &Error) -> ObjectError {
        let host = &self.address.host;
        if let Some(reason) = certificate_error(error) {
            return ObjectError::Refused(format!(
                "{host}: its certificate is not trusted ({reason}): AWS_CA_BUNDLE may name a file \
                 with the certificate of its authority"
            ));
        }
        let text = match error {
            Error::Timeout(ureq::Timeout::PerRead | ureq::Timeout::PerWrite) => {
                format!("no byte came or went for {} s", self.limits.idle.as_secs_f32())
            }
            Error::Timeout(ureq::Timeout::Global) => {
                format!("no whole answer within {} s", self.limits.request.as_secs_f32())
            }
            Error::Timeout(part) => format!("a time limit has passed ({part})"),
            Error::HostNotFound => "no such host".into(),
            Error::Io(error) => error.to_string(),
            error => error.to_string(),
        };
        ObjectError::Unavailable(format!("{host}: {text}"))
    }
}

/// Reads a body whole. One that is shorter than announced is an error.
fn read_body(reader: impl Read, length: Option<u64>) -> std::io::Result<Vec<u8>> {
    // A false length may not reserve much.
    let reserved = length.unwrap_or(0).min(16 << 20) as usize;
    let mut body = Vec::with_capacity(reserved + 1);
    let mut reader = reader;
    reader.read_to_end(&mut body)?;
    if length.is_some_and(|length| length != body.len() as u64) {
        return Err(std::io::Error::other("the answer ends too early"));
    }
    Ok(body)
}

/// Why the certificate of the store was refused, if that is what happened.
fn certificate_error(error: &Error) -> Option<String> {
    let inner = match error {
        Error::Rustls(error) => Some(error),
        Error::Io(error) => error.get_ref().and_then(|inner| inner.downcast_ref()),
        _ => None,
    };
    match inner? {
        rustls::Error::InvalidCertificate(reason) => Some(format!("{reason:?}")),
        _ => None,
    }
}

/// The certificates that are trusted: the system's, or those of a file.
fn root_certificates(bundle: Option<&Path>) -> Result<RootCerts, ObjectError> {
    let certificates: Vec<Certificate<'static>> = match bundle {
        Some(path) => {
            let failed = |what: String| {
                ObjectError::Setup(format!("AWS_CA_BUNDLE {}: {what}", path.display()))
            };
            let text = std::fs::read(path).map_err(|error| failed(error.to_string()))?;
            let items: Result<Vec<_>, _> = parse_pem(&text).collect();
            let items = items.map_err(|error| failed(error.to_string()))?;
            let certificates = items.into_iter().filter_map(|item| match item {
                PemItem::Certificate(certificate) => Some(certificate),
                _ => None,
            });
            let certificates: Vec<_> = certificates.collect();
            if certificates.is_empty() {
                return Err(failed("it holds no certificate".into()));
            }
            certificates
        }
        None => {
            let found = rustls_native_certs::load_native_certs();
            if found.certs.is_empty() {
                return Err(ObjectError::Setup(
                    "the system has no certificates to trust: install ca-certificates, or name a \
                     file in AWS_CA_BUNDLE"
                        .into(),
                ));
            }
            found.certs.iter().map(|der| Certificate::from_der(der).to_owned()).collect()
        }
    };
    Ok(RootCerts::from(certificates))
}
